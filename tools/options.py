"""Generates types for editors, and docs, from the declarations of options.

python -m tools.options           write speq/options/typed.py and docs/options.md
python -m tools.options --check   fail where one of them is not up to date
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from speq.cli import app
from speq.cli.bench import bench_app
from speq.cli.cache import cache_app
from speq.cli.from_dataclass import CommandParameter
from speq.cli.options import Output
from speq.config import RunConfig, SamplingParams
from speq.measure.settings import PlanSettings, TuneSettings
from speq.options.declared import Declared, declared_options, option_names
from speq.options.kinds import Choice
from speq.pipeline.settings import StagesSettings
from speq.quantizing.settings import ConversionSettings, PackSettings, QuantizeSettings
from speq.ray.settings import RaySettings
from speq.training.settings import HeadSettings, TrainingSettings

ROOT = Path(__file__).parent.parent
# The default of an option of sampling that is not given.
OWN = "the model's own"
# TypedDicts: what each is of, and what their functions take by itself.
TYPED: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "RunOptions": ((RunConfig,), ("memory_budget",)),
    "SamplingOptions": ((SamplingParams,), ()),
    "PackOptions": ((PackSettings,), ("out",)),
    "QuantizeOptions": ((QuantizeSettings, ConversionSettings), ()),
    "TrainHeadOptions": ((HeadSettings, TrainingSettings), ("texts",)),
    "PlanOptions": ((PlanSettings,), ("memory_budget",)),
    "TuneOptions": ((TuneSettings,), ("memory_budget",)),
}
# Options that several commands share, by where they are declared: title, and what to know.
SHARED: dict[type, tuple[str, str]] = {
    RunConfig: (
        "Options of a run",
        "How a model is held and run: `speq.RunConfig`, keyword arguments of "
        "`Generator.from_pretrained`, and options of commands.",
    ),
    SamplingParams: (
        "Options of sampling",
        "How tokens are chosen and when generation ends: `speq.SamplingParams`, keyword "
        "arguments of `Generator.generate` and `stream`, and options of commands.",
    ),
    StagesSettings: (
        "Options of stages",
        "Whether a model's layers run on several machines, of which this is the first "
        "([pipeline](pipeline.md)).",
    ),
    RaySettings: (
        "Options of a cluster",
        "Whether replicas of a model run on a Ray cluster ([server](server.md#replicas)), or "
        "stages of it ([pipeline](pipeline.md#placed-by-ray)).",
    ),
    Output: (
        "Options of output",
        "Where a command's result goes, beside what it shows. Every command has all of these "
        "where it does not say otherwise.",
    ),
}
PAGE = """# Options

Written by `python -m tools.options` from the dataclasses that declare each option once.

In Python the names are the same, with `_` for `-`. MODEL is a model's folder, or its hub id, with
`@REVISION` behind it for a certain one; `--model MODEL` does as well. Sizes are such as `8GiB`,
`512MiB` or `20GB`, rates such as `25GB/s`. Defaults stand in brackets.

Options that few need are set by `--set NAME=VALUE`, several times if need be. `--set ?` lists those
of a command.

Profiles of `speq tune` are kept in `~/.cache/speq/profiles`. Neither `XDG_CACHE_HOME` nor any other
variable of the environment changes what speq does: `--out FILE` and `--profile FILE` name another
place. (Libraries under speq read theirs, such as `HF_HOME`.)
"""
HEAD = '''"""Options as keyword arguments, for type checkers and editors.

Written by `python -m tools.options` from the dataclasses that declare them; a test compares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

