"""One budget, item by item."""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.layers.int4_matrix import Int4Matrix
from speq.load import load
from speq.models.opened import open_model
from speq.models.shape import ModelShape
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget, DeviceOverhead, demand_of, kept_bytes
from speq.planning.host_memory import host_plan
from speq.planning.memory import Demand, MemoryPlan, plan_memory
from speq.planning.model_spec import ModelSpec
from speq.runtime import Runtime

Folder = Callable[[str], Path]
ITEMS = ("non_expert_weights", "draft", "kv_cache", "read_buffers", "workspace", "slots")
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def workspace(rows: int, context: int) -> int:
    return 70 * rows + 3 * context + rows * context


DEMAND = Demand(
    non_expert_bytes=100_000,
    loading_bytes=0,
    draft_bytes=80_000,
    kv_bytes_per_token=50,
    reading_bytes=700,
    slot_bytes=9_000,
    num_experts=24,
    workspace=workspace,
)


def demands(count: int) -> list[tuple[Demand, int]]:
    """Random demands, large and small beside each other, and contexts."""
    rng = random.Random(41)
    made = []
    for _ in range(count):
        per_row, per_pair, flat = rng.randint(0, 500), rng.randint(0, 4), rng.randint(0, 5000)

        def random_workspace(
            rows: int, context: int, a: int = per_row, b: int = per_pair, c: int = flat
        ) -> int:
            return a * rows + b * rows * context + c

        demand = Demand(
            non_expert_bytes=rng.randint(1, 2_000_000),
            loading_bytes=0,
            draft_bytes=rng.choice([0, rng.randint(1, 1_000_000)]),
            kv_bytes_per_token=rng.randint(1, 300),
            reading_bytes=rng.choice([0, rng.randint(1, 20_000)]),
            slot_bytes=rng.randint(1, 50_000),
            num_experts=rng.randint(2, 64),
            workspace=random_workspace,
        )
        made.append((demand, rng.randint(1, 600)))
    return made


def smallest(demand: Demand, context: int) -> int:
    """The budget that the error for a budget of one byte names."""
    with pytest.raises(SpeqError) as caught:
        plan_memory(demand, 1, context)
    named = re.search(r"the smallest workable budget is (\d+) bytes", str(caught.value))
    assert named is not None
    return int(named[1])


def chunks(context: int) -> list[int]:
    """Lengths to choose from: none is twice as long as a prompt can be."""
    return [chunk for chunk in CHUNKS if chunk == 16 or chunk < 2 * context]


def check(made: MemoryPlan, demand: Demand, budget: int, context: int) -> None:
    """What holds of any plan."""
    assert tuple(made.items) == ITEMS
    assert made.budget == budget
    assert made.context == context
    assert made.items["non_expert_weights"] == demand.non_expert_bytes
    assert made.items["draft"] == demand.draft_bytes
    assert made.items["kv_cache"] == context * demand.kv_bytes_per_token
    assert made.items["read_buffers"] == demand.reading_bytes
    assert made.items["workspace"] == demand.workspace(made.chunk, context)
    assert made.items["slots"] == made.slots * demand.slot_bytes
    assert 2 <= made.slots <= demand.num_experts
    assert made.chunk in chunks(context)
    spent = sum(made.items.values())
    assert spent <= budget
    # Nothing that another slot could be made of is left over.
    assert made.slots == demand.num_experts or budget - spent < demand.slot_bytes


def test_items_add_up_to_at_most_the_budget() -> None:
    rng = random.Random(42)
    for demand, context in demands(200):
        least = smallest(demand, context)
        for budget in (least, least + rng.randint(0, 1000), least * rng.randint(2, 9)):
            check(plan_memory(demand, budget, context), demand, budget, context)


def test_smallest_workable_budget_works_and_nothing_below_does() -> None:
    for demand, context in demands(200):
        least = smallest(demand, context)
        made = plan_memory(demand, least, context)
        assert made.slots == 2
        with pytest.raises(SpeqError, match=f"the smallest workable budget is {least} bytes"):
            plan_memory(demand, least - 1, context)


