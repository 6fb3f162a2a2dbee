"""`speq plan`: its memory, its times, its break-evens, and what it prints."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speq import SpeqError
from speq.cli import app
from speq.cli.plan import findings
from speq.config import RunConfig
from speq.drafts.draft_source import RoundedDraft
from speq.errors import NoRoom, OptionError
from speq.experts.codec import codec_of
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import Packing, pack
from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.profile import Profile, ProfileKey
from speq.governor.roofline import Link
from speq.governor.step_model import StepModel
from speq.load import load
from speq.measure.plan import plan as plan_call
from speq.measure.route_trace import RouteTrace
from speq.models.opened import open_model
from speq.planning.assumptions import Assumptions
from speq.planning.budget_plan import BudgetPlan, plan_budget
from speq.planning.cost.locality import (
    BUNDLED,
    MANY_EXPERTS,
    PUBLISHED,
    Locality,
    RouteCurve,
    nearest_curve,
)
from speq.planning.cost.peers import Peers
from speq.planning.cost.planner import Outlook, PassBytes, Speeds, choose
from speq.planning.cost.presets import PRESETS, preset
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey
from speq.planning.demand import Budget
from speq.planning.model_spec import ModelSpec
from speq.planning.peers import peers_of
from speq.planning.used_experts import UsedExperts
from speq.runtime import Runtime
from speq.stats import StepStats
from speq.units import format_rate, parse_bytes, parse_rate
from tests.helpers.paths import DATA, ROUTES

CONFIGS = DATA / "configs"
QWEN = CONFIGS / "Qwen1.5-MoE-A2.7B"
DEEPSEEK = CONFIGS / "DeepSeek-V2-Lite"
PHI = CONFIGS / "Phi-3.5-MoE-instruct"
LATER = DATA / "published"
GIB = 1 << 30


@cache
def model_spec(path: Path) -> ModelSpec:
    return ModelSpec.of_config(path.name, path, "auto")


def planned(path: Path, budget: str, **changes: Any) -> BudgetPlan:
    of = model_spec(path)
    experts = of.shape.experts
    given = Assumptions(
        preset("rtx-4090"), Locality(experts.num_experts, of.shape.top_k), acceptance=0.9
    )
    room = Budget.of(parse_bytes(budget), 4096, False, of.shape)
    return plan_budget(of, room, replace(given, **changes))


def by_way(made: BudgetPlan) -> dict[tuple[str, bool], int]:
    """Slots by codec and draft."""
    return {(c.codec, c.drafts): c.slots for c in made.candidates}


# Memory.


def test_items_of_qwen_are_what_its_config_implies() -> None:
    made = planned(QWEN, "24GiB")
    hidden, layers, vocab, expert = 2048, 24, 151936, 3 * 2048 * 1408
    attention = 4 * hidden * hidden + 3 * hidden
    shared = 3 * hidden * 5632 + hidden
    of_layer = attention + shared + 60 * hidden + 2 * hidden
    weights = 2 * vocab * hidden + layers * of_layer + hidden
    rotary_bytes = 64 * 4
    way = [(c.codec, c.drafts) for c in made.candidates].index(("raw", True))
    items = made.memory[way].items
    # transformers holds its rotary frequencies once or twice.
    assert items["non_expert_weights"] - 2 * weights in (rotary_bytes, 2 * rotary_bytes)
    assert items["kv_cache"] == 4096 * 2 * layers * hidden * 2
    dense, head = layers * (4 * hidden * hidden + 3 * hidden * 5632), vocab * hidden
    draft = 60 * layers * expert + dense + 2 * head  # the head in two planes
    assert items["draft"] == draft // 2 + draft // 128 * 2
    assert items["slots"] == made.memory[way].slots * expert * 2
    assert items["read_buffers"] == 4096
    used = sum(items.values())
    assert 0 <= 24 * GIB - used < expert * 2


def test_slots_of_each_codec_by_bits_of_a_weight() -> None:
    made = planned(QWEN, "16GiB")
    for candidate in made.candidates:
        bits = {"raw": 16, "lossless": 11.4, "residual": 8.9}[candidate.codec]
        exact = bits * 3 * 2048 * 1408 / 8
        assert exact - 1 <= candidate.moved_bytes < exact + 4096
        codes = 4.125 * 3 * 2048 * 1408 / 8 if candidate.codec == "residual" else 0
        assert candidate.read_bytes == candidate.moved_bytes + codes


@pytest.mark.parametrize(
    ("path", "billions", "layers", "experts", "top_k"),
    [(QWEN, 14.3, 24, 60, 4), (DEEPSEEK, 15.7, 26, 64, 6), (PHI, 41.9, 32, 16, 2)],
)
def test_models_of_the_paper(
    path: Path, billions: float, layers: int, experts: int, top_k: int
) -> None:
    """Table 1 agrees, but for Phi-3.5-MoE's 8 experts: with these sizes only 16 make 41.9 billion
    parameters."""
    of = model_spec(path)
    weights = of.shape.resident_weights + of.count * of.codec.shape.weights
    assert round(weights / 1e9, 1) == billions
    assert (of.num_layers, of.shape.experts.num_experts, of.shape.top_k) == (layers, experts, top_k)


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "billions", "rest_gib"),
    [
        # Worked out from the sizes by hand, layer by layer; the rest in bfloat16.
        ("DeepSeek-V3", 58, 256, 8, 654, 31.9),
        ("MiniMax-M2", 62, 256, 8, 224.7, 7.5),
        ("ERNIE-4.5-21B-A3B-PT", 27, 64, 6, 20.4, 2.7),
        ("Hunyuan-A13B-Instruct", 32, 64, 8, 77.3, 5.76),
        ("Solar-Open-100B", 48, 128, 8, 96.6, 11.2),
        ("Qwen3-Next-80B-A3B-Instruct", 48, 512, 10, 77.31, 4.41),
        ("Qwen3.5-35B-A3B", 40, 256, 8, 32.21, 4.56),
        ("LFM2-8B-A1B", 22, 32, 4, 7.751, 1.096),
        ("gemma-4-26B-A4B-it", 30, 128, 8, 22.84, 4.46),
        ("gpt-oss-20b", 24, 32, 4, 19.1, 3.36),
        ("gpt-oss-120b", 36, 128, 4, 114.66, 4.04),
    ],
)
def test_models_of_later_families(
    name: str, layers: int, experts: int, top_k: int, billions: float, rest_gib: float
) -> None:
    of = model_spec(LATER / name)
    assert (of.num_layers, of.shape.experts.num_experts, of.shape.top_k) == (layers, experts, top_k)
    weights = of.count * of.codec.shape.weights
    assert weights / 1e9 == pytest.approx(billions, rel=0.002)
    assert of.shape.resident_bytes(torch.bfloat16) / GIB == pytest.approx(rest_gib, abs=0.06)
    made = planned(LATER / name, f"{int(rest_gib) + 20}GiB")
    assert max(by_way(made).values()) > 2 * top_k


def test_entries_are_planned_by_the_width_of_each_layer() -> None:
    """Of Gemma 4 every sixth layer has 2 heads of 512 where others have 8 of 256."""
    made = planned(LATER / "gemma-4-26B-A4B-it", "32GiB")
    wide, narrow = 25 * 2 * 8 * 256, 5 * 2 * 2 * 512
    assert made.memory[0].items["kv_cache"] == 4096 * (wide + narrow) * 2


@pytest.mark.parametrize(
    ("name", "layers"), [("Qwen3-Next-80B-A3B-Instruct", 48), ("Qwen3.5-35B-A3B", 40)]
)
def test_states_are_planned_beside_entries(name: str, layers: int) -> None:
    """A quarter of the layers keeps entries, and a token takes 2 KiB of each."""
    made = planned(LATER / name, "32GiB")
    entries = 4096 * layers // 4 * 2 * 2 * 256 * 2
    # Two states, 96 tokens that may be given up behind three that the convolution looks at, and two
    # copies of a state and these three.
    state, inputs = 32 * 128 * 128 * 4, (96 + 3) * 8192 * 2
    copies = 2 * (state + 3 * 8192 * 2)
    kept = layers * 3 // 4 * (2 * state + inputs + 2 * 96 * 32 * 4 + copies)
    assert made.memory[0].items["kv_cache"] - entries == kept


def test_inputs_of_convolutions_are_planned_beside_entries() -> None:
    """Six layers of 24 keep entries of 8 heads of 64; the others 96 tokens behind two taps, and two
    copies of these two.
    """
    made = planned(LATER / "LFM2-8B-A1B", "12GiB")
    entries = 4096 * 6 * 2 * 8 * 64 * 2
    assert made.memory[0].items["kv_cache"] == entries + 18 * (96 + 2 + 2 * 2) * 2048 * 2


@pytest.mark.parametrize(
    ("name", "hidden", "width"), [("DeepSeek-V3", 7168, 2048), ("MiniMax-M2", 3072, 1536)]
)
def test_experts_published_in_fp8_are_planned_as_they_are(
    name: str, hidden: int, width: int
) -> None:
    """A byte a weight, and a float32 scale for each block of 128 by 128."""
    of, made = model_spec(LATER / name), planned(LATER / name, "60GiB")
    codes = 3 * hidden * width
    assert of.codec.slot_bytes == -(-(codes + codes // (128 * 128) * 4) // 4096) * 4096
    assert ("fp8", False) in by_way(made)
    assert {codec for codec, _ in by_way(made)} == {"fp8"}


def test_experts_published_in_mxfp4_are_planned_as_they_are() -> None:
    """4.25 bits a weight, and no draft, which would be as large."""
    of, made = model_spec(LATER / "gpt-oss-20b"), planned(LATER / "gpt-oss-20b", "8GiB")
    codes = 3 * 2880 * 2880 // 2
    assert of.codec.slot_bytes == -(-(codes + codes // 16) // 4096) * 4096
    assert of.draft is None
    assert {way: slots > 2 * 4 for way, slots in by_way(made).items()} == {("mxfp4", False): True}


@pytest.mark.parametrize("path", [QWEN, DEEPSEEK, PHI])
def test_more_budget_never_buys_fewer_slots(path: Path) -> None:
    before: dict[tuple[str, bool], int] = {}
    for gib in (*range(8, 40, 4), 56, 72, 84, 110):
        slots = by_way(planned(path, f"{gib}GiB"))
        assert all(slots[way] >= count for way, count in before.items())
        before = slots
    assert set(before.values()) == {model_spec(path).count}


@pytest.mark.parametrize(
    ("codec", "draft"),
    [
        *(("raw", "auto"), ("raw", "none"), ("lossless", "auto"), ("lossless", "none")),
        ("residual", "auto"),
    ],
)
def test_a_plan_and_a_run_report_the_same_bytes(
    bundled: Path, tmp_path: Path, draft: str, codec: str
) -> None:
    folder = bundled
    if codec != "raw":
        folder = tmp_path / "packed"
        words = open_model(bundled)
        assert isinstance(words.store, SafetensorsExpertStore)
        rounded = RoundedDraft(words.checkpoint, words.store, words.shape.experts, owned=False)
        codes = rounded if codec == "residual" else None
        packing = Packing(codec_of(codec, words.store.codec.shape), codes)
        pack(words.checkpoint, words.store, folder, packing)
        words.close()
    config = RunConfig.of(
        "26MiB",
        context_length=512,
        draft=draft,
        drafter="int4" if draft == "auto" else "none",
        draft_length="auto",
        codec=codec,
        dense="raw",
        device="cpu",
    )
    opened = open_model(folder)
    of = ModelSpec.of_model("bundled", opened, "auto")
    runtime = Runtime(load(opened, config))
    try:
        given = Assumptions(preset("laptop-ddr5"), Locality(32, 4, BUNDLED), 0.9)
        # Options that name who drafts leave no room for another drafter.
        budget = replace(Budget.of(26 << 20, 512, True, of.shape), longest_side=0)
        made = plan_budget(of, budget, given)
        candidates = [(c.codec, c.drafts) for c in made.candidates]
        assert made.memory[candidates.index((codec, draft == "auto"))].items == runtime.plan.items
    finally:
        runtime.close()


def test_texts_side_by_side_are_planned_as_they_are_run(bundled: Path) -> None:
    config = RunConfig.of(
        "40MiB", context_length=512, max_batch=4, draft="none", drafter="none", draft_length=0,
        codec="raw", dense="raw", device="cpu",
    )  # fmt: skip
    opened = open_model(bundled)
    of = ModelSpec.of_model("bundled", opened, "auto")
    runtime = Runtime(load(opened, config))
    try:
        given = Assumptions(preset("laptop-ddr5"), Locality(32, 4, BUNDLED), 0.9)
        budget = replace(Budget.of(40 << 20, 512, True, of.shape), batch_size=4, longest_side=0)
        made = plan_budget(of, budget, given)
        candidates = [(each.codec, each.drafts) for each in made.candidates]
        items = made.memory[candidates.index(("raw", False))].items
        assert items == runtime.plan.items
        alone = plan_call(bundled, "40MiB", context_length=512, preset="laptop-ddr5", dense="raw")
        (one,) = {each.items["kv_cache"] for each in alone.memory}
        assert items["kv_cache"] == 4 * one
    finally:
        runtime.close()


def test_a_config_alone_plans_as_the_model_does(bundled: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bundled / "config.json").read_text())
    opened = open_model(bundled)
    try:
        whole = ModelSpec.of_model("tiny", opened, "auto")
    finally:
        opened.close()
    assert ModelSpec.of_config("tiny", tmp_path, "auto") == whole


# Routes.


@pytest.mark.parametrize("slots", [8, 20, 32])
def test_independent_routes_miss_what_is_not_held(slots: int) -> None:
    """LRU keeps any experts as well as any others: one token misses K (1 - S / E)."""
    of = Locality(32, 4, None)
    assert of.distinct(1) == pytest.approx(4)
    assert of.distinct(2) == pytest.approx(4 + 4 * 28 / 32)
    assert of.misses(slots, 1) == pytest.approx(4 * (1 - slots / 32))


@pytest.mark.parametrize(
    ("slots", "hits"), [(6, 0.292), (16, 0.5094), (22, 0.6113), (32, 0.7656), (48, 0.9577)]
)
def test_published_routes_hit_as_in_table_3(slots: int, hits: float) -> None:
    assert 1 - Locality(64, 6, PUBLISHED).misses(slots, 1) / 6 == pytest.approx(hits, abs=0.05)


@pytest.mark.parametrize("curve", [BUNDLED, PUBLISHED, MANY_EXPERTS, None])
def test_misses_grow_with_tokens_and_shrink_with_slots(curve: RouteCurve | None) -> None:
    of = Locality(60, 4, curve)
    assert of.misses(60, 13) == 0
    for tokens in (1, 2, 5, 13, 50):
        row = [of.misses(slots, tokens) for slots in range(0, 61, 4)]
        assert row[0] == pytest.approx(of.distinct(tokens))
        assert row == sorted(row, reverse=True)
        assert of.misses(20, tokens) < of.misses(20, tokens + 1)


@pytest.mark.parametrize(
    "points", [((1, 4),), ((1, 3), (2, 6)), ((1, 4), (2, 4)), ((2, 5), (1, 4)), ((1, 4), (2, 32))]
)
def test_a_curve_that_no_routes_have_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(SpeqError, match="somewhere"):
        RouteCurve("somewhere", 32, 4, points)


# Times.

PLAIN = ResidencyPlan("raw", "none", 1000, 1000, 1000, slots=96)
DRAFT = ResidencyPlan("residual", "int4", 600, 600, 900, draft_bytes=300, slots=80)


def outlook(link: float = 1e6, **changes: Any) -> Outlook:
    speeds = Speeds(10e-3, 0.0, 4e-3, {"raw": 1e-4, "residual": 1e-4})
    made = Outlook(8, Locality(32, 4, BUNDLED), speeds, Link(link), 0.9)
    return replace(made, **changes)


def test_a_step_by_hand() -> None:
    of = replace(outlook(), locality=Locality(32, 4, None), acceptance=0.5)
    step = of.step_estimate(PLAIN, 0)
    assert step.verify_s == pytest.approx(10e-3 + 8 * 4 * 1e-4)
    # 12 slots of 32 a layer: each of the 32 requests misses with 20 / 32.
    assert step.moved_bytes == pytest.approx(32 * 20 / 32 * 1000)
    assert step.new_s == pytest.approx(0.02)
    # A layer with m late experts of four waits m ms, less what the three others compute meanwhile.
    chances = [math.comb(4, late) * 0.625**late * 0.375 ** (4 - late) for late in range(5)]
    waits_s = [0, 1e-3 - 3e-4, 2e-3 - 3e-4, 3e-3 - 3e-4, 4e-3 - 3e-4]
    on_demand_s = 0.0132 + 8 * sum(c * w for c, w in zip(chances, waits_s, strict=True))
    # Of what is beyond the link's 20 ms, prefetching leaves seven tenths.
    assert of.with_estimate(PLAIN).tpot_s == pytest.approx(0.02 + 0.7 * (on_demand_s - 0.02))
    on_demand = replace(of, ahead=False).with_estimate(PLAIN)
    assert on_demand.tpot_s == pytest.approx(on_demand_s)
    drafted = of.step_estimate(DRAFT, 2)
    assert drafted.tokens == pytest.approx(1 + 0.5 + 0.25)
    assert drafted.draft_s == pytest.approx(8e-3)
    stays = (1 - 4 / 32) ** 3
    assert drafted.verify_s == pytest.approx(10e-3 + 8 * 32 * (1 - stays) * 1e-4)
    assert drafted.moved_bytes == pytest.approx(8 * 22 * (1 - stays) * 600)


def test_missing_experts_are_divided_between_a_card_and_its_host() -> None:
    """Both read the host's memory: all its bytes together take their share of its bandwidth."""
    alone = replace(outlook(), locality=Locality(32, 4, None))
    of = replace(alone, host_bytes_per_s=4e6)
    missed, step = 32 * 20 / 32, of.step_estimate(PLAIN, 0)
    assert step.moved_bytes == pytest.approx(missed / 4 * 1000)
    assert step.new_s == pytest.approx(missed * 1000 / 4e6)
    assert step.host_s == pytest.approx(step.new_s)  # both end at once
    # The card reads a quarter of the missing ones, and rows come and go in each of 8 layers.
    read = 8 * 4 - missed * 3 / 4
    assert step.verify_s == pytest.approx(10e-3 + read * 1e-4 + 8 * 40e-6)
    with_draft = alone.with_estimate(replace(DRAFT, codec="raw"))
    ours, theirs = of.prior(with_draft), alone.prior(with_draft)
    assert ours.missed is not None and theirs.missed is not None
    assert ours.missed == pytest.approx([share / 4 for share in theirs.missed])
    assert ours.hosted == pytest.approx([share * 3 / 4 for share in theirs.missed])
    # Three on the host take as long as one over the link.
    assert ours.host_s == pytest.approx(ours.transfer_s / 3)
    assert (theirs.host_s, theirs.hosted) == (0.0, (0.0, 0.0))
    for unchanged in (replace(of, host_bytes_per_s=1e6), replace(of, host_bytes_per_s=0.0)):
        assert unchanged.step_estimate(PLAIN, 0) == alone.step_estimate(PLAIN, 0)
    over_codes = replace(PLAIN, codec="residual", needs_draft=True)
    assert of.step_estimate(over_codes, 0) == alone.step_estimate(over_codes, 0)


