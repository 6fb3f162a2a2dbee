"""The linear map of early router scores, and what is counted of guesses."""

import pytest
import torch

from bench.lab.guesses import LayerScores, mapped, recall, step_of


def scores(early: torch.Tensor | None, own: torch.Tensor, top_k: int = 2) -> LayerScores:
    return LayerScores(early, own, own.topk(top_k).indices, torch.full((len(own), top_k), 0.5))


def test_a_map_finds_what_is_linear() -> None:
    generator = torch.Generator().manual_seed(1)
    early = torch.randn(4000, 6, generator=generator)
    own = early @ torch.randn(6, 6, generator=generator) + torch.randn(6, generator=generator)
    found = mapped(scores(early, own), 2000)
    assert found is not None
    assert (found - own).abs().mean() < 0.05 * (early - own).abs().mean()
    assert mapped(scores(None, own), 2000) is None


def test_guesses_are_judged_on_tokens_that_nothing_was_fitted_to() -> None:
    own = torch.tensor([[3.0, 2, 1, 0], [0.0, 1, 2, 3], [3.0, 0, 2, 1]])
    layers = [scores(None, own), scores(own, own)]
    guess = torch.tensor([[0.0, 0, 9, 9], [9.0, 0, 0, 8], [9.0, 8, 0, 0]])
    assert recall(layers, [None, guess], 1) == pytest.approx(0.5)  # 3 of 2, 3; 0 of 0, 2
    assert recall(layers, [None, None], 1) is None
    step = step_of(layers, [None, guess], 1)
    assert step.used == [[[3, 2]], [[3, 2]]]
    assert step.guessed == [[], [([0, 3], [9.0, 8.0])]]
