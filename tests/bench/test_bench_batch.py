"""The bench of batches: what it runs, and how rows follow from steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speq import SpeqError
from speq.bench.paper import batches
from speq.bench.paper.batches import AUTO, HELD, PLAIN, Cell
from speq.generator import Generator
from speq.governor.speedup_model import Measurement, SpeedupParameters, modelled_speedup
from speq.stats import StepStats

Folder = Callable[[str], Path]


def settings(**changes: Any) -> batches.Settings:
    given: dict[str, Any] = {
        "memory_budget": "64MiB",
        "batches": "1,2",
        "draft_lengths": "2",
        "prompts": [],
        "num_prompts": 2,
        "max_new_tokens": 12,
        "rounds": 1,
        "run": {"dtype": "float32", "device": "cpu"},
    }
    return batches.Settings(**(given | changes))


def step(**figures: Any) -> StepStats:
    """Of 4 layers and a second."""
    return StepStats("decode", layers=4, end_s=1.0, **figures)


def test_figures_of_steps_by_hand() -> None:
    steps = [
        step(sequences=2, draft_length=4, accepted=3, emitted=5, requests=24, verify_s=0.5),
        step(sequences=2, draft_length=4, accepted=1, emitted=3, requests=16, verify_s=0.3),
    ]
    steps[0].draft_s, steps[1].moved_bytes, steps[1].hits = 0.2, 4_000_000, 10
    found = batches.sample_of(Cell(2, "2"), steps, top_k=4)
    assert found == {
        "steps": 2,
        "tokens_per_s": 4.0,
        "tpot_ms": pytest.approx(500.0),
        "verify_ms": pytest.approx(400.0),
        "draft_ms": pytest.approx(100.0),
        "draft_length_mean": 2.0,
        "acceptance_rate": 0.5,
        "accept_length": 2.0,
        "accepted_share": pytest.approx(2 / 3),
        "rows_mean": 6.0,
        "distinct": 5.0,
        "tokens_per_expert": 4.8,  # 6 rows choose 4 each of 5
        "moved_mb": 0.5,
        "hit_rate": 0.25,
    }


def sample(tokens_per_s: float, verify_ms: float, **more: Any) -> dict[str, Any]:
    given = {"tokens_per_s": tokens_per_s, "verify_ms": verify_ms, "rows_mean": 2.0}
    return given | {"accepted_share": None} | more


def test_rows_stand_beside_those_of_the_same_texts() -> None:
    found = batches.rows_of(
        {
            Cell(1, PLAIN): [sample(10.0, 50.0)],
            Cell(1, HELD): [sample(8.0, 60.0)],
            Cell(2, PLAIN): [sample(20.0, 80.0), sample(16.0, 90.0), sample(17.0, 70.0)],
            Cell(2, HELD): [sample(16.0, 90.0)],
            Cell(2, "3"): [sample(24.0, 120.0, accepted_share=0.5)],
            Cell(2, AUTO): [sample(34.0, 100.0)],
        },
        num_experts=8,
        top_k=2,
    )
    by_cell = {(row["texts"], row["draft_length"]): row for row in found}
    assert by_cell[1, HELD]["speedup"] == 0.8
    plain = by_cell[2, PLAIN]
    assert (plain["tokens_per_s"], plain["verify_ms"], plain["of_fewest"]) == (17.0, 80.0, 1.7)
    assert (plain["tokens_per_s_least"], plain["tokens_per_s_most"]) == (16.0, 20.0)
    drafted = by_cell[2, "3"]
    assert drafted["target_efficiency"] == 0.75
    assert (drafted["speedup"], drafted["speedup_held"]) == (pytest.approx(24 / 17), 1.5)
    assert drafted["independent"] == 3.5  # 8 (1 - 9/16)
    assert by_cell[2, AUTO]["speedup"] == 2.0
    assert by_cell[2, AUTO]["target_efficiency"] is None


def algorithm_rows(parameters: SpeedupParameters) -> list[dict[str, Any]]:
    """Rows whose speed-ups are Algorithm 1's own."""
    return [
        {
            "texts": texts,
            "draft_length": str(length),
            "accepted_share": 0.8,
            "speedup_held": modelled_speedup(
                parameters, Measurement(texts, length, 4, 32, 0.8, 0.0)
            ),
        }
        for texts in (1, 2, 4, 8)
        for length in (1, 2, 4, 6)
    ]


def test_algorithm_1_is_fitted_to_some_cells_and_tells_the_others() -> None:
    rows = algorithm_rows(SpeedupParameters(expert=0.3, draft_bias=0.5, ridge=20.0))
    found = batches.fitted(rows, 32, 4)
    assert (found["fitted_to"], found["held_out"]) == (12, 4)
    out = [(row["texts"], row["draft_length"]) for row in rows if row["fitted"] == "no"]
    assert out == [(1, "6"), (2, "4"), (4, "2"), (8, "1")]
    assert found["error_fitted"] < 0.01
    assert found["error_held_out"] < 0.05
    for row in rows:
        assert row["modelled"] == pytest.approx(row["speedup_held"], rel=0.1)


def test_too_few_cells_are_not_fitted_to() -> None:
    rows = algorithm_rows(SpeedupParameters())[:4]
    found = batches.fitted(rows, 32, 4)
    assert list(found) == ["not_fitted"] and "needs as many at least" in found["not_fitted"]


def test_every_cell_is_run_as_it_is_called(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen2_moe")
    held: list[tuple[bool, int | None, int]] = []
    sizes: list[tuple[int, int]] = []
    close, measured = Generator.close, batches.shared_steps

    def closed(self: Generator) -> None:
        config = self.runtime.config
        held.append((self.runtime.plan.has_draft, config.draft_length, config.max_batch))
        close(self)

    def shared_steps(*given: Any) -> list[StepStats]:
        steps = list(measured(*given))
        sizes.extend((len(given[2]), each.sequences) for each in steps)
        return steps

    monkeypatch.setattr(Generator, "close", closed)
    monkeypatch.setattr(batches, "shared_steps", shared_steps)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon"}\n{"prompt": "def main"}\n')
    given = settings(prompts=[prompts])
    report = batches.run(str(model), given, tmp_path / "found.json", False)
    assert held[:2] == [(False, 0, 2), (True, 2, 2)] and held[2][1:] == (None, 2)
    assert [(row["texts"], row["draft_length"]) for row in report.rows] == [
        (texts, length) for texts in (1, 2) for length in (PLAIN, HELD, "2", AUTO)
    ]
    assert sizes and all(texts == shared for texts, shared in sizes)
    for row in report.rows:
        assert row["draft_length_mean"] == {PLAIN: 0, HELD: 0, "2": 2}.get(
            row["draft_length"], row["draft_length_mean"]
        )
        if row["draft_length"] in (PLAIN, HELD):
            assert row["rows_mean"] == row["texts"] and row["accept_length"] == 1
    assert report.rows[0]["distinct"] == report.rows[1]["distinct"]
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == report.rows
    assert "not fitted: 2 measurements" in batches.notes(report)[-1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batches": "2,3"}, "batches has 2 and 3, of which the one is no multiple"),
        ({"num_prompts": 3}, "there are 3 prompts, which are no whole batches of 2"),
        ({"batches": "16", "draft_lengths": "4"}, "so many texts draft 3 tokens each at most"),
        ({"max_new_tokens": 4}, "texts have written up to 2 before all 2 are there"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        batches.run("nothing", settings(**changes), None, False)
