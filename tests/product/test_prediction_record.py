"""How far guesses of the next layer's router are believed."""

import pytest

from speq.scheduler.prediction_record import CLASSES, WIDTH, PredictionRecord


def test_before_anything_is_known_odds_are_even() -> None:
    record = PredictionRecord()
    assert {record.probability(margin) for margin in (-1.0, 0.0, 0.3, 2.9, 1e6)} == {0.5}


def test_guesses_count_by_their_margin() -> None:
    record = PredictionRecord()
    record.learn({3: 0.1, 4: 0.2, 5: 0.3, 6: 0.26}, {3, 5, 6, 9})
    # Four of even odds and one of two right, four and two of two right, four alone.
    assert record.probability(0.1) == (2 + 1) / (4 + 2)
    assert record.probability(0.3) == (2 + 2) / (4 + 2)
    assert record.probability(0.6) == 2 / 4
    record.learn({3: 0.3}, set())
    assert record.probability(0.3) == (2 + 2) / (4 + 3)
    record.learn({}, {1, 2})
    assert record.probability(0.1) == (2 + 1) / (4 + 2)


@pytest.mark.parametrize(
    ("margin", "same", "other"),
    [
        (0.0, 0.2499, 0.25),
        (-3.0, 0.0, 0.25),
        (0.25, 0.4999, 0.5),
        (2.5, 2.7499, 2.75),
        (2.75, 1e9, 2.7499),
    ],
)
def test_classes_of_margins(margin: float, same: float, other: float) -> None:
    assert (WIDTH, CLASSES) == (0.25, 12)
    record = PredictionRecord()
    record.learn({0: margin}, {0})
    assert record.probability(same) == record.probability(margin) == 3 / 5
    assert record.probability(other) == 0.5


def test_what_is_seen_outweighs_the_assumption() -> None:
    record = PredictionRecord()
    for number in range(400):
        record.learn({0: 1.0}, {0} if number % 10 else set())
    assert record.probability(1.0) == (2 + 360) / (4 + 400)
