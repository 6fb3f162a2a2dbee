"""The governor's parts on made-up steps, and the whole of it on simulated machines."""

import math
import random
import subprocess
import sys

import pytest

from speq.governor import measured_steps as m
from speq.governor.acceptance import HORIZON, PRIOR, Acceptance
from speq.governor.adaptive import AdaptiveDraftLength, make_governor
from speq.governor.batches import Governors
from speq.governor.draft_length import LENGTHS, Decision, FixedDraftLength
from speq.governor.explanation import explain
from speq.governor.learned import prior_of
from speq.governor.measured_steps import FADING, MeasuredSteps
from speq.governor.objectives import Objectives
from speq.governor.prior import Prior
from speq.governor.profile import Profile, ProfileKey
from speq.governor.step_model import StepModel
from speq.stats import Forecast, StepStats
from tests.helpers.draft_machine import Machine, run


class Branching(Machine):
    """One on which a share of its own stands of trees, which have three tokens for each pass."""

    def __init__(self, draft_s: float, row_s: float, share: float, of_trees: float) -> None:
        super().__init__(draft_s, row_s, share)
        self._of_trees = of_trees

    def tree_s(self, passes: int, nodes: int) -> float:
        """Time of a token."""
        rows = min(3 * passes, nodes)
        tokens = sum(self._of_trees**i for i in range(passes + 1))
        return (self.plain_s + passes * self.draft_s + rows * self.row_s) / tokens

    def step(self, decision: Decision) -> StepStats:
        passes, nodes = decision.draft_length, decision.nodes
        if nodes is None or not passes:
            return super().step(decision)
        drafted = min(3 * passes, nodes)
        accepted = 0
        while accepted < passes and self._rng.random() < self._of_trees:
            accepted += 1
        draft_s, verify_s = passes * self.draft_s, self.plain_s + drafted * self.row_s
        start_s, self._now_s = self._now_s, self._now_s + draft_s + verify_s
        depth = max(accepted, passes - 1)  # one pass went to another branch
        return StepStats(
            "decode",
            draft_length=depth,
            branches=drafted - depth,
            passes=passes,
            accepted=accepted,
            emitted=accepted + 1,
            requests=8 * (drafted + 1),
            hits=8 * (drafted + 1),
            draft_s=draft_s,
            verify_s=verify_s,
            start_s=start_s,
            end_s=self._now_s,
            ground=decision.ground,
            reason=decision.reason,
        )


class Asides(Machine):
    """One with a drafter besides, whose tokens cost a row and no drafting."""

    def __init__(self, draft_s: float, row_s: float, share: float, of_asides: float) -> None:
        super().__init__(draft_s, row_s, share)
        self._aside = Machine(0.0, row_s, of_asides)

    def step(self, decision: Decision) -> StepStats:
        if decision.drafter is None:
            return super().step(decision)
        step = self._aside.step(decision)
        step.drafter = decision.drafter
        return step


def test_acceptance_of_a_censored_draft() -> None:
    """Two of three stand: positions 1 and 2 did, 3 did not, 4 was not seen. All of two: no more."""
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.observe(3, 2)
    first, second, third, fourth = acceptance.probabilities()
    assert first == second > 0.9
    assert third < 0.1
    assert fourth == pytest.approx(acceptance.overall) == pytest.approx(2 / 3, abs=0.02)
    whole = Acceptance(4)
    for _ in range(200):
        whole.observe(2, 2)
    assert whole.overall > 0.95
    assert whole.probabilities()[2] == pytest.approx(whole.overall)


def test_acceptance_follows_a_change_and_forgets_its_own_certainty() -> None:
    acceptance = Acceptance(1)
    for _ in range(500):
        acceptance.observe(1, 1)
    for _ in range(int(3 * HORIZON)):
        acceptance.observe(1, 0)
    assert acceptance.overall < 0.06
    known = acceptance.deviation
    for _ in range(1000):
        acceptance.observe(0, 0)
    assert acceptance.overall < 0.06
    assert acceptance.deviation > 3 * known


