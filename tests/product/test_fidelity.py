"""The draft of the bundled model is as good as INT4 rounding should make it."""

from pathlib import Path

import pytest

from speq.measure import check
from tests.helpers.tiny_models import write_perturbed


@pytest.mark.full
def test_bundled_model_against_transformers_and_its_draft(bundled: Path) -> None:
    """Teacher-forced on text like its training data; rounding alone costs about 3 % of tokens."""
    report, verdict = check.run(
        str(bundled),
        "40MiB",
        dtype="float32",
        prompts=None,
        num_prompts=8,
        json_file=None,
        force=False,
    )
    assert verdict.passed, verdict.sentence
    tokens = sum(row["tokens"] for row in report.rows)
    assert tokens > 500

    def mean(name: str) -> float:
        return sum(row[name] * row["tokens"] for row in report.rows) / tokens

    assert mean("agreement") == 1
    # At one token of one prompt a router's fourth and fifth expert lie 2e-8 apart, seen in double
    # precision: sums in another order may choose the other, at a price that is still small.
    *clear, edge = sorted(row["max_logit_difference"] for row in report.rows)
    assert max(clear) < 1e-4
    assert edge < 0.1
    assert 0.94 < mean("draft_agreement") < 1
    assert 0.975 < mean("route_recall") < 1
    assert 0.90 < mean("same_route_sets") < 1


@pytest.mark.wide
def test_a_poor_draft_is_told_from_a_good_one(bundled: Path, tmp_path: Path) -> None:
    poor = write_perturbed(tmp_path / "poor", bundled, noise=1.0)
    report, verdict = check.run(
        str(bundled),
        "40MiB",
        dtype="float32",
        draft=str(poor),
        prompts=None,
        num_prompts=2,
        json_file=None,
        force=False,
    )
    assert verdict.passed
    assert max(row["draft_agreement"] for row in report.rows) < 0.9
