"""Layers of the gated delta rule: what they compute, beside numpy, and what they take back."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.errors import Broken
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.kernels.recurrent import RecurrentSizes, delta_steps, mix_inputs, mix_one_by_one
from speq.models.conv_inputs import PENDING
from speq.models.length import Length
from speq.models.recurrent_cache import RecurrentLayer, RecurrentRows
from speq.models.states import BatchStateLayer
from speq.models.tree import Tree

SIZES = RecurrentSizes(key_heads=2, value_heads=4, key_width=6, value_width=5, taps=4)
CPU = torch.device("cpu")


class Parts:
    """A layer's convolution, and the rule for prompts one token at a time."""

    sizes = SIZES

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(SIZES.channels, SIZES.taps, generator=generator).to(dtype)
        self.prompts = 0

    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        return delta_steps(state, mix_one_by_one(windows, self.weight), decays, betas)

    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        self.prompts += 1
        state, out = state.clone(), []
        for window, decay, beta in zip(windows, rows.decays, rows.betas, strict=True):
            mixed = mix_inputs(window[None], self.weight)
            out.append(delta_steps(state, mixed, decay[None], beta[None]))
        return torch.cat(out), state


PARTS = Parts()


def rows_of(count: int, seed: int) -> RecurrentRows:
    generator = torch.Generator().manual_seed(seed)
    return RecurrentRows(
        torch.randn(count, SIZES.channels, generator=generator),
        -torch.rand(count, SIZES.value_heads, generator=generator),
        torch.rand(count, SIZES.value_heads, generator=generator),
    )


def some(rows: RecurrentRows, places: Any) -> RecurrentRows:
    return RecurrentRows(*(part[places] for part in rows))


def together(*parts: RecurrentRows) -> RecurrentRows:
    return RecurrentRows(*(torch.cat(each) for each in zip(*parts, strict=True)))


def new_layer(dtype: torch.dtype = torch.float32) -> tuple[RecurrentLayer, Length]:
    length = Length()
    return RecurrentLayer(SIZES, dtype, CPU, length), length


def alone(rows: RecurrentRows, parts: Parts = PARTS) -> Tensor:
    """One token after another, each of which stays."""
    layer, length = new_layer(rows.inputs.dtype)
    out = []
    for at in range(len(rows.inputs)):
        length.tree = None
        out.append(layer.run(some(rows, slice(at, at + 1)), parts))
        length.count += 1
        length.settled = length.count
    return torch.cat(out)


def in_numpy(rows: RecurrentRows) -> Any:
    """A text of these tokens, in float64."""
    taps, weight = SIZES.taps, PARTS.weight.double().numpy()
    inputs = np.concatenate([np.zeros((taps - 1, SIZES.channels)), rows.inputs.double().numpy()])
    state = np.zeros(SIZES.state)
    out, keys = [], SIZES.key_heads * SIZES.key_width
    for at in range(len(rows.inputs)):
        mixed = (inputs[at : at + taps] * weight.T).sum(0)
        mixed = mixed / (1 + np.exp(-mixed))
        made = np.zeros((SIZES.value_heads, SIZES.value_width))
        for head in range(SIZES.value_heads):
            of = head * SIZES.key_heads // SIZES.value_heads
            query, key = (
                mixed[start + of * SIZES.key_width :][: SIZES.key_width] for start in (0, keys)
            )
            value = mixed[2 * keys + head * SIZES.value_width :][: SIZES.value_width]
            query, key = (each / np.sqrt((each**2).sum() + 1e-6) for each in (query, key))
            state[head] *= np.exp(float(rows.decays[at, head]))
            change = float(rows.betas[at, head]) * (value - key @ state[head])
            state[head] += np.outer(key, change)
            made[head] = query / np.sqrt(SIZES.key_width) @ state[head]
        out.append(made)
    return np.stack(out)


def test_tokens_are_those_of_the_formula() -> None:
    rows = rows_of(11, 1)
    np.testing.assert_allclose(alone(rows).numpy(), in_numpy(rows), atol=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-5), (torch.bfloat16, 2e-2)])
def test_states_are_float32_whatever_the_models_dtype(dtype: torch.dtype, atol: float) -> None:
    rows, parts = rows_of(9, 5), Parts(dtype)
    rows = rows._replace(inputs=rows.inputs.to(dtype))
    out = new_layer(dtype)[0].run(rows, parts)
    assert out.dtype == torch.float32
    assert torch.equal(out, alone(rows, parts))
    np.testing.assert_allclose(out.numpy(), in_numpy(rows), atol=atol)


@pytest.mark.parametrize("count", [1, 2, 5, MAX_LINEAR_ROWS])
def test_tokens_together_are_bit_for_bit_those_alone(count: int) -> None:
    rows = rows_of(3 + count, 2)
    layer, length = new_layer()
    first = layer.run(some(rows, slice(0, 3)), PARTS)
    length.count = length.settled = 3
    behind = layer.run(some(rows, slice(3, None)), PARTS)
    assert torch.equal(torch.cat([first, behind]), alone(rows))