def test_acceptance_of_long_runs_and_of_drafts_that_never_stand() -> None:
    """Days without a draft, days of drafts in vain, and a plan that expects none to stand."""
    idle, vain, hopeless = Acceptance(1), Acceptance(2), Acceptance(2)
    for _ in range(200_000):
        idle.observe(0, 0)
    assert idle.overall == pytest.approx(PRIOR)
    assert idle.accepted == pytest.approx(PRIOR)
    for _ in range(60_000):
        vain.observe(2, 0)
    hopeless.believe(0.0, 5)
    for acceptance in (vain, hopeless):
        assert 0 < acceptance.overall < 1e-6
        assert math.isfinite(acceptance.deviation / acceptance.overall)


def test_the_share_that_stands_is_found() -> None:
    rng = random.Random(2)
    for share in (0.2, 0.5, 0.8, 0.95):
        acceptance, found = Acceptance(6), []
        for _ in range(3000):
            accepted = 0
            while accepted < 6 and rng.random() < share:
                accepted += 1
            acceptance.observe(6, accepted)
            found.append(acceptance.overall)
        assert sum(found[500:]) / len(found[500:]) == pytest.approx(share, abs=0.03)


def test_the_model_finds_the_terms_of_a_step() -> None:
    """0.3 s a drafted token; 0.4 and 0.01 s an expert to verify; 0.05 s to move it, half hidden."""
    model, rng = StepModel(), random.Random(4)
    for _ in range(400):
        k = rng.choice((0, 2, 4, 8))
        experts = 32 if k == 0 else round(32 * (k + 1) ** 0.6 * rng.uniform(0.95, 1.05))
        moved = experts // 4
        draft_s, verify_s = 0.3 * k, 0.4 + 0.01 * experts
        stall_s = 0.05 * moved / 2
        model.observe(
            StepStats(
                "decode",
                draft_length=k,
                requests=experts,
                moved=moved,
                moved_bytes=100 * moved,
                draft_s=draft_s,
                verify_s=verify_s + stall_s,
                link_s=0.05 * moved,
                stall_s=stall_s,
                end_s=draft_s + verify_s + stall_s,
            )
        )
    assert model.draft_token_s == pytest.approx(0.3)
    assert model.compute.slope == pytest.approx(0.01, rel=0.03)
    assert model.link.value == pytest.approx(0.05)
    for k in (0, 4):
        (found,) = model.estimates([k], [1.0])
        experts = 32 * (k + 1) ** 0.6
        assert found.draft_s == pytest.approx(0.3 * k)
        assert found.verify_s == pytest.approx(0.4 + 0.01 * experts, rel=0.06)
        assert found.moved_bytes == pytest.approx(100 * experts / 4, rel=0.1)
        expected_s = 0.3 * k + 0.4 + 0.01 * experts + 0.05 * experts / 8
        assert found.step_s == pytest.approx(expected_s, rel=0.06)


@pytest.mark.parametrize("host_s", [0.02, 0.12])
def test_the_model_finds_what_the_host_takes_beside_the_link(host_s: float) -> None:
    """0.05 s a moved expert, a quarter of all; as many are computed on the host meanwhile. The
    device waits for the longer of both.
    """
    model, rng = StepModel(), random.Random(4)
    for _ in range(400):
        k = rng.choice((0, 2, 4, 8))
        experts = 32 if k == 0 else round(32 * (k + 1) ** 0.6 * rng.uniform(0.95, 1.05))
        moved = experts // 4
        draft_s, verify_s = 0.3 * k, 0.4 + 0.01 * experts
        waited_s = max(0.05, host_s) * moved
        model.observe(
            StepStats(
                "decode",
                draft_length=k,
                requests=experts,
                moved=moved,
                host_experts=moved,
                draft_s=draft_s,
                host_s=host_s * moved,
                link_s=0.05 * moved,
                stall_s=0.05 * moved,
                end_s=draft_s + verify_s + waited_s,
            )
        )
    assert model.host.value == pytest.approx(host_s)
    for made in (model, StepModel.of(prior_of(model, 0.5))):
        for k in (0, 4):
            (found,) = made.estimates([k], [1.0])
            experts = 32 * (k + 1) ** 0.6
            assert found.host_s == pytest.approx(host_s * experts / 4, rel=0.1)
            expected_s = 0.3 * k + 0.4 + 0.01 * experts + max(0.05, host_s) * experts / 4
            assert found.step_s == pytest.approx(expected_s, rel=0.06)