def test_a_host_beside_a_card_is_planned_with() -> None:
    config = DATA / "configs" / "DeepSeek-V2-Lite"
    rates: dict[str, Any] = {"preset": "rtx-4090", "link": "25GB/s", "host_budget": "64GiB"}
    alone = plan_call(config, "8GiB", **rates)
    shared = plan_call(config, "8GiB", host_bandwidth="70GB/s", **rates)
    assert shared.candidates[0].tpot_s < alone.candidates[0].tpot_s
    told = "the processor computes 64%, and the others are copied meanwhile"
    assert any(f"{told}; no card has run this" in line for line in findings(shared))
    # What was measured of a host was measured beside its card: 3 MB/s and the link's 1.
    measured = Assumptions(profile(host=((1.0, 1000 / 3e6),)), shared.assumptions.locality, 0.9)
    told = told.replace("64%", "75%")
    assert any(line.endswith(told) for line in findings(replace(shared, assumptions=measured)))
    assert not any("the processor computes" in line for line in findings(alone))
    with pytest.raises(SpeqError, match="host_bandwidth is given and the model runs on the CPU"):
        plan_call(config, "8GiB", link="3GB/s", memory_bandwidth="40GB/s", host_bandwidth="70GB/s")


EVEN = tuple(count / 32 for count in range(33))


