"""Budgets that change under way: slots are taken and given back, and tokens stay those of plain
transformers.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import Generator, SpeqError
from speq.errors import OptionError
from speq.host_memory import BUDGET_STEP
from speq.memory_watch import MemoryWatch
from tests.helpers.kernel_files import Kernel, group
from tests.helpers.often import often
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

GIB = 1 << 30
ASKED: Any = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[7, 8, 9, 10], [200, 3, 3, 8, 41], list(range(5, 90))]


def load(model: Path, budget: str = "96MiB", **options: Any) -> Generator:
    options = {"dtype": "float32", "profile": "none", "draft": "none"} | options
    return Generator.from_pretrained(model, budget, **options)


@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu", "entropy"])
@pytest.mark.parametrize(
    ("family", "options"),
    often(
        [
            ("olmoe", {"draft": "auto", "draft_length": 3}),
            ("gpt_oss", {"drafter": "ngram", "draft_length": 4}),
            ("qwen3_next", {}),
            ("olmoe", {}),
        ],
        quick=1,
        wide=1,
    ),
)
def test_tokens_while_the_budget_changes(
    family: str, options: dict[str, Any], policy: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / family, family, torch.float32)
    plain, rng = load_plain(model), random.Random(3)
    seen = set()
    generator = load(model, cache_policy=policy, max_batch=2, context_length=160, **options)
    runtime = generator.runtime
    least, most = runtime.least_budget, runtime.plan.budget
    slot_bytes, count = runtime.residency_plan.slot_bytes, runtime.plan.slots
    wanted = {tuple(each): greedy_tokens(plain, each, 24) for each in PROMPTS}
    with generator.batch(160) as batch:
        for _ in range(2):
            for prompt in PROMPTS:
                batch.add(generator.prepare(prompt, None, ASKED))
            while not batch.idle:
                if rng.random() < 0.4:
                    slots = rng.choice([0, 1, rng.randrange(count), count])
                    generator.resize(min(least + slots * slot_bytes, most))
                for output in batch.step():
                    assert output.error is None
                    if output.request.finish_reason is not None:
                        prompt = tuple(output.request.prompt_token_ids)
                        assert output.request.output_token_ids == wanted[prompt]
                plan = runtime.plan
                seen.add(plan.slots)
                assert plan.budget == generator.wanted_budget
                assert sum(plan.items.values()) <= plan.budget
                assert runtime.engine.offload.loader.cache.num_slots == plan.slots
                assert len(runtime.engine.offload.loader.cache) <= plan.slots
    assert {2, count} <= seen and len(seen) > 3
    generator.close()


def test_memory_of_slots_is_given_back(tiny: Callable[[str], Path]) -> None:
    """Pages that the system took read as zeros."""
    generator = load(tiny("olmoe"))
    before = generator.generate([3, 4, 5], max_new_tokens=16, ignore_eos=True).token_ids
    runtime = generator.runtime
    slots, whole = runtime.engine.offload.slots, runtime.plan.slots
    assert all(slots[at].count_nonzero() for at in range(whole // 2))
    generator.resize(runtime.least_budget)
    assert runtime.plan.slots == 2
    assert slots[:2].count_nonzero() and not slots[2:].count_nonzero()
    assert generator.generate([3, 4, 5], max_new_tokens=16, ignore_eos=True).token_ids == before
    assert not slots[2:].count_nonzero()
    generator.resize("96MiB")
    assert runtime.plan.slots == whole
    assert generator.generate([3, 4, 5], max_new_tokens=16, ignore_eos=True).token_ids == before
    assert slots[2:].count_nonzero()
    generator.close()


def test_more_slots_than_at_first(tiny: Callable[[str], Path]) -> None:
    model = tiny("olmoe")
    wanted = greedy_tokens(load_plain(model), [3, 4, 5], 40)
    generator = load(model)
    least = generator.runtime.least_budget
    generator.close()
    generator = load(model, f"{least}B", context_length=64)
    stream = generator.stream([3, 4, 5], max_new_tokens=40, ignore_eos=True)
    made = [next(stream).id for _ in range(9)]
    few = generator.runtime.plan.slots
    generator.resize("96MiB")
    made += [token.id for token in stream]
    # The arena has no more, as long as a request runs.
    assert generator.runtime.plan.slots == few
    assert made == wanted
    assert generator.generate([3, 4, 5], max_new_tokens=40, ignore_eos=True).token_ids == wanted
    assert generator.runtime.plan.slots == 24 > few
    assert generator.facts["memory_bytes"]["budget"] == 96 << 20
    # A longer context is laid out within the budget that holds now.
    generator.resize(few_bytes := generator.runtime.least_budget)
    assert generator.facts["memory_bytes"]["budget"] == few_bytes
    generator.close()


def test_budgets_that_are_refused(tiny: Callable[[str], Path]) -> None:
    generator = load(tiny("olmoe"))
    least = generator.runtime.least_budget
    for size, sentence in (
        (least - 1, f"needs .* \\({least} bytes\\) at the least, and this machine has "),
        ("900TiB", "at the least, and this machine has "),
        ("auto", "auto"),
        ("none of it", "none of it"),
        (-1, "-1"),
    ):
        with pytest.raises(OptionError, match=sentence):
            generator.resize(size)
    assert generator.runtime.plan.budget == generator.wanted_budget == 96 << 20
    generator.resize(least)
    generator.close()
    with pytest.raises(SpeqError, match="was closed"):
        generator.resize(least)


class Machine:
    """Free memory, stalls and time, as a run finds them."""

    def __init__(self, root: Path) -> None:
        self.kernel, self.now_s = Kernel(root), 0.0

    def free(self, nbytes: int) -> None:
        (self.kernel.proc / "meminfo").write_text(f"MemAvailable: {nbytes >> 10} kB\n")

    def stalls(self, percent: float) -> None:
        folder = self.kernel.proc / "pressure"
        folder.mkdir(exist_ok=True)
        other = "full avg10=0.00 avg60=0.00 avg300=0.00 total=0"
        text = f"some avg10={percent:.2f} avg60=99.00 avg300=99.00 total=1\n{other}\n"
        (folder / "memory").write_text(text)

    def watch(self, most: int) -> MemoryWatch:
        return MemoryWatch(most, self.kernel.proc, lambda: self.now_s)

    def after(self, seconds: float, watch: MemoryWatch, budget: int) -> int:
        self.now_s += seconds
        return watch.budget(budget)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_budget_follows_free_memory(machine: Machine) -> None:
    watch = machine.watch(16 * GIB)
    machine.free(4 * GIB)
    assert machine.after(1, watch, 16 * GIB) == 16 * GIB
    machine.free(GIB)  # a sixteenth is not too little
    assert machine.after(1, watch, 16 * GIB) == 16 * GIB
    machine.free(GIB // 2)  # what is left shall be 2 GiB
    assert machine.after(0.5, watch, 16 * GIB) == 16 * GIB
    assert machine.after(0.5, watch, 16 * GIB) == 16 * GIB - 3 * GIB // 2
    budget = 16 * GIB - 3 * GIB // 2
    machine.free(4 * GIB)
    assert machine.after(29, watch, budget) == budget
    assert machine.after(1, watch, budget) == budget + GIB
    assert machine.after(1, watch, budget + GIB) == 16 * GIB
    machine.free(2 * GIB + 2 * BUDGET_STEP - 1024)
    assert machine.after(60, watch, 10 * GIB) == 10 * GIB


def test_a_budget_follows_stalls(machine: Machine) -> None:
    watch = machine.watch(16 * GIB)
    machine.free(8 * GIB)
    machine.stalls(9.99)
    assert machine.after(1, watch, 16 * GIB) == 16 * GIB
    machine.stalls(10)
    assert machine.after(1, watch, 16 * GIB) == 15 * GIB
    # The kernel still tells of the seconds before.
    assert machine.after(9, watch, 15 * GIB) == 15 * GIB
    assert machine.after(1, watch, 15 * GIB) == 15 * GIB - 15 * GIB // 16


def test_stalls_of_the_groups_come_first(machine: Machine) -> None:
    kernel, watch = machine.kernel, machine.watch(16 * GIB)
    machine.free(8 * GIB)
    machine.stalls(50)
    group(
        kernel.mount("sys", "cgroup2") / "user/mine",
        memory__pressure="some avg10=0.00 avg60=1.00 avg300=1.00 total=1",
    )
    kernel.belongs("0::/user/mine")
    assert machine.after(1, watch, 16 * GIB) == 16 * GIB
    group(
        kernel.root / "sys/user",
        memory__pressure="some avg10=12.50 avg60=1.00 avg300=1.00 total=1",
        memory__max=20 * GIB,
        memory__current=14 * GIB,
    )
    assert machine.after(1, watch, 16 * GIB) == 15 * GIB
    group(kernel.root / "sys/user", memory__current=20 * GIB)  # whatever the machine has
    assert machine.after(1, watch, 15 * GIB) == 13 * GIB


def test_a_run_gives_memory_back_while_it_generates(
    machine: Machine, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speq.memory_watch.MemoryWatch", machine.watch)
    model = tiny("olmoe")
    wanted = greedy_tokens(load_plain(model), [3, 4, 5], 30)
    generator = load(model, f"{96 << 20}B")
    assert generator.runtime.plan.budget == 96 << 20
    machine.free(0)
    assert generator.generate([3, 4, 5], max_new_tokens=9, ignore_eos=True).token_ids == wanted[:9]
    assert generator.runtime.plan.budget == 96 << 20  # a budget that was given stays
    generator.close()

    # Of 2 GiB that are free, a run takes one.
    monkeypatch.setattr("speq.host_memory.available_bytes", lambda: 2 * GIB)
    machine.free(GIB)
    generator = load(model, "auto")
    assert generator.runtime.plan.budget == GIB
    made = []
    for token in generator.stream([3, 4, 5], max_new_tokens=30, ignore_eos=True):
        made.append(token.id)
        machine.free(0)
        machine.now_s += 1
    assert made == wanted
    assert generator.runtime.plan.budget == generator.runtime.least_budget
    assert generator.runtime.plan.slots == 2
    generator.close()
