"""Verifications within an expert budget: by hand, beside plain transformers, and in whole runs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from speq import Generator, SpeqError
from speq.cli import app
from speq.config import RunConfig, SamplingParams
from speq.engine.approximation import Approximation
from speq.engine.draft import Draft, Outcome
from speq.engine.drafter import DraftLimits, PlainDecoding
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.engine.sampler import HostSampler
from speq.kernels.decoder_ops import RouterRule
from speq.layers.expert_budget import BudgetRules, ExpertBudget, PredictedBudget, rules_of
from speq.layers.expert_counts import ExpertCounts
from speq.layers.gates import ScoreGate
from speq.measure.probe import verify
from speq.models.kv_cache import KVCache
from speq.models.moe_model import Scored
from speq.models.packed_batch import SequenceTokens
from speq.routing import Route, RoutePrediction
from speq.scheduler.expert_key import ExpertKey
from speq.stats import Recorder
from tests.helpers.cells import Cell, Folder, Folders, loaded
from tests.helpers.often import often
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

PROMPT = [*range(40, 60)]
ROWS = [7, 99, 180, 23, 5]


# By hand


@pytest.mark.parametrize(
    ("rules", "at_hand", "inside"),
    [
        (BudgetRules(2), [], {0, 2}),
        # Of two alike the lower one.
        (BudgetRules(3), [], {0, 2, 1}),
        (BudgetRules(2), [4], {0, 2, 4}),
        (BudgetRules(2, residents=False), [4], {0, 2}),
        (BudgetRules(None, floor=0.2), [], {0, 2, 1, 3}),
        (BudgetRules(None, floor=0.26), [4], {0, 4}),
        # Never fewer than a token needs.
        (BudgetRules(None, floor=0.9), [], {0, 2}),
        (BudgetRules(2, floor=0.9), [1], {0, 1}),
    ],
)
def test_shortlists(rules: BudgetRules, at_hand: list[int], inside: set[int]) -> None:
    scores = np.array([1.5, 1.0, 1.2, 1.0, 0.1], np.float32)

    def residents(experts: Sequence[int]) -> list[int]:
        return [expert for expert in experts if expert in at_hand]

    assert set(np.flatnonzero(rules.shortlist(scores, 2, residents))) == inside


class ResidencyPlan:
    """A supply that has certain experts."""

    def __init__(self, *experts: int) -> None:
        self.experts = experts

    def at_hand(self, layer: int, experts: Sequence[int]) -> list[int]:
        return [expert for expert in experts if expert in self.experts]


def budget_of(rules: BudgetRules, *at_hand: int) -> ExpertBudget:
    recorder = Recorder()
    return ExpertBudget(
        rules, [ScoreGate(RouterRule(divided=True))], ResidencyPlan(*at_hand), recorder.timed
    )


def route_of(shares: list[list[float]], top_k: int = 2) -> Route:
    logits = torch.tensor(shares).log()
    weights, ids = torch.tensor(shares).topk(top_k)
    return Route(ids, weights / weights.sum(-1, keepdim=True), logits)


SHARES = [
    [0.50, 0.30, 0.10, 0.06, 0.04],
    [0.30, 0.45, 0.15, 0.06, 0.04],
    [0.05, 0.04, 0.06, 0.25, 0.60],
]


def test_rows_count_by_the_chance_that_they_stand() -> None:
    """The third row alone wants expert 4, very much, and is unlikely to stand."""
    shares = [*SHARES[:2], [0.02, 0.01, 0.02, 0.05, 0.90]]
    for by_reach, ids in ((True, {0, 1}), (False, {0, 4})):
        budget = budget_of(BudgetRules(2, by_reach=by_reach))
        budget.begin([1.0, 0.9, 0.1])
        served = budget.serve(0, route_of(shares), [0, 1, 2])
        assert {expert for row in served.ids for expert in row} == ids


def test_rows_that_were_given_up_do_not_count() -> None:
    budget = budget_of(BudgetRules(2, by_reach=False))
    budget.begin([1.0, 1.0, 1.0])
    served = budget.serve(0, route_of(SHARES), [0, 1])
    assert {expert for row in served.ids[:2] for expert in row} == {0, 1}
    assert budget.end().natural == 2


def test_substitution_and_truncation_by_hand() -> None:
    """Experts 0 and 1 are inside: the third row chooses these, or has nothing."""
    kept = 0.5 + 0.3 + 0.3 + 0.45
    wanted = kept + 0.25 + 0.6
    for truncate in (False, True):
        budget = budget_of(BudgetRules(2, truncate=truncate))
        budget.begin([1.0, 1.0, 0.1])
        route = route_of(SHARES)
        served = budget.serve(0, route, [0, 1, 2])
        if truncate:
            assert served.left_out == {2, 3, 4}
            assert served.ids == route.ids
        else:
            assert served.left_out == set()
            assert served.ids == [[0, 1], [1, 0], [0, 1]]
            # Rows that have what they want are as they were, to the bit.
            assert torch.equal(served.topk_weights[:2], route.topk_weights[:2])
            assert served.weights[2] == pytest.approx([5 / 9, 4 / 9], rel=1e-5)
        found = budget.end()
        assert found.wanted.sum() == pytest.approx(wanted, rel=1e-6)
        assert found.kept.tolist() == pytest.approx([0.8, 0.75, 0.0], abs=1e-6)
        assert (found.natural, found.served) == (4, 2)


def test_nothing_is_bounded_outside_of_a_verification() -> None:
    budget, route = budget_of(BudgetRules(2)), route_of(SHARES)
    assert budget.serve(0, route, [0, 1, 2]) is route


def test_static_ranking_goes_by_counts() -> None:
    counts = torch.tensor([[0, 0, 9, 8, 1]])
    budget = budget_of(BudgetRules(2, counts=counts))
    budget.begin([1.0, 1.0, 1.0])
    served = budget.serve(0, route_of(SHARES), [0, 1, 2])
    assert served.ids == [[2, 3], [2, 3], [3, 2]]


def test_what_a_draft_names_is_brought_within_the_budget() -> None:
    """The best two by what tokens named so far want, weighed by their chances."""
    rules = BudgetRules(2)
    predicted = PredictedBudget(rules, [ScoreGate(RouterRule(divided=True))] * 2, 5)
    everything = [4, 3, 2, 1, 0]
    predicted.begin()
    predicted.named(0, route_of(SHARES[:1]), 1.0)
    assert predicted.worth(0, everything) == [1, 0]
    predicted.named(0, route_of(SHARES[2:]), 0.9)
    assert predicted.worth(0, everything) == [4, 0]
    # A pass that was recorded leaves no logits: 0.6 and 0.4 for the two that it chose.
    predicted.named(1, Route(torch.tensor([[3, 2]]), torch.tensor([[0.6, 0.4]])), 1.0)
    assert predicted.worth(1, everything) == [3, 2]
    predicted.predicted(1, RoutePrediction([[0, 3]], [[1.0, 1.0]]), [0.9])
    assert predicted.worth(1, everything) == [3, 0]
    predicted.begin()
    predicted.predicted(1, RoutePrediction([[1, 4]], [[1.0, 1.0]]), [0.5])
    assert predicted.worth(1, everything) == [4, 1]


# Audits


def step_of(request: Request, draft: Draft, outcome: Outcome) -> RequestStep:
    cache = KVCache(1, ((1, 2), (1, 2)), 2, torch.float32, torch.device("cpu"))
    return RequestStep(
        request, cache, PlainDecoding(), DraftLimits(len(draft.token_ids)), draft, outcome=outcome
    )


def logits_of(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log()


def test_an_audit_by_hand() -> None:
    """Two accepted rows: the budget halves the first token's probability, and prefers another
    token in the second.
    """
    budgeted = logits_of([0.2, 0.4, 0.4 - 1e-6], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8])
    exact = logits_of([0.1, 0.8, 0.1], [0.25, 0.6, 0.15], [0.8, 0.1, 0.1])
    passes = iter([budgeted, exact])
    approximation = Approximation(budget_of(BudgetRules(2)), 1.0, Recorder().timed)
    draft = Draft.chain([1, 2])
    scored = approximation.score(lambda: Scored(next(passes), torch.empty(0)), [1.0, 0.5, 0.2])
    assert torch.equal(scored.logits, exact)
    step = step_of(Request([0], SamplingParams()), draft, Outcome([0, 1], [1, 1]))
    stats = approximation.report(step, scored, HostSampler())
    assert stats is not None
    assert (stats.verifications, stats.audited, stats.differing) == (1, 2, 1)
    nats = [np.log(0.8 / 0.4), np.log(0.6 / 0.3)]
    assert stats.nats == pytest.approx(sum(nats), rel=1e-5)
    assert stats.nats_squared == pytest.approx(sum(each**2 for each in nats), rel=1e-5)


def test_a_share_of_verifications_is_audited() -> None:
    passes = 0

    def score() -> Scored:
        nonlocal passes
        passes += 1
        return Scored(torch.zeros(2, 3), torch.empty(0))

    approximation = Approximation(budget_of(BudgetRules(2)), 0.25, Recorder().timed)
    for _ in range(8):
        approximation.score(score, [1.0, 0.5])
    assert passes == 8 + 2
    # Plain decoding has no budget, and nothing to audit.
    approximation.score(score, [1.0])
    assert passes == 11
    step = step_of(Request([0], SamplingParams()), Draft(), Outcome([0], [0]))
    plain = Scored(torch.zeros(1, 3), torch.empty(0))
    assert approximation.report(step, plain, HostSampler()) is None


# Beside plain transformers


def chosen(family: str, logits: Any, allowed: Any, top_k: int) -> dict[int, float]:
    """Ids and weights of a token among allowed experts, worked out in float64."""
    exps = np.exp(logits - logits.max())
    scores = {"glm4_moe": 1 / (1 + np.exp(-logits))}.get(family, exps / exps.sum())
    best = sorted(np.flatnonzero(allowed), key=lambda expert: -scores[expert])[:top_k]
    weights = {int(expert): scores[expert] for expert in best}
    if family in ("mixtral", "glm4_moe"):
        total = sum(weights.values())
        weights = {expert: weight / total for expert, weight in weights.items()}
    scale = {"glm4_moe": 1.5}.get(family, 1.0)
    return {expert: weight * scale for expert, weight in weights.items()}


class Patched:
    """Plain transformers, whose last rows choose within a budget of B experts a layer."""

    def __init__(
        self, model: Any, family: str, most: int, accept_prob: list[float], drop: bool
    ) -> None:
        self.family, self.most, self.accept_prob, self.drop = family, most, accept_prob, drop
        self.wanted, self.kept = np.zeros(len(accept_prob)), np.zeros(len(accept_prob))
        for layer in model.model.layers:
            router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
            if hasattr(layer.mlp, "experts"):
                if hasattr(router, "e_score_correction_bias"):
                    router.e_score_correction_bias.zero_()
                router.register_forward_hook(self.choose)

    def choose(self, router: Any, args: Any, output: Any) -> Any:
        logits, weights, ids = (each.clone() for each in output)
        rows = range(len(logits) - len(self.accept_prob), len(logits))
        exact = logits.double().numpy()
        shares = np.exp(exact - exact.max(1, keepdims=True))
        if self.family == "glm4_moe":
            shares = 1 / (1 + np.exp(-exact))
        shares /= shares.sum(1, keepdims=True)
        scores = sum(
            accept_prob * shares[row]
            for accept_prob, row in zip(self.accept_prob, rows, strict=True)
        )
        allowed = np.zeros(len(scores), bool)
        allowed[np.argsort(-scores, kind="stable")[: self.most]] = True
        for at, row in enumerate(rows):
            natural = ids[row].tolist()
            if not self.drop:
                given = chosen(self.family, exact[row], allowed, len(natural))
                ids[row] = torch.tensor([*given])
                weights[row] = torch.tensor([*given.values()])
            else:
                weights[row] *= torch.from_numpy(allowed[natural])
                given = {expert: 0.0 for expert in natural if allowed[expert]}
            self.wanted[at] += shares[row][natural].sum()
            self.kept[at] += sum(shares[row][expert] for expert in natural if expert in given)
        return logits, weights, ids


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["substitute", "truncate"])
@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", "mixtral", "deepseek_v2", pytest.param("glm4_moe", marks=pytest.mark.wide)],
)
def test_logits_are_those_of_transformers_with_patched_routers(
    family: str, policy: str, tmp_path: Path
) -> None:
    overrides = {"n_group": 1, "topk_group": 1} if family == "glm4_moe" else {}
    model = write_model(tmp_path / family, family, **overrides)
    plain = load_plain(model)
    if family == "glm4_moe":  # so that who is best is by scores alone
        for name, tensor in plain.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.zero_()
        plain.save_pretrained(model)
    generator = Generator.from_pretrained(
        model,
        "64MiB",
        dtype="float32",
        draft_length=4,
        context_length=64,
        expert_budget=4,
        expert_residents="ranked",
        expert_policy=policy,
        expert_audit=0.0,
    )
    with closing(generator):
        engine = generator.runtime.reserve(64)
        engine.prefill(Request(PROMPT, SamplingParams()))
        draft = Draft.chain(ROWS[1:])
        accept_prob = draft.accept_prob(engine.confidence.probability)
        assert accept_prob[0] == 1 > accept_prob[-1]
        logits = verify(engine, ROWS[0], draft).logits
        approximation = engine.approximation
        assert approximation is not None
        patched = Patched(plain, family, 4, accept_prob, policy == "truncate")
        expected = plain(torch.tensor([PROMPT + ROWS])).logits[0, -len(ROWS) :]
        assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
        every = Outcome([*range(len(ROWS))], [0] * len(ROWS))
        step = step_of(Request(PROMPT, SamplingParams()), draft, every)
        stats = approximation.report(step, Scored(logits, logits), HostSampler())
        assert stats is not None
        assert stats.wanted == pytest.approx(patched.wanted.sum(), rel=1e-4)
        assert stats.kept == pytest.approx(patched.kept.sum(), rel=1e-4)
        assert stats.kept < 0.99 * stats.wanted


# In whole runs


def tokens_of(folder: Path, cell: Cell, draft: str, count: int, **options: Any) -> list[int]:
    generator, _ = loaded(cell, folder, draft, "float32", len(PROMPT) + count, **options)
    with closing(generator):
        result = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
        assert (result.stats["budget"] is not None) == generator.runtime.config.approximates
        return result.token_ids


CELLS = (
    Cell(3, "two slots", "own"),
    Cell(3, "half", "poor", "packed", cache_policy="lookahead", prefetch="three-phase"),
    Cell(5, "half", "poor", prefetch="three-phase", trees="large"),
    Cell(5, "half", "own", prefetch="three-phase", trees="pruned"),
    Cell(3, "half", "own", drafter="ngram"),
    Cell(3, "half", "own", drafter="head", prefetch="three-phase"),
    Cell(5, "half", "own", drafter="head", trees="pruned"),
    Cell(3, "half", "own", drafter="cached", prefetch="three-phase"),
)


@pytest.mark.parametrize(
    "family",
    often(["qwen2_moe", "phimoe", "dots1"], quick=0, wide=1),
)
def test_a_budget_of_all_experts_is_exact(family: str, folders: Folders) -> None:
    expected = greedy_tokens(load_plain(folders.float32(family)), PROMPT, 60)
    for at, cell in enumerate(CELLS):
        model, draft = folders.of(family, cell)
        options = {"expert_floor": 1e-9} if at % 2 else {"expert_budget": "100%"}
        assert tokens_of(model, cell, draft, 60, **options) == expected, cell


def test_an_audit_finds_nothing_in_a_budget_of_all_experts(folders: Folders) -> None:
    cell = CELLS[2]
    model, draft = folders.of("qwen2_moe", cell)
    options = {"expert_budget": "100%", "expert_audit": 1.0}
    generator, _ = loaded(cell, model, draft, "float32", len(PROMPT) + 30, **options)
    with closing(generator):
        found = generator.generate(PROMPT, max_new_tokens=30, ignore_eos=True).stats["budget"]
    assert 20 < found["audited"] < 30  # what has no draft has no budget
    assert (found["differing"], found["nats"], found["dropped_share"]) == (0, 0.0, 0.0)
    assert found["served"] == found["natural"] > 0


@pytest.mark.wide
def test_audited_verifications_emit_the_exact_tokens(folders: Folders) -> None:
    """Where all are audited, the text is the exact model's, however small the budget."""
    family = "qwen2_moe"
    expected = greedy_tokens(load_plain(folders.float32(family)), PROMPT, 60)
    for at, cell in enumerate(CELLS):
        model, draft = folders.of(family, cell)
        policy = "truncate" if at % 2 else "substitute"
        options = {"expert_budget": 2, "expert_policy": policy, "expert_audit": 1.0}
        assert tokens_of(model, cell, draft, 60, **options) == expected, cell


