"""Where a token's time goes: the clock of parts, with a fake clock, and a real run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq.bench.machine import step
from speq.bench.machine.step import PartClock, Settings, summarise
from speq.devices.device import Processor
from speq.errors import SpeqError
from speq.models import moe_model
from speq.models.moe_model import EXPERTS, WHOLE
from speq.models.opened import open_model
from tests.helpers.host_device import host_device
from tests.helpers.tiny_models import BY_FAMILY
from tests.helpers.told import Told


class Ticks:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_is_charged_to_the_innermost_part() -> None:
    ticks = Ticks()
    clock = PartClock(ticks)

    def spend(seconds: float) -> None:
        ticks.now_s += seconds

    for kind in ("draft token", "draft token", "verification"):
        clock.begin(kind)
        clock.enter("whole")
        spend(1)
        for _ in range(2):
            clock.enter("attention")
            spend(2)
            clock.enter("norms")
            spend(4)
            clock.leave()
            spend(8)
            clock.leave()
            spend(16)
        clock.leave()
        spend(1000)  # nobody's
        clock.enter("head")  # beside the whole, and of the same pass
        spend(32)
        clock.leave()
    wanted = {"whole": 1 + 2 * 16, "attention": 2 * (2 + 8), "norms": 2 * 4, "head": 32}
    assert clock.passes == {"draft token": [wanted, wanted], "verification": [wanted]}


def test_summary_adds_up_to_the_whole() -> None:
    passes = [{"attention": 0.003, EXPERTS: 0.005}, {"attention": 0.001, EXPERTS: 0.003}]
    rows = summarise("verification", passes, whole_s=0.010, stall_s=0.001)
    assert [row["part"] for row in rows] == [
        "all",
        "around the model",
        EXPERTS,
        "attention",
        "waiting for experts",
    ]
    times = [row["time_ms"] for row in rows]
    assert times == pytest.approx([10, 4, 3, 2, 1])
    assert [row["share"] for row in rows] == pytest.approx([1, 0.4, 0.3, 0.2, 0.1])
    assert {row["passes"] for row in rows} == {2}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_every_weight_belongs_to_a_part(family: str, tiny: Callable[[str], Path]) -> None:
    opened = open_model(tiny(family))
    model = moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    parts = model.parts()
    opened.checkpoint.close()
    assert {"attention", "router", "norms", "head", EXPERTS, WHOLE} <= set(parts)
    assert len(parts[EXPERTS]) == len(parts["router"]) == model.num_moe_layers
    inner = [module for name, modules in parts.items() if name != WHOLE for module in modules]
    covered = {id(weight) for module in inner for weight in module.parameters()}
    rest = [name for name, weight in named(parts[WHOLE][0]) if id(weight) not in covered]
    assert rest in ([], ["embed_tokens.weight"])  # tied to the head in some


def named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(module.named_parameters())


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "memory_budget": "40MiB",
        "draft_length": "2",
        "draft_kernel": "fused",
        "prompts": None,
        "num_prompts": 1,
        "max_new_tokens": 12,
        "device": "cpu",
        "dtype": "auto",
    }
    return Settings(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft_length", "kernel"), [("0", "fused"), ("2", "fused"), ("2", "unfused")]
)
def test_parts_of_the_bundled_model(
    bundled: Path, draft_length: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run = [0], step.DRAFT_KERNELS[kernel]

    def counted(*arguments: object) -> torch.Tensor:
        calls[0] += 1
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setitem(step.DRAFT_KERNELS, kernel, counted)
    given, told = settings(draft_length=draft_length, draft_kernel=kernel), Told()
    report = step.run(str(bundled), given, None, False, told)
    assert told.steps("running prompts") >= given.num_prompts
    assert not told.unfinished
    assert (calls[0] > 0) == (draft_length != "0")
    kinds = ["draft token", "verification"] if draft_length != "0" else ["verification"]
    assert list(dict.fromkeys(row["pass"] for row in report.rows)) == kinds
    for kind in kinds:
        whole, *rows = [row for row in report.rows if row["pass"] == kind]
        assert whole["part"] == "all"
        assert sum(row["time_ms"] for row in rows) == pytest.approx(whole["time_ms"])
        assert all(row["time_ms"] >= 0 for row in rows)
        names = {row["part"] for row in rows}
        assert {"attention", "router", "norms", "head", EXPERTS, WHOLE, "shared experts"} <= names
        # Eleven tokens after the first: one a step, or at most three.
        assert whole["passes"] == 11 if draft_length == "0" else 4 <= whole["passes"] <= 22


@pytest.mark.wide
def test_drafts_are_timed_launched_and_recorded(tiny: Callable[[str], Path]) -> None:
    """On a device with graphs, beside the parts, which are timed in launched passes."""
    with host_device():
        report = step.run(
            str(tiny("olmoe")), settings(device="cuda", max_new_tokens=6), None, False
        )
    alone = [row for row in report.rows if row["pass"].startswith("draft token, ")]
    assert [row["pass"] for row in alone] == ["draft token, launched", "draft token, a graph"]
    assert [row["part"] for row in alone] == ["all", "all"]
    launched, recorded = (row["time_ms"] for row in alone)
    assert [row["share"] for row in alone] == pytest.approx([1, recorded / launched])
    assert alone[0]["passes"] == alone[1]["passes"] >= 3
    kinds = {row["pass"] for row in report.rows} - {row["pass"] for row in alone}
    assert kinds == {"draft token", "verification"}


def test_nonsense_is_refused(bundled: Path) -> None:
    with pytest.raises(SpeqError, match="max_new_tokens is 1; it must be at least 2"):
        step.run(str(bundled), settings(max_new_tokens=1), None, False)
    with pytest.raises(SpeqError, match="draft_kernel is 'quick'; it must be one of fused"):
        step.run(str(bundled), settings(draft_kernel="quick"), None, False)