def test_corrections_are_those_of_gaussian_regression() -> None:
    """The smoother beside the same model solved as one system of equations."""
    numpy = pytest.importorskip("numpy")
    measured = MeasuredSteps((0, 1, 2, 4, 8))
    rng = random.Random(7)
    # Faded counts, means and variances of what was measured, by length.
    weight = dict.fromkeys((0, 2, 8), 0.0)
    mean_s, spread = dict.fromkeys(weight, 0.0), dict.fromkeys(weight, m.NOISE)
    for _ in range(60):
        k = rng.choice((0, 2, 2, 8))
        step_s = (1 + 0.4 * k) * rng.lognormvariate(0.2, 0.1)
        measured.observe(k, step_s, 1)
        weight = {length: (1 - m.FADING) * count for length, count in weight.items()}
        if weight[k] >= 1:
            share = 1 / min(weight[k] + m.NOISE_STEPS, m.HORIZON)
            spread[k] += share * ((step_s / mean_s[k] - 1) ** 2 - spread[k])
        weight[k] += 1
        mean_s[k] += (step_s - mean_s[k]) / weight[k]
    modelled = [1.0, 1.3, 1.7, 2.5, 4.1]
    x = numpy.log1p(numpy.array(measured.lengths))
    prior = m.LEVEL + m.WANDER * numpy.minimum.outer(x, x)
    seen = [measured.lengths.index(k) for k in weight]
    assert seen == [0, 2, 4]
    assert [measured.weight(k) for k in weight] == pytest.approx([*weight.values()])
    noise = [m.STRETCH * spread[k] / weight[k] for k in weight]
    y = [math.log(mean_s[k] / modelled[at]) for k, at in zip(weight, seen, strict=True)]
    gain = prior[:, seen] @ numpy.linalg.inv(prior[numpy.ix_(seen, seen)] + numpy.diag(noise))
    mean, covariance = gain @ y, prior - gain @ prior[seen, :]
    found = measured.corrections(modelled)
    assert [c.mean for c in found] == pytest.approx(mean.tolist())
    assert [c.variance for c in found] == pytest.approx(numpy.diag(covariance).tolist())


@pytest.mark.parametrize(
    ("draft_s", "row_s", "share"),
    [(0.7, 0.4, 0.5), (0.1, 0.05, 0.3), (0.1, 0.05, 0.9), (0.05, 0.02, 0.98), (0.9, 0.3, 0.98)],
)
def test_the_best_length_is_found_and_kept(draft_s: float, row_s: float, share: float) -> None:
    machine = Machine(draft_s, row_s, share)
    best_s = min(machine.token_s(k) for k in range(13))
    steps = run(AdaptiveDraftLength(), machine, 600)
    took_s = sum(step.end_s - step.start_s for step in steps)
    ideal_s = sum(step.emitted for step in steps) * best_s
    # Luck with tokens that stand is in it, as are the first steps and all probes.
    assert took_s <= 1.06 * ideal_s
    late = [step for step in steps[100:] if step.ground == "best"]
    mean_s = sum(machine.token_s(step.draft_length) for step in late) / len(late)
    assert mean_s <= 1.03 * best_s


