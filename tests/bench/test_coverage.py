"""Coverage of experts: the figures by hand, and routes and trees against transformers."""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speq.bench.paper import coverage, expert_shares, route_sample
from speq.bench.paper.coverage import Settings
from speq.bench.paper.route_sample import RouteSample, TextSample, TreePlan, TreeSample, recorded
from speq.dashboard.bench_panels import coverage as bench_panels
from speq.engine.draft import Draft
from speq.engine.drafter import DraftLimits
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.errors import SpeqError
from speq.generator import Generator
from speq.layers.expert_counts import ExpertCounts
from speq.measure import probe
from speq.routing import Route
from tests.helpers.tiny_models import load_plain, write_model

Folder = Callable[[str], Path]
BUDGET = "4MiB"
# One layer, four tokens with two of four experts each.
IDS = np.array([[[0, 1], [1, 0], [1, 3], [0, 1]]])
WEIGHTS = np.array([[[0.5, 0.25], [0.75, 0.125], [0.5, 0.5], [0.25, 0.25]]])
PROBABILITIES = np.array(
    [[[0.5, 0.25, 0.125, 0.125], [0.125, 0.75, 0, 0.125], [0, 0.5, 0, 0.5], [0.25] * 4]]
)
MARKS = np.array([[[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0]]], bool)
TREE_KEYS = {
    "shape", "asked", "rows", "depth", "samples", "distinct", "distinct_least", "distinct_most",
    "of_text", "independent",
}  # fmt: skip


def sample() -> RouteSample:
    """Of two layers: as above, and the same with its experts in reverse."""
    marks = np.concatenate([MARKS, MARKS[..., ::-1]])
    weights = expert_shares.served(IDS, WEIGHTS, 4)
    return RouteSample(
        marks,
        np.concatenate([weights, weights[..., ::-1]]),
        np.concatenate([PROBABILITIES, PROBABILITIES[..., ::-1]]),
    )


# Definitions.


def test_windows_do_not_overlap_and_are_whole() -> None:
    assert [*expert_shares.windows(7, 3)] == [slice(0, 3), slice(3, 6)]
    assert [*expert_shares.windows(2, 3)] == []


def test_marks_and_weights_by_hand() -> None:
    assert (expert_shares.chosen(IDS, 4) == MARKS).all()
    assert expert_shares.served(IDS, WEIGHTS, 4).tolist() == [
        [[0.5, 0.25, 0, 0], [0.125, 0.75, 0, 0], [0, 0.5, 0, 0.5], [0.25, 0.25, 0, 0]]
    ]


def test_distinct_experts_by_hand() -> None:
    assert expert_shares.distinct(MARKS).tolist() == [3]
    assert expert_shares.distinct(MARKS[:, :2]).tolist() == [2]


def test_coverage_by_hand() -> None:
    # Sums of probability: 7/8, 14/8, 3/8, 8/8 of 4, so that experts rank 1, 3, 0, 2.
    scores = PROBABILITIES.sum(1)
    assert scores.tolist() == [[0.875, 1.75, 0.375, 1.0]]
    assert expert_shares.ranking(scores).tolist() == [[1, 3, 0, 2]]
    found = expert_shares.covered(scores, scores, [1, 2, 4])
    assert found.tolist() == [[1.75 / 4, 2.75 / 4, 1]]
    # The same experts hold 1.75, 0.5, 0.875 and 0 of what was served, 3.125 in all.
    weights = expert_shares.served(IDS, WEIGHTS, 4).sum(1)
    held = expert_shares.covered(scores, weights, [1, 2, 3])
    assert held.tolist() == [[1.75 / 3.125, 2.25 / 3.125, 1]]


def test_of_equal_experts_the_lower_ranks_first() -> None:
    assert expert_shares.ranking(np.array([[1.0, 2.0, 1.0, 2.0]])).tolist() == [[1, 3, 0, 2]]


