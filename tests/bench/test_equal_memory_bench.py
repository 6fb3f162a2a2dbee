"""`speq bench equal-memory`: its engine part, what codecs cost, and the command as a whole."""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speq import SpeqError
from speq.bench.paper import codec_costs
from speq.bench.paper.candidates import Candidate, Outcome, candidates_of
from speq.bench.paper.equal_memory_engine import EngineRuns
from speq.bench.paper.recording import Recording
from speq.bench.runs.schedule import budget_for
from speq.drafts.dense_draft import DenseDraft
from speq.experts.pack import pack
from speq.models.opened import open_model
from speq.quantizing.models import packing_of
from tests.helpers.tiny_models import write_model

Folder = Callable[[str], Path]
LRU_RAW = Candidate("raw", 0, "lru", "none")
DRAFT_RAW = Candidate("raw", 2, "lookahead", "three-phase")


def engine_runs(model: Path, rounds: int = 1) -> EngineRuns:
    return EngineRuns({"raw": str(model)}, ["one two", "three"], "four", 10, rounds, 2)


def test_the_engine_takes_turns_and_tries_on_another_text(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round of a system takes 10 ms longer than its trial, the next ones 20 and 30."""
    trial_ms = {c: 50.0 + at for at, c in enumerate(candidates_of([2, 4])["auto"])}
    fast = Candidate("residual", 4, "lookahead", "three-phase")
    trial_ms[fast] = 40.0
    calls: list[tuple[Candidate, list[str], bool]] = []

    def measured(
        self: EngineRuns, candidate: Candidate, budget: int, context: int, texts: list[str],
        warm_up: bool,
    ) -> Outcome:  # fmt: skip
        calls.append((candidate, texts, warm_up))
        rounds = sum(call == calls[-1] for call in calls) if warm_up else 0
        return Outcome(5, trial_ms[candidate] + 10 * rounds, 0.0, 0.0, 0.0, 0.0, None)

    monkeypatch.setattr(EngineRuns, "_measure", measured)
    systems = candidates_of([2, 4])
    done: list[tuple[int, int]] = []
    standings = engine_runs(tiny("qwen3_moe"), rounds=3).compete(
        systems, 0.5, lambda label, at, total: done.append((at, total))
    )
    every = systems["auto"]
    assert calls[: len(every)] == [(candidate, ["four"], False) for candidate in every]
    chosen = [LRU_RAW, Candidate("lossless", 0, "lru", "none"), DRAFT_RAW, fast, fast]
    assert [standing.candidate for standing in standings.values()] == chosen
    rounds = calls[len(every) :]
    assert all(texts == ["one two", "three"] and warm for _, texts, warm in rounds)
    order = [candidate for candidate, _, _ in rounds]
    assert order == [*chosen, *chosen[1:], chosen[0], *chosen[2:], *chosen[:2]]
    assert [o.tpot_ms for o in standings["LRU raw"].outcomes] == [60, 70, 80]
    assert done == [(at, len(every) + 15) for at in range(1, len(every) + 16)]


def test_the_engine_at_one_budget(tiny: Folder) -> None:
    """Of a small model, whose passes take more memory than its experts do."""
    runs = engine_runs(tiny("qwen3_moe"))
    standings = runs.compete({"LRU raw": [LRU_RAW], "draft + raw": [DRAFT_RAW]}, 8.0)
    # The longer prompt has 7 tokens, and 10 are generated.
    assert runs.context == 17
    assert budget_for(str(tiny("qwen3_moe")), 8.0, 17) > 8 * 24 * 24576
    (lru,), (drafting,) = (standing.outcomes for standing in standings.values())
    assert lru.acceptance_rate is None
    assert drafting.acceptance_rate is not None and 0 < drafting.acceptance_rate <= 1
    for found in (lru, drafting):
        assert 2 <= found.slots <= 24
        assert 0 < found.compute_ms <= found.tpot_ms


# What codecs cost.


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in bfloat16, and its packs, by codec."""
    root = tmp_path_factory.mktemp("equal-memory")
    model = write_model(root / "model", "qwen3_moe", torch.bfloat16)
    folders = {"raw": model}
    for codec in ("lossless", "residual"):
        folders[codec] = root / codec
        opened = open_model(model)
        packing = packing_of(opened, codec, "auto")
        pack(opened.checkpoint, opened.store, folders[codec], packing)  # type: ignore[arg-type]
        opened.close()
    return folders


def test_costs_of_packs_and_of_experts_that_are_encoded(packed: dict[str, Path]) -> None:
    stores = {codec: str(folder) for codec, folder in packed.items()}
    told: list[tuple[int, int]] = []
    encoded = codec_costs.measure(
        {"raw": stores["raw"]}, lambda label, done, total: told.append((done, total))
    )
    assert told == [(at, 24) for at in range(1, 25)]
    read = codec_costs.measure(stores)
    for codec, cost in encoded.items():
        assert replace(cost, compute=read[codec].compute) == read[codec]
        assert cost.weights == 3 * 64 * 32
        assert cost.compute > 0
    raw = encoded["raw"]
    # 12,288 bytes are whole blocks.
    assert (raw.slot_bytes, raw.moved_bytes, raw.compute) == (12288, 12288, 1)
    for codec in ("lossless", "residual"):
        entries = json.loads((packed[codec] / "experts.json").read_text())["records"]
        sizes = [nbytes for _, nbytes, _ in entries]
        assert encoded[codec].moved_bytes == round(sum(sizes) / len(sizes))
        assert encoded[codec].slot_bytes == -(-max(sizes) // 4096) * 4096
        assert encoded[codec].moved_bytes < raw.moved_bytes


def test_compute_by_a_clock_of_its_own(packed: dict[str, Path]) -> None:
    """Every reading takes as long as there were before it: calls of one round 1, 3 and 5 ticks."""
    readings = iter(itertools.cycle([0, 1, 1, 4, 4, 9]))
    found = codec_costs.measure({"raw": str(packed["raw"])}, clock=lambda: float(next(readings)))
    assert [found[codec].compute for codec in ("raw", "lossless", "residual")] == [1, 3, 5]


def test_models_that_are_not_the_same_are_refused(
    packed: dict[str, Path], tiny: Folder, tmp_path: Path
) -> None:
    stores = {codec: str(folder) for codec, folder in packed.items()}
    with pytest.raises(SpeqError, match=r"residual has codec residual; give one with codec loss"):
        codec_costs.measure(stores | {"lossless": stores["residual"]})
    other = write_model(tmp_path / "other", "qwen3_moe", torch.bfloat16, seed=1)
    with pytest.raises(SpeqError, match=r"lossless was not packed from the checkpoint of .*other"):
        codec_costs.measure({"raw": str(other), "lossless": stores["lossless"]})
    with pytest.raises(SpeqError, match=r"codec lossless codes bfloat16 and .* are float32"):
        codec_costs.measure({"raw": str(tiny("qwen3_moe"))})


# The command.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    from speq import cli

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["speq", "bench", "equal-memory", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


@pytest.fixture
def arguments(packed: dict[str, Path], tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "c", "d")))
    return [
        packed["raw"], "--memory-budget", "64MiB", "--prompts", prompts, "--num-prompts", 2,
        "--max-new-tokens", 13, "--draft-lengths", "2", "--rounds", 1,
    ]  # fmt: skip


@pytest.mark.wide
def test_the_command(
    arguments: list[object],
    packed: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, page = tmp_path / "equal.json", tmp_path / "equal.html"
    packs = [part for codec in ("lossless", "residual") for part in (f"--{codec}", packed[codec])]
    written = ["--json", target, "--picture", page]
    given = [*arguments, *packs, "--fractions", "0.2,0.6", "--engine-fractions", 12, *written]
    assert command(monkeypatch, *given) == 0
    shown = capsys.readouterr().out
    assert "bits a weight" in shown and "auto is chosen by a short trial" in shown
    report = json.loads(target.read_text())
    rows = report["rows"]
    systems = list(candidates_of([2]))
    assert [(row["part"], row["f"], row["system"]) for row in rows] == [
        (part, f, system)
        for part, f in (("replay", 0.2), ("replay", 0.6), ("engine", 12.0))
        for system in systems
    ]
    by_name = {(row["f"], row["system"]): row for row in rows}
    # An INT4 expert of groups of 64, and of 32: codes, and scales of gate and up, and of down.
    draft_bytes = 24 * (3 * 64 * 32 // 2 + 64 * 2 + 64 * 2)
    opened = open_model(packed["raw"])
    draft_bytes += DenseDraft.of("auto", opened.shape.draft_layers).nbytes
    opened.close()
    assert report["settings"]["draft_bytes"] == draft_bytes
    costs = {row["codec"]: row for row in report["codecs"]}
    for name in ("raw", "residual"):
        room = int(0.6 * 24 * 12288) - draft_bytes
        wanted = room // costs[name]["slot_bytes"]
        assert by_name[0.6, f"draft + {name}"]["slots"] == wanted
    assert by_name[0.6, "LRU raw"]["slots"] == int(0.6 * 24)
    # No room for a draft.
    assert by_name[0.2, "draft + residual"]["tpot_ms"] is None
    for row in rows:
        if row["slots"]:
            assert row["tpot_ms"] > 0
            assert row["samples"] == 1
            # Where all experts fit, nothing is moved any more.
            lru = by_name[row["f"], "LRU raw"]["moved_bytes_per_token"]
            found = row["moved_bytes_per_token"] / lru if lru else None
            assert row["ratio_to_lru_raw"] == (found and pytest.approx(found))
    assert {aim["part"] for aim in report["aims"]} == {"replay", "engine"}
    assert '"name": "bytes"' in page.read_text(encoding="utf-8")
    # Nothing is replaced unasked, nor measured before that is known.
    for option in (written[:2], written[2:]):
        assert command(monkeypatch, *arguments, *option) == 1
        assert "exists already; choose another name or add --force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--fractions", "half"], "fractions is 'half'"),
        (["--draft-lengths", "0,2"], "draft_lengths is 0; it must be from 1"),
        (["--draft-lengths", "a"], "draft_lengths is 'a'"),
        (["--rounds", 0], "rounds is 0"),
        (["--max-new-tokens", 1], "max_new_tokens is 1"),
        (["--num-prompts", 3], "num_prompts is 4 and"),
        (["--link", "fast"], "memory size 'fast'"),
        (["--engine-fractions", "0.5"], "the engine reads packed models; give the folders"),
    ],
)
def test_nonsense_is_refused(
    changes: list[object],
    sentence: str,
    arguments: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *arguments, *changes) == 1
    assert sentence in capsys.readouterr().err


def test_no_room_for_the_draft_while_recording_is_refused(packed: dict[str, Path]) -> None:
    with pytest.raises(SpeqError, match="memory_budget is 500KiB, which has no room for the dr"):
        Recording.of(str(packed["raw"]), "500KiB", [2], ["a"], 4, 10**9)
