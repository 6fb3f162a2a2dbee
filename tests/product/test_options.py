"""An option is declared once: what follows from that, tried with options of the tests' own."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import speq
from speq import RunConfig, SamplingParams, SpeqError
from speq.bench.settings import ShapesSettings, TpotSettings
from speq.cli import app
from speq.cli.bench import BENCHES, bench_app
from speq.cli.cache import cache_app
from speq.cli.from_dataclass import Exclude, command
from speq.cli.options import Output
from speq.config import Model
from speq.generator import Generator
from speq.measure.report import Column, print_table
from speq.options import typed
from speq.options.declared import Option, build, declared_options, split
from speq.options.kinds import Choice, File, ListOf, Number, Rate, Size, Switch, Text, Whole
from speq.registries import CACHE_POLICIES
from speq.units import parse_bytes
from tests.helpers.paths import ROOT
from tests.helpers.told import Told
from tools.options import TYPED, annotation, option_list, typed_module, written_files


@dataclass(frozen=True, slots=True)
class Throwaway(RunConfig):
    """A run with one option more."""

    patience: Annotated[int, Option("How long to wait.", Whole(1, 9))] = 3


def commands_of(function: Any) -> typer.Typer:
    made = typer.Typer()
    made.command()(command(function))
    return made


def test_a_throwaway_option_goes_everywhere() -> None:
    """Into the class and its checks, a command, its help, and the docs."""
    assert build(Throwaway, {"memory_budget": "1GiB", "patience": 5}).patience == 5
    with pytest.raises(SpeqError, match="patience is 10; it must be from 1 to 9"):
        build(Throwaway, {"memory_budget": "1GiB", "patience": 10})
    with pytest.raises(SpeqError, match=r"unknown option patiense; .*tool_syntax, patience$"):
        build(Throwaway, {"memory_budget": "1GiB", "patiense": 5})
    given: list[Throwaway] = []

    def wait(run: Throwaway) -> None:
        """Wait."""
        given.append(run)

    made = commands_of(wait)
    help_text = " ".join(CliRunner().invoke(made, ["--help"]).stdout.split())
    assert "--patience" in help_text and "How long to wait. [default: 3]" in help_text
    arguments = ["--memory-budget", "1GiB", "--prefetch", "three-phase"]
    for more in ([], ["--patience", "7"]):
        done = CliRunner().invoke(made, [*arguments, *more], catch_exceptions=False)
        assert done.exit_code == 0
    assert [(run.patience, run.memory_budget) for run in given] == [(3, 2**30), (7, 2**30)]
    assert all(run.prefetch == "three-phase" for run in given)
    row = "- `--patience N` (`3`): How long to wait.\n"
    assert option_list(declared_options(Throwaway)).count(row) == 1


def test_a_registered_thing_is_a_choice_at_once() -> None:
    assert "newest" not in str(inspect.signature(command(_hold)))
    with CACHE_POLICIES.registered("newest", object):
        assert RunConfig.of("1GiB", cache_policy="newest").cache_policy == "newest"
        help_text = CliRunner().invoke(commands_of(_hold), ["--help"]).stdout
        assert "newest" in help_text
    with pytest.raises(SpeqError, match="cache_policy is 'newest'; it must be one of lru"):
        RunConfig.of("1GiB", cache_policy="newest")


def _hold(run: RunConfig) -> None:
    """Hold."""


@pytest.mark.parametrize(
    ("kind", "given", "held"),
    [
        (Whole(0, 64, word="auto"), "auto", None),
        (Whole(0, 64, word="auto"), "+7", 7),
        (Whole(among=(4, -1)), -1, -1),
        (Number(1.0), 1, 1),
        (Number(5, without_minimum=True), 1e-300, 1e-300),
        (Size(), "1.5KiB", 1536),
        (Size(kept=True), " 1.5KiB", " 1.5KiB"),
        (Rate(), "25GB/s", 25e9),
        (Rate(), 7, 7.0),
        (Text(wanted=None), "", ""),
        (Text(path=True), Path("a/b"), "a/b"),
        (File(), "a/b", Path("a/b")),
        (File(printed=True), "-", Path("-")),
        (Switch(), True, True),
        (Choice(("auto",), CACHE_POLICIES), "lfu", "lfu"),
        (ListOf(Whole(1)), "1, 2,16", (1, 2, 16)),
        (ListOf(Whole(1)), [3, 4], (3, 4)),
        (ListOf(Size(kept=True)), "1KiB,2MiB", ("1KiB", "2MiB")),
        (ListOf(Text(), repeated=True), "a,b", ("a,b",)),
        (ListOf(Text(), repeated=True), None, ()),
        (ListOf(Text(), repeated=True), ["a", "b"], ("a", "b")),
    ],
    ids=repr,
)
def test_values_as_they_are_held(kind: Any, given: Any, held: Any) -> None:
    found = kind.check("it", given)
    assert found == held and type(found) is type(held)
    if held is not None and not isinstance(given, bool):
        assert kind.check("it", kind.text(found)) == held  # what would be typed reads back


@pytest.mark.parametrize(
    ("kind", "given", "sentence"),
    [
        (Whole(0), True, "it is True; it must be a whole number"),
        (Whole(among=(4, -1)), 5, "it is 5; it must be one of 4, -1"),
        (Whole(among=(4, -1)), True, "it is True; it must be one of 4, -1"),
        (Whole(0, word="auto"), "9" * 30, "it must be auto or a whole number"),
        (Number(1.0), float("nan"), "it is nan; it must be from 0 to 1"),
        (Number(1.0), 10**400, "it must be from 0 to 1"),
        (Number(2, without_minimum=True), 0, "it is 0; it must be above 0 and at most 2"),
        (Number(2, unit="milliseconds"), "1", "it is '1'; it must be a number of milliseconds"),
        (Size(), "99999999999999999999TiB", "it must be at most 1024 TiB"),
        (Size(), True, "memory size True is not understood"),
        (Rate(), "9999999TB/s", "it must be above 0 and at most 1024 TiB/s"),
        (Rate(), "fast", "it is 'fast'; give bytes per second with a unit, such as 25GB/s"),
        (Text(), "", "it is empty; give a text that is not empty"),
        (Text(), "a\0", "with a character 0 in it"),
        (Text(), Path("a"), "give a text that is not empty"),
        (File(), "", "it is empty; give a file"),
        (File(readable=True), "/", "it is '/', a folder; give a file"),
        (File(printed=True), "--stats", "it is '--stats'; give a file, or - to print"),
        (Switch(), 1, "it is 1; it must be True or False"),
        (ListOf(Whole(1), "numbers, such as 1,4"), "1,two", "it is '1,two'; it must be numbers, s"),
        (ListOf(Whole(1), "numbers, such as 1,4"), 3, "it is 3; it must be numbers, such as 1,4"),
        (ListOf(Whole(2)), "3,1", "it is 1; it must be at least 2"),
        (ListOf(Number(16), "numbers"), "1e999", "it is '1e999'; it must be numbers"),
        (ListOf(Number(16), "numbers"), "1e9", "it is 1000000000.0; it must be from 0 to 16"),
    ],
    ids=repr,
)
def test_values_that_are_refused(kind: Any, given: Any, sentence: str) -> None:
    with pytest.raises(SpeqError) as refused:
        kind.check("it", given)
    assert sentence in str(refused.value)


def test_options_are_taken_apart_and_put_together() -> None:
    given = {"budgets": "1GiB,2GiB", "codec": "raw", "rounds": 5, "draft_lengths": "0,auto"}
    made = build(TpotSettings, given)
    assert (made.budgets, made.draft_lengths) == (("1GiB", "2GiB"), ("0", "auto"))
    assert made.run == {"codec": "raw"}
    assert made.as_json()["run"] == {"codec": "raw"}
    with pytest.raises(SpeqError, match="budgets must be given"):
        build(ShapesSettings, {})
    with pytest.raises(SpeqError, match="codec is 'x'; it must be one of auto, raw"):
        build(TpotSettings, given | {"codec": "x"})
    run, sampling = split({"memory_budget": "1KiB", "top_k": 3}, RunConfig, SamplingParams)
    assert (run, sampling) == (RunConfig(1024), SamplingParams(top_k=3))
    with pytest.raises(SpeqError, match="unknown option topk; the options are memory_budget, "):
        split({"topk": 3}, RunConfig, SamplingParams)
    assert TpotSettings(("1GiB",), lossless=Path("a")).as_json()["lossless"] == "a"
    assert TpotSettings(("1GiB",), prompts=(Path("a"),)).as_json()["prompts"] == ["a"]


def test_a_command_may_leave_options_out_and_have_defaults_of_its_own() -> None:
    given: list[SamplingParams] = []
    own = Exclude(without=("seed",), defaults=(("top_k", 7),))

    def draw(sampling: Annotated[SamplingParams, own]) -> None:
        given.append(sampling)

    made = commands_of(draw)
    assert CliRunner().invoke(made, ["--stop", "a", "--stop", "b,c"]).exit_code == 0
    assert given == [SamplingParams(top_k=7, stop=("a", "b,c"))]
    assert CliRunner().invoke(made, ["--seed", "1"]).exit_code == 2


def test_options_that_few_need_stand_behind_set() -> None:
    given: list[RunConfig] = []

    def wait(run: RunConfig) -> None:
        given.append(run)

    made, budget = commands_of(wait), ["--memory-budget", "1GiB"]
    values = ["expert-floor=0.03", "verify_reads=true", "draft_nodes=8", "prune_rows=off"]
    arguments = [word for value in values for word in ("--set", value)]
    done = CliRunner().invoke(made, [*budget, *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    wanted = {"expert_floor": 0.03, "verify_reads": True, "draft_nodes": 8, "prune_rows": "off"}
    assert given == [RunConfig.of("1GiB", **wanted)]
    listed = CliRunner().invoke(made, ["--set", "?"])  # needs nothing else
    assert listed.exit_code == 0 and len(given) == 1
    names = [line.partition("=")[0] for line in listed.stdout.splitlines() if line[0] != " "]
    assert names == [each.name for each in declared_options(RunConfig) if each.option.by_set]
    assert {"expert_floor", "graphs", "draft_counts"} <= set(names) and len(names) == 17
    assert "graphs=NAME (default auto)" in listed.stdout
    help_text = CliRunner().invoke(made, ["--help"], env={"COLUMNS": "200"}).stdout
    assert "--set" in help_text and "--expert-floor" not in help_text
    for words, sentence in (
        (["graphs"], "--set has 'graphs'; give NAME=VALUE"),
        (["=1"], "--set has '=1'; give NAME=VALUE"),
        (
            ["colour=1"],
            "--set has unknown option 'colour'; give one of prefix_cache_limit, graphs, ",
        ),
        (
            ["codec=raw"],
            "--set has unknown option 'codec'; give one of prefix_cache_limit, graphs, ",
        ),
        (["graphs=auto", "graphs=none"], "--set has graphs twice; give it once"),
        (["draft_nodes=many"], "--set has 'draft_nodes=many'; draft_nodes takes a number"),
        (["verify_reads=perhaps"], "verify_reads takes true or false"),
        (["graphs=some"], "graphs is 'some'; it must be one of auto, none"),
        (["expert_floor=2"], "expert_floor is 2.0; it must be above 0 and at most 1"),
    ):
        with pytest.raises(SpeqError) as refused:
            arguments = [word for value in words for word in ("--set", value)]
            CliRunner().invoke(made, [*budget, *arguments], catch_exceptions=False)
        assert sentence in str(refused.value)


def test_generate_shows_few_enough_options() -> None:
    (generate,) = [each for prefix, each in ALL if name_of(prefix, each) == "generate"]
    options = options_of(generate).values()
    shown = [each for each in options if not each.option.by_set and not each.option.argument]
    assert len(shown) + 1 <= 49  # with --set


def test_two_options_of_one_name_are_no_command() -> None:
    def clash(first: SamplingParams, second: SamplingParams) -> None:
        pass

    with pytest.raises(TypeError, match="clash has two options of one name"):
        command(clash)
    with pytest.raises(TypeError, match="parameter it is neither an option nor a dataclass"):
        command(_untold)


def _untold(it: int) -> None:
    pass


# The commands of speq.

ALL = [
    (prefix, each)
    for prefix, made in (((), app), (("cache",), cache_app), (("bench",), bench_app))
    for each in made.registered_commands
    if not each.hidden
]


def name_of(prefix: tuple[str, ...], each: Any) -> str:
    return " ".join([*prefix, each.name or each.callback.__name__])


def options_of(each: Any) -> dict[str, Any]:
    return {option.name: option for part in each.callback.parameters for option in part.options}


def test_every_bench_is_a_line_and_a_command() -> None:
    names = [each.name for each in bench_app.registered_commands]
    assert names == [*(bench.name for bench in BENCHES), "widen"]
    for bench in BENCHES:
        path = ROOT / f"{bench.module.removeprefix('speq.').replace('.', '/')}.py"
        assert "\ndef run(" in path.read_text()


def test_a_word_means_the_same_in_every_command() -> None:
    """Each option that has a run's name has its default and takes the same, but for those named."""
    run = {option.name: option for option in declared_options(RunConfig)}
    own = {
        ("batch", "max_batch"),  # nobody waits for a single text
        ("chat", "prefix_cache"),  # whose turns come back
        ("serve", "prefix_cache"),
        ("pack", "codec"),  # what is written, where auto is raw
        ("quantize", "memory_budget"),
        ("quantize", "dense"),  # whether such layers are quantised as well
        ("train-head", "memory_budget"),
        ("bench kernels", "dtype"),  # of the rows
        ("prove", "dtype"),  # in which nothing turns on rounding
    }
    found = set()
    for prefix, each in ALL:
        for name, option in options_of(each).items():
            if name in run and (option.option, option.default) != (
                run[name].option,
                run[name].default,
            ):
                found.add((name_of(prefix, each), name))
    assert found == own


