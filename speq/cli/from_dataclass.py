"""Commands out of functions whose parameters are dataclasses of options, or single options.

def generate(model: Model, run: RunConfig, sampling: SamplingParams) -> None: ...

app.command()(command(generate))
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from speq.errors import OptionError
from speq.options.assignments import parse_assignments
from speq.options.declared import REQUIRED, Declared, Nested, Option, Options, build

# Given by its place, or so.
MODEL = "model"
# The value with which some options list what may be given.
LIST = "?"
# Options that ask for what is the same for all models.
OF_ALL_MODELS = frozenset({"accuracy"})
# Takes options that few users need.
SET = "set"
# Headings of options in the order of help: first what most look for.
PANELS = (
    *(None, "Sampling", "Memory", "Output", "Device and precision", "Experts", "Drafts"),
    *("Tokenizer", "Not exact", "Several machines"),
)
SET_HELP = "Set an option that few need; `--set ?` lists them. May be given several times."


@dataclass(frozen=True, slots=True)
class Exclude:
    """What a command leaves out of a dataclass, and defaults that are its own."""

    without: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class CommandParameter:
    """A parameter of a command's function. config: what it is built as; None: a single option."""

    name: str
    options: tuple[Declared, ...]
    config: type[Options] | None

    def value(self, given: Mapping[str, Any]) -> Any:
        """Raises SpeqError for what an option does not take."""
        if self.config is None:
            (option,) = self.options
            return option.check(given[option.name])
        names = {each.name for each in self.options}
        return build(self.config, {name: value for name, value in given.items() if name in names})


def command_parameters(function: Callable[..., None]) -> tuple[CommandParameter, ...]:
    """What a command's function takes, by its annotations."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return tuple(_command_parameter(name, hint) for name, hint in hints.items())


def command(function: Callable[..., None]) -> Callable[..., None]:
    """What typer makes a command of: `function`, with one parameter for each option that is shown,
    and `--set` for the others.

    Raises TypeError where two options have one name.
    """
    parameters = command_parameters(function)
    options = [option for parameter in parameters for option in parameter.options]
    names = [option.name for option in options]
    if len(set(names)) < len(names):
        raise TypeError(f"{function.__name__} has two options of one name among {names}")
    by_set = [option for option in options if option.option.by_set]
    # Arguments come before options, whichever dataclass they are of.
    options.sort(key=lambda each: (not each.option.argument, PANELS.index(each.panel)))
    shown = [each for option in options if not option.option.by_set for each in _parameters(option)]
    if by_set:
        shown.append(_set_parameter(by_set))

    def run(**typed: Any) -> None:
        assignments = typed.pop(SET, None) or ()
        given = _with_model(typed)
        given |= assigned(assignments, by_set)
        function(**{parameter.name: parameter.value(given) for parameter in parameters})

    # Paragraphs, which terminals break into lines.
    paragraphs = (function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    run.parameters = parameters  # type: ignore[attr-defined]
    return run


def assigned(assignments: Sequence[str], options: Sequence[Declared]) -> dict[str, Any]:
    """Values that `--set` gives, by name. Raises SpeqError as `parse_assignments`, and for names
    that are none of the options.
    """
    found = parse_assignments("--set", assignments, options)
    known = [option.name for option in options]
    for name in found:
        if name not in known:
            raise OptionError(
                f"--set has unknown option {name!r:.80}; give one of {', '.join(known)}"
            )
    return found


def _set_parameter(options: Sequence[Declared]) -> inspect.Parameter:
    def list_options(assignments: list[str] | None) -> list[str] | None:
        if assignments and "?" in assignments:
            for option in options:
                default = option.shown(option.default)
                known = f" (default {default})" if default else ""
                typer.echo(f"{option.name}={option.option.kind.metavar}{known}")
                typer.echo(textwrap.indent(textwrap.fill(option.option.description, 76), "    "))
            raise typer.Exit
        return assignments

    made = typer.Option(
        "--set", metavar="NAME=VALUE", help=SET_HELP, callback=list_options, is_eager=True
    )
    return _parameter(SET, list[str] | None, made, None)


def _command_parameter(name: str, hint: Any) -> CommandParameter:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    config = get_args(hint)[0] if extras else hint
    for each in extras:
        if isinstance(each, Option):
            return CommandParameter(name, (Declared(name, each),), None)
    if not isinstance(config, type) or not issubclass(config, Options):
        raise TypeError(f"parameter {name} is neither an option nor a dataclass of options")
    exclude = next((each for each in extras if isinstance(each, Exclude)), Exclude())
    defaults = dict(exclude.defaults)
    options = Nested(config, exclude.without).options
    return CommandParameter(
        name,
        tuple(replace(each, default=defaults.get(each.name, each.default)) for each in options),
        config,
    )


def _parameters(option: Declared) -> list[inspect.Parameter]:
    kind, flag = option.option.kind, f"--{option.name.replace('_', '-')}"
    repeated = getattr(kind, "repeated", False)
    typed: Any = list[kind.typed] if repeated else kind.typed  # type: ignore[name-defined]
    help_text = option.option.description
    default = REQUIRED if option.required else option.shown(option.default)
    metavar = "" if typed is bool else kind.metavar
    if option.option.argument:
        metavar = option.name.upper() if not repeated else f"{option.name.upper()}..."
        if option.name != MODEL:
            return [_parameter(option.name, typed, typer.Argument(metavar=metavar, help=help_text))]
        # Required, by its place or by its name: `_with_model` says so.
        place = typer.Argument(metavar=metavar, help=help_text, show_default=False)
        by_name = typer.Option(flag, hidden=True)
        return [
            _parameter(MODEL, str | None, place, None),
            _parameter(f"{MODEL}_by_name", str | None, by_name, None),
        ]
    if default is None or default in ([], ""):
        typed = typed | None
        default = None
    made = typer.Option(flag, help=help_text, metavar=metavar, rich_help_panel=option.panel)
    return [_parameter(option.name, typed, made, default)]


def _parameter(name: str, typed: Any, made: Any, default: Any = REQUIRED) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is REQUIRED else default,
        annotation=Annotated[typed, made],
    )


def _with_model(typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, without what was not, and the model under its name."""
    given = dict(typed)
    if MODEL in given:
        by_name = given.pop(f"{MODEL}_by_name")
        if given[MODEL] is not None and by_name is not None:
            raise typer.BadParameter("the model is given twice, by its place and with --model")
        if given[MODEL] is None and by_name is None:
            asked = {name for name, value in given.items() if value}
            if LIST not in given.values() and not asked & OF_ALL_MODELS:
                raise typer.BadParameter("the model is missing; give MODEL, a folder or a hub id")
            by_name = LIST  # the answer is the same for all models
        given[MODEL] = by_name if given[MODEL] is None else given[MODEL]
    return {name: value for name, value in given.items() if value is not None and value != []}
