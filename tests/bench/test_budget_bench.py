"""Expert budgets compared: quality, oracle and outputs by hand, and a run of the whole bench."""

from pathlib import Path

import numpy as np
import pytest
import torch

from speq.bench.paper.budget_quality import Quality, rouge_l, standard_error
from speq.bench.paper.budget_settings import Compared, compared
from speq.bench.paper.expert_budget import common_prefix, run
from speq.bench.paper.expert_outputs import kept_output, oracle_order
from speq.bench.settings import BudgetSettings
from speq.errors import SpeqError
from speq.layers.expert_counts import ExpertCounts
from speq.layers.gates import ScoreGate
from speq.options.declared import build
from speq.routing import Route
from tests.helpers.cells import Folder
from tests.helpers.smallest import two_slot_budget


def test_the_oracle_takes_what_brings_it_nearest() -> None:
    """One row in two dimensions: the exact output is (3, 1), the shares are halves."""
    outputs = torch.tensor([[[2.0, 0.0], [6.0, 1.0], [0.0, 2.0], [6.0, -9.0]]])
    shares = torch.full((1, 4), 0.5)
    exact = torch.tensor([[3.0, 1.0]])
    # (3, 0.5) leaves (0, 0.5); then (0, 1) is nearer to it than (1, 0); the last one is far off.
    assert oracle_order(outputs, shares, exact) == [1, 2, 0, 3]


def test_the_oracle_is_greedy_over_all_rows() -> None:
    torch.manual_seed(4)
    outputs, shares = torch.randn(5, 6, 3), torch.rand(5, 6)
    exact = torch.randn(5, 3)
    order = oracle_order(outputs, shares, exact)
    assert sorted(order) == [*range(6)]
    parts = (outputs * shares[..., None]).double().numpy()
    left = exact.double().numpy().copy()
    for at, expert in enumerate(order):
        rest = [each for each in range(6) if each not in order[:at]]
        errors = {each: np.square(left - parts[:, each]).sum() for each in rest}
        assert min(errors, key=lambda each: errors[each]) == expert
        left -= parts[:, expert]


@pytest.mark.parametrize("truncate", [False, True])
def test_outputs_within_a_budget_by_hand(truncate: bool) -> None:
    shares = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]])
    weights, ids = shares.topk(2)
    route = Route(ids, weights / weights.sum(-1, keepdim=True))
    outputs = torch.tensor([[[1.0], [10.0], [100.0]], [[2.0], [20.0], [200.0]]])
    allowed = torch.tensor([True, True, False])
    found = kept_output(outputs, route, shares.log(), ScoreGate(divided=True), allowed, truncate)
    first = 1.0 * 5 / 8 + 10.0 * 3 / 8
    second = 20.0 * 3 / 9 if truncate else 2.0 / 4 + 20.0 * 3 / 4
    assert found.squeeze(-1).tolist() == pytest.approx([first, second], rel=1e-5)


def test_quality_by_hand() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    quality = Quality()
    quality.add([2, 0], exact, ours)
    quality.add([2, 1], exact, exact)
    row = quality.row()
    first = np.log(4), np.log(4) - np.log(2)
    assert quality.nats == pytest.approx([first[0], np.log(4)])
    assert row["nats_added"] == pytest.approx(first[1] / 2)
    assert row["nats_added_error"] == pytest.approx(first[1] / 2)
    kl = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert row["kl"] == pytest.approx(kl / 2 / 2, abs=1e-7)
    assert row["same_token"] == 3 / 4
    assert standard_error([1.0]) is None


@pytest.mark.parametrize(
    ("one", "other", "score", "prefix"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0, 4),
        ([1, 2, 3, 4], [2, 4], 2 * 2 / 6, 0),
        ([1, 2, 3], [1, 3, 2, 5], 2 * 2 / 7, 1),
        ([1], [2], 0.0, 0),
        ([], [2], 0.0, 0),
    ],
)
def test_overlap_of_texts(one: list[int], other: list[int], score: float, prefix: int) -> None:
    assert rouge_l(one, other) == pytest.approx(score)
    assert common_prefix(one, other) == prefix