def test_a_small_budget_is_another_model_and_says_so(folders: Folders) -> None:
    cell = Cell(3, "half", "own", prefetch="three-phase")
    model, draft = folders.of("qwen2_moe", cell)
    exact = greedy_tokens(load_plain(model), PROMPT, 100)
    options = {"expert_budget": 2, "expert_audit": 0.5, "expert_residents": "ranked"}
    generator, _ = loaded(cell, model, draft, "float32", len(PROMPT) + 100, **options)
    with closing(generator):
        result = generator.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        steps = generator.last_run.decode
    assert result.token_ids != exact
    budget = result.stats["budget"]
    assert budget["verifications"] == len(steps)
    assert budget["audited"] == sum(step.emitted for step in steps if step.audit_s)
    assert 0 < budget["differing"] <= budget["audited"]
    assert 0 < budget["dropped_share"] < 1
    assert budget["served"] < budget["natural"]


@pytest.mark.parametrize("trees", ["none", "small"])
def test_a_head_goes_on_from_what_a_budget_made_of_the_text(trees: str, folders: Folders) -> None:
    """It hears the states whose entries are kept: of the model within the budget, and of the exact
    one where a verification was audited.
    """
    cell = Cell(3, "half", "own", drafter="head", trees=trees)
    model, draft = folders.of("qwen2_moe", cell)
    heard: list[tuple[list[int], Tensor]] = []
    options = {"expert_budget": 2, "expert_audit": 0.5, "expert_residents": "ranked"}
    generator, _ = loaded(cell, model, draft, "float32", len(PROMPT) + 40, **options)
    with closing(generator):
        engine = generator.runtime.engine
        drafter, verify = engine.drafters[0], engine.verification.score
        observe_verified = drafter.observe_verified  # type: ignore[attr-defined]
        made: list[Tensor] = []

        def score(batch: Sequence[SequenceTokens]) -> list[Scored]:
            (scored,) = verify(batch)
            made.append(scored.features.clone())
            return [scored]

        def listen(token_ids: list[int], hidden_states: Tensor) -> None:
            if made:  # otherwise a prompt
                assert torch.equal(hidden_states[0], made[-1][0])
            heard.append((token_ids, hidden_states))
            observe_verified(token_ids, hidden_states)

        drafter.observe_verified = listen  # type: ignore[attr-defined]
        engine.verification.score = score  # type: ignore[method-assign]
        result = generator.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        budget = result.stats["budget"]
        steps = generator.last_run.decode
    assert 0 < budget["audited"] < 40
    assert len(made) == len(steps) + sum(step.audit_s > 0 for step in steps)
    tokens = [token_id for token_ids, _ in heard for token_id in token_ids]
    assert tokens == PROMPT + result.token_ids[:-1]


