"""Draft against exact model: the definitions by hand, and both models against references."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.bench.runs import fidelity, fidelity_counts
from speq.bench.runs.fidelity import Settings
from speq.bench.runs.fidelity_counts import SEEDS, Fidelity, NextTokens, Position
from speq.bench.runs.route_match import RouteMatch, entropy_bits, ranked, total
from speq.dashboard.bench_panels import fidelity as bench_panels
from speq.engine.drafter import DraftContext, DraftLimits
from speq.engine.drafters.int4 import Int4Drafter
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.engine.sampler import HostSampler
from speq.errors import SpeqError
from speq.generator import Generator
from speq.measure import probe
from speq.routing import Route
from speq.runtime import Runtime
from tests.helpers.tiny_models import BY_FAMILY, load_plain, write_model

Folder = Callable[[str], Path]

# Token ids of the small models' bytes: the first is cut within a pass of six, the second after two.
TEXTS = [list(b"Once upon a time there was"), list(b"two plus 2 =")]
DRAFT_LENGTH = 5
BUDGET = "4MiB"
LAYER_KEYS = {
    "layer", "pairs", "hard", "soft", "mismatch", "recall", "entropy_bits", "entropy_share",
    "activations",
}  # fmt: skip
POSITION_KEYS = {
    "position", "forced_recall", "recall", "accepted_recall", "drafts", "accepted",
    "accepted_after",
}  # fmt: skip


def route(topk_ids: list[list[int]], weights: list[list[float]], logits: Any = None) -> Route:
    seen = None if logits is None else torch.tensor(logits)
    return Route(torch.tensor(topk_ids), torch.tensor(weights), seen)


# Definitions.


def test_experts_are_ranked_by_the_router() -> None:
    ids, weights = [[3, 1], [0, 2]], [[0.4, 0.6], [0.5, 0.5]]
    assert ranked(route(ids, weights)) == [[1, 3], [0, 2]]
    logits = [[0.0, 1.0, 9.0, 2.0], [1.0, 0.0, 3.0, 0.0]]
    assert ranked(route(ids, weights, logits)) == [[3, 1], [2, 0]]
    # Equals are told apart by their numbers, however the router lists them.
    assert ranked(route([[2, 0, 1]], [[0.3, 0.3, 0.4]])) == [[1, 0, 2]]


def test_matches_by_hand() -> None:
    match = RouteMatch()
    match.add([4, 2, 7], [4, 2, 7])
    match.add([4, 2, 7], [2, 4, 7])
    match.add([4, 2, 7], [7, 2, 4])
    match.add([4, 2, 7], [4, 2, 5])
    match.add([4, 2, 7], [0, 1, 3])
    assert match == RouteMatch(hard=1, soft=2, mismatch=2, named=3 + 3 + 3 + 2, choices=15)
    assert (match.pairs, match.recall) == (5, 11 / 15)
    assert RouteMatch().recall is None
    assert total([match, RouteMatch(hard=3, named=9, choices=9)]) == RouteMatch(4, 2, 2, 20, 24)


def test_entropy_by_hand() -> None:
    assert entropy_bits([5, 5, 5, 5]) == pytest.approx(2)
    assert entropy_bits([0, 8, 0]) == 0
    assert entropy_bits([2, 1, 1, 0]) == pytest.approx(1.5)


def test_next_tokens_by_hand() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.2, 0.6]]).log()
    draft = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]).log()
    counts = NextTokens()
    counts.add(exact + 3, draft - 2, [0, 2])  # the third token is the text's last
    row = counts.row()
    assert (row["tokens"], row["agreement"]) == (3, 2 / 3)
    assert row["exact_perplexity"] == pytest.approx((0.5 * 0.125) ** (-1 / 2))
    assert row["draft_perplexity"] == pytest.approx((0.25 * 0.25) ** (-1 / 2))
    assert row["perplexity_gap"] == pytest.approx(0, abs=1e-5)
    overlaps = (0.25 + 0.25 + 0.25, 0.125 + 0.5 + 0.125, 0.1 + 0.2 + 0.6)
    assert row["overlap"] == pytest.approx(sum(overlaps) / 3)


def test_tokens_drawn_alike() -> None:
    """By shared noise: from (1 - d) / (1 + d) to 1 - d where a share d differs, here a quarter."""
    exact = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(400, 3)
    draft = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(400, 3)
    counts = NextTokens()
    counts.add(exact, draft, [])
    # Three standard deviations of luck.
    luck = 3 * (0.24 / (400 * SEEDS)) ** 0.5
    assert 0.6 - luck < counts.row()["drawn_alike"] < 0.75 + luck
    same = NextTokens()
    same.add(exact, exact, [])
    assert same.row()["drawn_alike"] == 1


def test_next_tokens_where_there_is_little_to_say() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25]]).log()
    draft = torch.tensor([[0.25, 0.5, 0.25]]).log()
    alone = NextTokens()
    alone.add(exact[:1], draft[:1], [])
    assert alone.row()["exact_perplexity"] is alone.row()["perplexity_gap"] is None
    hopeless = NextTokens()
    hopeless.add(torch.tensor([[0.0, 1e6]]), torch.tensor([[0.0, 0.0]]), [0])
    assert hopeless.row()["exact_perplexity"] is None
    assert hopeless.row()["draft_perplexity"] == pytest.approx(2)


@pytest.mark.parametrize(("broken", "name"), [(0, "exact model"), (1, "draft")])
def test_logits_that_are_no_numbers_are_refused(broken: int, name: str) -> None:
    logits = [torch.zeros(2, 4), torch.zeros(2, 4)]
    logits[broken][1, 2] = math.inf
    with pytest.raises(SpeqError, match=f"the {name} computes logits that are not finite"):
        NextTokens().add(*logits, [0, 0])


def test_counts_become_shares() -> None:
    found = Fidelity(
        layers=[RouteMatch(6, 1, 1, 15, 16), RouteMatch(2, 2, 4, 11, 16)],
        activations=[[4, 4, 4, 4], [8, 8, 0, 0]],
        positions=[
            Position(RouteMatch(named=9, choices=10), RouteMatch(named=8, choices=10),
                     RouteMatch(named=4, choices=5), proposed=8, accepted=6),
            Position(proposed=8, accepted=3),
            Position(proposed=8, accepted=0),
            Position(proposed=7, accepted=0),
        ],
    )  # fmt: skip
    report = fidelity.report_of("a model", {}, found)
    first, second, whole = report.rows
    assert (first["layer"], second["layer"], whole["layer"]) == (0, 1, "all")
    assert [whole[name] for name in ("pairs", "hard", "soft", "mismatch", "recall")] == [
        16, 8 / 16, 3 / 16, 5 / 16, 26 / 32,
    ]  # fmt: skip
    assert [second[name] for name in ("hard", "soft", "mismatch")] == [0.25, 0.25, 0.5]
    assert (first["entropy_bits"], first["entropy_share"]) == (2, 1)
    assert (second["entropy_bits"], second["entropy_share"]) == (1, 0.5)
    assert (whole["entropy_bits"], whole["entropy_share"]) == (1.5, 0.75)
    positions = report.positions
    assert [row["position"] for row in positions] == [1, 2, 3, 4]
    shares = [positions[0][name] for name in ("forced_recall", "recall", "accepted_recall")]
    assert shares == [0.9, 0.8, 0.8]
    assert [row["accepted"] for row in positions] == [6 / 8, 3 / 8, 0, 0]
    assert [row["accepted_after"] for row in positions] == [6 / 8, 3 / 6, 0, None]
    assert positions[1]["recall"] is None
    assert all(set(row) == LAYER_KEYS for row in report.rows)
    assert all(set(row) == POSITION_KEYS for row in positions)


# Small random models.


class ExactAsDraft:
    """A draft that cannot err: the exact experts."""

    drafts = True
    whole = True

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.on_route: Callable[[int, Route], None] | None = None

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        if self.on_route is not None:
            self.on_route(layer, route)
        return self.runtime.engine.offload.target(layer, hidden_states, route)


def small(path: Path, **options: Any) -> Generator:
    return Generator.from_pretrained(
        path,
        BUDGET,
        dtype="float32",
        draft_length=DRAFT_LENGTH,
        draft_dense="none",
        context_length=40,
        **options,
    )


@pytest.mark.parametrize("family", BY_FAMILY)
def test_the_exact_model_is_its_own_perfect_draft(
    family: str, tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = small(tiny(family))
    try:
        runtime = generator.runtime
        perfect: Any = ExactAsDraft(runtime)
        monkeypatch.setattr(Runtime, "draft_bank", perfect)
        engine = runtime.engine
        engine.drafters[0] = Int4Drafter(
            DraftContext(runtime.model, engine.caches[0], perfect, HostSampler())
        )
        found = fidelity.compare(generator, TEXTS, DRAFT_LENGTH)
    finally:
        generator.close()
    report = fidelity.report_of(str(tiny(family)), {}, found)
    *layers, whole = report.rows
    assert len(layers) == runtime.model.num_moe_layers
    tokens = sum(map(len, TEXTS))
    for row in layers:
        assert (row["pairs"], sum(row["activations"])) == (tokens, tokens * runtime.shape.top_k)
    assert (whole["hard"], whole["soft"], whole["mismatch"], whole["recall"]) == (1, 0, 0, 1)
    (text,) = report.texts
    assert (text["tokens"], text["agreement"]) == (tokens, 1)
    assert text["draft_perplexity"] == pytest.approx(text["exact_perplexity"], rel=1e-5)
    # Four drafts behind 6, 12, 18 and 24 tokens of the first text, one behind 6 of the second.
    for row in report.positions:
        shares = ("forced_recall", "recall", "accepted_recall", "accepted", "accepted_after")
        assert [row[name] for name in shares] == [1] * 5
        assert row["drafts"] == 5


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_the_exact_side_is_that_of_transformers(family: str, tiny: Folder) -> None:
    generator = small(tiny(family))
    try:
        found = fidelity.compare(generator, TEXTS, DRAFT_LENGTH)
        top_k = generator.runtime.shape.top_k
    finally:
        generator.close()
    plain = load_plain(tiny(family))
    nats = 0.0
    counts: list[Counter[int]] = [Counter() for _ in found.layers]
    for token_ids in TEXTS:
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            output = plain(ids, output_router_logits=True)
        for count, logits in zip(counts, output.router_logits, strict=True):
            count.update(logits.view(len(token_ids), -1).topk(top_k).indices.flatten().tolist())
        probs = output.logits[0, :-1].double().softmax(-1)
        nats -= float(probs.gather(1, ids[0, 1:, None]).log().sum())
    for count, activations in zip(counts, found.activations, strict=True):
        assert activations == [count[expert] for expert in range(len(activations))]
    (row,) = fidelity.report_of("", {}, found).texts
    predicted = sum(map(len, TEXTS)) - len(TEXTS)
    assert row["exact_perplexity"] == pytest.approx(math.exp(nats / predicted), rel=1e-4)
    assert row["perplexity_gap"] == row["draft_perplexity"] - row["exact_perplexity"] != 0


def test_free_drafts_are_the_engines_own_steps(
    tiny: Folder, poor_draft: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], RequestStep, tuple[int, int]]] = []
    attempt = probe.attempt

    def recorded(engine: Engine, request: Request, limits: DraftLimits) -> RequestStep:
        turn = attempt(engine, request, limits)
        seen.append((request.prompt_token_ids, turn, engine.lookahead.recall(turn.outcome.path)))
        return turn

    monkeypatch.setattr(fidelity_counts, "attempt", recorded)
    generator = small(tiny("qwen3_moe"), draft=str(poor_draft("qwen3_moe")))
    try:
        found = fidelity.compare(generator, TEXTS, DRAFT_LENGTH)
    finally:
        generator.close()
    first, second = TEXTS
    starts = [first[:7], first[:13], first[:19], first[:25], second[:7]]
    assert [prompt_token_ids for prompt_token_ids, _, _ in seen] == starts
    assert {turn.draft.depth for _, turn, _ in seen} == {DRAFT_LENGTH}
    steps = [turn.outcome.accepted for _, turn, _ in seen]
    assert 0 < sum(steps) < DRAFT_LENGTH * len(steps)
    for at, position in enumerate(found.positions):
        assert position.accepted == sum(accepted > at for accepted in steps)
        # The pending token and the accepted ones have been run by the draft, short of the last.
        assert position.kept.pairs == len(found.layers) * sum(each >= at for each in steps)
    kept = total(position.kept for position in found.positions)
    assert kept.named == sum(named for _, _, (named, _) in seen)
    assert kept.choices == sum(choices for _, _, (_, choices) in seen)
    free = total(position.free for position in found.positions)
    assert free.pairs == len(found.layers) * DRAFT_LENGTH * len(steps) > kept.pairs
    # A poor draft mistakes experts, but never those before which nothing was rounded.
    assert found.layers[0].hard == found.layers[0].pairs
    assert all(layer.mismatch > 0 for layer in found.layers[1:])


def test_a_text_is_cut_to_the_context(tmp_path: Path) -> None:
    model = write_model(tmp_path / "short", "olmoe", max_position_embeddings=16)
    generator = Generator.from_pretrained(model, BUDGET, draft_length=DRAFT_LENGTH)
    try:
        shown: list[tuple[str, int, int]] = []
        found = fidelity.compare(
            generator, TEXTS, DRAFT_LENGTH, progress=lambda *report: shown.append(report)
        )
        assert found.texts.tokens == 10 + 10
        assert {(what, total) for what, _, total in shown} == {
            ("comparing draft and exact model", 20)
        }
        assert [done for _, done, _ in shown] == [6, 10, 16, 20]
        with pytest.raises(SpeqError, match="of 16 tokens has no room for a text beside such"):
            fidelity.compare(generator, TEXTS, 15)
    finally:
        generator.close()


def test_settings_that_leave_nothing_to_compare_are_refused(tiny: Folder) -> None:
    for changes, message in (
        ({"draft": "none"}, "draft is none, and there is nothing to compare"),
        ({"draft_length": 0}, "draft_length is 0; it must be from 1 to 63"),
        ({"draft_length": 64}, "draft_length is 64; it must be from 1 to 63"),
        ({"max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"memory_budget": "900KiB"}, "budget 900 KiB has no room for the draft"),
    ):
        values: dict[str, Any] = {
            "memory_budget": BUDGET,
            "num_prompts": 1,
            "max_tokens": 9,
        } | changes
        with pytest.raises(SpeqError, match=message):
            fidelity.run(
                str(tiny("qwen2_moe")), Settings(**(values | changes)),
                json_file=None, force=False,
            )  # fmt: skip


# The command.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    from speq import cli

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["speq", "bench", "fidelity", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


@pytest.fixture
def arguments(tiny: Folder, tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": bytes(ids).decode()}) + "\n" for ids in TEXTS))
    return [
        tiny("qwen2_moe"), "--memory-budget", BUDGET, "--prompts", prompts, "--num-prompts", 2,
        "--max-tokens", 20, "--draft-length", 3,
    ]  # fmt: skip


def test_the_command_prints_tables_and_writes_json(
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "results" / "fidelity.json"
    assert command(monkeypatch, *arguments, "--json", target) == 0
    out = capsys.readouterr().out
    for title in ("hard", "mismatch", "of log2 E", "perplexity, draft", "accepted", "all"):
        assert title in out
    report = json.loads(target.read_text())
    assert report["bench"] == "fidelity"
    assert report["settings"]["draft_length"] == 3
    assert [row["layer"] for row in report["rows"]] == [0, 1, "all"]
    assert all(set(row) == LAYER_KEYS for row in report["rows"])
    assert [row["position"] for row in report["positions"]] == [1, 2, 3]
    assert all(set(row) == POSITION_KEYS for row in report["positions"])
    (text,) = report["texts"]
    assert text["tokens"] == 20 + len(TEXTS[1])
    for row in report["rows"]:
        assert row["hard"] + row["soft"] + row["mismatch"] == pytest.approx(1)

    # Refused before anything is measured.
    before = target.read_bytes()
    assert command(monkeypatch, *arguments, "--json", target) == 1
    captured = capsys.readouterr()
    assert captured.err == f"error: {target} exists already; choose another name or add --force\n"
    assert (captured.out, target.read_bytes()) == ("", before)


def test_the_picture_shows_the_rows() -> None:
    found = Fidelity(
        layers=[RouteMatch(6, 1, 1, 15, 16), RouteMatch(2, 2, 4, 11, 16)],
        activations=[[4, 4, 4, 4], [8, 8, 0, 0]],
        positions=[Position(RouteMatch(named=9, choices=10), proposed=8, accepted=6)],
    )
    report = json.loads(json.dumps(asdict(fidelity.report_of("a model", {}, found))))
    activation, entropy, matches, draft = bench_panels.panels(report)
    assert activation.data[0]["z"] == [[50] * 4, [100, 100, 0, 0]]
    of_lines = {line["name"]: line["y"] for line in entropy.data}
    assert of_lines == {"entropy of the choice": [2, 1], "evenly spread": [2, 2]}
    stacked = {bar["name"].partition(":")[0]: bar["y"] for bar in matches.data}
    assert stacked == {"hard": [75, 25], "soft": [12.5, 25], "mismatch": [12.5, 50]}
    lines = {line["name"]: line["y"] for line in draft.data}
    assert lines["route recall, teacher-forced, %"] == [90]
    assert lines["token accepted, %"] == [75]
    assert bench_panels.notes(report) == []
