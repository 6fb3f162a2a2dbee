"""Where experts came from and what for, counted while the model really runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from speq import Generator
from speq.registries import PREFETCHERS
from speq.stats import RunStats
from tests.test_replay import check_sums

Folder = Callable[[str], Path]


def run_of(model: Path, draft: str, budget: str, prefetch: str, policy: str) -> RunStats:
    generator = Generator.from_pretrained(
        model,
        budget,
        dtype="float32",
        draft=draft,
        draft_length=4,
        context_length=96,
        cache_policy=policy,
        prefetch=prefetch,
    )
    try:
        store, slots = generator.runtime.opened.store, generator.runtime.plan.slots
        assert 2 < slots < store.num_layers * store.num_experts
        prompt = [(7 * i * i + 3 * i) % 256 for i in range(24)]
        generator.generate(prompt, max_new_tokens=40, ignore_eos=True)
        record_bytes = store.codec.record_bytes
        run = generator.last_run
    finally:
        generator.close()
    assert run is not None
    # Each transfer moves one expert.
    for step in run.steps:
        transfers = [event for event in step.events if event.kind == "transfer"]
        assert {event.moved_bytes for event in transfers} <= {record_bytes}
        assert step.moved_bytes == record_bytes * len(transfers)
        assert step.ahead_bytes == record_bytes * sum(event.ahead for event in transfers)
    figures = run.summary()
    assert (
        figures["used"] + figures["wasted"]
        <= sum((step.ahead_bytes for step in run.steps), start=0) / record_bytes
    )
    return run


@pytest.mark.parametrize(
    ("prefetch", "policy"),
    [
        *((mode, "lookahead") for mode in PREFETCHERS.names),
        ("three-phase", "entropy"),
        ("none", "lfu"),
    ],
)
def test_figures_add_up_layer_by_layer(
    prefetch: str, policy: str, tiny: Folder, poor_draft: Folder
) -> None:
    run = run_of(tiny("olmoe"), str(poor_draft("olmoe")), "1000KiB", prefetch, policy)
    decode = [step for step in run.steps if step.phase == "decode"]
    for step in run.steps:
        check_sums(step)
        assert step.exposed_s <= step.link_s + 1e-9
        assert step.link_s <= step.transfer_s + 1e-9
        assert step.exposed_s <= step.stall_s + 1e-9
    figures = run.summary()
    # The run's layers are the sums of its steps'.
    for name in ("requests", "hits", "late", "used", "wasted", "rejected_bytes", "ahead_bytes"):
        assert sum(layer[name] for layer in figures["layers"]) == sum(
            getattr(step, name) for step in decode
        )
    moved = sum(layer["demand_bytes"] + layer["ahead_bytes"] for layer in figures["layers"])
    assert moved == figures["moved_bytes"] > 0
    assert [layer["layer"] for layer in figures["layers"]] == [0, 1, 2]
    assert all(layer["passes"] == len(decode) for layer in figures["layers"])
    # A poor draft names experts that only its wrong tokens want.
    assert figures["acceptance_rate"] < 0.9
    assert 0 < figures["rejected_bytes"] < figures["moved_bytes"]
    assert 0 <= figures["hidden_share"] <= 1
    # What the prompt asked for ahead may still arrive in the first steps.
    later = decode[2:]
    if prefetch == "none":
        assert sum(step.ahead_bytes + step.late for step in later) == 0
        assert sum(step.late_s for step in later) == 0
    else:
        assert sum(step.ahead_bytes for step in later) > 0
        assert sum(step.used for step in later) > 0


def test_without_a_draft_nothing_is_rejected(tiny: Folder) -> None:
    run = run_of(tiny("olmoe"), "none", "700KiB", "three-phase", "lookahead")
    figures = run.summary()
    assert (figures["rejected_bytes"], figures["draft_length_mean"]) == (0, 0)
    for step in run.steps:
        check_sums(step)
