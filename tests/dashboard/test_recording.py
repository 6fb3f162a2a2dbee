"""Recordings of real runs: their records say what the run's own figures say."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speq import Generator, SpeqError
from speq.dashboard.recording import Recording, bits_of, spans_of
from speq.dashboard.run_panels.run_page import panels_of
from speq.dashboard.run_record import RunRecord, read_run
from speq.stats import StepStats, TimeSpan
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.panels import check
from tests.helpers.tiny_models import write_model

PROMPT = "hello there"


@pytest.fixture(scope="module")
def generator(tiny: Callable[[str], Path]) -> Iterator[Generator]:
    made = Generator.from_pretrained(
        tiny("qwen3_moe"), "1MiB", draft_length=3, reader_threads=2, context_length=64
    )
    yield made
    made.close()


def recorded(generator: Generator, kept_steps: int = 256, tokens: int = 24) -> RunRecord:
    with Recording(generator, kept_steps) as recording:
        for _ in recording.stream(PROMPT, max_new_tokens=tokens, ignore_eos=True):
            pass
        record = recording.record()
    assert record is not None
    return record


def flags(bits: str, record: RunRecord) -> np.ndarray:
    """[layers, experts] bool: bit by bit, without numpy's own unpacking."""
    raw = base64.b64decode(bits)
    size = record.layers * record.experts
    found = [bool(raw[at // 8] >> (at % 8) & 1) for at in range(size)]
    return np.array(found).reshape(record.layers, record.experts)


def test_a_record_has_what_the_run_measured(generator: Generator) -> None:
    record = recorded(generator)
    run = generator.last_run
    assert run is not None
    assert record.stats == run.summary()
    assert len(record.steps) == len(run.steps) > 4
    for kept, step in zip(record.steps, run.steps, strict=True):
        assert kept.phase == step.phase
        assert kept.end_ms - kept.start_ms == pytest.approx(step.duration_s * 1e3, abs=0.01)
        assert kept.start_ms == pytest.approx((step.start_s - run.start_s) * 1e3, abs=0.01)
        for name in ("draft_length", "accepted", "requests", "moved_bytes", "rejected_bytes"):
            assert kept.figures[name] == getattr(step, name)
        for name in ("draft", "verify", "stall", "link", "exposed", "transfer"):
            seconds = getattr(step, f"{name}_s")
            assert kept.figures[f"{name}_ms"] == pytest.approx(seconds * 1e3, abs=0.01)
        assert sum(end - start for start, end, _ in kept.transfers) == pytest.approx(
            step.link_s * 1e3, abs=0.05
        )
        assert sum(moved for *_, moved in kept.transfers) == step.moved_bytes
        for at in range(5):
            name = ("requests", "hits", "late", "used", "wasted")[at]
            assert sum(row[at] for row in kept.layers) == kept.figures[name]


def test_tokens_say_where_they_are_from(generator: Generator) -> None:
    record = recorded(generator)
    again = generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert [token.id for token in record.tokens] == again.token_ids
    assert "".join(token.text for token in record.tokens) == again.text
    origins = [token.origin for token in record.tokens]
    assert origins[0] == "prompt" and origins.count("prompt") == 1
    for step in record.steps[1:]:
        of_step = [token for token in record.tokens if token.step == step.number]
        accepted = int(min(step.figures["accepted"], step.figures["emitted"]))
        exact = int(step.figures["emitted"]) - accepted
        assert [token.origin for token in of_step] == ["accepted"] * accepted + ["exact"] * exact
        assert {token.waited_ms for token in of_step} == {step.figures["stall_ms"]}


def test_positions_add_up_to_acceptance_and_recall(generator: Generator) -> None:
    record = recorded(generator)
    stats = record.stats
    decode = record.steps[1:]
    for step in decode:
        assert len(step.positions) == step.figures["draft_length"] + 1
        stood = [kept for kept, *_ in step.positions]
        assert stood == sorted(stood, reverse=True)
        assert sum(stood) - 1 == step.figures["accepted"]
    named = sum(each[1] for step in decode for each in step.positions)
    choices = sum(each[2] for step in decode for each in step.positions)
    assert named / choices == pytest.approx(stats["route_recall"])


def test_positions_of_a_tree_are_its_depths(tiny: Callable[[str], Path]) -> None:
    generator = Generator.from_pretrained(
        tiny("qwen3_moe"),
        "1200KiB",
        draft_length=3,
        draft_nodes=6,
        reader_threads=2,
        context_length=64,
    )
    try:
        record = recorded(generator)
    finally:
        generator.close()
    assert any(step.figures["branches"] for step in record.steps)
    for step in record.steps[1:]:
        assert len(step.positions) == step.figures["draft_length"] + 1
        assert sum(stood for stood, *_ in step.positions) - 1 == step.figures["accepted"]
    named = sum(each[1] for step in record.steps for each in step.positions)
    assert named == sum(step.figures["named"] for step in record.steps) > 0


def test_residency_is_that_of_the_slots(generator: Generator) -> None:
    record = recorded(generator)
    held = record.residency
    assert held.steps == [step.number for step in record.steps]
    cache = generator.runtime.engine.offload.loader.cache
    last = flags(held.slots[-1], record)
    assert {(int(a), int(b)) for a, b in zip(*np.nonzero(last), strict=True)} == {
        (key.layer, key.expert) for key in cache.residents()
    }
    assert len(cache.residents()) <= cache.num_slots
    for step, used in zip(record.steps, held.used, strict=True):
        asked = flags(used, record)
        # Each distinct expert of a layer is one request of the exact model.
        if step.phase == "decode":
            assert asked.sum(axis=1).tolist() == [row[0] for row in step.layers]
        else:
            assert not asked.any()
    assert held.host is None


def test_only_the_last_steps_are_kept(generator: Generator) -> None:
    record = recorded(generator, kept_steps=3)
    assert len(record.steps) == 3
    assert [step.number for step in record.steps] == [record.left_out + at for at in range(3)]
    assert record.left_out == len(generator.last_run.steps) - 3  # type: ignore[union-attr]
    assert len(record.tokens) == 24


def test_nobody_listens_outside_the_block(generator: Generator) -> None:
    listeners = generator.runtime.recorder.listeners
    assert listeners == []
    with Recording(generator) as recording:
        assert recording.record() is None
        assert len(listeners) == 1
        stream = recording.stream(PROMPT, max_new_tokens=12)
        next(stream)
        half = recording.record()
        assert half is not None and len(half.tokens) == 1
        stream.close()
        whole = generator.generate("another", max_new_tokens=4, ignore_eos=True)
        other = recording.record()
        assert other is not None
        # A run of somebody else: its steps, and none of the tokens before it.
        assert other.tokens == [] and other.stats["new_tokens"] == len(whole.token_ids)
    assert listeners == []


def test_a_record_is_read_back(generator: Generator, tmp_path: Path) -> None:
    record = recorded(generator)
    record.write(tmp_path / "run.json")
    again = read_run(tmp_path / "run.json")
    assert json.loads(again.to_json()) == json.loads(record.to_json())
    assert again.steps[1].figures == record.steps[1].figures
    assert again.options["draft_length"] == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "run.json is no run of format speq-run-1"),
        ('{"format": "speq-run-0"}', "another format"),
        ('{"format": "speq-run-1", "tokens": 3}', "is no run of format"),
        ("[1]", "it must hold an object"),
        ("{", "is not valid JSON"),
    ],
)
def test_anything_else_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SpeqError, match=sentence):
        read_run(tmp_path / "run.json")