def test_more_budget_is_never_refused() -> None:
    for demand, context in demands(60):
        budget = smallest(demand, context)
        for _ in range(40):
            budget += max(1, budget // 10)
            assert plan_memory(demand, budget, context).slots >= 2


def test_slots_stop_at_the_number_of_experts() -> None:
    made = plan_memory(DEMAND, 10**9, 128)
    assert made.slots == 24
    assert made.items["slots"] == 24 * 9_000
    spent = 100_000 + 80_000 + 128 * 50 + 700 + workspace(128, 128) + 24 * 9_000
    assert made.report() == {"budget": 10**9, **made.items, "unused": 10**9 - spent}


def test_model_of_one_expert_needs_one_slot() -> None:
    only = replace(DEMAND, num_experts=1, draft_bytes=0)
    least = 100_000 + 64 * 50 + 700 + workspace(16, 64) + 9_000
    assert plan_memory(only, least, 64).slots == 1
    with pytest.raises(SpeqError, match=f"the smallest workable budget is {least} bytes"):
        plan_memory(only, least - 1, 64)


def test_chunk_shrinks_with_the_budget() -> None:
    least = smallest(DEMAND, 600)
    budgets = [least + 2_000 * n for n in range(1000)]
    found = [plan_memory(DEMAND, budget, 600).chunk for budget in budgets]
    assert found == sorted(found)
    assert set(found) == {16, 32, 64, 128, 256, 512, 1024}


def test_chunks_are_no_longer_than_prompts_can_be() -> None:
    longest = {
        context: plan_memory(DEMAND, 10**12, context).chunk for context in (1, 16, 17, 128, 10**6)
    }
    assert longest == {1: 16, 16: 16, 17: 32, 128: 128, 10**6: 4096}


def test_chunk_is_the_longest_that_leaves_room() -> None:
    """A sixteenth of the budget or what all slots leave, and never at the price of the second."""
    rng = random.Random(43)
    met = set()
    for demand, context in demands(200):
        budget = smallest(demand, context) + rng.choice([0, 3_000, 30_000, 3_000_000])
        made = plan_memory(demand, budget, context)
        fixed = sum(made.items[name] for name in ITEMS[:4])
        spare = budget - fixed - demand.num_experts * demand.slot_bytes
        limit = min(max(budget / 16, spare), budget - fixed - 2 * demand.slot_bytes)
        fitting = [c for c in chunks(context) if demand.workspace(c, context) <= limit]
        assert made.chunk == max(fitting, default=16)
        met.add(made.chunk)
    assert met == set(CHUNKS[:7])


def test_error_names_the_items() -> None:
    with pytest.raises(SpeqError) as caught:
        plan_memory(DEMAND, 1024, 100)
    needed = 100_000 + 80_000 + 100 * 50 + 700 + workspace(16, 100) + 2 * 9_000
    assert str(caught.value) == (
        "memory budget 1 KiB is too small for a context of 100 tokens: it takes non expert "
        "weights 97.7 KiB, draft 78.1 KiB, kv cache 4.88 KiB, read buffers 700 B, workspace "
        f"2.95 KiB, slots 17.6 KiB (at the least); the smallest workable budget is {needed} "
        "bytes (202 KiB), or less with a shorter context"
    )


def test_loading_in_another_dtype_must_fit() -> None:
    """Both copies of the weights exist for a moment, before anything else is laid out."""
    plain = replace(DEMAND, draft_bytes=0)
    demand = replace(plain, loading_bytes=50_000)
    with pytest.raises(SpeqError, match=r"and loading .* 146 KiB .*budget is 150000 bytes"):
        plan_memory(demand, 149_999, 100)
    assert plan_memory(demand, 150_000, 100) == plan_memory(plain, 150_000, 100)


def test_recorded_passes_take_from_the_slots() -> None:
    recorded = replace(DEMAND, graphs=lambda context: 300 * context)
    budget = smallest(DEMAND, 64)
    assert "graphs" not in plan_memory(DEMAND, budget, 64).items
    with pytest.raises(SpeqError, match=r"read buffers 700 B, graphs 18.8 KiB, workspace"):
        plan_memory(recorded, budget, 64)
    made = plan_memory(recorded, budget + 300 * 64, 64)
    assert made.items == plan_memory(DEMAND, budget, 64).items | {"graphs": 300 * 64}


def test_longer_context_takes_from_the_slots() -> None:
    budget = 300_000
    plans = [plan_memory(DEMAND, budget, context) for context in (64, 256, 1024)]
    slots = [made.slots for made in plans]
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1]
    with pytest.raises(SpeqError, match="for a context of 100000 tokens"):
        plan_memory(DEMAND, budget, 100_000)


def tiny_demand(path: Path, codec: str, dtype: str, on_cpu: bool) -> tuple[Demand, ModelShape]:
    """Experts of 64 by 32 in bfloat16, four to a token; drafts of four tokens."""
    opened = open_model(path)
    model_spec = ModelSpec.of_model("tiny", opened, dtype)
    opened.close()
    residency_plan = ResidencyPlan(codec, "none", 1 << 14, 1 << 14, 1 << 14)
    return demand_of(model_spec, residency_plan, Budget(1 << 30, 1024, on_cpu)), model_spec.shape