def test_the_model_is_given_by_its_place_or_by_name() -> None:
    given: list[str] = []

    def name(model: Model) -> None:
        given.append(model)

    made = commands_of(name)
    for arguments in (["a/b"], ["--model", "a/b"]):
        assert CliRunner().invoke(made, arguments).exit_code == 0
    assert given == ["a/b", "a/b"]
    for arguments, sentence in (([], "model is missing"), (["a", "--model", "b"], "twice")):
        done = CliRunner().invoke(made, arguments)
        assert done.exit_code == 2 and sentence in done.output
    with_model = [each for _, each in ALL if "model" in options_of(each)]
    assert len(with_model) == 13 + 3  # all but doctor, and benches of machines, servers and several


def test_run_is_chat() -> None:
    named = {each.name or each.callback.__name__: each for each in app.registered_commands}
    assert named["run"].callback.parameters == named["chat"].callback.parameters


def test_json_and_trace_mean_one_thing() -> None:
    for prefix, each in ALL:
        options = options_of(each)
        name = name_of(prefix, each)
        has = "json" in options
        none = (
            "chat",
            "demo",
            "serve",
            "stage",
            "dashboard",
            "pack",
            "quantize",
            "train-head",
            "report",
            "bench widen",
            *("cache verify", "cache clear", "cache limit"),
        )
        assert has == (name not in none), name
        if has:
            assert options["json"] == declared_options(Output)[0]
        assert ("trace" in options) == (name == "generate")