def test_experts_chosen_together_by_hand() -> None:
    (together,) = expert_shares.coactivation(MARKS)
    assert together.tolist() == [[3, 3, 0, 0], [3, 4, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert expert_shares.strongest_pair(together) == (0, 1)
    # Each of 4 tokens chooses one of the six pairs.
    assert expert_shares.expected_pair(4, 2, 4) == pytest.approx(4 / 6)
    # The paper's own: 8 of 64, 0.014 of tokens.
    assert expert_shares.expected_pair(1, 8, 64) == pytest.approx(0.0139, abs=1e-4)


def test_experts_chosen_together_are_counted_pair_by_pair() -> None:
    rng = random.Random(7)
    ids = [[rng.sample(range(9), 3) for _ in range(40)] for _ in range(2)]
    marks = expert_shares.chosen(np.array(ids), 9)
    for layer, matrix in enumerate(expert_shares.coactivation(marks)):
        pairs: dict[tuple[int, int], int] = {}
        for chosen in ids[layer]:
            for pair in combinations(sorted(chosen), 2):
                pairs[pair] = pairs.get(pair, 0) + 1
        for one in range(9):
            assert matrix[one, one] == sum(one in chosen for chosen in ids[layer])
            for other in range(one + 1, 9):
                assert matrix[one, other] == matrix[other, one] == pairs.get((one, other), 0)
        assert pairs[expert_shares.strongest_pair(matrix)] == max(pairs.values())


def test_clusters_stand_side_by_side() -> None:
    blocks = np.zeros((6, 6), np.int64)
    for group in ((0, 3, 5), (1, 2, 4)):
        for one in group:
            for other in group:
                blocks[one, other] = 9
    # The first is nearer to the second than to any other of its block, and so is joined with it.
    blocks[0, 3] = blocks[3, 0] = 20
    order = expert_shares.clustered(blocks)
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert order[:2] == [0, 3]
    assert {*order[:3]} == {0, 3, 5} and {*order[3:]} == {1, 2, 4}


def test_groups_are_as_close_as_their_pairs_on_the_mean() -> None:
    """By a second way: means over pairs, computed anew for each joining."""
    rng = np.random.default_rng(3)
    upper = np.triu(rng.permutation(64).reshape(8, 8), 1)
    together = upper + upper.T
    groups = [[expert] for expert in range(8)]
    while len(groups) > 1:
        _, one, other = max(
            (np.mean([together[a, b] for a in left for b in right]), at, beside)
            for (at, left), (beside, right) in combinations(enumerate(groups), 2)
        )
        groups[one] += groups.pop(other)
    assert expert_shares.clustered(together) == groups[0]


def test_sizes_are_eighths_or_as_asked_for() -> None:
    assert coverage.sizes_of((), 32) == [4, 8, 12, 16, 24]
    assert coverage.sizes_of((), 6) == [1, 2, 3, 4]
    assert coverage.sizes_of((8, 3), 8) == [8, 3]
    with pytest.raises(SpeqError, match="experts is 9; it must be from 1 to 8"):
        coverage.sizes_of((9,), 8)


# What is made of samples.


def test_shares_are_means_over_windows_and_layers() -> None:
    rows = coverage.coverage_rows([TextSample("code", sample())], [2], [1])
    (row,) = rows
    assert (row["prompts"], row["tokens"], row["experts"], row["windows"]) == ("code", 2, 1, 2)
    # First layer: 1.0 of 2 and 0.75 of 2. In the second, whose equals turn round, the same.
    assert row["probability"] == pytest.approx((1 / 2 + 0.75 / 2) / 2)
    # Expert 1 was served 1.0 of 1.625, and 0.75 of 1.5; in the last window expert 3 is as likely,
    # ranks first in the second layer, where it is expert 0, and was served 0.5.
    first, second = (1 / 1.625 + 0.75 / 1.5) / 2, (1 / 1.625 + 0.5 / 1.5) / 2
    assert row["served"] == pytest.approx((first + second) / 2)
    assert row["served_most"] == pytest.approx(first)
    assert row["served_least"] == pytest.approx(second)


def test_kinds_have_rows_of_their_own_and_all_together() -> None:
    part = sample()
    short = RouteSample(part.marks[:, :2], part.weights[:, :2], part.probabilities[:, :2])
    rows = coverage.coverage_rows([TextSample("code", part), TextSample("prose", short)], [2], [4])
    assert [(row["prompts"], row["windows"]) for row in rows] == [
        ("code", 2), ("prose", 1), ("all", 3)
    ]  # fmt: skip
    assert {row["probability"] for row in rows} == {1}


def test_chains_and_trees_by_hand() -> None:
    tree = TreeSample(2, 1, 1, np.repeat(MARKS[:, [1, 1, 2]], 2, axis=0))
    rows = coverage.unique_rows([TextSample("code", sample(), [tree])], [1, 3], [2, 5], 2)
    assert all(set(row) == TREE_KEYS for row in rows)
    one, three, grown = rows
    assert (one["shape"], one["rows"], one["asked"], one["samples"]) == ("chain", 1, 0, 4)
    assert one["distinct"] == one["distinct_least"] == one["distinct_most"] == 2
    assert one["independent"] == pytest.approx(2)
    # One window of three tokens, with experts 0, 1 and 3.
    assert (three["samples"], three["distinct"]) == (1, 3)
    assert three["independent"] == pytest.approx(4 * (1 - 0.5**3))
    # Tokens 1 to 3 of the text have experts 0, 1 and 3 too. There is no tree of 5 tokens.
    assert (grown["shape"], grown["asked"], grown["rows"], grown["depth"]) == ("tree", 2, 3, 1)
    assert (grown["samples"], grown["distinct"], grown["of_text"]) == (1, 3, 3)
    assert grown["independent"] == pytest.approx(4 * (1 - 0.5**3))


def test_concentration_by_hand() -> None:
    first, second, whole = coverage.layer_rows([TextSample("code", sample())], 2)
    for row, pair in ((first, [0, 1]), (second, [2, 3])):
        assert (row["pair"], row["together"], row["tokens"]) == (pair, 3, 4)
        assert row["expected"] == pytest.approx(4 / 6)
        assert row["concentration"] == pytest.approx(3 / (4 / 6))
        assert sorted(row["order"]) == [0, 1, 2, 3]
    # Pairs 01, 02, 03, 12, 13, 23.
    assert first["coactivation"] == [3, 0, 0, 0, 1, 0]
    assert first["choices"] == [3, 4, 0, 1]
    assert (whole["layer"], whole["concentration"]) == ("all", pytest.approx(4.5))
    assert set(first) == set(second) == set(whole)


def test_of_one_expert_a_token_there_are_no_pairs() -> None:
    marks = np.array([[[1, 0, 0], [0, 0, 1]]], bool)
    tokens = RouteSample(marks, marks.astype(float), marks.astype(float))
    layer, whole = coverage.layer_rows([TextSample("code", tokens)], 1)
    assert layer["concentration"] is layer["pair"] is whole["concentration"] is None
    assert layer["choices"] == [1, 0, 1]


def test_counts_are_those_of_all_texts() -> None:
    texts = [TextSample("code", sample()), TextSample("prose", sample())]
    counts = coverage.counts_of(texts, "a model", 2)
    assert counts == ExpertCounts("a model", 8, 2, [[6, 8, 0, 2], [2, 0, 8, 6]])


# Small random models.


def small(path: Path, **options: Any) -> Generator:
    return Generator.from_pretrained(
        path,
        BUDGET,
        dtype="float32",
        draft_dense="none",
        prune_rows="off",
        drafter="int4",
        **{"draft_length": 4, "draft_nodes": 6} | options,
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_routes_are_those_of_transformers(
    family: str, tiny: Folder, poor_draft: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the text, and of each node of a tree, as if its path were a text of its own."""
    drafts: list[Draft] = []
    attempt = probe.attempt

    def heard(engine: Engine, request: Request, limits: DraftLimits) -> RequestStep:
        turn = attempt(engine, request, limits)
        drafts.append(turn.draft)
        return turn

    monkeypatch.setattr(route_sample, "attempt", heard)
    prompts, new = ["Once upon", "two plus 2 ="], 14
    generator = small(tiny(family), draft=str(poor_draft(family)))
    try:
        plan = TreePlan((3, 6), None, 6)
        texts = recorded(generator, [("a", each) for each in prompts], new, plan)
        prompt_token_ids = [generator.encode(each) for each in prompts]
        written = [
            generator.generate(each, max_new_tokens=new, ignore_eos=True).token_ids
            for each in prompts
        ]
    finally:
        generator.close()
    plain = load_plain(tiny(family))
    trees = iter(drafts)
    for text, before, after in zip(texts, prompt_token_ids, written, strict=True):
        assert text.tokens.tokens == new - 1
        logits = router_logits(plain, before + after[:-1])[:, len(before) :]
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert text.tokens.probabilities == pytest.approx(probabilities, abs=1e-5)
        top_k = int(text.tokens.marks[0, 0].sum())
        assert (text.tokens.marks == best(logits, top_k)).all()
        assert ((text.tokens.weights > 0) <= text.tokens.marks).all()
        assert len({tree.start for tree in text.trees}) >= 2
        for tree in text.trees:
            draft = next(trees)
            assert tree.marks.shape[1] == draft.nodes <= tree.nodes + 1
            assert tree.depth == draft.depth
            # The pending token is one of the text.
            assert (tree.marks[:, 0] == text.tokens.marks[:, tree.start]).all()
            so_far = before + after[: tree.start + 1]
            for leaf in {*range(draft.nodes)} - {*draft.parents}:
                path = path_to(leaf, draft)
                alone = router_logits(plain, so_far + draft.above(leaf))[:, -len(path) :]
                assert (tree.marks[:, path] == best(alone, top_k)).all()
    assert next(trees, None) is None
    assert any(not draft.is_chain for draft in drafts)


def path_to(node: int, draft: Draft) -> list[int]:
    """Nodes from the pending token down."""
    return [*path_to(draft.parents[node - 1], draft), node] if node else [0]


def router_logits(plain: Any, token_ids: list[int]) -> Any:
    """[L, T, E] of the routers of plain transformers, heard by hooks."""
    heard: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: heard.append(out[0].double().numpy()))
        for name, module in plain.named_modules()
        if name.endswith(("mlp.gate", "block_sparse_moe.gate"))
    ]
    try:
        with torch.inference_mode():
            plain(torch.tensor([token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    assert heard, "the routers have another name"
    return np.stack([each.reshape(len(token_ids), -1) for each in heard])


def best(logits: Any, top_k: int) -> Any:
    """Marks of the `top_k` highest."""
    marks = np.zeros(logits.shape, bool)
    np.put_along_axis(marks, np.argsort(-logits, axis=-1)[..., :top_k], True, axis=-1)
    return marks


def test_the_weights_are_those_that_experts_were_served_with() -> None:
    routes = [
        Route(
            torch.tensor([[2, 0], [1, 2]]),
            torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
            torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]),
        )
    ]
    found = RouteSample.of(routes, [1])
    assert found.marks.tolist() == [[[False, True, True]]]
    assert found.weights.tolist() == [[[0.0, 0.5, 0.5]]]
    e = np.e
    assert found.probabilities[0, 0] == pytest.approx(np.array([1, e, e]) / (1 + 2 * e))


def test_routers_without_numbers_are_refused() -> None:
    ids, weights = torch.tensor([[0]]), torch.tensor([[1.0]])
    with pytest.raises(SpeqError, match="the router of MoE layer 0 tells no logits"):
        RouteSample.of([Route(ids, weights)], [0])
    with pytest.raises(SpeqError, match="routers compute logits that are not finite"):
        RouteSample.of([Route(ids, weights, torch.tensor([[0.0, torch.inf]]))], [0])


# The command.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    from speq import cli

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["speq", "bench", "coverage", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    # A model whose drafts are tried in no other test here, and which has no pairs to spare.
    model = write_model(tmp_path / "model", "olmoe")
    for name in ("verse", "sums"):
        rows = [json.dumps({"prompt": f"{name} of {number}"}) + "\n" for number in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return [
        model, "--memory-budget", BUDGET, "--prompts", tmp_path / "verse.jsonl", "--prompts",
        tmp_path / "sums.jsonl", "--num-prompts", 2, "--max-new-tokens", 13, "--windows", "1,4",
        "--chains", "1,2,12", "--tree-nodes", "2,5", "--tree-every", 4, "--dtype", "float32",
    ]  # fmt: skip


def test_the_command_prints_tables_and_writes_json_and_counts(
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, counts, page = (tmp_path / name for name in ("a.json", "counts.json", "page.html"))
    more = ("--json", target, "--counts", counts, "--picture", page)
    assert command(monkeypatch, *arguments, *more) == 0
    captured = capsys.readouterr()
    for title in ("served weight", "same rows, text", "N(t)", "concentration"):
        assert title in captured.out
    assert "how often each expert was chosen" in captured.out
    report = json.loads(target.read_text())
    assert report["bench"] == "coverage"
    kinds = ("verse", "sums", "all")
    assert {(row["prompts"], row["tokens"]) for row in report["rows"]} == {
        (kind, tokens) for kind in kinds for tokens in (1, 4)
    }
    # Two texts of twelve tokens a kind.
    windows = {(row["prompts"], row["tokens"]): row["windows"] for row in report["rows"]}
    assert (windows["verse", 1], windows["sums", 4], windows["all", 4]) == (24, 6, 12)
    for row in report["rows"]:
        assert 0 < row["probability_least"] <= row["probability"] <= row["probability_most"] <= 1
    chains = [row["rows"] for row in report["unique"] if row["shape"] == "chain"]
    assert chains == [1, 2, 12]
    found = ExpertCounts.read(counts)
    layers = report["layers"][:-1]
    assert found.tokens == 48 and found.counts == [row["choices"] for row in layers]
    assert page.read_text().startswith("<!doctype html>")

    # Refused before anything is measured.
    assert command(monkeypatch, *arguments, "--counts", counts) == 1
    captured = capsys.readouterr()
    assert captured.err == f"error: {counts} exists already; choose another name or add --force\n"


def test_without_an_int4_copy_there_are_no_trees(
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "a.json"
    assert command(monkeypatch, *arguments, "--draft", "none", "--json", target) == 0
    assert "no trees: no INT4 copy of the experts was held" in capsys.readouterr().out
    assert {row["shape"] for row in json.loads(target.read_text())["unique"]} == {"chain"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chains": (1, 13)}, "chains has 13 and max_new_tokens is 13, of which 12 are run"),
        ({"windows": (64,)}, "windows has 64 and max_new_tokens is 13"),
        ({"tree_nodes": (12,)}, "tree_nodes has 12 and max_new_tokens is 13"),
        ({"tree_nodes": (64,)}, "tree_nodes is 64; it must be from 1 to 63"),
        ({"experts": (99,)}, "experts is 99; it must be from 1 to 8"),
        ({"prompts": ("rhymes",)}, "'rhymes' are neither a kind nor a file"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str, tiny: Folder) -> None:
    sound = {"max_new_tokens": 13, "windows": (4,), "chains": (2,), "tree_nodes": (4,)}
    settings = {"memory_budget": BUDGET, "num_prompts": 1} | sound | changes
    with pytest.raises(SpeqError, match=message):
        coverage.run(str(tiny("qwen2_moe")), Settings(**settings), json_file=None, force=False)


# The picture.


def report_of(samples: list[TextSample]) -> dict[str, Any]:
    report = coverage.CoverageReport(
        "coverage",
        "a model",
        {"counts": None},
        coverage.coverage_rows(samples, [1, 2], [1, 2]),
        unique=coverage.unique_rows(samples, [1, 2], [2], 2),
        layers=coverage.layer_rows(samples, 2),
    )
    found: dict[str, Any] = json.loads(json.dumps(asdict(report)))
    return found


def test_the_picture_shows_the_rows() -> None:
    tree = TreeSample(2, 1, 1, np.repeat(MARKS[:, [1, 1, 2]], 2, axis=0))
    texts = [TextSample("code", sample(), [tree]), TextSample("prose", sample())]
    report = report_of(texts)
    panels = bench_panels.panels(report)
    unique, probability, served, one, two, concentration, first, second = panels
    lines = {line["name"]: (line["x"], line["y"]) for line in unique.data}
    assert lines["tree"] == ([3], [3])
    assert lines["chain"] == ([1, 2], [2, 2.5])
    assert lines["as many tokens of the text"] == ([3], [3])
    assert lines["independent choice"] == ([1, 2, 3], [2, 3, 3.5])
    assert [line["name"] for line in probability.data] == ["1 tokens", "2 tokens"]
    whole = [row for row in report["rows"] if row["prompts"] == "all"]
    for panel, key in ((probability, "probability"), (served, "served")):
        drawn = [value for line in panel.data for value in line["y"]]
        assert drawn == pytest.approx([100 * row[key] for row in whole])
        least = [low for line in panel.data for low in line["error_y"]["arrayminus"]]
        wanted = [100 * (row[key] - row[f"{key}_least"]) for row in whole]
        assert least == pytest.approx(wanted)
    for panel in (one, two):
        assert [line["name"] for line in panel.data] == ["code", "prose", "all"]
    assert concentration.data[0]["y"] == pytest.approx([4.5, 4.5])
    for panel, row in ((first, report["layers"][0]), (second, report["layers"][1])):
        (drawn_map,) = panel.data
        assert drawn_map["y"] == drawn_map["x"] == [str(expert) for expert in row["order"]]
        matrix = {
            (one, other): drawn_map["z"][i][j]
            for i, one in enumerate(row["order"])
            for j, other in enumerate(row["order"])
        }
        pairs = dict(zip(combinations(range(4), 2), row["coactivation"], strict=True))
        for (low, high), tokens in pairs.items():
            ratio = tokens / row["expected"]
            assert matrix[low, high] == matrix[high, low] == pytest.approx(ratio)
        assert all(matrix[expert, expert] is None for expert in range(4))
    assert bench_panels.notes(report) == [
        "The strongest pair of a layer is chosen 4.5 times as often as uniform choice would have "
        "it, on the mean of layers; 4.5 to 4.5 times."
    ]


def test_of_large_models_some_layers_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_panels, "MOST_CELLS", 20)
    report = report_of([TextSample("code", sample())])
    maps = [panel.title for panel in bench_panels.panels(report) if panel.name == "together"]
    assert maps == ["Experts chosen together in layer 0"]
    assert bench_panels.notes(report)[1] == "Of 2 layers, pairs of 1 are drawn."


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"order": [0, 1, 2, 2]}, "order is .*; it must be each expert's number once"),
        ({"coactivation": [1, 2]}, "coactivation is .*; it must be a number for each pair"),
    ],
)
def test_maps_that_do_not_fit_are_refused(change: dict[str, Any], sentence: str) -> None:
    report = report_of([TextSample("code", sample())])
    report["layers"][0] |= change
    with pytest.raises(SpeqError, match=sentence):
        bench_panels.panels(report)
