"""How long passes wait for missing experts, against every case by hand."""

from itertools import product

import pytest

from speq.planning.cost.waiting import exposed_share, waiting_s


def layer_s(late: tuple[bool, ...], expert_s: float, transfer_s: float) -> float:
    """One layer on a clock: what has come is computed, one expert at a time."""
    arrivals = [0.0] * (len(late) - sum(late))
    arrivals += [transfer_s * (at + 1) for at in range(sum(late))]
    now_s = 0.0
    for arrived_s in arrivals:
        now_s = max(now_s, arrived_s) + expert_s
    return now_s


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("missing", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("expert_s", "transfer_s"), [(0.0, 1.0), (0.4, 4.7), (1.2, 4.5)])
def test_waiting_is_what_all_cases_wait(
    count: int, missing: float, expert_s: float, transfer_s: float
) -> None:
    expected_s = 0.0
    for late in product((False, True), repeat=count):
        chance = missing ** sum(late) * (1 - missing) ** (count - sum(late))
        expected_s += chance * (layer_s(late, expert_s, transfer_s) - count * expert_s)
    assert waiting_s(count, missing, expert_s, transfer_s) == pytest.approx(expected_s)


def test_experts_that_come_sooner_than_they_are_computed() -> None:
    """Then a layer waits for the first of those that come, where all of them are late."""
    assert waiting_s(4, 1.0, 2.0, 0.5) == 0.0 <= layer_s((True,) * 4, 2.0, 0.5) - 8.0 <= 0.5
    assert waiting_s(4, 0.5, 2.0, 0.1) == 0.0


def test_a_layer_may_have_thousands_of_experts() -> None:
    """Of so many about as many are late as are expected to be."""
    assert waiting_s(2048, 0.5, 0.0, 1.0) == pytest.approx(1024)
    assert waiting_s(2048, 0.9, 0.0, 1.0) == pytest.approx(0.9 * 2048)


def test_a_share_is_of_what_computing_could_hide() -> None:
    # 6 s of transfers beside 10 s of computing: 4 s of waiting in 6 that could be hidden.
    assert exposed_share(10.0, 6.0, 4.0, 1.0) == pytest.approx(4 / 6)
    assert exposed_share(10.0, 6.0, 4.0, 0.5) == pytest.approx(2 / 6)
    # 20 s of transfers take 10 s more than computing anyway.
    assert exposed_share(10.0, 20.0, 13.0, 1.0) == pytest.approx(3 / 10)
    assert exposed_share(10.0, 20.0, 9.0, 1.0) == 0.0
    assert exposed_share(10.0, 0.0, 0.0, 0.7) == 0.7
