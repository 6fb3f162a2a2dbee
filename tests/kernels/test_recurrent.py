"""The rules of layers with states: every instruction set against plain torch, and tokens that run
together.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from speq.kernels import reference_recurrent
from speq.kernels.recurrent import NORM_EPSILON, RecurrentSizes, delta_steps, selective_scan

# Whole vectors of columns and parts of them, one head, and heads that share keys.
SIZES = [
    RecurrentSizes(1, 1, 1, 1, 4),
    RecurrentSizes(1, 1, 5, 12, 4),
    RecurrentSizes(1, 3, 12, 5, 4),
    RecurrentSizes(2, 4, 20, 20, 4),
    RecurrentSizes(2, 2, 7, 77, 4),
    RecurrentSizes(1, 2, 128, 128, 4),
    RecurrentSizes(1, 1, 3, 245, 4),
    RecurrentSizes(2, 4, 20, 21, 4, by_channel=True),
    RecurrentSizes(1, 2, 128, 128, 4, by_channel=True),
]
# So many that regions of even one token have threads.
MANY = RecurrentSizes(6, 12, 64, 130, 4)
pytestmark = pytest.mark.usefixtures("isa")


class Tokens(NamedTuple):
    """What the rules take behind a state."""

    mixed: Tensor
    decays: Tensor
    betas: Tensor

    @classmethod
    def of(cls, sizes: RecurrentSizes, count: int) -> "Tokens":
        generator = torch.Generator().manual_seed(count)
        return cls(
            torch.randn(count, sizes.channels, generator=generator),
            -torch.rand(count, *sizes.decays, generator=generator),
            torch.rand(count, sizes.value_heads, generator=generator),
        )

    def part(self, first: int, last: int) -> "Tokens":
        return Tokens(*(each[first:last] for each in self))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
of_rules = pytest.mark.parametrize(
    "rule", [delta_steps, selective_scan], ids=lambda rule: rule.__name__
)


def state_of(sizes: RecurrentSizes) -> Tensor:
    return torch.randn(sizes.state, generator=torch.Generator().manual_seed(7))


def by_torch(state: Tensor, tokens: Tokens, rule: Rule = delta_steps) -> Tensor:
    out = torch.full((len(tokens.mixed), state.shape[0], state.shape[2]), torch.nan)
    if rule is delta_steps:
        reference_recurrent.delta_rule_out(*tokens, NORM_EPSILON, state, out)
    else:
        reference_recurrent.selective_scan_out(*tokens, state, out)
    return out


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 17])
@of_rules
def test_rule_is_torchs(sizes: RecurrentSizes, count: int, rule: Rule) -> None:
    tokens, ours, wanted = Tokens.of(sizes, count), state_of(sizes), state_of(sizes)
    if rule is selective_scan:  # whose keys are as they are
        tokens = tokens._replace(mixed=tokens.mixed / sizes.key_width**0.5)
    assert_close(rule(ours, *tokens), by_torch(wanted, tokens, rule))
    assert_close(ours, wanted)


@pytest.mark.parametrize("sizes", [*SIZES[1:5], SIZES[-1], MANY], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@of_rules
def test_tokens_together_are_bit_for_bit_those_alone(
    sizes: RecurrentSizes, threads: int, rule: Rule
) -> None:
    """In passes of any length, on any number of threads."""
    tokens, alone = Tokens.of(sizes, 17), state_of(sizes)
    wanted = torch.cat([rule(alone, *tokens.part(at, at + 1)) for at in range(17)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ends in ((17,), (1, 6, 17), (16, 17)):
            state, first, out = state_of(sizes), 0, []
            for end in ends:
                out.append(rule(state, *tokens.part(first, end)))
                first = end
            assert torch.equal(torch.cat(out), wanted)
            assert torch.equal(state, alone)
    finally:
        torch.set_num_threads(before)


@of_rules
def test_reference_runs_tokens_as_if_alone(rule: Rule) -> None:
    """It takes the place of the kernels where these are missing."""
    tokens, together, alone = Tokens.of(MANY, 3), state_of(MANY), state_of(MANY)
    out = by_torch(together, tokens, rule)
    for at in range(3):
        assert torch.equal(by_torch(alone, tokens.part(at, at + 1), rule)[0], out[at])
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


@of_rules
def test_what_is_no_number_stays_in_its_head(rule: Rule) -> None:
    sizes = SIZES[3]
    tokens, state = Tokens.of(sizes, 3), state_of(sizes)
    tokens.mixed[1, -1] = torch.nan  # a value of the last head
    out = rule(state, *tokens)
    assert out[:, :-1].isfinite().all()
    assert out[0].isfinite().all()
    assert out[1:, -1, -1].isnan().all()
    assert state[-1, :, -1].isnan().all()


@of_rules
def test_no_tokens_are_no_error(rule: Rule) -> None:
    state = state_of(SIZES[3])
    assert rule(state, *Tokens.of(SIZES[3], 0)).shape == (0, 4, 20)
    assert torch.equal(state, state_of(SIZES[3]))
