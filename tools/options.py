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
    Output: ("Options of output", "Where a command's result goes, beside what it shows."),
}
PAGE = """# Options

Written by `python -m tools.options` from the dataclasses that declare each option once.

In Python the names are the same, with `_` for `-`. Every command takes the model by its place;
`--model MODEL` does as well. A model is a folder or a hub id. Sizes are such
as `8GiB`, `512MiB` or `20GB`, rates such as `25GB/s`.

Options that few need are set by `--set NAME=VALUE` on the command line, several times if need be:
`--set graphs=none --set expert_floor=0.03`. `--set ?` lists those of a command.

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
        f"\n## {title}\n\n{text}\n\n{option_table(declared_options(config))}"
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
    rows = [option for option in own if option.inside is None]
    text = f"\n### `{' '.join([name, *arguments])}`\n\n{_wrapped(purpose)}\n"
    if rows:
        text += "\n" + option_table(rows)
    also = [_shared(config, options) for config, options in shared if config is not None]
    for config in (RunConfig, SamplingParams):
        names = option_names(config)
        inner = tuple(each for each in own if each.inside is not None and each.name in names)
        also += [_shared(config, inner)] if inner else []
    return text + (f"\nAnd {', '.join(also)}.\n" if also else "")


def _wrapped(purpose: str) -> str:
    return "\n\n".join(textwrap.fill(each, 100) for each in purpose.split("\n\n"))


def _shared(config: type, options: tuple[Declared, ...]) -> str:
    """A shared part, with what a command leaves out of it or has otherwise."""
    title = SHARED[config][0].lower()
    text = f"[{title}](#{title.replace(' ', '-')})"
    found = {option.name: option for option in options}
    left_out = [_flag(each) for each in declared_options(config) if each.name not in found]
    if left_out:
        text += f" without {', '.join(left_out)}"
    changed = [
        f"{_flag(each)} {_default(found[each.name]) or OWN}"
        for each in declared_options(config)
        if each.name in found and found[each.name].default != each.default
    ]
    return text + (f" (default {', '.join(changed)})" if changed else "")


def option_table(options: Iterable[Declared]) -> str:
    lines = ["| option | takes | default | |\n|---|---|---|---|\n"]
    for option in sorted(options, key=lambda option: option.option.by_set):
        kind, by_set = option.option.kind, option.option.by_set
        takes = "" if kind.typed is bool and not by_set else f"`{kind.metavar}`"
        name = _argument(option) if option.option.argument else _flag(option)
        text = option.option.description
        lines.append(f"| {name} | {takes} | {_default(option)} | {text} |\n")
    return "".join(lines)


def _argument(option: Declared) -> str:
    return option.name.upper() + ("..." if getattr(option.option.kind, "repeated", False) else "")


def _flag(option: Declared) -> str:
    if option.option.by_set:
        return f"`--set {option.name}`"
    return f"`--{option.name.replace('_', '-')}`"


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