def test_experts_on_further_gpus_by_hand() -> None:
    """A quarter of what tokens choose is there; the first GPU has slots for half of the rest."""
    assert Locality(32, 4, None).without(8, 0.25) == Locality(24, 3.0, None)
    of = replace(outlook(), locality=Locality(32, 4, None), peers=Peers((1, 1), 64, EVEN, 4, 10))
    held = replace(PLAIN, peers=(6, 2))
    step = of.step_estimate(held, 0)
    # Of 3 experts that are asked of the first, each misses with 12 / 24.
    assert step.moved_bytes == pytest.approx(8 * 3 * 12 / 24 * 1000)
    assert step.verify_s == pytest.approx(10e-3 + 8 * 3 * 1e-4)
    # The other expert is of the larger one with 6 / 8: all devices compute at once.
    assert of.peers_s(held, 1) == pytest.approx(40e-6 + 6 / 8 * 1e-4)
    slow = replace(of, speeds=replace(of.speeds, expert_s={"raw": 1e-6}))
    assert slow.verify_s(held, 1) == pytest.approx(10e-3 + 8 * (40e-6 + 6 / 8 * 1e-6))
    assert of.asked(1) == 8 * 4  # of all of them


def test_further_gpus_hold_what_makes_layers_shortest() -> None:
    room = Peers((8 * 16_000,), 64, EVEN, 4, 10)
    of = replace(outlook(), locality=Locality(32, 4, None), peers=room)
    # Loading an expert takes ten times as long as computing one: as many as fit.
    assert of.with_estimate(PLAIN).peers == (16,)
    # With all in slots they compute for as long as the first GPU: 4 * (1 - 14 / 32) * 100 us are
    # 225 us, and 40 + 4 * 14 / 32 * 100 are 215.
    whole = replace(PLAIN, slots=8 * 32)
    assert of.with_peers(whole).peers == (14,)
    # Where rows take longer to go there than experts to compute, the fewest.
    quick = replace(of, speeds=replace(of.speeds, expert_s={"raw": 1e-7}))
    assert quick.with_peers(whole).peers == (2,)