@pytest.mark.parametrize("codec", ["raw", "lossless", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_takes_memory_for_one_expert_in_plain_words(
    tiny_bfloat16: Folder, codec: str, dtype: torch.dtype
) -> None:
    """Prompts go through experts one at a time: decoded, converted, its rows gathered."""
    name = str(dtype).removeprefix("torch.")
    demand, shape = tiny_demand(tiny_bfloat16("olmoe"), codec, name, on_cpu=False)
    rows, weights = 1000, 3 * 64 * 32
    kernels = demand.workspace(rows, 1024) - shape.activation_bytes(rows, 1, 1024, dtype)
    decoded = 0 if codec == "raw" else 2 * weights
    converted = 4 * weights if dtype == torch.float32 else 0
    index, gathered = 2 * 8 * rows * 4, 2 * rows * 64 * dtype.itemsize
    assert kernels == decoded + converted + index + gathered
    # Few rows go in blocks of sixteen, in float32: inputs, and what is between projections.
    blocks = [
        demand.workspace(rows, 1024) - shape.activation_bytes(rows, 1, 1024, dtype)
        for rows in (1, 16, 17, 64)
    ]
    assert blocks[0] < blocks[1] == blocks[2] == blocks[3]
    assert 16 * 4 * (64 + 32) * 4 <= blocks[1] < 8 * 16 * 4 * (64 + 32) * 4


def test_memory_of_a_pass_on_the_processor(tiny_bfloat16: Folder) -> None:
    """Attention's part is a block's mask, in three copies, and its rows."""
    demand, shape = tiny_demand(tiny_bfloat16("olmoe"), "raw", "float32", on_cpu=True)
    others = {16: 270_400, 100: 1_336_000, 1000: 12_884_800}
    for rows, nbytes in others.items():
        nbytes += 2 * rows * 1024 * (2 + 4) + 3 * min(rows, 256) * 64 * 4
        assert shape.workspace_bytes(rows, 5, 1024, torch.float32) == nbytes
        assert demand.workspace(rows, 1024) == shape.workspace_bytes(rows, 1, 1024, torch.float32)


# What a device takes besides.


def test_overhead_is_an_item_and_less_is_left_for_slots() -> None:
    over = replace(DEMAND, overhead=lambda context: 7 * context + 20_000)
    plain, made = plan_memory(DEMAND, 400_000, 64), plan_memory(over, 400_000, 64)
    assert made.items["device_overhead"] == 7 * 64 + 20_000
    assert set(made.items) - set(plain.items) == {"device_overhead"}
    assert sum(made.items.values()) <= 400_000 and made.slots < plain.slots
    assert smallest(over, 64) == smallest(DEMAND, 64) + 7 * 64 + 20_000
    with pytest.raises(SpeqError, match=r"device overhead 20 KiB"):
        plan_memory(over, 1024, 64)


def test_tensors_that_are_kept_are_a_runs(tiny_bfloat16: Folder) -> None:
    """Weights, the parts of the draft and the KV cache, each with its bytes."""
    config = RunConfig.of("8MiB", dtype="float32", device="cpu", draft_length=2, codec="raw")
    loaded = load(open_model(tiny_bfloat16("olmoe")), config)
    runtime = Runtime(loaded)
    arena, context = loaded.arena, runtime.plan.context
    assert arena is not None
    drafts = [layer.draft for layer in loaded.model.dense.values()]
    codes = [draft for draft in drafts if isinstance(draft, Int4Matrix)]
    assert len(codes) > 1
    made = [
        *loaded.model.dense_sizes,
        *(weights.nbytes for weights in loaded.model._hf_model.parameters()),
        *(part.nbytes for part in arena.parts.values()),
        *(part.nbytes for draft in codes for part in (draft.weight.qweight, draft.weight.scales)),
        *(tensor.nbytes for tensor in runtime.engine.caches[0].tensors()),
    ]
    assert list(kept_bytes(loaded.model_spec, runtime.residency_plan, context)) == made
    told: list[tuple[list[int], bool]] = []

    def overhead(sizes: Iterable[int], recorded: bool) -> int:
        told.append((list(sizes), recorded))
        return 5

    beside = replace(loaded.budget_for(context), beside=DeviceOverhead(None, overhead))
    demand = demand_of(loaded.model_spec, runtime.residency_plan, beside)
    assert demand.overhead is not None and demand.overhead(context) == 5
    assert told == [(made, False)]
    runtime.close()


def none_beside(sizes: Iterable[int], recorded: bool) -> int:
    return 0


@pytest.mark.parametrize("budget", [1 << 20, 200_000, 100_000])
def test_what_the_hosts_memory_holds(budget: int, tiny_bfloat16: Folder) -> None:
    opened = open_model(tiny_bfloat16("olmoe"))
    model_spec = ModelSpec.of_model("tiny", opened, "bfloat16")
    opened.close()
    given = Budget(1 << 30, 64, on_cpu=False, readers=3, beside=DeviceOverhead(budget, none_beside))
    residency_plan = ResidencyPlan("raw", "none", 1 << 14, 1 << 14, 1 << 14)
    reading = 3 * model_spec.reading_bytes
    fitting = (budget - reading) >> 14
    if fitting < 5:  # one for each reader, one that is filled and one that is copied
        short = (5 << 14) - (budget - reading)
        with pytest.raises(SpeqError, match=rf"host_budget that is larger by {short} bytes"):
            host_plan(model_spec, residency_plan, given)
        return
    made = host_plan(model_spec, residency_plan, given)
    assert made is not None
    assert made.records == min(fitting, 24) and made.resident == (fitting >= 24)
    assert made.to_dict() == {
        "budget_bytes": budget,
        "records": made.records,
        "record_bytes": made.records << 14,
        "read_buffer_bytes": reading,
        "on_disk": 24 - made.records,
    }
    stays = "hold all 24 experts" if made.resident else f"other {24 - made.records} stay on disk"
    assert stays in made.sentence
    for without in (None, DeviceOverhead(None, none_beside)):
        assert host_plan(model_spec, residency_plan, replace(given, beside=without)) is None
