"""MoE-SpeQ's equations against values worked out by hand, and what must hold of them everywhere."""

import json
import math
import random
from itertools import pairwise
from typing import Any

import pytest

from speq import SpeqError
from speq.governor.objectives import Objectives, longest_within
from speq.governor.profile import Profile, ProfileKey
from speq.governor.roofline import Link, StepEstimate, accepted_tokens

# 10 bytes/s, 1 s for a batch, 3 s until the first expert.
LINK = Link(10.0, overhead_s=1.0, first_fetch_s=3.0)
VERIFY_S = (2.0, 2.5, 3.0, 4.5, 6.0)


def step(draft_length: int, moved_bytes: float = 0.0, exposed: float = 1.0) -> StepEstimate:
    """Half of the drafted tokens stand; a draft takes 0.5 s and 0.25 s a token."""
    return StepEstimate(
        draft_length,
        1 + accepted_tokens([0.5] * draft_length),
        0.5 + 0.25 * draft_length if draft_length else 0.0,
        VERIFY_S[draft_length],
        LINK.transfer_s(moved_bytes),
        moved_bytes,
        LINK.first_fetch_s if moved_bytes else 0.0,
        exposed,
    )


def test_accepted_tokens_by_hand() -> None:
    assert accepted_tokens([]) == 0
    assert accepted_tokens([0.5]) == 0.5
    # 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.25
    assert accepted_tokens([0.5, 0.8, 0.25]) == pytest.approx(1.0)
    assert accepted_tokens([1.0] * 7) == 7


def test_accepted_tokens_stay_under_their_limit() -> None:
    """1 + k_accept(k) rises with k, by less and less, and never reaches 1 / (1 - p)."""
    for p in (0.05, 0.3, 0.6, 0.9, 0.98):
        tokens = [1 + accepted_tokens([p] * k) for k in range(9)]
        steps = [after - before for before, after in pairwise(tokens)]
        assert all(step > 0 for step in steps)
        assert steps == sorted(steps, reverse=True)
        assert tokens[-1] < 1 / (1 - p)
        assert 1 + accepted_tokens([p] * 3000) == pytest.approx(1 / (1 - p))


def test_terms_by_hand() -> None:
    assert [LINK.transfer_s(size) for size in (0, 5, 40)] == [0.0, 1.5, 5.0]


def test_a_step_by_hand() -> None:
    """k = 2: tokens 1 + 0.5 + 0.25, draft 1 s, first fetch 3 s, 20 bytes 3 s, verification 3 s."""
    found = step(2, 20.0)
    assert (found.tokens, found.draft_s, found.verify_s, found.new_s) == (1.75, 1.0, 3.0, 3.0)
    assert found.serial_s == found.step_s == max(1.0, 3.0) + 3.0 + 3.0
    assert found.overlapped_s == max(1.0 + 3.0, 3.0)
    assert found.tokens_per_s == 1.75 / 9
    assert found.token_s == 9 / 1.75
    assert found.intensity == 1.75 / 20
    # A third of what could be hidden is not.
    partly = step(2, 20.0, exposed=0.2)
    assert partly.step_s == pytest.approx(4 + 0.2 * (9 - 4))


def test_a_step_that_moves_nothing() -> None:
    found = step(1)
    assert found.serial_s == found.overlapped_s == found.compute_s == 0.75 + 2.5
    assert found.intensity == math.inf
    assert found.tokens_per_s == found.tokens / found.compute_s


def test_what_limits() -> None:
    assert StepEstimate(1, 1.5, 3.0, 1.0, 0.5).limit == "draft"
    assert StepEstimate(1, 1.5, 1.0, 3.0, 0.5).limit == "verification"
    assert StepEstimate(1, 1.5, 1.0, 1.0, 3.0).limit == "link"
    # Hidden transfers limit nothing, even long ones.
    assert StepEstimate(1, 1.5, 2.0, 3.0, 4.5, exposed=0.0).limit == "verification"
    assert StepEstimate(1, 1.5, 2.0, 3.0, 5.5, exposed=0.0).limit == "link"


def test_link_and_host_are_at_work_at_once() -> None:
    """Draft 1 s, verification 3 s, link 3 s beside host 2 s, or 5 s."""
    one = StepEstimate(2, 1.75, 1.0, 3.0, 3.0, 20.0, host_s=2.0)
    assert one.serial_s == one.step_s == 1.0 + 3.0 + 3.0
    assert one.overlapped_s == 4.0
    other = one._replace(host_s=5.0, exposed=0.5)
    assert (other.serial_s, other.overlapped_s, other.step_s) == (9.0, 5.0, 7.0)
    assert (one._replace(new_s=6.0).limit, other.limit) == ("link", "host")
    assert StepEstimate(2, 1.75, 1.0, 3.0, 1.0, host_s=3.5).limit == "host"


def test_throughput_stays_under_both_roofs() -> None:
    rng = random.Random(1)
    for _ in range(500):
        link = Link(1 + 99 * rng.random(), rng.random(), rng.random())
        moved_bytes = 100 * rng.random()
        found = StepEstimate(
            rng.randrange(9),
            1 + accepted_tokens(rng.random() for _ in range(8)),
            rng.random(),
            0.1 + rng.random(),
            link.transfer_s(moved_bytes),
            moved_bytes,
            link.first_fetch_s,
            rng.random(),
        )
        assert found.tokens_per_s <= found.tokens / found.compute_s * (1 + 1e-12)
        roof = found.intensity * link.bandwidth_bytes_per_s
        assert found.tokens_per_s <= roof * (1 + 1e-12)
        assert found.overlapped_s <= found.step_s <= found.serial_s