def test_a_plan_for_several_gpus_prints_the_split() -> None:
    config = DATA / "configs" / "DeepSeek-V2-Lite"
    rates: dict[str, Any] = {"preset": "rtx-4090", "link": "25GB/s", "host_budget": "64GiB"}
    alone = plan_call(config, "8GiB", **rates)
    made = plan_call(config, "8GiB", peer_budget="6GiB,3GiB", **rates)
    assert made.best_s < alone.best_s
    held = made.candidates[made.best].peers
    assert made.to_dict()["best"]["peers"] == [*held] and held[0] > held[1] > 0
    slot_bytes = made.candidates[made.best].slot_bytes
    for count, gib in zip(held, (6, 3), strict=True):
        assert count * 26 * slot_bytes <= gib * GIB
    there, hits = made.hit_rates
    assert there == pytest.approx(sum(held) / 64) and hits > alone.hit_rates[1] > 0
    told = f"further GPUs hold {held[0]} and {held[1]} of the 64 experts of each layer, which are "
    assert any(line.startswith(f"{told}{there:.0%}") for line in findings(made))
    assert not any("further GPUs" in line for line in findings(alone))
    with pytest.raises(SpeqError, match="peer_budget is given and the model runs on the CPU"):
        plan_call(config, "8GiB", link="3GB/s", memory_bandwidth="40GB/s", peer_budget="6GiB")


def test_a_plan_for_several_gpus_is_one_that_loads() -> None:
    """What a load refuses is refused, and no way is chosen that further GPUs cannot run."""
    config = DATA / "configs" / "DeepSeek-V2-Lite"
    rates: dict[str, Any] = {"preset": "rtx-4090", "link": "25GB/s", "host_budget": "64GiB"}
    with pytest.raises(NoRoom, match="of further GPU 2 for experts, and one of each layer takes"):
        plan_call(config, "8GiB", peer_budget="6GiB,256MiB", **rates)
    with pytest.raises(
        OptionError, match=r"64 further GPUs, and a layer has 64 .* name 63 at most"
    ):
        plan_call(config, "8GiB", peer_budget=["6GiB"] * 64, **rates)
    made = plan_call(config, "16GiB", peer_budget="6GiB", **rates)
    assert all(sum(way.peers) > 0 for way in made.candidates)
    assert "residual with a draft" in made.left_out
    alone = plan_call(config, "16GiB", **rates)
    assert "residual" in {way.codec for way in alone.candidates}


def test_biases_are_counted_on_further_gpus() -> None:
    """Each has those of all experts, in the dtype of rows."""
    spec = ModelSpec.of_config("gpt-oss", LATER / "gpt-oss-20b", "auto")
    budget = Budget(12 * GIB, 512, on_cpu=False)
    used = UsedExperts(24, 32)
    biased = peers_of(spec, [6 * GIB], used, budget)
    layout = replace(spec.shape.experts, biased=False)
    plain = peers_of(
        replace(spec, shape=replace(spec.shape, experts=layout)), [6 * GIB], used, budget
    )
    assert plain.slots_bytes[0] - biased.slots_bytes[0] == 24 * 32 * (2 * 2880 + 2880) * 2