@pytest.mark.parametrize(
    ("row_s", "of_trees", "trees"),
    [(0.01, 0.8, True), (0.3, 0.8, False), (0.01, 0.5, False)],
    ids=["rows are cheap", "rows are dear", "trees yield no more"],
)
def test_trees_are_drafted_where_they_pay(row_s: float, of_trees: float, trees: bool) -> None:
    """Of chains half the tokens stand. Drafts whose rows cost nearly nothing are better as trees,
    if more tokens stand then, and else chains are.
    """
    nodes = 16
    machine = Branching(0.1, row_s, 0.5, of_trees)
    governor = AdaptiveDraftLength(nodes=nodes)
    steps = run(governor, machine, 800)
    chain_s = min(machine.token_s(k) for k in LENGTHS)
    tree_s = min(machine.tree_s(k, nodes) for k in LENGTHS[1:])
    assert (tree_s < chain_s) == trees
    took_s = sum(step.end_s - step.start_s for step in steps)
    assert took_s <= 1.06 * min(tree_s, chain_s) * sum(step.emitted for step in steps)
    late = [step for step in steps[200:] if step.ground == "best"]
    share = sum(step.branches > 0 for step in late) / len(late)
    assert share > 0.9 if trees else share < 0.1


def test_room_for_trees_leaves_chains_as_they_were() -> None:
    """Without trees nothing is decided otherwise."""
    of_chains = run(AdaptiveDraftLength(), Machine(0.1, 0.05, 0.9), 300)
    assert {step.branches for step in of_chains} == {0}
    fixed = make_governor(3, Objectives(), nodes=8).decide()
    assert (fixed.draft_length, fixed.nodes) == (3, 8)


@pytest.mark.parametrize(
    ("longest", "of_asides", "share", "pays"),
    [(0, 0.9, 0.0, True), (0, 0.05, 0.0, False), (4, 0.9, 0.6, True), (4, 0.05, 0.9, False)],
    ids=["alone", "alone, in vain", "better than the run's own", "worse than the run's own"],
)
def test_another_drafter_is_chosen_where_it_has_drafts_that_pay(
    longest: int, of_asides: float, share: float, pays: bool
) -> None:
    """Of every ten steps it has a draft for four."""
    machine = Asides(0.2, 0.1, share, of_asides)
    governor = AdaptiveDraftLength(longest, secondary="ngram")
    offered, aside, drafted = [], [], []
    for step in range(600):
        offered.append(step % 10 < 4)
        decision = governor.decide(offered[-1])
        aside.append(decision.drafter == "ngram")
        drafted.append(decision.draft_length > 0)
        assert not aside[-1] or (offered[-1] and decision.draft_length)
        assert ("by ngram" in decision.reason) == aside[-1]
        governor.observe(machine.step(decision))
    late = [chosen for chosen, there in zip(aside[200:], offered[200:], strict=True) if there]
    assert sum(late) > 0.8 * len(late) if pays else sum(late) < 0.15 * len(late)
    # The run's own drafts in the other steps, where there is one.
    others = [drew for drew, there in zip(drafted[200:], offered[200:], strict=True) if not there]
    assert sum(others) > 0.7 * len(others) if longest else not any(others)


def test_nobody_drafts_where_only_another_drafter_may_and_has_nothing() -> None:
    governor = AdaptiveDraftLength(0, secondary="ngram", objectives=Objectives(latency_s=1e-3))
    machine = Asides(0.2, 0.1, 0.0, 0.9)
    for _ in range(20):
        decision = governor.decide()
        assert (decision.draft_length, decision.drafter) == (0, None)
        governor.observe(machine.step(decision))
    assert decision.ground == "bound"