def test_a_prompt_is_run_at_once_and_gone_on_from() -> None:
    rows, before = rows_of(MAX_LINEAR_ROWS + 9, 4), PARTS.prompts
    prompt = MAX_LINEAR_ROWS + 4
    layer, length = new_layer()
    length.reading = True
    out = [layer.run(some(rows, slice(0, prompt)), PARTS)]
    assert PARTS.prompts == before + 1
    length.count = length.settled = prompt
    length.reading = False
    out.append(layer.run(some(rows, slice(prompt, None)), PARTS))
    assert torch.equal(torch.cat(out), alone(rows))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_given_up_leaves_no_trace(seed: int) -> None:
    """Drafts of other tokens, verifications of which a part stands, one text after another."""
    rng = random.Random(seed)
    layer, length = new_layer()
    for text in range(2):
        length.count, length.settled, length.sequence, length.tree = 0, 0, text, None
        kept, made = rows_of(0, 0), torch.empty(0, *SIZES.state[::2])
        for turn in range(12):
            length.settled = root = length.count
            drafted = rng.randint(0, 6)
            for at in range(drafted):  # by another model: other inputs
                layer.run(rows_of(1, 1000 * seed + 50 * turn + at), PARTS)
                length.count += 1
            length.count = root
            rows = rows_of(1 + drafted, 7000 * (seed + 1) + 100 * text + turn)
            out = layer.run(rows, PARTS)
            stands = rng.randint(1, 1 + drafted)
            length.count += stands
            kept = together(kept, some(rows, slice(0, stands)))
            made = torch.cat([made, out[:stands]])
        assert torch.equal(made, alone(kept))


@pytest.mark.parametrize("seed", range(6))
def test_each_path_of_a_tree_is_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(3, 20)
    parents = [rng.randint(0, at) for at in range(nodes - 1)]
    before, rows = rows_of(5, 11), rows_of(nodes, 12 + seed)
    layer, length = new_layer()
    layer.run(before, PARTS)
    length.count = length.settled = 5
    tree = Tree.of(parents)
    length.tree = tree
    out = layer.run(rows, PARTS)

    def path_to(node: int) -> list[int]:
        return [*path_to(tree.parents[node]), node] if node >= 0 else []

    for node in range(nodes):
        path = path_to(node)
        expected = alone(together(before, some(rows, path)))
        assert torch.equal(out[node], expected[-1])
    # The same, node by node, as trees are drafted.
    drafted = []
    for node in range(nodes):
        length.tree = Tree.of(parents[:node], rows=1)
        drafted.append(layer.run(some(rows, slice(node, node + 1)), PARTS))
        length.count += 1
    assert torch.equal(torch.cat(drafted), out)
    # A path is kept, and the text goes on behind it.
    length.count, length.tree = 5, tree
    layer.run(rows, PARTS)
    path, following = path_to(nodes - 1), rows_of(2, 99)
    layer.keep(5, torch.tensor(path) + 5)
    length.count, length.tree = 5 + len(path), None
    length.settled = length.count
    expected = alone(together(before, some(rows, path), following))
    assert torch.equal(layer.run(following, PARTS), expected[-2:])


def test_texts_side_by_side_are_each_alone() -> None:
    texts = [new_layer() for _ in range(3)]
    counts = [2, 1, 4]
    rows = [rows_of(count, 30 + at) for at, count in enumerate(counts)]
    both = BatchStateLayer([layer for layer, _ in texts], counts)
    out = both.run(together(*rows), PARTS).split(counts)
    for found, each in zip(out, rows, strict=True):
        assert torch.equal(found, alone(each))


def test_more_tokens_than_may_be_given_up_are_not_taken() -> None:
    layer, length = new_layer()
    layer.run(rows_of(MAX_LINEAR_ROWS, 1), PARTS)
    length.count = MAX_LINEAR_ROWS
    with pytest.raises(Broken, match="97 tokens of a sequence may be rolled back"):
        layer.run(rows_of(PENDING - MAX_LINEAR_ROWS + 1, 2), PARTS)


@pytest.mark.parametrize("count", [MAX_LINEAR_ROWS, MAX_LINEAR_ROWS + 1, PENDING])
def test_any_number_of_tokens_can_be_given_up(count: int) -> None:
    """As a verification's, whose number says nothing: prompts alone need not go back."""
    before, drafted, following = rows_of(3, 21), rows_of(count, 22), rows_of(2, 23)
    layer, length = new_layer()
    layer.run(before, PARTS)
    length.count = length.settled = 3
    assert torch.equal(layer.run(drafted, PARTS)[-1], alone(together(before, drafted))[-1])
    length.count = length.settled = 4  # the pending token alone stands
    kept = together(before, some(drafted, slice(0, 1)), following)
    assert torch.equal(layer.run(following, PARTS), alone(kept)[-2:])


@pytest.mark.parametrize("prompt", [5, MAX_LINEAR_ROWS + 4])
@pytest.mark.parametrize("drafted", [0, 3])
def test_another_sequence_goes_on_from_a_copied_state(prompt: int, drafted: int) -> None:
    """Of the same cache or another, whatever ran after it and whatever was taken back before it."""
    rows, other, following = rows_of(prompt, 41), rows_of(4, 42), rows_of(3, 43)
    layer, length = new_layer()
    length.reading = True
    layer.run(rows, PARTS)
    length.count = length.settled = prompt
    length.reading = False
    if drafted:
        layer.run(rows_of(drafted, 44), PARTS)  # and nothing of it is kept
    snapshot = layer.new_snapshot()
    layer.save(snapshot)
    layer.run(other, PARTS)
    length.count = length.settled = prompt + 4
    layer.run(other, PARTS)
    expected = alone(together(rows, following))[-3:]
    fresh, its = new_layer()
    for each, at in ((fresh, its), (layer, length)):
        at.count = at.settled = prompt
        each.restore(snapshot)
        assert torch.equal(each.run(following, PARTS), expected)
