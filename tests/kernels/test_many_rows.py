"""More rows than a kernel of a GPU takes: in blocks, or through experts one at a time.

Ops and experts in slots are called as the engine calls them, with the CUDA kernels underneath.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from speq.devices.device import Processor
from speq.devices.named import find_device
from speq.engine.offload import host_side
from speq.experts.codec import ExpertShape, Matrices, codec_of
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.experts.slots import SlotExperts
from speq.files.alignment import allocate_aligned
from speq.kernels import library, ops, reference, reference_compact
from speq.kernels.grouping import MAX_BLOCKS, Grouping, most_fused_rows
from speq.layers.exact_experts import ExactExperts
from speq.models.opened import open_model
from speq.routing import Route
from speq.stats import Recorder
from tests.helpers.backends import (
    CUDA_BACKENDS,
    cuda_device,
    cuda_kernels_on_host,
    poisoned_memory,
)
from tests.helpers.expert_problems import SILU
from tests.helpers.pairwise import covering

E, H, F = 20, 32, 16
# Experts that are on somebody's route.
ROUTED = 18
SHAPE = ExpertShape(H, F, torch.bfloat16)
LAYER, LAYERS = 1, 2
# A residual's codes are permuted or not; slots are not in the order of the experts.
FORMS = ("raw", "lossless", "residual", "residual of permuted codes")
ROWS = (17, 33, 64, 65, 130)
TOP_KS = (1, 4, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a standard deviation. Both projections, the activation and the product are rounded.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.0125}


@pytest.fixture(params=CUDA_BACKENDS)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield from cuda_device(request)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls a plain torch version of a kernel fails."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the reference ran")

    for module in (reference, reference_compact):
        for name in dir(module):
            if name.endswith("_out"):
                monkeypatch.setattr(module, name, refuse)
    with pytest.raises(AssertionError, match="the reference ran"):
        reference.moe_grouped_out()  # type: ignore[call-arg]


@cache
def matrices() -> list[Matrices]:
    generator = torch.Generator().manual_seed(5)
    shapes = (SHAPE.gate_up_shape, SHAPE.down_shape)
    experts = []
    for _ in range(E):
        gate_up, down = (torch.randn(s, generator=generator).mul(0.2).bfloat16() for s in shapes)
        experts.append((gate_up, down))
    return experts


def slot_of(expert: int) -> int:
    return (7 * expert + 3) % E


def int4_experts(permuted: bool) -> tuple[Int4Layout, list[Int4Expert]]:
    plain, generator = Int4Layout(H, F), torch.Generator().manual_seed(6)
    experts = []
    for gate_up, down in matrices():
        perm = torch.randperm(H, generator=generator)
        columns = gate_up[:, perm] if permuted else gate_up
        expert = Int4Expert.round(plain, columns, down)
        more = {"input_perm": perm.int()} if permuted else {}
        experts.append(Int4Expert({**expert.parts, **more}))
    return Int4Layout(H, F, None, permuted), experts


def experts_in_slots(form: str, device: torch.device) -> SlotExperts:
    codec = codec_of(form.partition(" ")[0], SHAPE)
    layout, codes = int4_experts("permuted" in form)
    slots = allocate_aligned(E, codec.slot_bytes)
    slots.fill_(0xA5)
    arena = Int4Arena(layout, LAYERS, E, device) if codec.needs_draft else None
    for expert, words in enumerate(matrices()):
        codec.encode(words, codes[expert] if codec.needs_draft else None, slots[slot_of(expert)])
        if arena is not None:
            for base_slot in arena.base_slots[:, expert].tolist():
                arena.put(base_slot, codes[expert if base_slot >= E else 0])
    return codec.experts(slots.to(device), arena)


@dataclass(frozen=True)
class Routed:
    """Rows and their routes. The last experts are in nobody's."""

    hidden_states: Tensor
    topk_ids: Tensor

    @classmethod
    def of(cls, rows: int, top_k: int, dtype: torch.dtype) -> "Routed":
        generator = torch.Generator().manual_seed(7)
        ids = torch.rand(rows, ROUTED, generator=generator).argsort(1)[:, :top_k].contiguous()
        return cls(torch.randn(rows, H, generator=generator).to(dtype), ids)

    def wanted(self) -> Tensor:
        """[T, K, H] in double precision, row by row."""
        words = [(gate_up.double(), down.double()) for gate_up, down in matrices()]
        out = torch.empty(*self.topk_ids.shape, H, dtype=torch.float64)
        for row, ids in enumerate(self.topk_ids.tolist()):
            x = self.hidden_states[row].double()
            for rank, expert in enumerate(ids):
                gate, up = (words[expert][0] @ x).chunk(2)
                out[row, rank] = words[expert][1] @ (functional.silu(gate) * up)
        return out

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.hidden_states.to(device), self.topk_ids.to(device)

    def run(self, experts: SlotExperts, device: torch.device, waves: list[list[int]]) -> Tensor:
        """Through experts, some at a time; rows of the others are NaN."""
        hidden_states, topk_ids = self.on(device)
        grouping = Grouping.of(topk_ids, self.topk_ids)
        out = torch.full((*topk_ids.shape, H), torch.nan, dtype=hidden_states.dtype, device=device)
        for wave in waves:
            slots = {expert: slot_of(expert) for expert in wave}
            experts.run(LAYER, hidden_states, grouping, slots, table_of(slots, device), SILU, out)
        return out.cpu()