'''


def typed_module() -> str:
    """Source of speq/options/typed.py: options that several TypedDicts have are in their bases."""
    holders: dict[str, tuple[str, ...]] = {}
    for name, (configs, without) in TYPED.items():
        for option in (each for config in configs for each in declared_options(config)):
            if option.name not in without:
                line = f"    {option.name}: {annotation(option)}\n{_docstring(option.option.help)}"
                holders[line] = (*holders.get(line, ()), name)
    bodies: dict[tuple[str, ...], str] = {}
    for line, names in holders.items():
        bodies[names] = bodies.get(names, "") + line
    shared = {
        names: "_" + "".join(name.removesuffix("Options") for name in names)
        for names in bodies
        if len(names) > 1
    }
    classes = [_typed_dict(base, [], bodies[names]) for names, base in shared.items()]
    for name in TYPED:
        bases = [base for names, base in shared.items() if name in names]
        classes.append(_typed_dict(name, bases, bodies[name,]))
    return HEAD + "\n".join(classes)


def _typed_dict(name: str, bases: list[str], body: str) -> str:
    head = f"class {name}({', '.join(bases or ['TypedDict'])}, total=False):"
    if len(head) > 100:
        head = head.replace("(", "(\n    ").replace("):", "\n):")
    return f"\n{head}\n{body}"


def _docstring(text: str) -> str:
    """Format a docstring, which editors show with the name."""
    lines = textwrap.wrap(text, 93)
    if len(lines) == 1 and len(text) <= 90:
        return f'    """{text}"""\n'
    return '    """' + "\n    ".join([*lines]) + '\n    """\n'


def annotation(option: Declared) -> str:
    """The type of what callers may give."""
    accepts = option.option.kind.accepts
    optional = option.default is None and not accepts.endswith("None")
    return f"{accepts} | None" if optional else accepts


def options_page() -> str:
    """docs/options.md."""
    shared = "".join(
        f"\n## {title}\n\n{text}\n\n{option_list(declared_options(config))}"
        for config, (title, text) in SHARED.items()
    )
    return PAGE + shared + "\n## Commands\n" + "".join(_commands())


def _commands() -> Iterator[str]:
    for prefix, typer_app in (
        ("speq", app),
        ("speq cache", cache_app),
        ("speq bench", bench_app),
    ):
        for each in typer_app.registered_commands:
            if each.hidden:
                continue
            callback: Any = each.callback
            name = each.name or callback.__name__
            yield _command(f"{prefix} {name}", callback.__doc__ or "", callback.parameters)


def _command(name: str, purpose: str, parameters: tuple[CommandParameter, ...]) -> str:
    shared = [(each.config, each.options) for each in parameters if each.config in SHARED]
    own = [o for each in parameters if each.config not in SHARED for o in each.options]
    arguments = [_argument(option) for option in own if option.option.argument]
    rows = [option for option in own if option.inside is None and not _told_above(option)]
    text = f"\n### `{' '.join([name, *arguments])}`\n\n{_wrapped(purpose)}\n"
    if rows:
        text += "\n" + option_list(rows)
    every = declared_options(Output)
    also = [
        _shared(config, options)
        for config, options in shared
        if config is not None and not (config is Output and tuple(options) == tuple(every))
    ]
    for config in SHARED:
        names = option_names(config)
        inner = tuple(each for each in own if each not in rows and each.name in names)
        also += [_shared(config, inner)] if inner else []
    return text + (f"\nAnd {', '.join(also)}.\n" if also else "")


def _wrapped(purpose: str) -> str:
    return "\n\n".join(textwrap.fill(each, 100) for each in purpose.split("\n\n"))


def _told_above(option: Declared) -> bool:
    """Whether the page's head or a shared table says the same of an option."""
    return option.name == "model" or any(
        (option.name, option.default, option.option.help)
        == (each.name, each.default, each.option.help)
        for config in SHARED
        for each in declared_options(config)
    )


def _shared(config: type, options: tuple[Declared, ...]) -> str:
    """A shared part, and either what a command takes of it or what it leaves out, the fewer of
    both; then what it has otherwise.
    """
    title = SHARED[config][0].lower()
    text = f"[{title}](#{title.replace(' ', '-')})"
    found = {option.name: option for option in options}
    every = declared_options(config)
    taken = [_flag(each) for each in every if each.name in found]
    left_out = [_flag(each) for each in every if each.name not in found]
    if len(taken) < len(left_out):
        text = f"of the {text} {', '.join(taken)}"
    elif left_out:
        text += f" without {', '.join(left_out)}"
    changed: dict[str, list[str]] = {}
    for each in every:
        if each.name in found and found[each.name].default != each.default:
            changed.setdefault(_default(found[each.name]) or OWN, []).append(_flag(each))
    defaults = [f"{default} of {', '.join(flags)}" for default, flags in changed.items()]
    return text + (f" (default {', '.join(defaults)})" if defaults else "")


def option_list(options: Iterable[Declared]) -> str:
    lines = []
    for option in sorted(options, key=lambda option: option.option.by_set):
        argument, choice = option.option.argument, isinstance(option.option.kind, Choice)
        name = f"`{_argument(option)}`" if argument else _flag(option, _takes(option))
        default = "" if argument else _default(option)
        text = option.option.help if choice else option.option.description
        lines.append(f"- {name}{default and f' ({default})'}: {text}\n")
    return "".join(lines)


def _takes(option: Declared) -> str:
    kind = option.option.kind
    if kind.typed is bool and not option.option.by_set:
        return ""
    metavar = "|".join(kind.choices) if isinstance(kind, Choice) else kind.metavar
    return ("=" if option.option.by_set else " ") + metavar


def _argument(option: Declared) -> str:
    return option.name.upper() + ("..." if getattr(option.option.kind, "repeated", False) else "")


def _flag(option: Declared, takes: str = "") -> str:
    if option.option.by_set:
        return f"`--set {option.name}{takes}`"
    return f"`--{option.name.replace('_', '-')}{takes}`"


def _default(option: Declared) -> str:
    if option.required:
        return "must be given"
    shown = option.shown(option.default)
    # 0 is a default to be told, though it equals False.
    return "" if shown is None or shown is False or shown in ([], "") else f"`{shown}`"


def written_files() -> Iterator[tuple[Path, str]]:
    """Files that follow from the declarations, and what should be in them."""
    yield ROOT / "speq" / "options" / "typed.py", typed_module()
    yield ROOT / "docs" / "options.md", options_page()


def main() -> None:
    stale = [
        (path, text)
        for path, text in written_files()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    if stale and "--check" in sys.argv:
        names = ", ".join(str(path.relative_to(ROOT)) for path, _ in stale)
        sys.exit(f"{names}: not up to date; run python -m tools.options")


if __name__ == "__main__":
    main()