def test_a_draft_on_the_host_by_hand() -> None:
    """Of 4 ms a drafted token, its experts take 1 on the card. The host reads 6 kB of them at 3
    MB/s, beside copies at 1 MB/s, and rows come and go in each of 8 layers.
    """
    speeds = replace(outlook().speeds, draft_experts_s=1e-3)
    of = replace(outlook(speeds=speeds), host_bytes_per_s=4e6, draft_token_bytes=6000)
    way = replace(DRAFT, codec="raw", draft_on_host=True)
    token_s = 3e-3 + 2e-3 + 8 * 40e-6
    assert of.step_estimate(way, 2).draft_s == pytest.approx(2 * token_s)
    assert of.step_estimate(replace(way, draft_on_host=False), 2).draft_s == pytest.approx(8e-3)
    assert replace(of, host_bytes_per_s=1e6).host_draft_token_s == math.inf
    assert replace(of, speeds=outlook().speeds).host_draft_token_s == math.inf


def test_a_draft_on_the_host_takes_no_slots() -> None:
    config = DATA / "configs" / "DeepSeek-V2-Lite"
    rates: dict[str, Any] = {"preset": "rtx-4090", "link": "25GB/s", "host_bandwidth": "70GB/s"}
    made = plan_call(config, "16GiB", host_budget="64GiB", **rates)
    held = made.host_draft
    assert held is not None
    beside = next(
        way
        for way in made.candidates
        if (way.codec, way.drafter, way.draft_experts) == (held.codec, "int4", None)
    )
    taken = (held.slots - beside.slots) * held.slot_bytes
    assert taken == pytest.approx(made.model_spec.base_bytes, rel=0.05)
    assert made.to_dict()["host_draft"]["slots"] == held.slots
    assert any(f"on the host: k={held.step.draft_length}, " in line for line in findings(made))
    # Beside the exact experts of 26 layers there is no room for it.
    assert plan_call(config, "16GiB", host_budget="24GiB", **rates).host_draft is None
    del rates["host_bandwidth"]
    assert plan_call(config, "16GiB", host_budget="64GiB", **rates).host_draft is None


def test_speeds_of_bandwidths_by_hand() -> None:
    rates = replace(preset("rtx-4090"), memory_bytes_per_s=1e9, layer_s=1e-3)
    speeds = Speeds.of_rates(
        rates, PassBytes(10, 2_000_000, 1_200_000, 500_000, 40), [PLAIN, DRAFT]
    )
    assert speeds.pass_s == pytest.approx(12e-3)
    assert speeds.draft_token_s == pytest.approx(11.7e-3)
    assert speeds.expert_s == {"raw": pytest.approx(1e-6), "residual": pytest.approx(0.9e-6)}


def test_speeds_of_a_survey_by_hand() -> None:
    survey = Survey("cpu", 1e6, 1e9, pass_s=2e-3, layer_s=1e-3, row_s=1e-4, miss_s=3e-4)
    survey = replace(survey, expert_s={"raw": 5e-7, "residual": 4e-6}, draft_expert_s=1e-5)
    speeds = Speeds.of_survey(
        survey, PassBytes(10, 2_000_000, 1_000_000, 500_000, 40), [PLAIN, DRAFT]
    )
    assert speeds.pass_s == pytest.approx(2e-3 + 10e-3 + 2e-3)
    # Reading 0.5 MB takes longer than the arithmetic of 40 experts.
    assert speeds.draft_token_s == pytest.approx(2e-3 + 10e-3 + 1e-3 + 0.5e-3)
    assert speeds.expert_s == {"raw": pytest.approx(1e-6), "residual": pytest.approx(4e-6)}
    of = outlook(speeds=speeds, locality=Locality(32, 4, None))
    way = replace(PLAIN, drafter="int4")
    step = of.step_estimate(replace(way, slots=256), 3)
    asked = of.asked(4)
    assert step.verify_s == pytest.approx(speeds.pass_s + 3e-4 + asked * 1e-6)
    # What is moved takes the processor, beside the link.
    missed = of.missed(way, 4)
    assert of.step_estimate(way, 3).verify_s == pytest.approx(step.verify_s + missed * 3e-4)


def test_a_run_begins_with_what_was_planned() -> None:
    of = outlook()
    chosen = of.with_estimate(DRAFT)
    prior = of.prior(chosen)
    model = StepModel.of(prior)
    assert model.ready and model.draft_token_s == pytest.approx(of.speeds.draft_token_s)
    length = chosen.step.draft_length
    for k, missed in ((0, of.missed(DRAFT, 1)), (length, of.missed(DRAFT, length + 1))):
        [step] = model.estimates([k], [1.0])
        planned = of.step_estimate(DRAFT, k)
        # Distinct experts are carried over by a formula of two terms.
        assert step.verify_s == pytest.approx(planned.verify_s, rel=0.1)
        assert step.draft_s == pytest.approx(planned.draft_s)
        assert step.moved_bytes == pytest.approx(missed * DRAFT.moved_bytes, rel=0.1)
        assert step.exposed == pytest.approx(planned.exposed)
    governor = AdaptiveDraftLength(prior=prior)
    governor.begin()
    assert governor.decide().ground == "best"


def test_a_plan_that_was_wrong_of_drafts_is_found_out_soon() -> None:
    """A plan that takes verifications for twice as slow as they are expects nothing of drafts."""
    of = outlook(1e12, speeds=Speeds(100e-3, 0.0, 90e-3, {"residual": 1e-4}))
    held = of.with_estimate(replace(DRAFT, slots=256))
    assert held.step.draft_length <= 1
    governor = AdaptiveDraftLength(prior=of.prior(held))
    governor.begin()
    now_s, tokens, lengths = 0.0, 0, []
    while tokens < 40:
        k = governor.decide().draft_length
        draft_s, verify_s = 0.024 * k, 0.052 + 0.007 * k
        step = StepStats("decode", draft_length=k, accepted=k, emitted=k + 1)
        step.requests, step.draft_s, step.verify_s = 32 + 18 * k, draft_s, verify_s
        step.start_s, step.end_s = now_s, now_s + draft_s + verify_s
        governor.observe(step)
        now_s, tokens = step.end_s, tokens + step.emitted
        lengths.append(k)
    assert max(lengths) >= 4
    assert now_s / tokens < 0.9 * 0.052