def test_speculation_that_does_not_pay_is_off_but_for_rare_probes() -> None:
    steps = run(AdaptiveDraftLength(), Machine(0.9, 0.6, 0.3), 2000)
    assert sum(step.draft_length == 0 for step in steps) >= 0.98 * len(steps)
    last = steps[1000:]
    probes = [step for step in last if step.ground == "probe"]
    assert probes and all(step.draft_length > 0 for step in probes)
    # What they lost beside plain tokens of a second each.
    lost_s = sum(step.end_s - step.start_s - step.emitted for step in probes)
    assert lost_s <= 0.015 * len(last)


def test_a_change_for_the_better_is_noticed() -> None:
    governor = AdaptiveDraftLength()
    run(governor, Machine(0.3, 0.1, 0.1), 500)
    steps = run(governor, Machine(0.1, 0.05, 0.95), 500)
    assert all(step.draft_length >= 4 for step in steps[-50:] if step.ground == "best")


def test_a_latency_objective_bounds_every_step() -> None:
    machine = Machine(0.05, 0.05, 0.95)  # without one, the longest is best
    assert max(s.draft_length for s in run(AdaptiveDraftLength(), machine, 200)) == 12
    steps = run(AdaptiveDraftLength(objectives=Objectives(latency_s=1.45)), machine, 200)
    assert steps[0].draft_length == 0
    assert all(step.end_s - step.start_s <= 1.45 for step in steps)
    assert {step.draft_length for step in steps[-50:] if step.ground == "best"} <= {3, 4}


@pytest.mark.parametrize("longest", [0, 1, 5])
def test_no_draft_is_longer_than_the_longest(longest: int) -> None:
    steps = run(AdaptiveDraftLength(longest), Machine(0.05, 0.05, 0.95), 100)
    # Of the lengths that are told apart, 4 comes before 6.
    assert max(step.draft_length for step in steps) == min(longest, 4)


def test_objectives_that_no_length_meets_are_missed_by_least() -> None:
    machine = Machine(0.05, 0.05, 0.95)
    steps = run(AdaptiveDraftLength(objectives=Objectives(latency_s=0.5)), machine, 50)
    # But for the one draft that shows what drafting takes.
    assert [at for at, step in enumerate(steps) if step.draft_length] == [4]
    assert steps[4].draft_length == 1
    assert steps[-1].ground == "bound"
    assert "no length meets the objectives" in steps[-1].reason
    steps = run(AdaptiveDraftLength(objectives=Objectives(tpot_s=0.01)), machine, 100)
    assert steps[-1].draft_length >= 10


def test_a_token_time_objective_rules_out_slower_probes() -> None:
    machine = Machine(0.9, 0.6, 0.3)  # plain decoding is best, and everything else over 1.2 s
    steps = run(AdaptiveDraftLength(objectives=Objectives(tpot_s=1.2)), machine, 300)
    assert sum(step.draft_length > 0 for step in steps) <= 3


def test_a_profile_spares_the_calibration() -> None:
    profile = Profile(
        ProfileKey("model", "cpu", 1, "0"),
        link=((1.0, 1e9),),
        transfer_overhead_s=0.0,
        first_fetch_s=0.0,
        expert_bytes=1,
        draft_base_s=0.0,
        draft_token_s=0.05,
        verify=((1, 1.0), (5, 1.2), (13, 1.6)),
        distinct=((1, 8.0), (5, 20.0), (13, 33.0)),
    )
    decision = AdaptiveDraftLength(prior=Prior.of_profile(profile)).decide()
    assert decision.ground == "best"
    assert decision.draft_length > 0


