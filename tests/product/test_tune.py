"""`speq tune`: what it measures, where it is kept, and who goes by it."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from speq import SpeqError, __version__
from speq.cli import app
from speq.experts.codec import ExpertShape, codec_of
from speq.governor.prior import Prior
from speq.governor.profile import Profile, ProfileKey
from speq.layers.expert_counts import ExpertCounts
from speq.measure import codec_speed, link, tune
from speq.measure.routes import distinct_points, expert_counts
from speq.measure.settings import TuneSettings
from speq.models.opened import open_model
from speq.options.declared import build
from speq.planning import profiles, used_experts
from speq.planning.assumptions import Assumptions
from speq.planning.cost.locality import Locality
from speq.planning.model_spec import ModelSpec
from speq.stats import StepStats
from tests.helpers.paths import DATA
from tests.helpers.told import Told

Folder = Callable[[str], Path]
KEY = ProfileKey("weights", "cpu: some", 1 << 20, "1")
BUDGET = "64MiB"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def profile_of(path: Path) -> Profile:
    return Profile.from_entries(json.loads(path.read_text()))


def step(k: int, accepted: int, draft_s: float, verify_s: float, requests: int) -> StepStats:
    return StepStats(
        "decode",
        draft_length=k,
        accepted=accepted,
        draft_s=draft_s,
        verify_s=verify_s + 0.5,
        stall_s=0.5,
        requests=requests,
    )


def test_figures_of_steps_by_hand() -> None:
    figures = tune.figures_of(
        {
            0: [step(0, 0, 0.0, 0.1, 8), step(0, 0, 0.0, 0.1, 10), step(0, 0, 0.0, 0.9, 9)],
            2: [step(2, 2, 0.21, 0.2, 14), step(2, 1, 0.21, 0.2, 16)],
            4: [step(4, 0, 0.41, 0.3, 20)],
        }
    )
    assert figures["verify"] == (
        (1.0, pytest.approx(0.1)),
        (3.0, pytest.approx(0.2)),
        (5.0, pytest.approx(0.3)),
    )
    assert figures["distinct"] == ((1.0, 9.0), (3.0, 15.0), (5.0, 20.0))
    assert figures["draft_base_s"] == pytest.approx(0.01)
    assert figures["draft_token_s"] == pytest.approx(0.1)
    # Of the three drafts 2, 2 and 1 tokens were tried and 2, 1 and 0 stood.
    assert figures["acceptance"] == pytest.approx(3 / 5)


def test_verifications_that_readers_disturb_do_not_count() -> None:
    """Readers took the processor in three passes of four."""
    disturbed = [step(0, 0, 0.0, verify_s, 8) for verify_s in (0.16, 0.1, 0.13, 0.15)]
    assert tune.figures_of({0: disturbed})["verify"] == ((1.0, pytest.approx(0.13)),)
    quiet = [step(0, 0, 0.0, 0.1, 8), *disturbed]
    assert tune.figures_of({0: quiet})["verify"] == ((1.0, pytest.approx(0.1)),)


def test_what_the_host_computes_is_no_part_of_a_verification() -> None:
    """It takes its time beside the copies that are waited for, 0.5 s."""
    for host_s, verify_s in ((0.2, 0.3), (0.7, 0.1)):
        found = tune.figures_of({0: [replace(step(0, 0, 0.0, 0.3, 8), host_s=host_s)]})
        assert found["verify"] == ((1.0, pytest.approx(verify_s)),)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([], (0.0, 0.0)),
        ([(3, 0.6)], (0.0, 0.2)),
        ([(1, 3.0), (2, 5.0), (4, 9.0)], (1.0, 2.0)),
        # Through what cannot be a time: a draft that gets faster, or that begins before it begins.
        ([(1, 3.0), (3, 1.0)], (0.0, 1.0)),
        ([(1, 1.0), (3, 5.0)], (0.0, 1.5)),
    ],
)
def test_line_through(points: list[tuple[int, float]], line: tuple[float, float]) -> None:
    assert tune.line_through(points) == pytest.approx(line)


def test_distinct_points_by_hand() -> None:
    routes = [[[0, 1], [0, 1], [2, 3], [4, 5], [0, 1], [0, 2]]]
    # Windows of one token, and of two: {0, 1}, {2, 3, 4, 5} and {0, 1, 2}.
    assert distinct_points(routes, 8) == ((1.0, 2.0), (2.0, 3.0))
    assert distinct_points([[]], 8) == ()


def test_every_phase_is_told_of(
    tiny_bfloat16: Folder, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(link, "READ_SIZES", (4096, 8192, 1 << 30))
    monkeypatch.setattr(codec_speed, "LAYER_BYTES", 1 << 18)
    told = Told()
    given = {"memory_budget": BUDGET, "prompts": prompts, "num_prompts": 1, "max_new_tokens": 40}
    settings = build(TuneSettings, given | {"device": "cpu"})
    tune.measure_profile(tiny_bfloat16("qwen2_moe"), settings, told)
    assert told.steps("timing kernels of each codec") == 3
    assert told.steps("timing encoders") == 2
    assert told.steps("measuring the link") == 2
    steps = [call[1:] for call in told.calls if call[0] == "measuring drafts and verifications"]
    assert (steps[0], steps[-1]) == ((0, 39), (39, 39))
    assert steps == sorted(steps)
    assert not told.unfinished


@pytest.mark.wide
def test_a_profile_is_measured_kept_and_gone_by(
    tiny_bfloat16: Folder, prompts: Path, home: Path
) -> None:
    model = tiny_bfloat16("qwen2_moe")
    settings = ("--prompts", prompts, "--max-new-tokens", 40, "--device", "cpu")
    text = run("tune", model, "--memory-budget", BUDGET, *settings)
    opened = open_model(model)
    try:
        key = profiles.key_of(opened, "cpu", 64 << 20)
        expert_bytes = opened.store.codec.shape.nbytes
    finally:
        opened.close()
    made = profiles.read_kept(key)
    assert made is not None and str(profiles.profile_path(key)) in text.replace("\n", "")
    assert (made.key.version, made.key.budget_bytes) == (__version__, 64 << 20)
    assert made.expert_bytes == expert_bytes
    assert made.link[-1][0] == expert_bytes
    assert set(made.decode_bytes_per_s) == {"raw", "lossless", "residual"}
    assert set(made.encode_bytes_per_s) == {"lossless", "residual"}
    rows = [rows for rows, _ in made.verify]
    assert rows == [1, 2, 3, 5, 9, 13]
    layers, top_k, experts = 2, 2, 8
    distinct = dict(made.distinct)
    assert distinct[1] == layers * top_k
    assert all(layers * top_k <= count <= layers * experts for count in distinct.values())
    assert made.draft_token_s > 0 and made.first_fetch_s > 0
    assert made.acceptance is not None and 0 <= made.acceptance <= 1
    assert made.routes[0] == (1, top_k)
    # Of two texts, of all their tokens but the last ones, which no pass has run.
    counts = ExpertCounts.read(kept_counts(model))
    assert (counts.num_layers, counts.num_experts, counts.top_k) == (layers, experts, top_k)
    assert 40 <= counts.tokens <= 2 * 40
    single_s = dict(made.verify)[1]
    for rows, verify_s in made.verify[1:]:
        shown = next(line for line in text.splitlines() if f"T(1) / T({rows:.0f})" in line)
        assert f"{single_s / verify_s:.2f}" in shown
    # The plan of the same budget goes by it; that of another does not.
    plan = ("plan", model, "--device", "cpu", "--context-length", 64, "--json", "-")
    found = json.loads(run(*plan, "--memory-budget", BUDGET))["assumptions"]
    assert found["machine"] == f"profile measured on {key.device}"
    assert found["acceptance"] == made.acceptance
    other = json.loads(run(*plan, "--memory-budget", "32MiB"))["assumptions"]
    assert other["machine"] == "measured on this machine just now; acceptance 90% assumed"


def kept_counts(model: Path) -> Path:
    with closing(open_model(model)) as opened:
        path = used_experts.counts_path(opened.checkpoint)
    assert path is not None
    return path


def test_counts_of_routes_by_hand() -> None:
    routes = [[[0, 1], [1, 2]], [[3, 2], [3, 0]]]
    counted = ExpertCounts("a model", 2, 2, [[1, 2, 1, 0], [1, 0, 1, 2]])
    assert expert_counts("a model", routes, 4) == counted


def test_without_room_for_a_draft_there_is_less_to_measure(bundled: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    settings = ("--num-prompts", 1, "--max-new-tokens", 33, "--device", "cpu")
    run("tune", bundled, "--memory-budget", "16MiB", *settings, "--out", out)
    made = profile_of(out)
    assert [rows for rows, _ in made.verify] == [1]
    assert (made.draft_token_s, made.acceptance) == (0.0, None)
    with pytest.raises(SpeqError, match="exists already"):
        run("tune", bundled, "--memory-budget", "16MiB", *settings, "--out", out)


def test_profiles_are_told_apart_by_all_of_their_key(home: Path) -> None:
    keys = [
        KEY,
        replace(KEY, model="others"),
        replace(KEY, device="cuda: some"),
        replace(KEY, budget_bytes=2 << 20),
        replace(KEY, version="2"),
    ]
    paths = {profiles.profile_path(key) for key in keys}
    assert len(paths) == len(keys) and None not in paths
    assert profiles.read_kept(KEY) is None
    first = Profile(KEY, ((1.0, 1.0),), 0.0, 0.0, 1, 0.0, 0.0, ((1.0, 1.0),))
    path = profiles.profile_path(KEY)
    assert path is not None
    profiles.write(first, path)
    assert profiles.read_kept(KEY) == first
    profiles.write(replace(first, key=keys[1]), path)
    with pytest.raises(SpeqError, match="remove it"):
        profiles.read_kept(KEY)


def test_a_user_without_a_home_names_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert profiles.profile_path(KEY) is None
    assert profiles.read_kept(KEY) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"acceptance": 1.5}, "acceptance of a profile is 1.5"),
        ({"decode_bytes_per_s": {"raw": 0.0}}, "raw in a profile is 0.0; it must be from 1 to"),
        ({"routes": ((2.0, 3.0), (1.0, 2.0))}, "routes of a profile"),
        ({"host": ((1.0, 0.0),)}, "host of a profile"),
    ],
)
def test_profiles_that_nothing_measured(changes: dict[str, object], sentence: str) -> None:
    made = Profile(KEY, ((1.0, 1.0),), 0.0, 0.0, 1, 0.0, 0.0, ((1.0, 1.0),))
    with pytest.raises(SpeqError, match=sentence):
        replace(made, **changes)
    assert (
        Profile.from_entries(json.loads(replace(made, acceptance=0.5).to_json())).acceptance == 0.5
    )


def test_the_host_of_a_profile_is_planned_with() -> None:
    """An expert of 6 bytes takes 2 s on the host: 3 bytes/s beside the link's 1."""
    made = Profile(KEY, ((1.0, 1.0),), 0.0, 0.0, 6, 0.0, 0.0, ((1.0, 1.0),))
    on_host = replace(made, host=((1.0, 2.0), (4.0, 3.0)))
    assert Profile.from_entries(json.loads(on_host.to_json())) == on_host
    assert (made.host_expert_s, on_host.host_expert_s) == (0.0, 2.0)
    locality = Locality(8, 2, None)
    assert Assumptions(made, locality, 0.5).on_host_bytes_per_s == 0.0
    assert Assumptions(on_host, locality, 0.5).on_host_bytes_per_s == 4.0
    assert Assumptions(on_host, locality, 0.5, None, 9.0).on_host_bytes_per_s == 9.0
    assert Prior.of_profile(on_host).host_s == 2.0