def test_a_base_is_charged_once_for_a_draft() -> None:
    prior = replace(
        outlook().prior(outlook().with_estimate(DRAFT)), draft_base_s=1.0, draft_token_s=0.1
    )
    drafts_s = [step.draft_s for step in StepModel.of(prior).estimates([0, 1, 8], [1.0, 2.0, 5.0])]
    assert drafts_s == pytest.approx([0.0, 1.1, 1.8])


def test_routes_are_those_of_the_model_with_most_nearly_as_many_experts() -> None:
    assert [nearest_curve(count) for count in (8, 16, 32)] == [BUNDLED] * 3
    assert [nearest_curve(count) for count in (60, 64)] == [PUBLISHED] * 2
    assert [nearest_curve(count) for count in (96, 128, 512)] == [MANY_EXPERTS] * 3


def profile(**changes: Any) -> Profile:
    made = Profile(
        key=ProfileKey("model", "cpu: some", 1 << 20, "1"),
        link=((1000.0, 5e5), (100_000.0, 1e6)),
        transfer_overhead_s=1e-4,
        first_fetch_s=2e-3,
        expert_bytes=1000,
        draft_base_s=1e-3,
        draft_token_s=4e-3,
        verify=tuple((float(rows), 10e-3 + 1e-4 * 30 * rows) for rows in (1, 2, 5, 9)),
        distinct=tuple((float(rows), 30.0 * rows) for rows in (1, 2, 5, 9)),
    )
    return replace(made, **changes)


def test_speeds_of_a_profile_are_those_measured() -> None:
    def never(rows: float) -> float:
        raise AssertionError("the profile counted them")

    sizes = PassBytes(10, 2_000_000, 1_000_000, 500_000, 40, head_bytes=500_000)
    speeds = Speeds.of_profile(profile(), sizes, never, [PLAIN, DRAFT])
    # A prior of little weight holds the slope, hence some percent.
    assert speeds.pass_s == pytest.approx(10e-3, rel=0.1)
    assert speeds.expert_s["raw"] == pytest.approx(1e-4, rel=0.05)
    assert speeds.expert_s["residual"] == pytest.approx(0.9 * speeds.expert_s["raw"])
    assert (speeds.draft_base_s, speeds.draft_token_s) == (1e-3, 4e-3)
    # A quarter of what a pass reads, and four of its ten layers.
    assert speeds.head_token_s == pytest.approx(0.65 * speeds.pass_s)
    timed = profile(decode_bytes_per_s={"raw": 2e9, "residual": 1e9})
    speeds = Speeds.of_profile(timed, sizes, never, [PLAIN, DRAFT])
    assert speeds.expert_s["residual"] == pytest.approx(2 * speeds.expert_s["raw"])


def test_the_best_draft_length_is_the_best() -> None:
    of = outlook()
    best = of.with_estimate(DRAFT)
    assert best.tpot_s == min(
        of.step_estimate(DRAFT, k).token_s for k in (1, 2, 3, 4, 6, 8, 10, 12)
    )
    chosen, reason = choose(of, [PLAIN, DRAFT])
    assert chosen == min(
        (of.with_estimate(PLAIN), best), key=lambda residency_plan: residency_plan.tpot_s
    )
    assert f"{chosen.tpot_s * 1e3:.1f} ms" in reason
    with pytest.raises(SpeqError, match="no way"):
        choose(of, [])


def test_a_draft_of_a_part_is_weighed_by_what_it_covers() -> None:
    of = outlook()
    whole, part = of.drafts(DRAFT), of.drafts(replace(DRAFT, draft_experts=4, draft_covers=0.5))
    assert whole is not None and part is not None
    assert whole.acceptance == of.acceptance and part.acceptance == of.acceptance / 2
    chosen, _ = choose(of, [DRAFT, replace(DRAFT, draft_experts=4, draft_covers=0.5)])
    assert chosen.draft_experts is None  # with as many slots as the whole


HEAD = replace(PLAIN, drafter="head", slots=90)


def test_a_head_is_weighed_by_how_far_its_tokens_stood() -> None:
    speeds = replace(outlook().speeds, head_token_s=1e-3)
    of = outlook(speeds=speeds, head_acceptance=(0.8, 0.5))
    drafts = of.drafts(HEAD)
    assert drafts is not None and drafts.accept_probs(4) == [0.8, 0.5, 0.5, 0.5]
    # The second depth is reached by eight drafts of ten.
    assert drafts.acceptance == pytest.approx((0.8 + 0.8 * 0.5) / 1.8)
    step = of.step_estimate(HEAD, 3)
    assert step.tokens == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.25)
    assert step.draft_s == pytest.approx(3e-3)
    assert step.verify_s == of.verify_s(HEAD, 4)
    # It names no experts: prefetching hides as much as without a draft.
    assert step.exposed == pytest.approx(
        0.7 * replace(of, ahead=False).step_estimate(HEAD, 3).exposed
    )
    prior = of.prior(of.with_estimate(HEAD))
    assert (prior.draft_token_s, prior.acceptance) == (1e-3, drafts.acceptance)
    chosen, reason = choose(of, [PLAIN, HEAD])
    assert chosen == min(
        (of.with_estimate(way) for way in (PLAIN, HEAD)), key=lambda way: way.tpot_s
    )
    assert "raw with a head" in reason and "raw without a draft" in reason


def test_a_head_that_says_nothing_is_weighed_as_plain_decoding() -> None:
    of = outlook()
    assert of.drafts(HEAD) is None and of.drafts(replace(HEAD, drafter="ngram")) is None
    assert of.with_estimate(HEAD).step == of.step_estimate(HEAD, 0)
    # Break-evens are those of INT4 drafts.
    assert of.gain([PLAIN, HEAD]) is None