PROFILE = Profile(
    ProfileKey("model", "cpu", 2**30, "0.1"),
    link=((100.0, 5.0), (1000.0, 10.0)),
    transfer_overhead_s=1.0,
    first_fetch_s=3.0,
    expert_bytes=10,
    draft_base_s=0.5,
    draft_token_s=0.25,
    verify=((1, 2.0), (3, 3.0), (5, 6.0)),
    distinct=((1, 4.0), (5, 11.0)),
    decode_bytes_per_s={"raw": 8.0},
)


def test_a_profile_survives_json() -> None:
    assert Profile.from_entries(json.loads(PROFILE.to_json())) == PROFILE
    assert PROFILE.slow_tier == LINK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "speq-profile-0"}, "another format"),
        ({"format": None}, "another format"),
        ({"verified": []}, "unexpected keyword argument 'verified'"),
        ({"verify": None}, "None are no pairs"),
        ({"verify": [[1, 2], 3]}, "are no pairs"),
        ({"verify": [["1", "2"]]}, "are no numbers"),
        ({"verify": []}, "verify of a profile is empty"),
        ({"verify": [[1, 1e300]]}, "the second from 1e-09 to 1e"),
        ({"verify": [[1, 1e-300]]}, "the second from 1e-09"),
        ({"verify": [[1, 10**400]]}, "are too large"),
        ({"verify": [[1, float("nan")]]}, "it must be pairs of numbers"),
        ({"verify": [[1.0, 2.0], [1.0000000001, 2.0]]}, "the first of each whole, rising"),
        ({"verify": [[3, 2.0], [1, 2.0]]}, "rising"),
        ({"distinct": [[1, 1e-12]]}, "distinct of a profile is"),
        ({"distinct": [[1e30, 2]]}, "distinct of a profile is"),
        ({"link": [[100.0, 5.0], [1.0, 10.0]]}, "link of a profile is"),
        ({"expert_bytes": 0}, "expert_bytes is 0; it must be from 1"),
        ({"expert_bytes": True}, "expert_bytes is True; it must be a whole number"),
        ({"draft_token_s": -1}, "draft_token_s of a profile is -1; it must be from 0"),
        ({"draft_token_s": "1"}, "draft_token_s of a profile is '1'; it must be a number"),
        ({"first_fetch_s": 10**400}, "first_fetch_s of a profile is 1000"),
        ({"acceptance": 2}, "acceptance of a profile is 2; it must be from 0 to 1"),
        ({"acceptance": []}, r"acceptance of a profile is \[\]; it must be a number"),
        ({"codec": []}, r"codec of a profile is \[\]; it must be a text"),
        ({"decode_bytes_per_s": [1]}, r"decode_bytes_per_s of a profile is \[1\]; it must be an"),
        ({"decode_bytes_per_s": {"raw": 0}}, "decode_bytes_per_s of raw in a profile is 0"),
        ({"encode_bytes_per_s": {"raw": None}}, "encode_bytes_per_s of raw in a profile is None"),
        ({"key": {}}, "missing 4 required"),
        ({"key": []}, "must be a mapping"),
        ({"key": {"model": 1, "device": "", "budget_bytes": 1, "version": ""}}, "model of a prof"),
        (
            {"key": {"model": "", "device": "", "budget_bytes": [1], "version": ""}},
            r"budget_bytes of a profile's key is \[1\]; it must be a whole number",
        ),
    ],
    ids=str,
)
def test_damaged_profiles_are_refused(changes: dict[str, Any], message: str) -> None:
    entries = json.loads(PROFILE.to_json()) | changes
    with pytest.raises(SpeqError, match=rf"^old\.json.*{message}.*; measure it again") as refused:
        Profile.from_entries(entries, "old.json")
    assert len(str(refused.value)) < 500


def test_the_longest_draft_within_a_latency_by_hand() -> None:
    """Cycles without transfers: 2, 3.25, 4, 5.75 and 7.5 s."""

    def longest(objectives: Objectives, moved_bytes: float = 0.0) -> int | None:
        return longest_within(objectives, (step(k, moved_bytes if k else 0.0) for k in range(5)))

    for latency_s, expected in ((1.9, None), (2, 0), (3.3, 1), (4, 2), (7.4, 3), (100, 4)):
        assert longest(Objectives(latency_s=latency_s)) == expected
    # 20 bytes from the first drafted token on: k = 1 takes 3 + 3 + 2.5 s, k = 2 as much and 0.5,
    # though all of that might be hidden.
    assert longest(Objectives(latency_s=8.6), 20.0) == 1
    # A token: 2, 2.17, 2.29, 3.07 and 3.87 s.
    assert longest(Objectives(tpot_s=2.2)) == 1


def test_objectives_must_be_times() -> None:
    with pytest.raises(SpeqError, match="latency_s is 0; it must be more than 0"):
        Objectives(latency_s=0)
