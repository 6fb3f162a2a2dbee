"""Choosing on a device: what the host would choose, in one read."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.engine import sampler as sampler_module
from speq.engine.accept import accept
from speq.engine.draft import Draft
from speq.engine.drafters.next_token import Chosen, NextTokens, SamplePosition, next_tokens_on
from speq.engine.logit_bias import LogitBias
from speq.engine.request import Request
from speq.engine.sampler import DeviceSampler, HostSampler
from speq.engine.sampling import noise
from speq.errors import SpeqError
from speq.routing import Route
from tests.helpers.host_device import HostDevice, host_device

V = 50
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 9},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8},
    {"temperature": 1.2, "seed": 2**63 - 1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 0.8},
]


def text(sampling: dict[str, Any], bias: LogitBias | None = None) -> Request:
    params = SamplingParams(**sampling)
    return Request([3, 1, 4, 1, 5], params, output_token_ids=[9, 2, 6, 9], bias=bias)


def logits_of(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, V, generator=generator)).to(dtype)


# Two tokens are as good as out, and no text ends before its sixth token.
BIAS = LogitBias({3: 2.5, 7: -100.0, 9: -4.0}, frozenset({11, 12}), 6)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["", "bias"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_chooses_what_the_host_does(
    sampling: dict[str, Any], dtype: torch.dtype, bias: LogitBias | None
) -> None:
    """Here, where both add up alike."""
    rng, chosen = random.Random(6), set()
    with host_device() as device:
        sampler = DeviceSampler(device)
        for seed in range(4):
            nodes = rng.randint(0, 4)
            parents = [rng.randint(0, node) for node in range(nodes)]
            draft = Draft([rng.randrange(V) for _ in range(nodes)], parents)
            logits = logits_of(draft.nodes, seed, dtype)
            host = HostSampler().choices(draft, logits, text(sampling, bias))
            wanted = [host(node) for node in range(draft.nodes)]
            waits = len(device.waits)
            there = logits.to(device.torch)
            choice = sampler.choices(draft, there, text(sampling, bias))
            assert [choice(node) for node in range(draft.nodes)] == wanted
            assert accept(draft, there, text(sampling), sampler) == accept(
                draft, logits, text(sampling)
            )
            assert device.reads == []
            assert len(device.waits) == waits + 2
            chosen |= set(wanted)
    assert len(chosen) > 3


def test_noise_is_sent_once_and_forgotten_with_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def counted(seed: int, position: int, size: int) -> Tensor:
        made.append((seed, position))
        return noise(seed, position, size)

    monkeypatch.setattr(sampler_module, "noise", counted)
    with host_device() as device:
        sampler = DeviceSampler(device)
        request = text({"temperature": 1.0, "seed": 7})
        scores = logits_of(1, 0).to(device.torch)
        for drafted in ([], [8], [8, 8]):
            sampler.choose(scores, request, [drafted])
        assert made == [(7, 4), (7, 5), (7, 6)]
        draft = Draft.chain([8, 8, 8])
        sampler.choices(draft, logits_of(4, 1).to(device.torch), request)
        assert made[3:] == [(7, 7)]
        request.output_token_ids += [8, 8]
        sampler.choose(scores, request, [[]])
        assert len(made) == 4
        sampler.choose(scores, text({"temperature": 1.0, "seed": 7}), [[]])
        assert made[4:] == [(7, 4)]  # another text; positions before the last were let go
        sampler.choose(scores, text({"temperature": 1.0, "seed": 8}), [[]])
        assert made[5:] == [(8, 4)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}])
def test_damage_is_noticed_in_the_same_read(bad: float, sampling: dict[str, Any]) -> None:
    logits = logits_of(3, 5)
    logits[2, 17] = bad
    logits[0, 3] = -torch.inf  # as some models forbid a token
    with host_device() as device:
        sampler = DeviceSampler(device)
        with pytest.raises(SpeqError, match="the model's logits are not numbers"):
            sampler.choices(Draft.chain([1, 2]), logits.to(device.torch), text(sampling))
        assert device.reads == []
        assert len(device.waits) == 1
        sampler.choices(Draft.chain([1]), logits[:2].to(device.torch), text(sampling))


Told = list[tuple[int, list[list[int]], list[list[float]]]]
IDS, WEIGHTS = [[4, 0], [2, 3], [1, 5]], [[0.75, 0.25], [0.5, 0.25], [1.0, 0.125]]


def next_token(
    next_of: NextTokens, logits: Tensor, sampling: dict[str, Any], told: Told
) -> Chosen | None:
    """What is drafted behind one token; routes are of three layers."""
    device = logits.device

    def run(on_layer: Any) -> Tensor:
        for layer, (ids, weights) in enumerate(zip(IDS, WEIGHTS, strict=True)):
            on_layer(
                layer,
                Route(torch.tensor([ids]).to(device), torch.tensor([weights]).to(device)),
            )
        return logits

    def on_layer(layer: int, route: Route) -> None:
        told.append((layer, route.ids, route.weights))

    (chosen,) = next_of(run, [SamplePosition(text(sampling), [7], on_layer)])
    return chosen


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafted_token_and_its_routes_are_read_together(sampling: dict[str, Any]) -> None:
    expected = [(at, [IDS[at]], [WEIGHTS[at]]) for at in range(3)]
    on_host: Told = []
    told: Told = []
    wanted = next_token(next_tokens_on(HostSampler()), logits_of(1, 8), sampling, on_host)
    with host_device() as device:
        next_of = next_tokens_on(DeviceSampler(device))
        logits = logits_of(1, 8).to(device.torch)
        found = next_token(next_of, logits, sampling, told)
        assert found is not None and wanted is not None
        assert found.token_id == wanted.token_id
        assert found.logit_margin == pytest.approx(wanted.logit_margin, rel=1e-3, abs=1e-4)
        assert device.reads == []
        assert len(device.waits) == 1
    assert on_host == told == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_damaged_draft_ends_and_says_nothing(bad: float) -> None:
    logits = logits_of(1, 9)
    logits[0, 30] = bad
    assert next_token(next_tokens_on(HostSampler()), logits, {}, []) is None
    device: HostDevice
    with host_device() as device:
        next_of = next_tokens_on(DeviceSampler(device))
        assert next_token(next_of, logits.to(device.torch), {}, []) is None