def test_a_draft_must_save_its_margin() -> None:
    of = outlook()
    plain_s, drafting_s = (of.with_estimate(way).tpot_s for way in (PLAIN, DRAFT))
    for margin in (0.0, 0.01, 0.25, 0.5, 0.75, 0.95):
        chosen, _ = choose(of, [PLAIN, DRAFT], margin)
        assert chosen.drafts == (drafting_s < (1 - margin) * plain_s)
    # Beside all experts it takes no slots that any of them wants.
    roomy = [replace(way, slots=8 * 32) for way in (PLAIN, DRAFT)]
    chosen, _ = choose(of, roomy, 0.95)
    assert chosen.drafts
    plain_s, drafting_s = (of.with_estimate(way).tpot_s for way in roomy)
    assert drafting_s < plain_s
    # The run may leave it aside, so that it is held though no drafted token is expected to stand.
    hopeless = replace(of, acceptance=0.0)
    plain_s, drafting_s = (hopeless.with_estimate(way).tpot_s for way in roomy)
    assert drafting_s > plain_s
    chosen, _ = choose(hopeless, roomy, 0.95)
    assert chosen.drafts
    # Another codec is not compared so: it costs what it costs.
    quicker = replace(of.speeds, expert_s={**of.speeds.expert_s, "raw": 0.0})
    chosen, _ = choose(replace(hopeless, speeds=quicker), roomy, 0.95)
    assert chosen.codec == "raw" and not chosen.drafts


def test_a_length_that_was_asked_for_is_drafted() -> None:
    """What plain decoding would take beside a draft is no reason to hold that one."""
    speeds = replace(outlook().speeds, head_token_s=1e-2, expert_s={"raw": 0.0, "residual": 1e-4})
    of = replace(outlook(speeds=speeds, head_acceptance=(0.05,)), lengths=(3,))
    head, draft = (replace(way, slots=8 * 32) for way in (HEAD, DRAFT))
    plain_s = [replace(way, expected=of.step_estimate(way, 0)).tpot_s for way in (head, draft)]
    assert plain_s[0] < plain_s[1]
    assert of.with_estimate(head).tpot_s > of.with_estimate(draft).tpot_s
    assert choose(of, [head, draft])[0].drafter == "int4"


@pytest.mark.parametrize("link", [1e5, 3e5, 1e6, 3e6])
def test_below_the_break_even_acceptance_speculation_loses(link: float) -> None:
    of, residency_plans = outlook(link), [PLAIN, DRAFT]
    border = of.break_even_acceptance(residency_plans)
    assert border is not None and 0 < border < 1
    below = replace(of, acceptance=border - 1e-3).gain(residency_plans)
    above = replace(of, acceptance=border + 1e-3).gain(residency_plans)
    assert below is not None and above is not None and below < 1 < above


def test_above_the_break_even_link_speculation_is_not_needed() -> None:
    # Drafting costs as much as decoding: all that it can do is to hide transfers.
    speeds = Speeds(10e-3, 0.0, 13e-3, {"raw": 1e-4, "residual": 1e-4})
    of, residency_plans = outlook(speeds=speeds), [PLAIN, DRAFT]
    border = of.break_even_link(residency_plans)
    assert border is not None and border > 0
    slower = replace(of, link=Link(border * 0.99)).gain(residency_plans)
    assert slower is not None and slower > 1
    for faster in (1.01, 2, 10, 1000):
        gain = replace(of, link=Link(border * faster)).gain(residency_plans)
        assert gain is not None and gain <= 1


def test_break_evens_that_are_none() -> None:
    free = outlook(speeds=Speeds(10e-3, 0.0, 1e-9, {"raw": 1e-4, "residual": 1e-9}))
    assert free.break_even_acceptance([PLAIN, replace(DRAFT, slots=256)]) == 0
    assert free.break_even_link([PLAIN, replace(DRAFT, slots=256)]) is None
    dear = outlook(speeds=Speeds(10e-3, 0.0, 1.0, {"raw": 1e-4, "residual": 1e-4}))
    assert dear.break_even_acceptance([PLAIN, DRAFT]) is None
    assert dear.break_even_link([PLAIN, replace(DRAFT, slots=8)]) == 0
    assert outlook().break_even_acceptance([PLAIN]) is None
    assert outlook().break_even_link([DRAFT]) is None
    assert outlook().gain([PLAIN]) is None


@pytest.mark.parametrize("changes", [{"acceptance": 1.1}, {"acceptance": -0.1}])
def test_an_outlook_on_nonsense_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(SpeqError, match=r"acceptance is .* from 0 to 1"):
        outlook(**changes)
    with pytest.raises(SpeqError, match=r"link gives 0.0 bytes/s"):
        outlook(link=0.0)


def test_a_faster_link_and_a_larger_budget_are_never_slower() -> None:
    times = [
        min(c.tpot_s for c in planned(DEEPSEEK, "16GiB", link_bytes_per_s=link).candidates)
        for link in (4e9, 8e9, 16e9, 32e9, 64e9)
    ]
    assert times == sorted(times, reverse=True)
    times = [
        min(c.tpot_s for c in planned(DEEPSEEK, f"{gib}GiB").candidates)
        for gib in (8, 12, 16, 24, 32, 48)
    ]
    assert times == sorted(times, reverse=True)


# The command.


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


JSON = ("--json", "-")


def test_json(tmp_path: Path) -> None:
    found = json.loads(run(QWEN, "--memory-budget", "16GiB", "--preset", "rtx-3090", *JSON))
    assert {"items", "candidates", "best", "break_even_acceptance"} <= set(found)
    assert "break_even_link_bytes_per_s" in found
    keys = {"codec", "draft", "slots", "tpot_ms", "draft_length"}
    assert all(keys <= set(entry) for entry in found["candidates"])
    assert found["best"] in found["candidates"]
    assert found["best"]["tpot_ms"] == min(entry["tpot_ms"] for entry in found["candidates"])
    assert sum(found["items"].values()) + found["unused_bytes"] == 16 * GIB
    for entry in found["candidates"]:
        assert entry["hidden_tpot_ms"] <= entry["tpot_ms"] <= entry["exposed_tpot_ms"]


def test_what_is_printed_says_what_it_rests_on() -> None:
    text = " ".join(
        run(
            *(DEEPSEEK, "--memory-budget", "12GiB", "--link", "25GB/s"),
            *("--memory-bandwidth", "900GB/s", "--acceptance", "0.8", "--locality", "independent"),
        ).split()
    )
    assert "bandwidths as given; independent routes, N(t) of MoESD; acceptance 0.80" in text
    assert "ways to hold the exact experts" in text
    assert re.search(r"best: \w+ with(out)? a draft, k=\d+: [\d.]+ ms a token expected", text)
    assert "texts" not in text
    assert "break-even" in text and "in host memory" not in text.partition("break-even")[0]


def test_a_plan_for_several_texts_says_whose_times_it_has() -> None:
    given = (DEEPSEEK, "--memory-budget", "12GiB", "--preset", "rtx-4090", "--max-batch", "4")
    assert "memory is for 4 sequences, and times are for one alone" in " ".join(run(*given).split())


