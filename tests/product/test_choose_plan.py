"""How a run holds its experts: by made-up profiles and surveys, in the real runtime."""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speq import Generator, SpeqError
from speq.cli import app
from speq.config import RunConfig
from speq.drafts.dense_draft import DenseDraft
from speq.errors import OptionError
from speq.experts.codec import ExpertShape, codec_of
from speq.experts.copied_store import CopiedExperts
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.int4 import Int4Layout
from speq.experts.pack import Packing, pack
from speq.files.alignment import allocate_aligned
from speq.governor.adaptive import AdaptiveDraftLength, make_governor
from speq.governor.objectives import Objectives
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.heads.head_file import head_path
from speq.measure import codec_speed
from speq.models.opened import open_model
from speq.planning import profiles
from speq.planning.assumptions import Assumptions
from speq.planning.candidates import candidates_of
from speq.planning.choose_plan import PlanChooser, PlanDecision
from speq.planning.cost.peers import ALONE, Peers
from speq.planning.cost.survey import Survey
from speq.planning.demand import Budget
from speq.planning.device_trial import (
    TIMED_PASSES,
    DeviceTrial,
    ExpertTimes,
    copied_s,
    some_records,
)
from speq.planning.fitting import fit
from speq.planning.model_spec import ModelSpec
from speq.planning.processor_trial import ProcessorTrial
from speq.planning.used_experts import UsedExperts
from speq.text.tokenizer import load_tokenizer, tokens_of
from tests.helpers.heads import write_random_head
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

