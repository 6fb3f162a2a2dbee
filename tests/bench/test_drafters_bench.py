"""All drafters compared: counts and diversity by hand, and a run of the whole bench."""

import json
import math
from pathlib import Path

import pytest
import torch

from speq.bench.runs.draft_counts import DraftCounts, diversity_index
from speq.bench.runs.drafters import cells_of, notes, run
from speq.bench.settings import DraftersSettings
from speq.dashboard.bench_panels.kinds import kind_of
from speq.engine.draft import Draft, Outcome
from speq.errors import SpeqError
from speq.heads.head_file import head_path
from speq.options.declared import build
from tests.helpers.cells import Folder
from tests.helpers.heads import write_random_head


def test_chains_by_hand() -> None:
    """Two texts: drafts of 3 tokens of which 2 and 0 stand, and none at all."""
    counts = DraftCounts()
    counts.begin_sequence()
    counts.add(Draft.chain([5, 6, 7], passes=3), Outcome([0, 1, 2], [5, 6, 8]), range(4))
    counts.add(Draft.chain([5, 9, 5], passes=3), Outcome([0], [1]), range(4))
    counts.begin_sequence()
    counts.add(Draft(), Outcome([0], [4]), range(1))
    counts.add(Draft.chain([4]), Outcome([0, 1], [4, 4]), range(2))
    row = counts.row()
    assert row["accept_length"] == (3 + 1 + 1 + 2) / 4
    assert (row["tried_by_depth"], row["by_depth"]) == ([3, 1, 1], [2 / 3, 1.0, 0.0])
    # Five tokens stood behind one another or fell: each was the only one behind its own.
    assert (row["tried_by_rank"], row["by_rank"]) == ([5], [3 / 5])
    assert (row["nodes_mean"], row["passes_mean"]) == (7 / 4, 6 / 4)
    # {5, 6, 7, 9} of which {5, 6} stood, and {4} and {4}.
    assert (row["unique_drafted"], row["unique_accepted"]) == ((4 + 1) / 2, (2 + 1) / 2)
    first = 0.4 * math.log(4) + 0.4 * math.log(2) + 0.2 * math.log(4)
    assert row["diversity"] == pytest.approx((first + 0.2 * math.log(3)) / 2)
    assert row["tdi"] is None


def test_trees_by_hand() -> None:
    """Node 2 stands, the second behind the root, and node 5, the third behind it."""
    draft = Draft([10, 11, 12, 13, 14, 15], [0, 0, 2, 2, 2, 1], passes=3)
    counts = DraftCounts()
    counts.begin_sequence()
    counts.add(draft, Outcome([0, 2, 5], [11, 14, 1]), range(7))
    row = counts.row()
    assert (row["tried_by_depth"], row["by_depth"]) == ([1, 1], [1.0, 1.0])
    assert (row["tried_by_rank"], row["by_rank"]) == ([2, 2, 1], [0.0, 0.5, 1.0])
    # One that was given up was not tried.
    counts = DraftCounts()
    counts.begin_sequence()
    counts.add(draft, Outcome([0, 2], [11, 14]), {0, 1, 2, 3})
    row = counts.row()
    assert (row["tried_by_depth"], row["by_depth"]) == ([1, 1], [1.0, 0.0])
    assert (row["tried_by_rank"], row["by_rank"]) == ([2, 1], [0.0, 1.0])
    assert row["unique_accepted"] == 1


def test_without_drafts_there_is_nothing_to_share() -> None:
    counts = DraftCounts()
    counts.begin_sequence()
    counts.add(Draft(), Outcome([0], [4]), range(1))
    row = counts.row()
    assert row["accept_length"] == 1
    assert row["by_depth"] == row["by_rank"] == []
    assert row["unique_drafted"] is row["diversity"] is row["tdi"] is None


def test_diversity_by_hand() -> None:
    """Eq. 18 over the three likeliest of four: shares 1/2, 1/4 and 1/4 of them."""
    logits = torch.tensor([0.4, 0.1, 0.2, 0.2]).log()
    wanted = (math.log(2) / 2 + math.log(4) / 2) / math.log(3)
    assert diversity_index(logits, 3) == pytest.approx(wanted, rel=1e-6)
    assert diversity_index(torch.zeros(9), 8) == pytest.approx(1.0)
    assert diversity_index(torch.tensor([40.0, 0, 0, 0]), 4) == pytest.approx(0.0, abs=1e-12)
    assert diversity_index(torch.tensor([math.nan] * 9)) is None