def test_without_free_residents_no_slot_changes_the_text(folders: Folders) -> None:
    texts = set()
    for cell in (
        Cell(3, "two slots", "own", readers=1),
        Cell(3, "half", "own", readers=4, cache_policy="lookahead", prefetch="three-phase"),
        Cell(3, "all", "own", readers=2),
    ):
        model, draft = folders.of("qwen2_moe", cell)
        options = {"expert_budget": 3, "expert_residents": "ranked", "expert_rows": "equal"}
        texts.add(tuple(tokens_of(model, cell, draft, 80, **options)))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("residents", "slots"),
    [
        ("free", "half"),
        ("ranked", "half"),
        pytest.param("ranked", "two slots", marks=pytest.mark.wide),
    ],
)
def test_no_more_is_asked_for_than_the_budget(
    residents: str, slots: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any layer of a verification, in waves as well, and nothing is brought ahead that is not
    worth it.
    """
    cell = Cell(5, slots, "own", prefetch="three-phase", cache_policy="lookahead")
    model, draft = folders.of("qwen2_moe", cell)
    options = {"expert_budget": 3, "expert_residents": residents, "expert_audit": 0.0}
    generator, _ = loaded(cell, model, draft, "float32", len(PROMPT) + 60, **options)
    engine = generator.runtime.engine
    loader, prefetcher = engine.offload.loader, engine.offload.prefetcher
    asked, ahead = [], []
    serve, load_ahead = loader.serve, loader.load_ahead

    def served(layer: int, experts: list[int], *others: Any, **more: Any) -> Iterator[Any]:
        if engine.recorder.step.phase == "decode":
            missing = loader.missing(layer, experts)
            asked.append(len(missing) if residents == "free" else len(experts))
        return serve(layer, experts, *others, **more)

    def loaded_ahead(keys: list[ExpertKey], room: int) -> int:
        for key in keys if engine.recorder.step.phase == "decode" else []:
            ahead.append(key)
            assert prefetcher.allowance.worth(key.layer, [key.expert]) == [key.expert]
        return load_ahead(keys, room)

    monkeypatch.setattr(loader, "serve", served)
    monkeypatch.setattr(loader, "load_ahead", loaded_ahead)
    with closing(generator):
        generator.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert ahead or slots == "two slots"
    assert 0 < max(asked) <= 3


# What is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"expert_policy": "truncate"}, "expert_policy is given without an expert budget"),
        ({"expert_audit": 0.5}, "expert_audit is given without an expert budget"),
        ({"expert_budget": 4, "draft_length": 0}, "draft_length is 0; leave one of the two out"),
        ({"expert_budget": 4, "expert_ranking": "static"}, "static takes a file of counts"),
        ({"expert_budget": 4, "expert_counts": "counts.json"}, "and router none"),
        ({"expert_budget": "4.5"}, "a whole number from 1, or a share such as 50%"),
        ({"expert_budget": "0%"}, "or a share such as 50%"),
        ({"expert_budget": "101%"}, "or a share such as 50%"),
        ({"expert_budget": 0}, "a whole number from 1"),
        ({"expert_floor": 0.0}, "expert_floor is 0.0; it must be above 0"),
        ({"expert_budget": 4, "expert_audit": 1.5}, "it must be from 0 to 1"),
        ({"expert_budget": 4, "expert_policy": "drop"}, "substitute, truncate"),
    ],
)
def test_options_that_make_no_budget(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError) as error:
        RunConfig.of("64MiB", **options)
    assert sentence in str(error.value)


def test_budgets_that_no_layer_can_have(tmp_path: Path) -> None:
    def rules(**options: Any) -> BudgetRules | None:
        return rules_of(RunConfig.of("64MiB", **options), layers=2, experts=8, top_k=3)

    assert rules() is None
    half = rules(expert_budget="50%")
    assert half is not None
    assert half.experts == 4
    for given, shown in ((2, "2"), (9, "9"), ("12.5%", "12%")):
        with pytest.raises(SpeqError, match=rf"expert_budget is {shown}, which is .* give 3 to 8"):
            rules(expert_budget=given)
    path = tmp_path / "counts.json"
    ExpertCounts("other", 2, 1, [[1, 1], [2, 0]]).write(path)
    with pytest.raises(SpeqError, match="are of other, with 1 of 2 experts"):
        rules(expert_budget=4, expert_ranking="static", expert_counts=path)
    ExpertCounts("this", 1, 3, [[1, 1, 1, 0, 0, 0, 0, 0]] * 2).write(path)
    known = rules(expert_budget=4, expert_ranking="static", expert_counts=path)
    assert known is not None
    assert known.counts is not None
    assert known.counts.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2


def test_the_command_says_that_it_is_not_exact(tiny: Folder, tmp_path: Path) -> None:
    run = ["generate", str(tiny("qwen2_moe")), "--memory-budget", "64MiB", "--prompt", "abc"]
    run += ["--max-new-tokens", "20", "--draft-length", "3", "--quiet"]
    report = tmp_path / "run.json"
    limited = CliRunner().invoke(
        app, [*run, "--expert-budget", "2", "--set", "expert_audit=1", "--json", str(report)]
    )
    assert limited.exit_code == 0
    budget = json.loads(report.read_text())["stats"]["budget"]
    said = f"APPROXIMATE: {budget['dropped_share']:.1%} of the routing weight was dropped; "
    said += f"{budget['differing']} of {budget['audited']} audited tokens would have differed"
    assert said in " ".join(limited.stderr.split())
    exact = CliRunner().invoke(app, run)
    assert exact.exit_code == 0
    assert "APPROXIMATE" not in exact.stderr
    refused = CliRunner().invoke(app, ["prove", *run[1:4], "--expert-budget", "2"])
    assert refused.exit_code == 2
    assert "No such option" in refused.stderr