BUDGET_BYTES = 5 << 19
LAYERS, EXPERTS, TOP_K = 2, 64, 4
PROMPT = "the sea"
TOKENS = 12
# Of each codec, bytes of words a second: as fast as each other, computed with and encoded.
EVEN = {"raw": 1e9, "lossless": 1e9, "residual": 1e9}
ENCODES = {"lossless": 1e12, "residual": 1e12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of experts enough that a budget holds a draft, and some slots beside it."""
    path = tmp_path_factory.mktemp("following") / "model"
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return write_model(path, "qwen2_moe", torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def exact(model: Path) -> list[int]:
    """What transformers gives."""
    return greedy_tokens(load_plain(model), tokens_of(load_tokenizer(model), PROMPT), TOKENS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def profile(model: Path, **changes: Any) -> Profile:
    """Drafting wins: a draft takes next to nothing, and a pass over many rows what one takes."""
    opened = open_model(model)
    try:
        key = profiles.key_of(opened, "cpu", BUDGET_BYTES)
    finally:
        opened.close()
    made = Profile(
        key=key,
        link=((20480.0, 1e9),),
        transfer_overhead_s=0.0,
        first_fetch_s=0.0,
        expert_bytes=18432,
        draft_base_s=0.0,
        draft_token_s=1e-4,
        verify=((1.0, 0.1), (5.0, 0.11), (13.0, 0.12)),
        distinct=((1.0, 8.0), (5.0, 30.0), (13.0, 60.0)),
        routes=((1.0, 4.0), (2.0, 7.0), (5.0, 13.0), (17.0, 30.0)),
        decode_bytes_per_s=EVEN,
        encode_bytes_per_s=ENCODES,
        acceptance=0.9,
    )
    return replace(made, **changes)


LOSES: dict[str, Any] = {"draft_token_s": 0.2, "acceptance": 0.5}
# Every miss is waited for, and words move in any codec: what counts is how many slots there are.
SLOW_LINK: dict[str, Any] = {"link": ((20480.0, 1e5),)}
SLOW_ENCODING: dict[str, Any] = {"encode_bytes_per_s": {"lossless": 1e4, "residual": 1e4}}


@contextmanager
def running(model: Path, **options: Any) -> Iterator[Generator]:
    given = {"device": "cpu", "dtype": "float32", "draft_length": "auto"} | options
    generator = Generator.from_pretrained(model, BUDGET_BYTES, **given)
    try:
        yield generator
    finally:
        generator.close()


def written(tmp_path: Path, made: Profile) -> Path:
    profiles.write(made, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def never(codecs: Sequence[str]) -> Survey:
    raise AssertionError("a profile says how fast experts are, or there is nothing to weigh")


# Exact experts take all of the time, and a pass over many rows shares them: drafting wins.
WINS = Survey(
    "cpu",
    link_bytes_per_s=1e12,
    memory_bytes_per_s=1e12,
    pass_s=0.0,
    layer_s=0.0,
    expert_s=dict.fromkeys(EVEN, 1e-2),
    encode_bytes_per_s=ENCODES,
)
RAW_FAST = {"raw": 1e-3, "lossless": 1e-2, "residual": 1e-2}
# A drafted token takes as long as any.
EXPENSIVE = replace(WINS, pass_s=1.0)


def planned(
    model: Path,
    made: Profile | None,
    survey: Survey | None = None,
    peers: Peers = ALONE,
    **options: Any,
) -> PlanDecision:
    """What a run with these options would settle on, without loading the model."""
    opened = open_model(model)
    try:
        model_spec = ModelSpec.of_draft("model", opened, "float32", Int4Layout(64, 48))
    finally:
        opened.close()
    config = RunConfig.of(BUDGET_BYTES, **({"draft_length": "auto", "device": "cpu"} | options))
    longest = {} if config.draft_length is None else {"longest_draft": config.draft_length}
    budget = Budget(BUDGET_BYTES, 64, on_cpu=True, **longest)
    chooser = replace(chooser_of(model_spec, budget, config), peers=peers)
    return chooser.choose(made, lambda codecs: survey or never(codecs))


def chooser_of(model_spec: ModelSpec, budget: Budget, config: RunConfig) -> PlanChooser:
    prefetches, on_host = config.prefetch != "none", config.host_compute == "auto"
    return PlanChooser(model_spec, budget, config, config.codec, prefetches, on_host)


# In the runtime.


def test_a_draft_that_loses_is_not_loaded(
    model: Path, exact: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "speq")
    slots = {}
    for name, changes in (("wins", {}), ("loses", LOSES)):
        file = written(tmp_path, profile(model, **changes))
        with running(model, codec="raw", profile=file) as generator:
            made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
            runtime, run = generator.runtime, generator.last_run
            assert made.token_ids == exact
            assert (runtime.draft_backend is not None) == (name == "wins")
            assert run is not None
            slots[name] = runtime.plan.slots
            reason = made.stats["planned"]
            assert reason.startswith("raw with" + ("" if name == "wins" else "out"))
            drafted = sum(step.draft_length for step in run.decode if step.drafter is None)
            assert (drafted > 0) == (name == "wins")
            if name == "loses":
                assert "without a draft, though one would fit" in caplog.text
    # The draft's bytes are slots.
    layout = Int4Layout(64, 48)
    gained = LAYERS * EXPERTS * layout.nbytes // 20480
    assert slots["loses"] >= slots["wins"] + gained


def test_the_first_decision_is_made_by_the_profile(model: Path, tmp_path: Path) -> None:
    with running(model, profile=written(tmp_path, profile(model))) as generator:
        generator.generate(PROMPT, max_new_tokens=2 * TOKENS, ignore_eos=True)
        run = generator.last_run
        assert run is not None
        first = run.decode[0]
        assert first.ground == "best" and first.draft_length > 0
        assert first.forecast is not None


def test_without_a_profile_the_first_decision_is_made_by_the_survey(
    model: Path, exact: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: WINS)
    with running(model, profile="none") as generator:
        made = generator.generate(PROMPT, max_new_tokens=2 * TOKENS, ignore_eos=True)
        run = generator.last_run
        assert made.token_ids[:TOKENS] == exact
        assert run is not None and "with a draft, k=" in made.stats["planned"]
        assert run.decode[0].ground == "best" and run.decode[0].draft_length > 0
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: EXPENSIVE)
    with running(model, profile="none") as generator:
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        run = generator.last_run
        assert made.token_ids == exact
        assert "without a draft, k=0" in made.stats["planned"]
        assert run is not None
        assert {step.draft_length for step in run.decode if step.drafter is None} == {0}


@pytest.mark.parametrize(("changes", "codec"), [(SLOW_LINK, "lossless"), (SLOW_ENCODING, "raw")])
def test_the_codec_of_published_experts_is_planned(
    model: Path, exact: list[int], tmp_path: Path, changes: dict[str, Any], codec: str
) -> None:
    file = written(tmp_path, profile(model, **LOSES, **changes))
    with running(model, profile=file) as generator:
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        assert made.token_ids == exact
        assert made.stats["codec"] == generator.runtime.opened.store.codec.name == codec


@pytest.mark.parametrize(("changes", "codec"), [(SLOW_LINK, "lossless"), (SLOW_ENCODING, "raw")])
def test_how_a_first_run_holds_experts_is_planned(
    model: Path,
    exact: list[int],
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    codec: str,
) -> None:
    """A run that leaves a packed copy holds its records, unless encoding them takes too long."""
    monkeypatch.setattr("speq.experts.packed_copy.LEAST_BYTES", 1)
    monkeypatch.setattr("speq.experts.packed_copy.SPARE_SHARE", 0)
    file = written(tmp_path, profile(model, **LOSES, **changes))
    with running(model, profile=file) as generator:
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        generator.runtime.finish_copy()
        assert made.token_ids == exact
        assert made.stats["codec"] == codec
    with running(model, profile=file) as generator:  # from the copy that either has left
        assert isinstance(generator.runtime.opened.store, CopiedExperts)


def spec_without_draft(model: Path) -> ModelSpec:
    with closing(open_model(model)) as opened:
        return ModelSpec.of_draft("model", opened, "float32", None)


def encoding_s(words_bytes: int, encodes: float = 1e6, reads: float = 1e9) -> float:
    """What encoding adds to reading where one thread reads three matrices, and one encodes them."""
    read_s = encoded_s = 0.0
    for _ in range(3):
        read_s += words_bytes / 3 / reads
        encoded_s = max(encoded_s, read_s) + words_bytes / 3 / encodes
    return encoded_s - read_s


def test_a_miss_of_a_first_run_is_half_of_words_and_half_of_a_record(model: Path) -> None:
    made = profile(model, encode_bytes_per_s={"lossless": 1e6})
    model_spec = replace(spec_without_draft(model), copied_slot_bytes=16384)
    words_bytes = 3 * 64 * 48 * 2
    raw, records = (
        Assumptions.of_profile(made, model_spec.shape).with_encoding_cost(way, words_bytes, True)
        for way in candidates_of(model_spec, on_cpu=True)
    )
    assert (raw.codec, raw.encoded, raw.moved_bytes) == ("raw", False, raw.slot_bytes)
    assert (records.codec, records.encoded, records.slot_bytes) == ("lossless", True, 16384)
    assert records.moved_bytes == (words_bytes + 16384) // 2
    assert records.encode_s == pytest.approx(encoding_s(words_bytes) / 2)


def test_residuals_are_planned_beside_a_draft(
    model: Path, exact: list[int], tmp_path: Path
) -> None:
    """Where slots are what counts, and drafts stand."""
    file = written(tmp_path, profile(model, acceptance=1.0, **SLOW_LINK))
    with running(model, profile=file, draft_length=2) as generator:
        assert generator.runtime.opened.store.codec.name == "residual"
        made = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        assert made.token_ids == exact


def test_a_kept_profile_is_found_and_none_is_none(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: WINS)
    made = profile(model, **LOSES)
    path = profiles.profile_path(made.key)
    assert path is not None and path.is_relative_to(home)
    profiles.write(made, path)
    with running(model, codec="raw") as generator:
        assert generator.runtime.draft_backend is None
    with running(model, codec="raw", profile="none") as generator:
        assert generator.runtime.draft_backend is not None
    path.write_text("{")
    with pytest.raises(SpeqError, match=r"is not valid JSON: .* with `speq tune`$"):
        Generator.from_pretrained(model, BUDGET_BYTES, device="cpu")


def test_what_a_way_takes_is_what_its_run_takes(model: Path) -> None:
    """Item by item, but for slots of a size that is estimated."""
    opened = open_model(model)
    codes = DenseDraft.of("auto", opened.shape.draft_layers)
    model_spec = ModelSpec.of_draft("model", opened, "float32", Int4Layout(64, 48), codes)
    opened.close()
    budget = Budget(BUDGET_BYTES, 64, on_cpu=True)
    for codec, draft in (("lossless", "none"), ("residual", "auto")):
        with running(model, codec=codec, draft=draft, profile="none") as generator:
            real = generator.runtime.plan.items
        way = next(
            way
            for way in candidates_of(model_spec, on_cpu=True)
            if way.encoded and (way.codec, way.drafts) == (codec, draft == "auto")
        )
        items = fit(model_spec, way, budget)[1].items
        assert items | {"slots": 0} == real | {"slots": 0}
        assert items["slots"] == pytest.approx(real["slots"], rel=0.05)


# Heads.

# One pass of a head takes nothing, and its tokens stand: beside it an INT4 copy only takes room.
STANDS = (1.0, 1.0)


@pytest.fixture
def headed(model: Path, tmp_path: Path) -> Path:
    """The model with a head of random weights that claims to be good."""
    path = tmp_path / "headed"
    shutil.copytree(model, path, ignore=shutil.ignore_patterns(".speq"))
    write_random_head(path, stand=STANDS)
    return path


def test_a_head_that_is_expected_to_win_drafts(
    headed: Path, exact: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: WINS)
    with running(headed, profile="none", codec="raw", reader_threads=1) as generator:
        made = generator.generate(PROMPT, max_new_tokens=2 * TOKENS, ignore_eos=True)
        assert generator.runtime.residency_plan.drafter == "head"
        assert made.stats["planned"].startswith("raw with a head, k=")
        assert made.token_ids[:TOKENS] == exact
        assert generator.runtime.draft_backend is None
        run = generator.last_run
    assert run is not None and run.decode[0].ground == "best" and run.decode[0].draft_length > 0


@pytest.mark.parametrize(
    ("stand", "options", "drafter"),
    [
        (STANDS, {"drafter": "int4"}, "int4"),
        (STANDS, {"draft": "none"}, "none"),
        (STANDS, {"draft_length": 0}, "none"),
        ((0.0,), {}, "int4"),
        ((), {}, "int4"),
    ],
)
def test_heads_that_are_not_wanted_draft_nothing(
    stand: tuple[float, ...],
    options: dict[str, Any],
    drafter: str,
    headed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_random_head(headed, stand=stand)
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: WINS)
    with running(headed, profile="none", codec="raw", **options) as generator:
        assert generator.runtime.residency_plan.drafter == drafter
        assert "head" not in generator.runtime.plan.items


def test_a_damaged_head_that_nobody_asked_for_is_left_aside(
    headed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProcessorTrial, "survey", lambda trial, codecs: WINS)
    path = head_path(headed)
    path.write_bytes(path.read_bytes()[:-4])
    with running(headed, profile="none", codec="raw") as generator:
        assert generator.runtime.residency_plan.drafter == "int4"
    assert "the head beside the model is not used" in caplog.text and "truncated" in caplog.text


# What is left open.


@pytest.mark.parametrize(
    ("changes", "options", "codec", "drafts", "weighed"),
    [
        ({}, {"codec": "raw"}, "raw", True, True),
        (LOSES, {"codec": "raw"}, "raw", False, True),
        # A length above 0, a draft or a drafter by name ask for one; 0 and none for none.
        (LOSES, {"codec": "raw", "draft_length": 3}, "raw", True, False),
        (LOSES, {"codec": "raw", "draft": "somewhere"}, "raw", True, False),
        (LOSES, {"codec": "raw", "drafter": "int4"}, "raw", True, False),
        ({}, {"codec": "raw", "draft_length": 0}, "raw", False, False),
        ({}, {"codec": "raw", "draft": "none"}, "raw", False, False),
        ({}, {"codec": "raw", "drafter": "none"}, "raw", False, False),
        (SLOW_LINK, {"draft": "none"}, "lossless", False, True),
        (SLOW_LINK, {"draft_length": 0}, "lossless", False, True),
        (SLOW_LINK | {"acceptance": 1.0}, {"draft": "somewhere"}, "residual", True, True),
        # Residuals are nothing without a draft.
        (LOSES, {"codec": "residual"}, "residual", True, False),
        # Speeds that were not measured are not weighed.
        (SLOW_LINK | {"draft_token_s": 0.0}, {"draft": "none"}, "lossless", False, True),
        (SLOW_LINK | {"encode_bytes_per_s": {}} | LOSES, {}, "raw", False, True),
        (SLOW_LINK | {"decode_bytes_per_s": {"raw": 1e9}} | LOSES, {}, "raw", False, True),
    ],
)
def test_options_are_respected(
    model: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    codec: str,
    drafts: bool,
    weighed: bool,
) -> None:
    """weighed: whether there was anything to weigh, so that the planner has a reason."""
    settled = planned(model, profile(model, **changes), **options)
    assert (settled.residency_plan.codec, settled.residency_plan.drafts) == (codec, drafts)
    assert (settled.reason is not None) == weighed
    could_draft = "none" not in options.values() and options.get("draft_length") != 0
    assert settled.gives_up_draft == (could_draft and not drafts)
    if settled.reason is not None:
        assert settled.reason.startswith(codec)
        assert (f"{'with' if drafts else 'without'} a draft, k=") in settled.reason.partition(":")[
            0
        ]


def test_with_further_gpus_a_codec_over_a_draft_is_not_chosen(model: Path) -> None:
    """They lack the codes: what the profile finds best alone would not load."""
    made = profile(model, **SLOW_LINK | {"acceptance": 1.0})
    assert planned(model, made, draft="somewhere").residency_plan.codec == "residual"
    peers = Peers((1 << 20,), 64, UsedExperts(LAYERS, EXPERTS).shares, TOP_K, 128)
    plan = planned(model, made, peers=peers, draft="somewhere").residency_plan
    assert (plan.codec, plan.drafts) == ("lossless", True) and plan.peers[0] > 0
    with pytest.raises(OptionError, match="codec residual are read over a draft's codes"):
        planned(model, made, peers=peers, codec="residual")


def test_drafts_that_were_not_timed_leave_all_to_a_survey(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "speq")
    settled = planned(model, profile(model, draft_token_s=0.0), WINS, codec="raw")
    assert settled.reason is not None and settled.residency_plan.drafts
    assert "the profile was measured without one" in caplog.text
    assert (
        "(measured on this machine just now; acceptance 90% assumed; routes of DeepSeek"
        in settled.reason
    )


@pytest.mark.parametrize(
    ("survey", "options", "codec", "drafts"),
    [
        (WINS, {"codec": "raw"}, "raw", True),
        (EXPENSIVE, {"codec": "raw"}, "raw", False),
        # Asked for, a draft is held whatever is expected of it.
        (replace(EXPENSIVE, expert_s=RAW_FAST), {"draft_length": 4}, "raw", True),
        (replace(EXPENSIVE, expert_s=RAW_FAST), {"drafter": "int4"}, "raw", True),
        # What computes faster, and what has room for more where misses count.
        (replace(EXPENSIVE, expert_s=RAW_FAST), {}, "raw", False),
        (replace(EXPENSIVE, expert_s=EVEN | {"lossless": 0.0}), {}, "lossless", False),
        (replace(EXPENSIVE, link_bytes_per_s=1e5), {"draft": "none"}, "lossless", False),
        (replace(EXPENSIVE, miss_s=1.0), {"draft": "none"}, "lossless", False),
        (replace(WINS, link_bytes_per_s=1e5), {"drafter": "int4"}, "residual", True),
        # What encodes slowly is not worth its room.
        (
            replace(EXPENSIVE, encode_bytes_per_s=dict.fromkeys(ENCODES, 1e4)),
            {"draft": "none"},
            "raw",
            False,
        ),
    ],
)
def test_a_survey_decides_as_a_profile_does(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    survey: Survey,
    options: dict[str, Any],
    codec: str,
    drafts: bool,
) -> None:
    quick = type("Quick", (), {"name": "cpu", "reason": "quick"})()
    monkeypatch.setattr("speq.kernels.library.backend_of", lambda op, device: quick)
    settled = planned(model, None, survey, **options)
    assert (settled.residency_plan.codec, settled.residency_plan.drafts) == (codec, drafts)
    assert settled.reason is not None
    could_draft = options.get("draft") != "none"
    assert settled.gives_up_draft == (could_draft and not drafts)


def test_experts_that_only_the_reference_runs_are_not_encoded(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "speq")
    slow = type("Slow", (), {"name": "reference", "reason": "nothing was built"})()
    monkeypatch.setattr("speq.kernels.library.backend_of", lambda op, device: slow)
    settled = planned(model, None, draft="none")  # one way is left: nothing to survey
    assert settled.residency_plan.codec == "raw" and settled.reason is None
    assert "lossless has no fast kernel here (nothing was built)" in caplog.text
    # Of a large model, whose survey is kept, it is told what the one way is expected to take.
    assert settled.residency_plan.expected is None
    monkeypatch.setattr("speq.planning.choose_plan.LEAST_BYTES", 1)
    weighed = planned(model, None, WINS, draft="none").residency_plan
    assert replace(weighed, expected=None) == settled.residency_plan and weighed.tpot_s > 0


def test_a_little_that_a_draft_is_expected_to_save_is_not_enough(model: Path) -> None:
    gains = []
    for pass_s in (0.0, 0.01, 0.02, 0.03, 0.04, 0.08):
        settled = planned(model, None, replace(WINS, pass_s=pass_s), codec="raw")
        assert settled.reason is not None
        found = re.search(r"k=\d+: ([\d.]+) ms .*draft ([\d.]+)\) \(", settled.reason)
        assert found is not None
        chosen, other = float(found[1]), float(found[2])
        gains.append(1 - (chosen / other if settled.residency_plan.drafts else other / chosen))
        assert settled.residency_plan.drafts == (gains[-1] > 0.05)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.05 and any(0 < gain < 0.05 for gain in gains)


@pytest.mark.parametrize(
    ("options", "drafter", "held"),
    [
        ({}, "int4", True),
        ({"drafter": "int4"}, "int4", True),
        ({"drafter": "ngram"}, "ngram", False),
        ({"drafter": "ngram", "draft": "none"}, "ngram", False),
        ({"drafter": "ngram", "codec": "residual"}, "ngram", True),
        ({"drafter": "none"}, "none", False),
        ({"drafter": "none", "codec": "residual"}, "none", True),
        ({"draft": "none"}, "none", False),
        ({"draft_length": 0}, "none", False),
        ({"draft_length": 0, "codec": "residual"}, "none", True),
    ],
)
def test_who_drafts_is_apart_from_whether_the_copy_is_held(
    model: Path, options: dict[str, Any], drafter: str, held: bool
) -> None:
    settled = planned(model, None, WINS, **({"codec": "raw"} | options))
    assert settled.residency_plan.drafter == drafter
    assert (settled.residency_plan.draft_bytes > 0) == (settled.memory.items["draft"] > 0) == held


def test_int4_drafts_need_the_copy(model: Path) -> None:
    with pytest.raises(SpeqError, match="drafter int4 drafts with the INT4 copy and draft is none"):
        planned(model, None, drafter="int4", draft="none")


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_the_draft_goes_exactly_where_it_leaves_fewer_than_two_slots(
    model: Path, codec: str
) -> None:
    opened = open_model(model)
    model_spec = ModelSpec.of_draft("model", opened, "float32", Int4Layout(64, 48))
    opened.close()
    config = RunConfig.of(BUDGET_BYTES, codec=codec, device="cpu")
    fits = []
    for size in range(1 << 20, 3 << 20, 4096):
        try:
            budget = Budget(size, 64, on_cpu=True)
            made = chooser_of(model_spec, budget, config).choose(None, lambda codecs: WINS)
        except SpeqError:
            continue
        fits.append((size, made.residency_plan.drafts, made.memory.slots))
    without = [slots for _, drafts, slots in fits if not drafts]
    first = next(at for at, (_, drafts, _) in enumerate(fits) if drafts)
    assert len(without) == first > 0
    assert fits[first][2] == 2
    assert all(drafts for _, drafts, _ in fits[first:])


def test_a_fixed_length_is_what_a_draft_is_weighed_at(model: Path) -> None:
    settled = planned(model, profile(model), draft_length=5)
    assert settled.reason is not None and "with a draft, k=5: " in settled.reason


def test_a_draft_that_fetches_ahead_is_expected_to_be_faster(model: Path) -> None:
    made = profile(model, link=((20480.0, 1e7),))
    token_ms = []
    for prefetch in ("three-phase", "none"):
        settled = planned(model, made, codec="raw", prefetch=prefetch)
        assert settled.reason is not None
        found = re.search(r"raw with a draft(?:, k=\d+:)? ([\d.]+)", settled.reason)
        assert found is not None
        token_ms.append(float(found[1]))
    assert token_ms[0] < 0.97 * token_ms[1]


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        ({}, 12),
        ({"latency_slo_ms": 750}, 3),  # 0.1 s and some more, and 0.2 s for each drafted token
        ({"latency_slo_ms": 250}, 0),
        ({"latency_slo_ms": 50}, 12),  # none does, which is left to the run
        ({"tpot_slo_ms": 195}, 2),  # 0.3 / 1.9, 0.5 / 2.71, 0.7 / 3.44 s and some more
        ({"tpot_slo_ms": 195, "latency_slo_ms": 350}, 1),
    ],
)
def test_no_draft_is_longer_than_objectives_allow_by_the_profile(
    model: Path, limits: dict[str, int], longest: int
) -> None:
    made = profile(model, draft_token_s=0.2, link=((20480.0, 1e12),))
    assert planned(model, made, codec="raw", draft="folder", **limits).longest == longest


def test_the_governor_keeps_to_the_bound(model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, profile(model, draft_token_s=0.02))
    with running(model, codec="raw", profile=file, latency_slo_ms=170) as generator:
        governor = generator.runtime.engine.governors.alone
        assert isinstance(governor, AdaptiveDraftLength)
        assert governor.longest == 3


def test_a_length_that_is_fixed_is_not_bounded(model: Path) -> None:
    assert planned(model, profile(model, draft_token_s=0.2), draft_length=8).longest == 12


def test_a_packed_model_keeps_its_codec(model: Path, tmp_path: Path) -> None:
    opened = open_model(model)
    assert isinstance(opened.store, SafetensorsExpertStore)
    codec = codec_of("lossless", opened.store.codec.shape)
    pack(opened.checkpoint, opened.store, tmp_path / "packed", Packing(codec))
    opened.close()
    for changes, drafter in (({}, "int4"), (LOSES, "none")):
        settled = planned(tmp_path / "packed", profile(tmp_path / "packed", **changes))
        assert (settled.residency_plan.codec, settled.residency_plan.drafter) == (
            "lossless",
            drafter,
        )
        assert settled.reason is not None and "encoded" not in settled.reason
    assert planned(tmp_path / "packed", profile(model), draft="none").reason is None


def test_a_miss_of_published_experts_moves_words_and_is_encoded(model: Path) -> None:
    made = profile(model, encode_bytes_per_s={"lossless": 1e6})
    model_spec = spec_without_draft(model)
    assumptions = Assumptions.of_profile(made, model_spec.shape)
    words_bytes = 3 * 64 * 48 * 2
    candidates = {
        (way.codec, way.encoded): replace(
            assumptions.with_encoding_cost(way, words_bytes, True), slots=30
        )
        for way in candidates_of(model_spec, on_cpu=True)
    }
    assert set(candidates) == {("raw", False), ("lossless", False), ("lossless", True)}
    encoded, packed = candidates["lossless", True], candidates["lossless", False]
    added_s = pytest.approx(encoding_s(words_bytes))
    assert (encoded.moved_bytes, encoded.encode_s) == (words_bytes, added_s)
    for encodes in (1e8, 1e9, 3e9):  # slower than the disk, as fast, and faster
        rates = {"lossless": encodes}
        other = Assumptions.of_profile(replace(made, encode_bytes_per_s=rates), model_spec.shape)
        timed = other.with_encoding_cost(encoded, words_bytes, True)
        assert timed.encode_s == pytest.approx(encoding_s(words_bytes, encodes))
    assert (packed.moved_bytes, packed.encode_s) == (packed.read_bytes, 0)
    assert encoded.read_bytes == packed.read_bytes < words_bytes
    # In host memory they lie encoded, whatever the disk has.
    [held] = [way for way in candidates_of(model_spec, on_cpu=False) if way.encoded]
    assert assumptions.with_encoding_cost(held, words_bytes, False) == replace(
        packed, encoded=True, slots=0
    )
    outlook = assumptions.outlook(LAYERS, model_spec.pass_bytes, [encoded])
    step = outlook.step_estimate(encoded, 0)
    missed = step.moved_bytes / words_bytes
    assert missed > 0
    assert step.new_s == pytest.approx(missed * words_bytes / 1e9)
    resident_s = outlook.step_estimate(replace(encoded, encode_s=0.0), 0).verify_s
    assert step.verify_s == pytest.approx(resident_s + missed * encoding_s(words_bytes))
    assert encoded.name == "lossless encoded as read, without a draft"


def test_the_host_of_a_profile_counts_where_it_computes(model: Path) -> None:
    """Where it computes nothing, all is as if it had not been timed."""
    timed = profile(model, host=((1.0, 1e-5),), **LOSES)
    alone = planned(model, replace(timed, host=()))
    assert planned(model, timed, host_compute="none") == alone
    assert alone.residency_plan.step.host_s == 0
    assert planned(model, timed).residency_plan.step.host_s > 0


# Files.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "others"}, "is of another model than .*, by the digest of its weights; run"),
        ({"device": "cuda: some"}, "was measured on cuda: some and this is cpu: .*; run"),
    ],
)
def test_profiles_of_others_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    made = profile(model)
    file = written(tmp_path, replace(made, key=replace(made.key, **changes)))
    with pytest.raises(SpeqError, match=sentence):
        Generator.from_pretrained(model, BUDGET_BYTES, device="cpu", profile=file)


def test_a_file_of_another_budget_or_version_is_said_to_be(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "speq")
    made = profile(model)
    key = replace(made.key, budget_bytes=1 << 30, version="0.0")
    file = written(tmp_path, replace(made, key=key))
    opened = open_model(model)
    try:
        assert profiles.find(str(file), opened, "cpu", BUDGET_BYTES) == replace(made, key=key)
    finally:
        opened.close()
    assert "within 1 GiB; its speeds are taken for 2.5 MiB too" in caplog.text
    assert "measured by version 0.0 of speq" in caplog.text


@pytest.mark.parametrize(
    ("option", "sentence"),
    [("", "profile is empty; give auto, none, or a file"), ("/no/such", "cannot be read")],
)
def test_no_file(model: Path, option: str, sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        Generator.from_pretrained(model, BUDGET_BYTES, device="cpu", profile=option)


def test_the_command_says_why(model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, profile(model, **LOSES))
    run = ("generate", "--model", model, "--memory-budget", BUDGET_BYTES, "--prompt", PROMPT)
    options = ("--device", "cpu", "--codec", "raw", "--draft-length", "auto", "--profile", file)
    arguments = [*map(str, (*run, *options, "--max-new-tokens", 2, "--explain"))]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "planned: raw without a draft, k=0" in " ".join(result.stderr.split())
    # `speq plan` weighs what a run of these files would, beside what packed ones would give.
    plan = ("plan", model, "--memory-budget", BUDGET_BYTES, "--profile", file, "--json", "-")
    found = CliRunner().invoke(
        app, [*map(str, (*plan, "--context-length", 64))], catch_exceptions=False
    )
    candidates = [
        (e["codec"], e["encoded"], e["draft"]) for e in json.loads(found.stdout)["candidates"]
    ]
    assert len(candidates) == len(set(candidates)) == 8
    assert {codec for codec, encoded, _ in candidates if encoded} == {"lossless", "residual"}


# The governor.


def test_a_governor_begins_with_what_is_known(model: Path) -> None:
    made = profile(model)
    governor = make_governor(None, Objectives(), Prior.of_profile(made))
    assert isinstance(governor, AdaptiveDraftLength)
    assert governor.acceptance.overall == pytest.approx(0.9)
    assert governor.decide().ground == "best"
    # Experts that were not counted, and drafts that were not timed, are measured first.
    uncounted = make_governor(None, Objectives(), Prior.of_profile(replace(made, distinct=())))
    assert uncounted.decide().reason == "plain decoding is measured first"
    undrafted = replace(made, draft_token_s=0.0, acceptance=None)
    untimed = make_governor(None, Objectives(), Prior.of_profile(undrafted))
    assert untimed.decide().reason == "drafting is measured first"


def test_encoding_is_timed_by_all_threads_together() -> None:
    """By a clock that says that two seconds went by."""
    shape = ExpertShape(64, 48, torch.bfloat16)
    for codec in ("lossless", "residual"):
        times = iter((3.0, 5.0))
        speed = codec_speed.encode_bytes_per_s(codec_of(codec, shape), 3, times.__next__)
        assert speed == 3 * codec_speed.ENCODED * shape.nbytes / 2


# On a device with memory of its own.


def on_device(model: Path, survey: Survey | None, budget_bytes: int) -> PlanDecision:
    """What a run on a device with memory of its own would settle on, by made-up times."""
    opened = open_model(model)
    try:
        model_spec = ModelSpec.of_draft("model", opened, "float32", Int4Layout(64, 48))
    finally:
        opened.close()
    tried: list[str] = []

    def surveyed(codecs: Sequence[str]) -> Survey:
        tried.extend(codecs)
        return survey or never(codecs)

    config = RunConfig.of(budget_bytes, device="cuda", draft_length=0)
    budget = Budget(budget_bytes, 64, on_cpu=False, longest_draft=0)
    settled = chooser_of(model_spec, budget, config).choose(None, surveyed)
    assert tried == ([] if survey is None else ["raw", "lossless"])
    return settled


@pytest.mark.parametrize(("run_us", "codec"), [(11, "lossless"), (500, "raw")])
def test_bytes_on_a_devices_link_are_weighed_against_decoding(
    run_us: int, codec: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = type("Fast", (), {"name": "cuda", "reason": "fast"})()
    monkeypatch.setattr("speq.kernels.library.backend_of", lambda op, device: fast)
    survey = Survey("cuda", 18432 / 100e-6, 1e12, 0.0, 0.0)
    survey = replace(survey, expert_s={"raw": 10e-6, "lossless": run_us * 1e-6})
    settled = on_device(model, survey, 5 << 19)
    assert settled.residency_plan.codec == codec
    assert settled.residency_plan.encoded == (codec == "lossless")


def test_a_device_without_a_fast_kernel_takes_words_as_they_are(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "speq")
    slow = type("Slow", (), {"name": "reference", "reason": "nothing was built"})()
    monkeypatch.setattr("speq.kernels.library.backend_of", lambda op, device: slow)
    assert on_device(model, None, 5 << 19).residency_plan.codec == "raw"
    assert "lossless has no fast kernel here (nothing was built)" in caplog.text


class Scripted:
    """A device on the CPU: copies are made at once, and events are a second apart more each time.
    gives_back: times that it was asked for what it keeps.
    """

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.now_s, self.events, self.gives_back = 0.0, 0, 0

    @property
    def compute(self) -> "Scripted":
        return self

    def stream(self) -> "Scripted":
        return self

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> "Instant":
        self.now_s += self.events
        self.events += 1
        return Instant(self.now_s)

    def elapsed_s(self, start: "Instant", end: "Instant") -> float:
        return end.at_s - start.at_s

    def staging(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def release_cached(self) -> None:
        self.gives_back += 1


@dataclass(frozen=True)
class Instant:
    at_s: float

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_an_experts_use_is_timed_by_the_devices_events(codec: str, model: Path) -> None:
    opened = open_model(model)
    try:
        store = opened.store
        given: Any = Scripted()
        made = codec_of(codec, store.codec.shape)
        # Room for eight experts: between the nth pair of events there are 2n - 1 seconds.
        limit = 8 * made.shape.nbytes
        use = ExpertTimes.of(store, given, opened.shape, torch.float32, limit, made)
        assert use.copy_s == pytest.approx(sum(2 * n - 1 for n in range(2, 9)) / 7)
        assert use.run_s == pytest.approx((2 * 9 - 1) / (TIMED_PASSES * TOP_K))
        assert given.gives_back == 1
        few: Any = Scripted()  # a token's experts are run, whatever is allowed
        assert (
            ExpertTimes.of(store, few, opened.shape, torch.float32, 1, made).copy_s
            == (3 + 5 + 7) / 3
        )
        # A survey has bytes of the largest record by the time of a copy, and of a run.
        third: Any = Scripted()
        trial = DeviceTrial(store, third, opened.shape, torch.float32, limit, graphs=True)
        survey = trial.survey([codec])
        assert survey.link_bytes_per_s == pytest.approx(use.record_bytes / use.copy_s)
        assert survey.memory_bytes_per_s == pytest.approx(use.record_bytes / use.run_s)
        assert survey.expert_s == {codec: pytest.approx(use.run_s)}
        assert (codec == "raw") == (use.record_bytes == made.shape.nbytes)
    finally:
        opened.close()


def test_timed_experts_are_records_of_the_codec(model: Path) -> None:
    opened = open_model(model)
    try:
        store = opened.store
        lossless = codec_of("lossless", store.codec.shape)
        records = some_records(store, lossless, 3)
        words = expert_slot(store)
        for at, record in zip(
            (0, LAYERS * EXPERTS // 3, 2 * LAYERS * EXPERTS // 3), records, strict=True
        ):
            store.read(*divmod(at, EXPERTS), words)
            for ours, theirs in zip(
                lossless.decode(record), store.codec.decode(words), strict=True
            ):
                assert torch.equal(ours, theirs)
        slots = allocate_aligned(3, lossless.slot_bytes)
        device: Any = Scripted()
        copied_s(device, slots, records)
        for slot, record in zip(slots, records, strict=True):
            assert torch.equal(slot[: len(record)], record)
    finally:
        opened.close()
