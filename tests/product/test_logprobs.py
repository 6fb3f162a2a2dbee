"""Log-probabilities of tokens: which rows of a verification they are of, and how many are told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq import Generator, SpeqError
from speq.engine.draft import Outcome
from speq.engine.logprobs import Logprobs
from tests.helpers.tiny_models import load_plain

VOCAB = 7


def test_rows_are_those_of_the_accepted_path() -> None:
    """Of a tree of five nodes, three stand."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3)).double()
    kept = Logprobs(2)
    kept.note(logits, Outcome(path=[0, 2, 4], token_ids=[6, 1, 3]))
    logprobs = kept.take(3)
    for each, node, token_id in zip(logprobs, (0, 2, 4), (6, 1, 3), strict=True):
        shares = logits[node].exp() / logits[node].exp().sum()
        assert each.logprob == pytest.approx(float(shares[token_id].log()), abs=1e-6)
        best = sorted(range(VOCAB), key=lambda i, shares=shares: -float(shares[i]))[:2]
        assert [token for token, _ in each.top] == best
        wanted = [float(shares[token].log()) for token in best]
        assert [logprob for _, logprob in each.top] == pytest.approx(wanted, abs=1e-6)


def test_tokens_behind_the_end_are_forgotten() -> None:
    logits = torch.zeros(3, VOCAB)
    kept = Logprobs(0)
    kept.note(logits, Outcome([0, 1, 2], [1, 2, 3]))
    assert [each.top for each in kept.take(2)] == [(), ()]
    assert kept.take(1) == []


def test_no_more_are_told_than_there_are() -> None:
    kept = Logprobs(20)
    kept.note(torch.zeros(1, VOCAB), Outcome([0], [1]))
    (logprobs,) = kept.take(1)
    assert len(logprobs.top) == VOCAB
    assert logprobs.logprob == pytest.approx(-torch.tensor(VOCAB).log().item())


def test_odds_of_a_run_are_the_plain_models(tiny: Callable[[str], Path]) -> None:
    """With drafts, a penalty and a temperature, none of which are in them."""
    path = tiny("qwen3_moe")
    generator = Generator.from_pretrained(path, "1MiB", draft_length=3, dtype="float32")
    try:
        ids = [*b"hello"]
        stream = generator.stream(
            ids,
            top_logprobs=3,
            max_new_tokens=20,
            ignore_eos=True,
            temperature=0.8,
            repetition_penalty=1.2,
            seed=4,
        )
        tokens = list(stream)
        with pytest.raises(SpeqError, match="top_logprobs is -1; it must be at least 0"):
            next(generator.stream(ids, top_logprobs=-1))
        assert [
            token.logprobs for token in generator.stream(ids, max_new_tokens=2, ignore_eos=True)
        ] == [None, None]
    finally:
        generator.close()
    answer = [token.id for token in tokens]
    with torch.no_grad():
        logits = load_plain(path)(torch.tensor([ids + answer])).logits[0]
    wanted = torch.log_softmax(logits[len(ids) - 1 : -1].float(), -1)
    for row, token in zip(wanted, tokens, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        values, best = row.topk(3)
        assert [each for each, _ in token.logprobs.top] == best.tolist()
        assert [each for _, each in token.logprobs.top] == pytest.approx(values.tolist(), abs=1e-4)
