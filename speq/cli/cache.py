"""`speq cache`: what runs keep unasked is listed, compared, removed, and held to a limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude, command
from speq.errors import FileError, OptionError, SpeqError
from speq.options.declared import Option, Options
from speq.options.kinds import Switch, Text
from speq.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from speq.files.kept import CachedItem

SUMMARY = "What runs keep in ~/.cache/speq and beside models: packed copies, drafts, profiles."
# Of commands that say one sentence.
SAID = Exclude(without=("json", "force"))

Of = Annotated[
    str | None,
    Option("Only what is of this model: its folder, or hub id.", Text("a model's folder")),
]


@dataclass(frozen=True, slots=True)
class CacheSettings(Options):
    """What of all that is kept."""

    of: Of = None


@dataclass(frozen=True, slots=True)
class ClearSettings(Options):
    """What is removed."""

    of: Of = None
    all: Annotated[bool, Option("Remove what is kept of all models.", Switch())] = False

    def check_together(self) -> None:
        """Raise SpeqError unless it is said what goes."""
        if (self.of is None) != self.all:
            given = "both were" if self.all else "neither was"
            raise OptionError(f"give one of --of MODEL and --all; {given} given")


@dataclass(frozen=True, slots=True)
class LimitSettings(Options):
    """How much may be kept."""

    size: Annotated[
        str,
        Option(
            "Such as 100GiB; none: as much as the disk has room for.",
            Text("a size such as 100GiB, or none"),
            argument=True,
        ),
    ]


cache_app = typer.Typer(help=SUMMARY, no_args_is_help=True)


@cache_app.callback()
def cache() -> None:
    """What runs keep in ~/.cache/speq and beside models: packed copies, drafts, profiles."""


def select_kept(of: str | None) -> "list[CachedItem]":
    """What is kept of a model, or of all."""
    from speq.files.kept import cached_items

    given = [] if of is None or not Path(of).is_dir() else [Path(of)]
    return [each for each in cached_items(given) if of is None or each.is_of(of)]


def list_kept(settings: CacheSettings, output: opt.Output) -> None:
    """Show what is kept, of which model, how large it is and when it was last read.

    Drafts beside models are shown where --of names the model, or a packed copy does.
    """
    from speq.files.cache_folder import cache_folder
    from speq.files.kept import limit_bytes

    output.check()
    things, limit = select_kept(settings.of), limit_bytes()
    counted = sum(each.nbytes for each in things if not each.beside)
    output.write(
        {
            "folder": str(cache_folder()),
            "limit_bytes": limit,
            "bytes": counted,
            "kept": [entry_of(each) for each in things],
        }
    )
    if not output.printed:
        show(things)
        most = "no limit" if limit is None else f"limit {format_bytes(limit)}"
        output.note(f"{format_bytes(counted)} in {cache_folder()}; {most}")


def entry_of(thing: "CachedItem") -> dict[str, Any]:
    return {
        "kind": thing.kind,
        "path": str(thing.path),
        "model": thing.model,
        "bytes": thing.nbytes,
        "last_read": datetime.fromtimestamp(thing.last_read, UTC).isoformat(timespec="seconds"),
        "beside_model": thing.beside,
    }


def show(things: "Sequence[CachedItem]") -> None:
    """One line for each thing."""
    from rich.table import Table

    from speq.measure.console import console

    table = Table(box=None, pad_edge=False)
    for title in ("kind", "size", "last read", "model", "path"):
        table.add_column(title, overflow="fold")
    for each in things:
        read = datetime.fromtimestamp(each.last_read).strftime("%Y-%m-%d %H:%M")
        table.add_row(each.kind, format_bytes(each.nbytes), read, each.model or "-", str(each.path))
    if things:
        console().print(table)


def verify(settings: CacheSettings, output: Annotated[opt.Output, SAID]) -> None:
    """Compare packed copies with their checksums, all of them.

    Fails where a record is not what was written; the next run that reads it mends it.
    """
    from speq.experts.packed_copy import damaged_records
    from speq.files.cache_folder import COPIES
    from speq.files.kept import NAMED

    bad = 0
    for each in select_kept(settings.of):
        if each.kind != NAMED[COPIES]:
            continue
        try:
            with output.progress() as progress:
                found = damaged_records(
                    each.path, lambda done, total: progress("comparing records", done, total)
                )
        except SpeqError as error:
            output.note(f"{each.path}: not whole, and not read by runs ({error})")
            continue
        bad += len(found)
        sound = "all records are what was written" if not found else f"{len(found)} are damaged"
        output.note(f"{each.path}: {sound}")
    if bad:
        raise FileError(f"{bad} records are not what was written; runs that read them mend them")


def clear(settings: ClearSettings, output: Annotated[opt.Output, SAID]) -> None:
    """Remove what is kept, of one model or of all: runs make it again as they need it.

    Profiles take minutes to measure again (`speq tune`). Models, packs, heads and quantised drafts
    stay.
    """
    from speq.files.kept import remove

    things = select_kept(settings.of)
    for each in things:
        try:
            remove(each)
        except OSError as error:
            raise FileError(f"{each.path} cannot be removed: {error.strerror}") from error
    output.note(f"{len(things)} removed, {format_bytes(sum(each.nbytes for each in things))}")


def limit(settings: LimitSettings, output: Annotated[opt.Output, SAID]) -> None:
    """Hold the cache folder to a size, from now on: what was read least recently goes first.

    limit.json in that folder says so. Drafts beside models are not counted.
    """
    from speq.files.kept import keep_within, set_limit

    size = None if settings.size == "none" else parse_bytes(settings.size)
    set_limit(size)
    if size is None:
        output.note("the cache folder has no limit")
        return
    keep_within(size)
    output.note(f"the cache folder holds {format_bytes(size)} at most")


cache_app.command("list")(command(list_kept))
for function in (verify, clear, limit):
    cache_app.command(function.__name__)(command(function))
