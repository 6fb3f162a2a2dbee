"""How often the host waits for the device: once a drafted token, once a layer, once a choice."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.config import SamplingParams
from speq.engine.request import Request
from speq.layers.draft_experts import DraftExperts
from speq.layers.exact_experts import ExactExperts
from speq.layers.route_reader import DeviceRoutes
from speq.routing import Route
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.route_history import RouteHistory
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.host_reads import Step, steps_of
from tests.helpers.often import often
from tests.helpers.smallest import two_slot_budget

PROMPT = [*range(30, 40)]
CONTEXT, TOKENS = 64, 10
DRAWN = {
    "temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.95, "min_p": 0.01,
    "repetition_penalty": 1.1, "frequency_penalty": 0.2,
}  # fmt: skip


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with host_device() as made:
        yield made


def generator_of(
    model: Path,
    prefetch: str,
    draft_length: int,
    budget: int | str,
    graphs: str,
    draft_experts: int | None = None,
) -> Generator:
    return Generator.from_pretrained(
        model,
        budget,
        draft_length=draft_length,
        context_length=CONTEXT,
        dtype="float32",
        prefetch=prefetch,
        graphs=graphs,
        draft_experts=draft_experts,
    )


def steps(device: HostDevice, generator: Generator, sampling: dict[str, Any]) -> list[Step]:
    """Of one text."""
    with steps_of(device, generator.runtime.engine) as found:
        generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True, **sampling)
    return found


@pytest.mark.parametrize(
    ("family", "sampling", "prefetch", "draft_length", "graphs"),
    often(
        [
            ("mixtral", DRAWN, "three-phase", 2, "auto"),
            ("qwen2_moe", {}, "three-phase", 3, "none"),
            ("qwen2_moe", DRAWN, "none", 0, "none"),
        ],
        quick=1,
        wide=1,
    ),
)
def test_the_host_waits_no_more_than_it_must(
    device: HostDevice,
    tiny: Callable[[str], Path],
    family: str,
    sampling: dict[str, Any],
    prefetch: str,
    draft_length: int,
    graphs: str,
) -> None:
    budget, demand = two_slot_budget(tiny(family), CONTEXT, "float32", draft_length)
    budget += 7 * demand.slot_bytes
    with closing(generator_of(tiny(family), prefetch, draft_length, budget, graphs)) as generator:
        found = steps(device, generator, sampling)
    assert len(found) >= TOKENS // (draft_length + 1) - 1
    for step in found:
        step.check()
    # What is counted is there: each drafted token is read, each layer and each outcome.
    assert sum(len(step.waited.get("propose", [])) for step in found) == sum(
        step.stats.draft_length for step in found
    )
    assert all(len(step.waited["verify"]) >= step.layers for step in found)
    for step in found:  # a verification is not over before its outcome is known
        (verify,) = [event for event in step.stats.events if event.kind == "verify"]
        assert verify.start_s < step.outcome_s <= verify.end_s
    assert sum(step.stats.moved for step in found) > 0


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_drafts_that_choose_again_wait_no_more(
    device: HostDevice, tiny: Callable[[str], Path], family: str
) -> None:
    """Among some experts, on the device."""
    with closing(generator_of(tiny(family), "none", 2, "1GiB", "none", 3)) as generator:
        assert generator.runtime.residency_plan.draft_experts == 3
        found = steps(device, generator, {})
    assert len(found) >= TOKENS // 3 - 1
    for step in found:
        step.check()
    assert sum(len(step.waited.get("propose", [])) for step in found) == sum(
        step.stats.draft_length for step in found
    )


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda rows: rows.sum().item(),
    "tolist": lambda rows: rows.tolist(),
    "cpu": lambda rows: rows.cpu(),
    "bool": lambda rows: bool(rows.isnan().any()),
    "mask": lambda rows: rows[rows > 0],
    "nonzero": lambda rows: rows.nonzero(),
    "unique": lambda rows: rows.unique(),
    "copy": lambda rows: torch.empty(rows.shape).copy_(rows),
    "beside": lambda rows: torch.empty(rows.shape).copy_(rows, non_blocking=True),
}


SENDS: dict[str, Callable[[Tensor], Any]] = {
    "to": lambda rows: torch.arange(3).to(rows.device),
    "tensor": lambda rows: torch.tensor([1.0, 2.0], device=rows.device),
    "copy": lambda rows: torch.empty_like(rows).copy_(torch.zeros(rows.shape)),
    "index": lambda rows: rows[[0]],
}
PARTS = [(DraftExperts, "propose"), (ExactExperts, "verify")]


@pytest.mark.wide
def test_a_read_in_a_layer_is_noticed(
    device: HostDevice, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted: dict[Any, Callable[[Tensor], Any]] = {}

    def reading(backend: Any) -> Callable[..., Tensor]:
        run = backend.__call__

        def call(self: Any, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
            if layer == 1 and backend in planted:
                planted[backend](hidden_states)
            return run(self, layer, hidden_states, route)

        return call

    for backend, _ in PARTS:
        monkeypatch.setattr(backend, "__call__", reading(backend))
    with closing(generator_of(tiny("qwen2_moe"), "none", 1, "1GiB", "none")) as generator:
        request = Request(PROMPT, SamplingParams(max_new_tokens=99, ignore_eos=True))
        engine = generator.runtime.engine
        engine.prefill(request)
        with steps_of(device, engine) as found:
            engine.step([request])
            found[-1].check()
            for (backend, part), (name, read) in product(PARTS, READS.items()):
                planted = {backend: read}
                engine.step([request])
                step = found[-1]
                # The experts lay in slots, so that no wait is left over.
                assert step.stats.draft_length and step.stats.hits == step.stats.requests
                with pytest.raises(AssertionError, match=f"{part} may wait"):
                    step.check()
                    pytest.fail(f"{name} in {part} was not noticed")
            for (backend, part), (name, send) in product(PARTS, SENDS.items()):
                planted = {backend: send}
                engine.step([request])
                with pytest.raises(AssertionError, match="sent from memory that is not pinned"):
                    found[-1].check()
                    pytest.fail(f"{name} in {part} was not noticed")


@pytest.mark.parametrize("top_k", [2, 6])
def test_what_is_asked_of_a_route_costs_one_read(device: HostDevice, top_k: int) -> None:
    """Of all six experts as well, where none is left to compare the last one with."""
    rows, experts = 4, 6
    generator = torch.Generator().manual_seed(top_k)
    weights, ids = torch.rand(rows, experts, generator=generator).topk(top_k)
    logits = torch.randn(rows, experts, generator=generator)
    route = Route(
        ids.to(device.torch),
        weights.to(device.torch),
        next_router=lambda rows: logits[rows].to(device.torch),
    )
    path = [0, 1, 3]
    buffer = LookaheadBuffer(1)
    for token in (0, 1):
        buffer.record(token, 0, Route(ids[[3 - token]], weights[[3 - token]]))
    device.reads.clear()
    DeviceRoutes(device).read(route, predict_next_layer=True)
    buffer.observe(0, route)
    history = RouteHistory(1, experts)
    history.observe(0, route)
    found = (
        route.ids,
        route.experts,
        route.weights,
        buffer.rejected(path),
        buffer.recall(path),
        history.chosen,
        route.predict_next_layer([3, 0]),
    )
    assert device.reads == []
    assert len(device.waits) == 1

    rows_of = ids.tolist()
    used = {expert for row in rows_of for expert in row}
    kept = {expert for node in path for expert in rows_of[node]}
    named = sum(len({*rows_of[node]} & {*rows_of[3 - node]}) for node in (0, 1))
    ordered = [sorted(row.tolist(), reverse=True) for row in logits[[3, 0]]]
    margins = [[value - row[min(top_k, experts - 1)] for value in row[:top_k]] for row in ordered]
    likeliest = logits[[3, 0]].argsort(descending=True)[:, :top_k].tolist()
    assert found[:-1] == (
        rows_of,
        sorted(used),
        weights.tolist(),
        {(0, expert) for expert in used - kept},
        (named, 2 * top_k),
        len(used),
    )
    assert found[-1] is not None
    assert found[-1].ids == likeliest
    torch.testing.assert_close(torch.tensor(found[-1].margins), torch.tensor(margins))
    assert (
        Route(ids, weights, next_router=logits.__getitem__).predict_next_layer([3, 0]) == found[-1]
    )
    assert Route(ids, weights).predict_next_layer([0]) is None