def settings_of(**options: object) -> DraftersSettings:
    few = {
        "budgets": "64MiB",
        "num_prompts": 1,
        "max_new_tokens": 10,
        "rounds": 1,
        "draft_length": 3,
        "tree_nodes": 5,
    }
    return build(DraftersSettings, few | options)


def test_drafters_with_heads_come_once_for_each() -> None:
    settings = settings_of(drafters="int4,head,head-tree", heads=["a", "b"], budgets="1GiB,2GiB")
    shown = [(cell.budget, cell.shown) for cell in cells_of(settings)]
    of_heads = ["int4", "head (a)", "head (b)", "head-tree (a)", "head-tree (b)"]
    assert shown == [(budget, name) for budget in ("1GiB", "2GiB") for name in of_heads]


@pytest.mark.wide
def test_all_that_a_model_can_have(tiny: Folder, tmp_path: Path) -> None:
    """A head with contrast; and without one what is left out is told, or refused where asked for.

    Texts that are drawn have no drafts of their own: whoever drafts, lengths differ and no texts.
    """
    model, file = tiny("olmoe"), tmp_path / "found.json"
    write_random_head(model, contrast=True)
    try:
        report = run(str(model), settings_of(), file, force=False)
    finally:
        head_path(model).unlink()
    rows = {(row["drafter"], row["temperature"]): row for row in report.rows}
    names = ["none", "ngram", "int4", "int4-half", "int4-tree", "cached", "cached-tree"]
    names += ["head", "head-tree", "head-no-contrast", "auto"]
    assert [*rows] == [(name, temperature) for name in names for temperature in (0.0, 1.0)]
    assert not report.left_out
    for (name, _), row in rows.items():
        assert row["samples"] == 1
        assert row["tpot_ms"] > 0
        given = {each: rows[each, row["temperature"]]["tpot_ms"] for each in names[:-1]}
        assert row["tpot_of_none"] == row["tpot_ms"] / given["none"]
        assert row["tpot_of_best"] == row["tpot_ms"] / min(given.values())
        assert row["round_tpot_ms"] == [row["tpot_ms"]]
        assert row["tpot_spread"] == 0
        assert name == "auto" or name.split("-")[0] == row["holds"]
        assert (row["draft_bytes"] > 0) == (row["holds"] in ("int4", "head"))
        if name != "auto":  # which may draft nothing
            assert (row["tdi"] is not None) == (name not in ("none", "ngram"))
        assert row["tried_by_depth"] == sorted(row["tried_by_depth"], reverse=True)
        assert len(row["by_rank"]) <= (5 if name.endswith("tree") else 1)
        heads = row["holds"] == "head"
        assert row["contrast"] is (name != "head-no-contrast" if heads else None)
    half, whole = rows["int4-half", 0.0]["draft_bytes"], rows["int4", 0.0]["draft_bytes"]
    assert half < whole
    # The same drafts but for the last tokens, which cost a pass more.
    assert rows["head-no-contrast", 0.0]["passes_mean"] > rows["head", 0.0]["passes_mean"]
    # All experts lie in slots once the prompt is read, or nearly so.
    assert rows["cached", 0.0]["accept_length"] >= rows["head", 0.0]["accept_length"]
    assert json.loads(file.read_text())["rows"] == report.rows
    panels = kind_of("drafters").panels(json.loads(file.read_text()))
    along = [f"{across}-temperature-{at}" for across in ("depth", "rank") for at in (0, 1)]
    assert [panel.name for panel in panels] == ["tpot", "moved", "length", *along, "tdi"]

    few = settings_of(temperatures="0")
    report = run(str(model), few, None, force=False)
    assert [row["drafter"] for row in report.rows] == [*names[:7], "auto"]
    said = notes(report)
    assert len(said) == 3
    assert "left out: head, 64MiB: there is no head at" in said[0]
    asked = settings_of(temperatures="0", drafters="head")
    with pytest.raises(SpeqError, match="head, budget 64MiB: there is no head at"):
        run(str(model), asked, None, force=False)