def check_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.double() - wanted).abs().max() / wanted.std()
    assert error < ALLOWED[found.dtype]


@pytest.mark.parametrize(("form", "rows", "top_k", "dtype"), covering(FORMS, ROWS, TOP_KS, DTYPES))
def test_experts_in_slots_are_those_of_double_precision(
    device: torch.device, no_reference: None, form: str, rows: int, top_k: int, dtype: torch.dtype
) -> None:
    """All of them at once, and in waves in another order: not a bit depends on it."""
    routed = Routed.of(rows, top_k, dtype)
    experts = experts_in_slots(form, device)
    found = routed.run(experts, device, [list(range(E))])
    check_close(found, routed.wanted())
    waves = [list(range(E))[start::2] for start in (1, 0)]
    assert torch.equal(found, routed.run(experts, device, waves))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_absent_experts_are_left_alone(device: torch.device, form: str) -> None:
    routed = Routed.of(70, 4, torch.bfloat16)
    experts = experts_in_slots(form, device)
    present = [1, 4, 9, 17, 19]
    found = routed.run(experts, device, [present])
    there = torch.isin(routed.topk_ids, torch.tensor(present))
    assert bool(there.any()) and not bool(there.all())
    assert torch.equal(found.isnan().any(2), ~there) and torch.equal(found.isnan().all(2), ~there)
    check_close(found[there], routed.wanted()[there])


def test_codecs_are_of_one_mind(device: torch.device) -> None:
    """What holds the words changes no bit of a product, however many rows there are."""
    for rows in (17, 65):
        routed = Routed.of(rows, 4, torch.bfloat16)
        raw, *others = (
            routed.run(experts_in_slots(form, device), device, [list(range(E))])
            for form in FORMS[:3]
        )
        for other in others:
            assert torch.equal(raw, other)