def test_an_expert_on_the_host_is_timed_by_its_rows() -> None:
    """By a clock that goes on by a second each time that it is asked."""
    config = DATA / "configs" / "DeepSeek-V2-Lite"
    shape = replace(ModelSpec.of_config("m", config, "bfloat16").shape, top_k=2)
    codec = codec_of("raw", ExpertShape(512, 512, torch.bfloat16))
    ticks = count()
    found = codec_speed.host_expert_points(codec, shape, torch.bfloat16, lambda: float(next(ticks)))
    assert found == tuple((float(rows), 1.0) for rows in (1, 2, 4, 8, 16))


def test_a_profile_from_before_encoding_was_timed_is_read() -> None:
    made = Profile(KEY, ((1.0, 1.0),), 0.0, 0.0, 1, 0.0, 0.0, ((1.0, 1.0),))
    content = json.loads(made.to_json())
    assert content.pop("host") == []
    assert content.pop("encode_bytes_per_s") == {}
    assert Profile.from_entries(content) == made


def test_too_few_tokens_to_measure_the_longest_draft(tiny_bfloat16: Folder) -> None:
    with pytest.raises(SpeqError, match="max_new_tokens is 5; it must be at least 33"):
        run("tune", tiny_bfloat16("olmoe"), "--memory-budget", BUDGET, "--max-new-tokens", 5)