@pytest.mark.parametrize("times", [2.0, 4.0])
def test_a_batch_of_another_size_begins_with_what_is_known(times: float) -> None:
    """Its rows ask for the experts that as many rows of one text do."""
    pays, loses = AdaptiveDraftLength(), AdaptiveDraftLength()
    run(pays, Machine(0.1, 0.05, 0.9), 300)
    run(loses, Machine(0.9, 0.6, 0.3), 300)
    assert pays.for_batch(4, times).decide().draft_length > 0
    assert loses.for_batch(4, times).decide().draft_length == 0
    assert pays.for_batch(4, times).decide().ground == "best"

    known, made = pays.model, pays.model.for_batch(times)
    assert made.single == known.distinct(times)
    for rows in (1.0, 3.0, 5.0):
        experts = known.distinct(times * rows)
        assert made.distinct(rows) == pytest.approx(experts)
        assert made.verify_s(experts) == pytest.approx(known.verify_s(experts), rel=0.05)
    assert made.link.value == known.link.value
    assert AdaptiveDraftLength().for_batch(4, times).decide().ground == "probe"


def test_the_nearest_size_of_batches_is_gone_by() -> None:
    governors = Governors(AdaptiveDraftLength(), most_rows=16)
    assert governors.of(2).decide().ground == "probe"  # nothing is known yet
    pair = governors.of(2)
    assert isinstance(pair, AdaptiveDraftLength)
    run(pair, Machine(0.1, 0.05, 0.9), 300)
    five = governors.of(5)
    assert isinstance(five, AdaptiveDraftLength)
    assert five.model.single == pair.model.distinct(4.0)
    assert five.longest == 1
    assert governors.of(6) is five and governors.of(1) is governors.alone


def test_a_draft_stops_where_new_experts_cost_more_than_it_brings() -> None:
    governor, rng = AdaptiveDraftLength(), random.Random(8)
    now_s = 0.0
    for _ in range(300):
        k = governor.decide().draft_length
        experts, moved = 16 + 4 * k, 2 + 2 * k
        draft_s, verify_s, stall_s = 0.1 * k, 1 + 0.05 * k, 0.05 * moved
        step_s = draft_s + verify_s + stall_s
        accepted = 0
        while accepted < k and rng.random() < 0.9:
            accepted += 1
        governor.observe(
            StepStats(
                "decode",
                draft_length=k,
                accepted=accepted,
                emitted=accepted + 1,
                requests=experts,
                moved=moved,
                moved_bytes=moved,
                draft_s=draft_s,
                verify_s=verify_s + stall_s,
                stall_s=stall_s,
                link_s=stall_s,
                start_s=now_s,
                end_s=now_s + step_s,
            )
        )
        now_s += step_s
    while governor.decide().ground != "best":
        pass
    assert governor.decide().draft_length >= 6
    expected = round(governor.model.new_experts(3))
    assert governor.continue_draft(3, expected, 0.7)
    # Tokens that hardly stand are not worth another one.
    assert not governor.continue_draft(3, expected, 0.01)
    decided = governor.decide().draft_length
    assert not governor.continue_draft(3, 100 * expected, 0.7)
    # It counts for the length that was decided on, at its price of a token.
    weights = [governor.measured.weight(k) for k in (decided, 3)]
    governor.observe(
        StepStats("decode", draft_length=3, accepted=3, emitted=4, requests=50, end_s=9.0)
    )
    kept = (1 - FADING) ** 4
    assert governor.measured.weight(decided) == pytest.approx(weights[0] * kept + 1)
    assert governor.measured.weight(3) == pytest.approx(weights[1] * kept)


