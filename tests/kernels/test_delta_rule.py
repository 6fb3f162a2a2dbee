"""The gated delta rule: every instruction set against plain torch, and tokens that run together."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from speq.kernels import reference_delta
from speq.kernels.delta_rule import NORM_EPSILON, DeltaSizes, delta_steps
from tests.helpers.backends import CPU_BACKENDS, Backend, backend_named

# Whole vectors of columns and parts of them, one head, and heads that share keys.
SIZES = [
    DeltaSizes(1, 1, 1, 1, 4),
    DeltaSizes(1, 1, 5, 12, 4),
    DeltaSizes(1, 3, 12, 5, 4),
    DeltaSizes(2, 4, 20, 20, 4),
    DeltaSizes(2, 2, 7, 77, 4),
    DeltaSizes(1, 2, 128, 128, 4),
    DeltaSizes(1, 1, 3, 245, 4),
]
# So many that regions of even one token have threads.
MANY = DeltaSizes(6, 12, 64, 130, 4)


@pytest.fixture(params=CPU_BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


class Tokens(NamedTuple):
    """What `delta_steps` takes behind a state."""

    mixed: Tensor
    decays: Tensor
    betas: Tensor

    @classmethod
    def of(cls, sizes: DeltaSizes, count: int) -> "Tokens":
        generator = torch.Generator().manual_seed(count)
        return cls(
            torch.randn(count, sizes.channels, generator=generator),
            -torch.rand(count, sizes.value_heads, generator=generator),
            torch.rand(count, sizes.value_heads, generator=generator),
        )

    def part(self, first: int, last: int) -> "Tokens":
        return Tokens(*(each[first:last] for each in self))


def state_of(sizes: DeltaSizes) -> Tensor:
    return torch.randn(sizes.state, generator=torch.Generator().manual_seed(7))


def by_torch(state: Tensor, tokens: Tokens) -> Tensor:
    out = torch.full((len(tokens.mixed), state.shape[0], state.shape[2]), torch.nan)
    reference_delta.delta_rule_out(*tokens, NORM_EPSILON, state, out)
    return out


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_rule_is_torchs(sizes: DeltaSizes, count: int) -> None:
    tokens, ours, wanted = Tokens.of(sizes, count), state_of(sizes), state_of(sizes)
    assert_close(delta_steps(ours, *tokens), by_torch(wanted, tokens))
    assert_close(ours, wanted)


@pytest.mark.parametrize("sizes", [*SIZES[1:5], MANY], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_together_are_bit_for_bit_those_alone(sizes: DeltaSizes, threads: int) -> None:
    """In passes of any length, on any number of threads."""
    tokens, alone = Tokens.of(sizes, 17), state_of(sizes)
    wanted = torch.cat([delta_steps(alone, *tokens.part(at, at + 1)) for at in range(17)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ends in ((17,), (1, 6, 17), (16, 17)):
            state, first, out = state_of(sizes), 0, []
            for end in ends:
                out.append(delta_steps(state, *tokens.part(first, end)))
                first = end
            assert torch.equal(torch.cat(out), wanted)
            assert torch.equal(state, alone)
    finally:
        torch.set_num_threads(before)


def test_reference_runs_tokens_as_if_alone() -> None:
    """It takes the place of the kernels where these are missing."""
    tokens, together, alone = Tokens.of(MANY, 3), state_of(MANY), state_of(MANY)
    out = by_torch(together, tokens)
    for at in range(3):
        assert torch.equal(by_torch(alone, tokens.part(at, at + 1))[0], out[at])
    assert torch.equal(together, alone)


def test_states_stay_and_go() -> None:
    sizes = SIZES[3]
    mixed, decays, betas = Tokens.of(sizes, 4)
    state, stay = state_of(sizes), torch.zeros_like(decays)
    delta_steps(state, mixed, stay, torch.zeros_like(betas))
    assert torch.equal(state, state_of(sizes))
    # What is forgotten leaves nothing: the state is that of a token at the start of a text.
    delta_steps(state, mixed[:1], torch.full_like(decays[:1], -torch.inf), betas[:1])
    started = torch.zeros_like(state)
    delta_steps(started, mixed[:1], decays[:1], betas[:1])
    assert_close(state, started)


def test_what_is_no_number_stays_in_its_head() -> None:
    sizes = SIZES[3]
    tokens, state = Tokens.of(sizes, 3), state_of(sizes)
    tokens.mixed[1, -1] = torch.nan  # a value of the last head
    out = delta_steps(state, *tokens)
    assert out[:, :-1].isfinite().all()
    assert out[0].isfinite().all()
    assert out[1:, -1, -1].isnan().all()
    assert state[-1, :, -1].isnan().all()


def test_no_tokens_are_no_error() -> None:
    state = state_of(SIZES[3])
    assert delta_steps(state, *Tokens.of(SIZES[3], 0)).shape == (0, 4, 20)
    assert torch.equal(state, state_of(SIZES[3]))