def test_help_of_every_command_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for prefix, each in ALL:
        name = name_of(prefix, each).split()
        done = CliRunner().invoke(app, [*name, "--help"])
        assert done.exit_code == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
        for option in options_of(each).values():
            if not option.option.argument and not option.option.by_set:
                assert f"--{option.name.replace('_', '-')}" in done.stdout, (name, option.name)


def test_the_command_line_waits_for_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom speq.cli import app\n"
        "assert CliRunner().invoke(app, ['bench', 'tpot', '--help']).exit_code == 0\n"
        "import speq.bench.settings, speq.measure.settings, speq.quantizing.settings\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_written_from_the_declarations_is_up_to_date() -> None:
    for path, text in written_files():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m tools.options"


def test_typed_options_are_those_of_the_dataclasses() -> None:
    for name, (configs, without) in TYPED.items():
        hints = get_type_hints(getattr(typed, name))
        wanted = {
            option.name: option
            for config in configs
            for option in declared_options(config)
            if option.name not in without
        }
        assert set(hints) == set(wanted)
        for option in wanted.values():
            assert f"    {option.name}: {annotation(option)}\n" in typed_module()
    assert set(get_type_hints(typed.RunOptions)) == {field.name for field in fields(RunConfig)} - {
        "memory_budget"
    }
    stream = inspect.signature(Generator.stream).parameters["options"].annotation
    assert get_args(stream) == (typed.SamplingOptions,)


