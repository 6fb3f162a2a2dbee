"""`speq bench tpot`: each setting in turn, and what its rows say of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from speq.bench.runs.tpot import MEDIANS, Settings, TpotCell, run, summarise
from speq.errors import SpeqError

Folder = Callable[[str], Path]


def test_variants_and_neighbours_are_measured_in_turn(tiny_bfloat16: Folder) -> None:
    variants = ("codec=raw dense=raw", "codec=lossless dense=lossless")
    settings = Settings(
        budgets=("8MiB",),
        draft_lengths=("0",),
        neighbours=(0, 1),
        variants=variants,
        num_prompts=1,
        max_new_tokens=4,
        rounds=2,
        run={"dtype": "bfloat16", "profile": "none"},
    )
    report = run(str(tiny_bfloat16("qwen3_moe")), settings)
    assert [(row["neighbours"], row["variant"]) for row in report.rows] == [
        (count, variant) for count in (0, 1) for variant in variants
    ]
    for row in report.rows:
        form = row["variant"].split("=")[-1]
        assert (row["codec"], row["dense"]) == (form, form)
        assert row["samples"] == 2
        assert row["tpot_ms"] > 0


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("codec", r"variant 'codec' has 'codec'; give NAME=VALUE"),
        ("=raw", "variant '=raw' has '=raw'"),
        ("dense=thin", "dense is 'thin'; it must be one of"),
        ("no-option=1", "no_option"),
    ],
)
def test_what_is_no_option_is_refused(tiny: Folder, variant: str, message: str) -> None:
    settings = Settings(budgets=("8MiB",), draft_lengths=("0",), variants=(variant,))
    with pytest.raises(SpeqError, match=message):
        run(str(tiny("qwen3_moe")), settings)


def test_rows_hold_medians_and_what_most_stay_within() -> None:
    of_all = dict.fromkeys(MEDIANS) | {
        "memory": {"draft": 5, "slots": 7},
        "codec": "raw",
        "dense": "raw",
        "stall_s": 1.0,
        "draft_s": 0.5,
        "verify_s": 2.0,
        "decode_s": 4.0,
    }
    samples = [of_all | {"tpot_ms": float(at), "hidden_share": 0.1 * at} for at in range(10, 0, -1)]
    samples[0]["hidden_share"] = None  # nothing was moved
    row = summarise(TpotCell("1MiB", "0", 0, ""), samples)
    assert row["tpot_ms"] == 5.5
    assert row["tpot_p90_ms"] == 9.0
    assert row["hidden_share"] == 0.5
    assert row["route_recall"] is None
    # A verification of two seconds waited for one of them.
    shares = (row["stall_share"], row["draft_share"], row["verify_share"])
    assert shares == (0.25, 0.125, 0.25)
    assert (row["samples"], row["draft_bytes"], row["slots_bytes"]) == (10, 5, 7)
    assert summarise(TpotCell("1MiB", "0", 0, ""), samples[:3])["tpot_p90_ms"] == 10.0