def on_a_device_with_streams(model: Path, budget: str, **options: Any) -> RunRecord:
    with host_device(HostDevice(7)):
        generator = Generator.from_pretrained(
            model, budget, device="cuda", prefetch="three-phase", reader_threads=2, **options
        )
        try:
            return recorded(generator, tokens=12)
        finally:
            generator.close()


@pytest.mark.wide
def test_a_device_with_streams_copies_over_pcie(tiny: Callable[[str], Path]) -> None:
    record = on_a_device_with_streams(tiny("qwen3_moe"), "2MiB", draft_length=3)
    assert (record.link, record.device) == ("PCIe", "cuda:0")
    # All experts lie in the host's memory.
    assert record.residency.host is None
    moved = sum(sum(bytes_ for *_, bytes_ in step.transfers) for step in record.steps)
    assert moved == record.stats["moved_bytes"] + record.stats["prefill_moved_bytes"] > 0
    panels = panels_of(record)
    for panel in panels:
        check(panel)
    (overlap,) = [panel for panel in panels if panel.name == "overlap"]
    assert "copying over PCIe, hidden" in [trace["name"] for trace in overlap.data]


@pytest.mark.wide
def test_a_host_that_holds_some_experts_says_which(tmp_path: Path) -> None:
    sizes = {"num_experts": 32, "num_experts_per_tok": 4}
    model = write_model(tmp_path / "model", "olmoe", torch.bfloat16, **sizes)
    record = on_a_device_with_streams(model, "700KiB", draft_length=0, host_budget="700KiB")
    assert record.residency.host is not None
    held = int(flags(record.residency.host, record).sum())
    assert 0 < held < record.layers * record.experts
    # Records are at least as long as their experts' words.
    expert_bytes = 3 * 64 * 32 * 2
    assert held * expert_bytes <= record.memory["host_records"]


def test_bits_by_hand() -> None:
    # Layer 1's expert 0 is bit 5: 0b100000 and 0b10.
    assert base64.b64decode(bits_of([(1, 0), (0, 1), (1, 4)], 2, 5)) == bytes([0b100010, 0b10])
    assert base64.b64decode(bits_of([], 2, 5)) == bytes([0, 0])


def test_spans_by_hand() -> None:
    events = [
        TimeSpan("transfer", 12.0, 13.0, moved_bytes=5),
        TimeSpan("transfer", 10.5, 11.0, moved_bytes=1),
        TimeSpan("transfer", 10.75, 11.25, moved_bytes=2),
    ]
    assert spans_of(events, 10.0, moved=True) == [[500.0, 1250.0, 3], [2000.0, 3000.0, 5]]
    assert spans_of(events[:1], 10.0, moved=False) == [[2000.0, 3000.0]]


def test_a_listener_hears_while_events_are_there() -> None:
    from speq.stats import Recorder, RunStats

    heard: list[tuple[str, int]] = []
    recorder = Recorder(clock=lambda: 0.0)
    recorder.begin_run(RunStats(0.0, {}))

    def listen(step: StepStats) -> None:
        heard.append((step.phase, len(step.events)))

    recorder.listeners.append(listen)
    recorder.begin("decode")
    recorder.add(TimeSpan("stall", 0.0, 1.0, 0, 1))
    recorder.finish()
    assert heard == [("decode", 1)]
