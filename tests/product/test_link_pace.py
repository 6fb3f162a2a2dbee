"""How many prefetches keep the link busy: by hand, with a weight of a fifth for what is new."""

import pytest

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.link_pace import FEWEST, MOST, WEIGHT, LinkThrottle
from speq.scheduler.transfer import Priority, TransferTicket


def ticket(start_s: float, end_s: float) -> TransferTicket:
    made = TransferTicket(ExpertKey(0, 0), 0, Priority.PREFETCH)
    made.start_s, made.end_s = start_s, end_s
    return made


def pace_of(*spans: tuple[float, float]) -> LinkThrottle:
    assert (FEWEST, MOST, WEIGHT) == (4, 64, 0.2)
    throttle = LinkThrottle()
    for span in spans:
        throttle.ended(ticket(*span))
    return throttle


def prefetches_for(throttle: LinkThrottle, gap_s: float) -> int:
    """After one gap of so long: a fifth of it is its mean so far."""
    throttle.look(1000.0)
    return throttle.look(1000.0 + gap_s)


def test_before_the_link_is_known_the_fewest() -> None:
    throttle = LinkThrottle()
    assert [throttle.look(now_s) for now_s in (0.0, 10.0, 500.0)] == [4, 4, 4]


def test_as_many_as_the_link_carries_between_two_looks() -> None:
    throttle = pace_of((0.0, 2.0), (2.0, 4.0))
    # 0.4, then 0.72 s for a transfer; a first look has no gap.
    assert throttle.look(10.0) == 4
    # 0.6 s between looks: one more. Then 1.08 s: two.
    assert throttle.look(13.0) == 4 + 1
    assert throttle.look(16.0) == 4 + 2
    # As time goes on evenly, 3 s to 2 s.
    for at in range(100):
        throttle.ended(ticket(4.0 + 2 * at, 6.0 + 2 * at))
    for now_s in range(19, 400, 3):
        last = throttle.look(float(now_s))
    assert last == 4 + 2
    assert throttle.look(1e6) == 64


def test_a_pause_is_no_gap() -> None:
    throttle = pace_of((0.0, 5.0))  # 1 s
    throttle.look(0.0)
    assert throttle.look(7.5) == 4 + 2
    throttle.pause()
    assert throttle.look(1e5) == 4 + 2
    # 1.5 + 0.2 x (11.5 - 1.5)
    assert throttle.look(1e5 + 11.5) == 4 + 4


@pytest.mark.parametrize(
    ("spans", "transfer_s"),
    [
        # One behind the other, a rest between them, which is not the link's.
        ([(0.0, 5.0), (20.0, 25.0)], 1 + 0.2 * (5 - 1)),
        # Two at a time: the second had the link for itself from 5 to 8.
        ([(0.0, 5.0), (1.0, 8.0)], 1 + 0.2 * (3 - 1)),
        # One that ended before another which was heard of first says nothing.
        ([(0.0, 5.0), (1.0, 4.0)], 1.0),
        ([(0.0, 5.0), (5.0, 5.0)], 1.0),
    ],
)
def test_time_for_a_transfer_alone(spans: list[tuple[float, float]], transfer_s: float) -> None:
    for prefetches in (1, 7, 30):
        # A gap just below and just above what so many take.
        exact = prefetches * transfer_s / 0.2
        assert prefetches_for(pace_of(*spans), exact - 1e-6) == 4 + prefetches
        assert prefetches_for(pace_of(*spans), exact + 1e-6) == 4 + prefetches + 1
