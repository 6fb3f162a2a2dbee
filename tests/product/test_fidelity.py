"""The draft of the bundled model is as good as INT4 rounding should make it."""

from pathlib import Path

import pytest

from bench.lab.fidelity import FidelityReport, FidelitySettings, run
from speq.measure import agreement
from speq.measure.report import read_prompts
from tests.helpers.tiny_models import write_perturbed


@pytest.mark.full
def test_bundled_model_against_transformers(bundled: Path) -> None:
    """Teacher-forced on text like its training data."""
    options = {"memory_budget": "40MiB", "dtype": "float32"}
    found = agreement.run(str(bundled), read_prompts(None, 8), **options)
    assert found.passed, found.sentence
    assert sum(row["tokens"] for row in found.rows) > 500
    assert all(row["agreement"] == 1 for row in found.rows)
    # At one token of one prompt a router's fourth and fifth expert lie 2e-8 apart, seen in double
    # precision: sums in another order may choose the other, at a price that is still small.
    *clear, edge = sorted(row["max_logit_difference"] for row in found.rows)
    assert max(clear) < 1e-4
    assert edge < 0.1


def fidelity(model: Path, num_prompts: int, draft: str = "auto") -> FidelityReport:
    given = {"memory_budget": "40MiB", "dtype": "float32", "draft_length": 4}
    return run(str(model), FidelitySettings(draft=draft, num_prompts=num_prompts, **given))


@pytest.mark.full
def test_draft_of_the_bundled_model(bundled: Path) -> None:
    """Teacher-forced, rounding alone costs about 3 % of tokens."""
    found = fidelity(bundled, 8)
    (text,), every = found.texts, found.rows[-1]
    assert text["tokens"] > 500
    assert 0.94 < text["agreement"] < 1
    assert 0.975 < every["recall"] < 1
    assert 0.90 < every["hard"] + every["soft"] < 1


@pytest.mark.wide
def test_a_poor_draft_is_told_from_a_good_one(bundled: Path, tmp_path: Path) -> None:
    poor = write_perturbed(tmp_path / "poor", bundled, noise=1.0)
    (text,) = fidelity(bundled, 2, str(poor)).texts
    assert text["agreement"] < 0.9