def test_budgets_that_are_compared(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.touch()
    settings = build(
        BudgetSettings,
        {
            **{"memory_budget": "1GiB", "experts": (4, 8), "floors": (0.1,), "counts": counts},
            **{"rankings": ("router", "static", "oracle"), "policies": ("truncate",)},
        },
    )
    found = compared(settings, 8, 2)
    assert [(each.ranking, each.residents, each.experts) for each in found] == [
        *(("router", "free", 4), ("router", "free", 8)),
        *(("router", "ranked", 4), ("router", "ranked", 8)),
        *(("static", "free", 4), ("static", "free", 8)),
        *(("static", "ranked", 4), ("static", "ranked", 8)),
        *(("oracle", "ranked", 4), ("oracle", "ranked", 8)),
        ("router", "free", 0),
    ]
    assert found[-1] == Compared("router", "truncate", "free", 0, 0.1)
    with pytest.raises(SpeqError, match="experts is 8; each token chooses 2 of 6"):
        compared(settings, 6, 2)
    with pytest.raises(SpeqError, match="experts is 4; each token chooses 5 of 8"):
        compared(settings, 8, 5)
    alone = build(BudgetSettings, {"memory_budget": "1GiB", "rankings": "static"})
    with pytest.raises(SpeqError, match="static ranking goes by counts"):
        compared(alone, 32, 2)


def test_the_bench(tiny: Folder, tmp_path: Path) -> None:
    """A budget of all experts is the exact model; smaller ones move less and are further off."""
    counts = tmp_path / "counts.json"
    ExpertCounts("tiny", 1, 2, [[1, 1, 0, 0, 0, 0, 0, 0]] * 2).write(counts)
    model = tiny("qwen2_moe")
    smallest, demand = two_slot_budget(model, 64, "float32", 3, drafter="ngram")
    budget = f"{smallest + 6 * demand.slot_bytes}B"
    settings = build(
        BudgetSettings,
        {
            **{"memory_budget": budget, "experts": "2,4,8", "floors": "", "counts": counts},
            **{"rankings": "router,static,oracle", "num_prompts": 2, "max_tokens": 24},
            **{"draft_length": 3, "max_new_tokens": 8, "reconstruction": True},
            **{"dtype": "float32", "codec": "raw", "dense": "raw", "drafter": "ngram"},
        },
    )
    report = run(str(model), settings, None, False)
    assert 8 <= report.settings["slots"] < 16
    exact, *rows = report.rows
    assert (exact["ranking"], exact["nats_added"], exact["dropped_share"]) == ("exact", 0.0, 0.0)
    assert (exact["rouge_l"], exact["tpot_of_exact"], exact["select_share"]) == (1.0, 1.0, 0.0)
    for row in rows:
        whole = row["experts"] == 8
        assert (row["kl"] < 1e-9) == whole
        if row["ranking"] != "oracle":
            assert (row["dropped_share"] == 0) == whole
            assert (row["rouge_l"] == 1.0) >= whole
        else:
            assert row["moved"] is row["tpot_ms"] is None
        if row["residents"] == "ranked":
            assert (row["reconstruction_error"] < 1e-9) == whole
            assert len(row["errors_by_layer"]) == 2
        else:
            assert row["reconstruction_error"] is None
    by_way = {(row["ranking"], row["residents"], row["experts"]): row for row in rows}
    for ranking in ("router", "static", "oracle"):
        errors = [by_way[ranking, "ranked", experts] for experts in (2, 4, 8)]
        falling = [row["reconstruction_error"] for row in errors]
        assert falling == sorted(falling, reverse=True)
    assert by_way["router", "ranked", 2]["distinct"] == 2