@pytest.mark.parametrize(("experts", "pays"), [(110, False), (30, True)])
def test_stopped_drafts_count_for_their_length(experts: int, pays: bool) -> None:
    """Every second draft needs so many more experts that it is stopped after one token. Those of 12
    tokens that are not stopped take 4.8 s for 9.7 tokens. Plain tokens take 1.2 s.

    With 110 experts more, a stopped draft takes 12.5 s for 1.95 tokens: both together take 1.5 s a
    token. With 30 they take 0.8 s.
    """
    governor, rng, now_s = AdaptiveDraftLength(), random.Random(8), 0.0
    lengths = []
    for _ in range(600):
        k = governor.decide().draft_length
        dear = rng.random() < 0.5
        drafted = 0
        while drafted < k and (
            not drafted or governor.continue_draft(drafted, 1000 * dear, 0.95**drafted)
        ):
            drafted += 1
        accepted = 0
        while accepted < drafted and rng.random() < 0.95:
            accepted += 1
        moved = 2 + 2 * drafted + experts * (dear and k > 0)
        step_s = 1 + 0.1 * drafted + 0.1 * moved
        governor.observe(
            StepStats(
                "decode",
                draft_length=drafted,
                accepted=accepted,
                emitted=accepted + 1,
                requests=80 + 4 * drafted,
                moved=moved,
                moved_bytes=moved,
                draft_s=0.05 * drafted,
                verify_s=step_s - 0.05 * drafted,
                stall_s=0.1 * moved,
                link_s=0.1 * moved,
                start_s=now_s,
                end_s=now_s + step_s,
            )
        )
        now_s += step_s
        lengths.append(k)
    late = lengths[300:]
    assert sum((k > 0) == pays for k in late) > 0.8 * len(late)


def test_the_first_step_after_a_prompt_says_nothing_of_later_ones() -> None:
    """It takes ten times as long, prompt after prompt; the governor neither probes in it nor learns
    from it.
    """
    slow, usual = Machine(1.0, 0.5, 0.9, plain_s=10.0), Machine(0.1, 0.05, 0.9)
    governor = AdaptiveDraftLength()
    late = []
    for prompt in range(30):
        governor.begin()
        for at in range(20):
            decision = governor.decide()
            if prompt and not at:
                assert decision.ground == "best"
            step = (usual if at else slow).step(decision)
            governor.observe(step)
            if prompt > 10 and step.ground == "best" and at:
                late.append((step.draft_length, step.forecast, step.end_s - step.start_s))
    best_s = min(usual.token_s(k) for k in range(13))
    for length, forecast, time_s in late:
        assert usual.token_s(length) < 1.03 * best_s
        assert forecast is not None and forecast.step_s == pytest.approx(time_s, rel=0.1)


class Warming(Machine):
    """Plain steps are slow while slots fill: the first eight, and three after every draft."""

    def __init__(self) -> None:
        super().__init__(0.7, 0.3, 0.5)
        self.steps = self.plain_run = 0

    def step(self, decision: Decision) -> StepStats:
        self.steps += 1
        self.plain_run = 0 if decision.draft_length else self.plain_run + 1
        cold = self.steps <= 8 or self.plain_run <= 3
        self.plain_s = 2.5 if cold and not decision.draft_length else 1.0
        return super().step(decision)


def test_plain_steps_are_looked_at_again_once_slots_have_filled() -> None:
    """At first a draft of one token, 1.33 s a token, beats plain steps of 2.5 s; these then take a
    second, but for those that follow drafts.
    """
    steps = run(AdaptiveDraftLength(), Warming(), 150)
    assert any(step.draft_length and step.ground == "best" for step in steps[:30])
    late = steps[50:]
    assert sum(step.draft_length == 0 for step in late) > 0.9 * len(late)


def test_decisions_say_why() -> None:
    steps = run(AdaptiveDraftLength(), Machine(0.1, 0.05, 0.9), 300)
    assert steps[0].reason == "plain decoding is measured first"
    best = [step for step in steps if step.ground == "best"][-1]
    k = best.draft_length
    assert "ms/token expected (k=" in best.reason
    assert "accepted" in best.reason
    assert best.forecast is not None
    assert best.forecast.step_s == pytest.approx(best.end_s - best.start_s, rel=0.1)
    explained = explain([StepStats("prefill"), *steps])
    assert sum(choice.steps for choice in explained.choices) == 300
    chosen = next(choice for choice in explained.choices if choice.draft_length == k)
    assert chosen.reason == [step for step in steps if step.draft_length == k][-1].reason
    assert explained.error is not None and explained.error < 0.1


