"""400 damaged inputs: each ends with the sound text or in one sentence, and leaves nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign, opened, repeated
from tests.fuzz.case import shown
from tests.fuzz.table import shares

INPUTS, SEED = 300, 16
# Of a test item: so many that the items of one class share what it makes of sound inputs.
ITEM = 10


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    # No resolved path: the interpreter of a venv is a link.
    with opened(Path(sys.executable), tmp_path_factory.mktemp("fuzz")) as campaign:
        yield campaign


# The first damages of each kind are of the wider checks, the others of the long ones.
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param(
            name,
            range(first, min(first + ITEM, count)),
            id=f"{name}-{first}",
            marks=pytest.mark.full if first else pytest.mark.wide,
        )
        for name, count in shares(INPUTS).items()
        for first in range(0, count, ITEM)
    ],
)
def test_damaged_inputs(name: str, numbers: range, fuzz: Campaign) -> None:
    failed = []
    for number in numbers:
        outcome = fuzz.outcome(name, SEED, number)
        if outcome.faults:
            failed.append(f"{repeated(name, SEED, number)}\n{shown(outcome)}")
    assert not failed, "\n".join(["", *failed])