def test_what_the_hosts_memory_holds_is_said() -> None:
    given = (QWEN, "--memory-budget", "12GiB", "--preset", "rtx-4090")
    found = json.loads(run(*given, "--host-budget", "8GiB", *JSON))
    host = found["host"]
    assert host["budget_bytes"] == 8 * GIB and host["records"] + host["on_disk"] == 24 * 60
    assert 0.9 * 8 * GIB < host["record_bytes"] <= 8 * GIB
    assert found["items"]["device_overhead"] > 50 << 20  # cuBLAS's workspace, segments not full
    text = " ".join(run(*given, "--host-budget", "8GiB").split())
    assert f"8 GiB of host memory hold {host['records']} of 1440 experts" in text
    assert f"the other {host['on_disk']} stay on disk and come through it" in text
    assert "device overhead" in text
    text = " ".join(run(*given, "--host-budget", "64GiB").split())
    assert "64 GiB of host memory hold all 1440 experts" in text
    # Of another machine nobody knows what it has: all are thought to fit.
    assert json.loads(run(*given, *JSON))["host"] is None
    assert "as published, stay in host memory" in run(*given)
    with pytest.raises(SpeqError, match=r"the host budget leaves .* larger by"):
        run(*given, "--host-budget", "16MiB")
    on_cpu = run(*given[:3], "--device", "cpu", "--link", "2GB/s", "--memory-bandwidth", "20GB/s")
    assert "device overhead" not in on_cpu


def test_a_trace_and_a_profile_are_taken_at_their_word(tmp_path: Path) -> None:
    made = tmp_path / "profile.json"
    made.write_text(profile(acceptance=0.77).to_json())
    found = json.loads(run(QWEN, "--memory-budget", "16GiB", "--profile", made, *JSON))
    assert found["assumptions"]["acceptance"] == 0.77
    assert found["assumptions"]["machine"] == "profile measured on cpu: some"
    arguments = ("--memory-budget", "16GiB", "--preset", "rtx-4090", "--routes", ROUTES, *JSON)
    found = json.loads(run(QWEN, *arguments))
    assert found["assumptions"]["locality"] == "routes of models/tiny-moe"
    trace = RouteTrace.read(ROUTES)
    tried = sum(min(len(s.path), len(s.drafted)) for s in trace.steps)
    stood = sum(len(s.path) - 1 for s in trace.steps)
    assert found["assumptions"]["acceptance"] == pytest.approx(stood / tried)


def test_a_way_that_does_not_fit_says_in_a_few_words_what_it_takes() -> None:
    made = planned(QWEN, "8GiB")
    assert {way.drafts for way in made.candidates} == {False}
    assert made.left_out["raw with a draft"] == made.left_out["lossless with a draft"]
    for name, reason in made.left_out.items():
        [gib] = re.fullmatch(r"takes ([\d.]+) GiB at the least", reason).groups()  # type: ignore[union-attr]
        roomy = planned(QWEN, f"{float(gib) + 0.1}GiB")
        assert name in {way.name for way in roomy.candidates}


def test_drafts_that_were_not_timed_are_left_out(tmp_path: Path) -> None:
    made = tmp_path / "profile.json"
    made.write_text(profile(draft_token_s=0.0).to_json())
    found = json.loads(run(QWEN, "--memory-budget", "16GiB", "--profile", made, *JSON))
    assert not any(entry["draft"] for entry in found["candidates"])
    assert found["left_out"] == {"with a draft": "the profile was measured without one"}


def test_presets_are_listed_and_plausible() -> None:
    text = run(QWEN, "--memory-budget", "1GiB", "--preset", "?")
    assert all(name in text for name in PRESETS)
    for rates in PRESETS.values():
        assert 1e9 < rates.link_bytes_per_s < rates.memory_bytes_per_s < 5e12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--memory-budget", "16GiB", "--preset", "abacus"), "preset is 'abacus'; it must be one"),
        (("--memory-budget", "1GiB", "--preset", "rtx-4090"), "too small for a context of 192"),
        (("--memory-budget", "16GiB", "--link", "25GB"), "bytes per second with a unit"),
        (("--memory-budget", "16GiB", "--link", "fast/s"), "is not understood"),
        (("--memory-budget", "16GiB", "--locality", "x"), "locality is 'x'"),
        (("--memory-budget", "16GiB", "--acceptance", "2", "--preset", "rtx-4090"), "from 0 to 1"),
        (("--memory-budget", "16GiB", "--context-length", "9000000"), "context_length is 9000000"),
        (("--memory-budget", "16GiB", "--profile", "/no/such.json"), "cannot be read"),
        (
            ("--memory-budget", "16GiB", "--profile", "x", "--preset", "rtx-4090"),
            "give one of them",
        ),
        (
            ("--memory-budget", "16GiB", "--routes", "x", "--locality", "bundled"),
            "locality and routes are given together",
        ),
    ],
)
def test_errors(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SpeqError, match=re.escape(sentence)):
        CliRunner().invoke(app, ["plan", str(DEEPSEEK), *arguments], catch_exceptions=False)


def test_models_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="does not exist"):
        run(tmp_path / "nowhere", "--memory-budget", "1GiB")
    content = json.loads((QWEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": {}}))
    with pytest.raises(SpeqError, match="is quantised"):
        run(tmp_path, "--memory-budget", "16GiB")


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise OSError("the network is down\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        SpeqError, match=r"'some/model' .* the hub: the network is down; check the name, .*"
    ):
        run("some/model", "--memory-budget", "16GiB")


def test_only_a_config_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, **patterns: list[str]) -> str:
        asked.append((name, revision))
        files = ["config.json", "model.safetensors", "tokenizer.json", "original/config.json"]
        assert [*filter_repo_objects(files, **patterns)] == ["config.json"]
        return str(QWEN)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = json.loads(run("Qwen/x", "--memory-budget", "16GiB", "--preset", "rtx-4090", *JSON))
    assert found["model"] == "Qwen/x"
    run("Qwen/x@main", "--memory-budget", "16GiB", "--preset", "rtx-4090")
    assert asked == [("Qwen/x", None), ("Qwen/x", "main")]


def test_rates() -> None:
    assert parse_rate("link", "25GB/s") == 25e9
    assert parse_rate("link", " 1.5 GiB / s") == 1.5 * GIB
    assert format_rate(25.2e9) == "25.2 GB/s"
    assert format_rate(7) == "7 B/s"
    with pytest.raises(SpeqError, match="link is '25'"):
        parse_rate("link", "25")
    assert math.isfinite(parse_rate("link", "9999TB/s"))