@pytest.mark.parametrize("words", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_words_are_converted_to_the_dtype_of_rows(
    device: torch.device, words: torch.dtype, dtype: torch.dtype
) -> None:
    routed = Routed.of(70, 2, dtype)
    codec = codec_of("raw", ExpertShape(H, F, words))
    slots = allocate_aligned(E, codec.slot_bytes)
    for expert, (gate_up, down) in enumerate(matrices()):
        codec.encode((gate_up.to(words), down.to(words)), None, slots[slot_of(expert)])
    found = routed.run(codec.experts(slots.to(device), None), device, [list(range(E))])
    check_close(found, routed.wanted())


# What makes the host wait for the device, or would on one.
HOST_READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")


class NoHostReads(TorchDispatchMode):
    """Fails whatever asks a device for a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(read in name for read in HOST_READS), f"{func} asks the device"
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy":
            assert result.device == args[0].device, f"{func} moves a tensor"
        if name == "index":
            assert all(index.dtype != torch.bool for index in args[1] if index is not None)
        return result


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor[0, 0].item(),
        lambda tensor: int(tensor[0, 0]),
        lambda tensor: tensor.unique(),
        lambda tensor: torch.where(tensor == 1),
        lambda tensor: tensor[tensor == 1],
        lambda tensor: bool((tensor == 1).any()),
    ],
)
def test_host_reads_are_seen(read: Callable[[Tensor], Any]) -> None:
    with NoHostReads(), pytest.raises(AssertionError, match=r"asks the device|^assert"):
        read(torch.ones(2, 2))


@pytest.mark.parametrize("rows", [16, 17, 65])
@pytest.mark.parametrize("form", FORMS)
def test_no_device_is_asked_for_anything(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, form: str, rows: int
) -> None:
    experts = experts_in_slots(form, device)
    routed = Routed.of(rows, 4, torch.bfloat16)
    hidden_states, topk_ids = routed.on(device)
    grouping = Grouping.of(topk_ids, routed.topk_ids)
    slots = {expert: slot_of(expert) for expert in range(E)}
    table = table_of(slots, device)
    out = hidden_states.new_empty(rows, 4, H)

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor is read on the host")

    for name in ("tolist", "numpy", "cpu", "item", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, refuse)
    with NoHostReads():
        experts.run(LAYER, hidden_states, grouping, slots, table, SILU, out)
    monkeypatch.undo()
    check_close(out.cpu(), routed.wanted())


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in given:
                storage = result.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {at: each for at, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_memory_is_what_is_planned(
    device: torch.device, tiny: Callable[[str], Path], form: str, dtype: torch.dtype
) -> None:
    """At worst all rows want one expert. Two are run: neither stays while the other is."""
    rows = 200
    ids = torch.full((rows, 2), 3)
    ids[:, 1] = 5
    routed = Routed(Routed.of(rows, 2, dtype).hidden_states, ids)
    experts = experts_in_slots(form, device)
    hidden_states, topk_ids = routed.on(device)
    slots = {expert: slot_of(expert) for expert in (3, 5)}
    table, out = table_of(slots, device), hidden_states.new_empty(rows, 2, H)
    with LiveBytes() as live:
        grouping = Grouping.of(topk_ids, ids)
        experts.run(LAYER, hidden_states, grouping, slots, table, SILU, out)
    check_close(out.cpu(), routed.wanted())
    shape = open_model(tiny("olmoe")).shape
    layout = replace(shape.experts, hidden_size=H, expert_width=F)
    shape = replace(shape, experts=layout, top_k=2)
    codec = codec_of(form.partition(" ")[0], SHAPE)
    planned = shape.gpu_kernel_bytes(rows, dtype, SHAPE.dtype, codec.plain_bytes)
    # What `activation_bytes` has of the experts' rows.
    planned += 4 * F * rows * dtype.itemsize
    # On the host nothing is copied: the index is numpy's.
    peak = live.peak + (2 * 8 * rows * 2 if device.type == "cpu" else 0)
    assert 0.75 * planned < peak <= planned


def table_of(slots: dict[int, int], device: torch.device) -> Tensor:
    """[E] int64: the slot of each expert, or -1."""
    return torch.tensor([slots.get(expert, -1) for expert in range(E)], device=device)


class Waves:
    """A server with all experts in slots, some at a time."""

    predicts_next_layer = False

    def serve(self, layer: int, experts: list[int]) -> Any:
        assert experts == sorted(set(experts))
        for start in range(0, len(experts), 4):
            yield {expert: slot_of(expert) for expert in experts[start : start + 4]}


@pytest.mark.parametrize("rows", [5, 20, 90])
def test_a_bank_over_waves(device: torch.device, no_reference: None, rows: int) -> None:
    """No row is left out: what nobody wrote to would be NaN."""
    routed = Routed.of(rows, 4, torch.float32)
    weights = torch.rand(rows, 4, generator=torch.Generator().manual_seed(8))
    told = []

    def on_route(layer: int, route: Route) -> Route:
        told.append(layer)
        return route

    on = Processor() if device.type == "cpu" else find_device(device.type)
    table, routes = host_side(on, E)
    bank = ExactExperts(
        Waves(),
        experts_in_slots("residual", device),
        table,
        routes,
        [SILU] * LAYERS,
        Recorder().timed,
        on_route,
    )
    hidden_states, topk_ids = routed.on(device)
    with poisoned_memory():
        assert bool(hidden_states.new_empty(8).isnan().all())
        found = bank(LAYER, hidden_states, Route(topk_ids, weights.to(device))).cpu()
    wanted = (routed.wanted() * weights.double().unsqueeze(2)).sum(1)
    assert (found - wanted).abs().max() < 2e-5 * wanted.std()
    assert told == [LAYER]


@pytest.mark.parametrize(("rows", "top_k"), [(17, 4), (16, 17), (33, 18)])
@pytest.mark.parametrize("permuted", [False, True])
def test_int4_experts_in_blocks(
    device: torch.device, permuted: bool, rows: int, top_k: int
) -> None:
    """Every row is what it is alone, and close to the reference."""
    layout, codes = int4_experts(permuted)
    arena = Int4Arena(layout, 1, E, device)
    for expert, each in enumerate(codes):
        arena.put(expert, each)
    routed = Routed.of(rows, top_k, torch.float32)
    weights = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(9)).to(device)
    hidden_states, topk_ids = routed.on(device)
    table, bank = arena.base_slots[0], arena.experts
    found = ops.moe_int4(hidden_states, topk_ids, weights, table, bank, SILU)
    plain = torch.empty_like(found)
    reference.moe_int4_out(
        *(hidden_states, topk_ids, weights, table),
        *(*bank.gate_up, *bank.down, bank.input_perm, SILU, plain),
    )
    assert (found - plain).abs().max() < 0.05 * plain.std()
    last = slice(rows - 1, rows)
    alone = ops.moe_int4(hidden_states[last], topk_ids[last], weights[last], table, bank, SILU)
    assert torch.equal(found[last], alone)


def test_double_precision_stays_with_the_reference(device: torch.device) -> None:
    routed = Routed.of(20, 4, torch.float64)
    for form in FORMS:
        found = routed.run(experts_in_slots(form, device), device, [list(range(E))])
        torch.testing.assert_close(found, routed.wanted(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("top_k", [1, 3, 17])
def test_rows_are_grouped_by_expert(device: torch.device, top_k: int) -> None:
    routed = Routed.of(130, top_k, torch.float32)
    grouping = Grouping.of(routed.topk_ids.to(device), routed.topk_ids)
    ids = routed.topk_ids.numpy()
    assert grouping.experts == sorted(set(ids.reshape(-1).tolist()))
    for expert in grouping.experts:
        rows, places = (part.cpu().numpy() for part in grouping.of_expert(expert))
        wanted_rows, ranks = np.nonzero(ids == expert)
        assert np.array_equal(rows, wanted_rows)
        assert np.array_equal(places, wanted_rows * top_k + ranks)


def test_few_rows_are_fused(device: torch.device) -> None:
    kernels = library.kernels_for(torch.empty(0, device=device))
    assert [kernels.call_rows(top_k) for top_k in (1, 16, 17, 20, 256, 257)] == [
        16,
        16,
        15,
        12,
        1,
        0,
    ]
    for rows, fused in ((1, True), (64, True), (65, False)):
        routed = Routed.of(rows, 4, torch.float32)
        grouping = Grouping.of(routed.topk_ids.to(device), routed.topk_ids)
        assert (grouping.index is None) == fused == (rows <= most_fused_rows(kernels, 4))
    assert most_fused_rows(kernels, 20) == MAX_BLOCKS * 12


def test_the_processor_takes_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its own kernels again, once the tests of a GPU's are over."""
    cpu = library.KERNELS["cpu"]
    if library.KERNELS["cuda"] is not cpu:
        with cuda_kernels_on_host():
            assert library.KERNELS["cpu"].overloads["linear"] is cpu.overloads["linear"]
            assert library.KERNELS["cpu"].overloads["moe_int4"] is not cpu.overloads["moe_int4"]
    assert library.KERNELS["cpu"] is cpu
    ids = torch.zeros(5000, 20, dtype=torch.int64)
    assert Grouping.of(ids, ids).index is None
    assert len(ops.row_blocks(20, ids)) == 1