def test_an_explanation_by_hand() -> None:
    steps = [
        StepStats("decode", draft_length=2, emitted=3, end_s=2.0, ground="best", reason="a"),
        StepStats("decode", draft_length=2, emitted=1, end_s=4.0, ground="probe", reason="b"),
        StepStats("decode", emitted=1, end_s=1.0, ground="fixed", reason="c"),
    ]
    steps[0].forecast = Forecast(
        draft_length=2, serial_s=3.0, overlapped_s=1.0, step_s=2.2, tokens=3
    )
    found = explain(steps)
    assert [choice.draft_length for choice in found.choices] == [0, 2]
    tree = StepStats("decode", draft_length=2, branches=3, emitted=2, end_s=3.0, ground="best")
    apart = explain([*steps, tree]).choices
    assert [(each.draft_length, each.branching, each.steps) for each in apart] == [
        *((0, False, 1), (2, False, 2), (2, True, 1)),
    ]
    aside = StepStats("decode", draft_length=2, emitted=2, end_s=3.0, drafter="ngram", reason="d")
    others = explain([*steps, aside]).choices
    assert [(each.draft_length, each.drafter, each.reason) for each in others] == [
        *((0, "", "c"), (2, "", "b"), (2, "ngram", "d")),
    ]
    two = found.choices[1]
    assert (two.steps, two.tokens, two.token_s, two.reason) == (2, 4, 1.5, "b")
    assert two.grounds == {"best": 1, "probe": 1}
    errors = (found.serial_error, found.overlapped_error, found.error)
    assert errors == pytest.approx((0.5, 0.5, 0.1))
    assert explain(steps[1:]).error is None
    # A draft that was stopped is not what was forecast.
    steps[1].forecast = Forecast(4, serial_s=30.0, overlapped_s=10.0, step_s=22.0, tokens=5)
    assert explain(steps).error == pytest.approx(0.1)


def test_fixed_lengths_stay_fixed() -> None:
    governor = make_governor(5, Objectives())
    assert governor == FixedDraftLength(5)
    assert governor.decide() == Decision(5, "fixed")
    assert governor.continue_draft(3, 10**6, 0.0)
    assert isinstance(make_governor(None, Objectives()), AdaptiveDraftLength)


def test_a_governor_is_made_without_torch() -> None:
    code = (
        "import sys; from speq.governor.adaptive import make_governor; "
        "from speq.governor.objectives import Objectives; "
        "make_governor(None, Objectives()).decide(); import speq.governor.speedup_model; "
        "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("short", range(1, 9))
def test_requests_of_one_step_still_calibrate(short: int) -> None:
    """The first step behind a prompt is not learnt from, and short requests have no other."""
    governor, machine = AdaptiveDraftLength(), Machine(0.1, 0.05, 0.9)
    for _ in range(short):
        governor.begin()
        governor.observe(machine.step(governor.decide()))
    governor.begin()
    steps = []
    for _ in range(61):
        steps.append(machine.step(governor.decide()))
        governor.observe(steps[-1])
    assert 0 in {step.draft_length for step in steps}
    assert max(step.draft_length for step in steps) > 1


def test_stopped_drafts_yield_what_they_yield() -> None:
    """Four tokens are decided on. Every second draft is stopped after one token, and all drafted
    tokens stand: a draft has a second token, and a third and fourth, as often as not.
    """
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.observe(1, 1, stopped=True)
        acceptance.observe(4, 4)
    first, second, *others = acceptance.probabilities()
    assert first > 0.95
    assert second == pytest.approx(0.5, abs=0.1)
    assert min(others) > 0.95
    assert acceptance.accepted > 0.95
    # Of a stopped draft whose last token falls, no token behind that was missed.
    fallen, stopped = Acceptance(4), Acceptance(4)
    fallen.observe(2, 1)
    stopped.observe(2, 1, stopped=True)
    assert fallen == stopped