def test_what_users_import() -> None:
    for name in speq.__all__:
        assert getattr(speq, name) is not None
    assert set(speq.HOMES) | {"SpeqError", "__version__"} == set(speq.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = speq.nothing


def test_functions_refuse_unknown_and_bad_options(tmp_path: Path) -> None:
    for call, sentence in (
        (lambda: speq.pack("m", "", codec="raw"), "out is empty; give a folder"),
        (lambda: speq.pack("m", tmp_path, level=9), "unknown option level; the options are out, c"),  # type: ignore[call-arg]
        (lambda: speq.quantize("m", calibration=tmp_path), "a folder; give a file of text"),
        (lambda: speq.quantize("m", codec="raw"), "unknown option codec; the options are bits"),  # type: ignore[call-arg]
        (lambda: speq.plan("m", "1GiB", link="slow"), "link is 'slow'; give bytes per second"),
        (lambda: speq.tune("m", "1GiB", draft_length=3), "unknown option draft_length"),  # type: ignore[call-arg]
        (lambda: speq.tune("m", "9999PB"), "memory size '9999PB' is not understood"),
    ):
        with pytest.raises(SpeqError) as refused:
            call()
        assert sentence in str(refused.value)


def test_python_and_commands_write_the_same_pack(bundled: Path, tmp_path: Path) -> None:
    told = Told()
    manifest = speq.pack(bundled, tmp_path / "a", codec="lossless", progress=told)
    assert manifest.codec == "lossless"
    assert not told.unfinished
    labels = [what for what, _, _ in told.calls]
    assert [*dict.fromkeys(labels)] == [
        "packing experts",
        "packing dense layers",
        "copying other weights",
    ]
    arguments = ["pack", "--model", str(bundled), "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(app, [*arguments, "--codec", "lossless"], catch_exceptions=False)
    assert "codec lossless, " in done.stdout
    for name in ("experts.bin", "experts.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_python_plans_as_the_command_does() -> None:
    model = ROOT / "tests" / "data" / "configs" / "DeepSeek-V2-Lite"
    made = speq.plan(model, "12GiB", preset="rtx-4090", acceptance=0.8)
    arguments = ["plan", str(model), "--memory-budget", "12GiB", "--preset", "rtx-4090"]
    done = CliRunner().invoke(app, [*arguments, "--acceptance", "0.8", "--json", "-"])
    found = json.loads(done.stdout)
    assert {"verdict", "by_budget"} <= found.keys()
    kept = {name: found[name] for name in found if name not in ("verdict", "by_budget")}
    assert kept == json.loads(json.dumps(made.to_dict()))
    assert made.budget.context == 192  # a short prompt, and as many tokens as are generated


def test_json_goes_to_a_file_or_alone_to_stdout(tmp_path: Path) -> None:
    model = str(ROOT / "tests" / "data" / "configs" / "DeepSeek-V2-Lite")
    target = tmp_path / "plan.json"
    plan = ["plan", model, "--memory-budget", "12GiB", "--preset", "rtx-4090", "--json"]
    shown = CliRunner().invoke(app, [*plan, str(target)], catch_exceptions=False)
    printed = CliRunner().invoke(app, [*plan, "-"], catch_exceptions=False)
    assert "ways to hold" in shown.stdout and "ways to hold" not in printed.stdout
    written, found = json.loads(target.read_text()), json.loads(printed.stdout)
    for each in (written, found):  # others write to this disk meanwhile
        del each["verdict"]["free_disk_bytes"], each["verdict"]["sentence"]
    assert written == found
    with pytest.raises(SpeqError, match="exists already; choose another name or add --force"):
        CliRunner().invoke(app, [*plan, str(target)], catch_exceptions=False)
    forced = CliRunner().invoke(app, [*plan, str(target), "--force"], catch_exceptions=False)
    assert forced.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "m", "--memory-budget", "99999999999999999999TiB"], "at most 1024 TiB"),
        (["pack", "m", "--out", ""], "out is empty; give a folder"),
        (["quantize", "m", "--calibration", "/"], "calibration is '/', a folder; give a file"),
        (["bench", "tpot", "m", "--budgets", "1GiB", "--max-new-tokens", "1"], "at least 2"),
        (["bench", "serve", "m", "--rates", "1e9"], "above 0 and at most 10000"),
        (["generate", "m", "--memory-budget", "1GiB", "--prompt", "a", "--json", "--x"], "- to pr"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_commands_refuse(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SpeqError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert sentence in str(refused.value)


def test_sizes_for_the_command_line_read_back() -> None:
    for size in (1, 1536, 5 << 20, 3 << 40):
        assert parse_bytes(Size().text(size)) == size


def test_tables_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures are never cut: the table is stood on its side first."""
    columns: dict[str, Column] = {f"figure {at}": (str(at), "{:.2f}") for at in range(9)}
    rows = [{str(at): 1000.25 * (at + 1) + row for at in range(9)} for row in range(4)]
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table("[bold]a title [/nope]", columns, rows)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        words = " ".join(shown.split())
        assert "[bold]a title [/nope]" in words and "figure 8" in words
        found = sorted(re.findall(r"\d+\.\d\d", shown), key=float)
        assert found == sorted((f"{x:.2f}" for row in rows for x in row.values()), key=float)


@pytest.mark.skipif(os.name != "posix", reason="needs descriptors as POSIX has them")
@pytest.mark.wide
def test_output_that_nobody_takes_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]" / "x[/nope]"
    shutil.copytree(ROOT / "tests" / "data" / "configs" / "DeepSeek-V2-Lite", folder)
    words = f"plan '{folder}' --memory-budget 12GiB --preset rtx-4090"
    for redirected, sentence in ((">&-", "error: standard output is closed;"), ("| true", "")):
        done = subprocess.run(
            f"exec 2>&1; {sys.executable} -m speq {words} 2>'{tmp_path}/err' {redirected}",
            shell=True, cwd=ROOT, capture_output=True, check=False,
        )  # fmt: skip
        err = (tmp_path / "err").read_text()
        assert "Traceback" not in err and "Exception ignored" not in err
        assert err.startswith(sentence) and done.returncode == (1 if sentence else 0)
