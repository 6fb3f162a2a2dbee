"""A page of pictures made of files: what benches and recorded runs wrote."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speq.dashboard.panel import Page, Panel
from speq.dashboard.report.pictures import panels_of, slug, wrong
from speq.dashboard.run_record import FORMAT, run_of
from speq.errors import FileError, SpeqError
from speq.files.json_file import read_json
from speq.units import format_bytes

WANTED = "give JSON files that `speq bench NAME --json` or `speq profile` wrote, or folders of them"
DAMAGED = "measure again"
Fact = tuple[str, str]
UNTOLD = ("", "auto", "none")


@dataclass(frozen=True, slots=True)
class PageSource:
    """What one file adds to a page. name: of the file, without its suffix."""

    name: str
    title: str
    facts: list[Fact]
    panels: list[Panel]
    notes: list[str] = field(default_factory=list)
    summary: str = ""


def page_of(paths: Sequence[Path]) -> Page:
    """One page of all files, and of all in folders.

    Raises SpeqError for a file that is not there, damaged, or neither of a bench nor of a run. In
    a folder such files are left out, and the page says so; there must be one to draw.
    """
    sources: list[PageSource] = []
    left_out: list[str] = []
    for path in paths:
        if path.is_dir():
            found, refused = gather_sources(files_of(path))
            sources += found
            left_out += refused
        else:
            sources.append(source_of(path))
    if not sources:
        said = f": {left_out[0]}" if left_out else f"; {WANTED}"
        raise FileError(f"{', '.join(map(str, paths))} holds nothing to draw{said}")
    return page_of_sources(sources, left_out)


def page_of_bench(report: dict[str, Any]) -> Page:
    """A page of what a bench has just found, as its JSON has it."""
    return page_of_sources([bench_source(report["bench"], report, "the report")])


def files_of(folder: Path) -> list[Path]:
    """The JSON files of a folder, in the order of their names."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {error.strerror}; {WANTED}") from error


def gather_sources(paths: Iterable[Path]) -> tuple[list[PageSource], list[str]]:
    """What files add, and why others do not."""
    sources, refused = [], []
    for path in paths:
        try:
            sources.append(source_of(path))
        except SpeqError as error:
            refused.append(str(error))
    return sources, refused


def source_of(path: Path) -> PageSource:
    """Raises SpeqError, naming the file, where it cannot be drawn."""
    content = read_json(path, DAMAGED, WANTED)
    if content.get("format") == FORMAT:
        return run_source(path, content)
    if isinstance(content.get("bench"), str):
        return bench_source(path.stem, content, str(path))
    raise FileError(f"{path} is neither of a bench nor of a run; {WANTED}")


def bench_source(name: str, report: dict[str, Any], place: str) -> PageSource:
    """The pictures of a bench's object. place: what errors name."""
    try:
        title = f"{report['bench']}: {report.get('model', 'of no model')}"
        facts, notes = bench_facts(report), [str(note) for note in report.get("notes") or ()]
        return PageSource(name, title, facts, panels_of(report), notes)
    except SpeqError as error:
        raise FileError(f"{place} cannot be drawn: {error}") from error


def run_source(path: Path, content: dict[str, Any]) -> PageSource:
    """Page of a recorded run."""
    from speq.dashboard.run_panels.run_page import page_of

    record = run_of(content, str(path))
    try:
        page = page_of(record)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FileError(
            f"{path} is damaged ({type(error).__name__}: {error}); write it again with "
            "`speq profile`"
        ) from error
    return PageSource(path.stem, page.title, page.facts, page.panels, page.notes, page.summary)


def page_of_sources(sources: Sequence[PageSource], left_out: Iterable[str] = ()) -> Page:
    """Panels in the order of their files; of several files each is said to be of which.

    left_out  why other files have no panels
    """
    notes = [f"Left out: {each}." for each in left_out]
    if len(sources) == 1:
        (source,) = sources
        panels = distinctly_named(source.panels)
        return Page(source.title, source.facts, panels, [*source.notes, *notes], source.summary)
    facts = [
        (source.name, "; ".join(f"{what}: {value}" for what, value in source.facts))
        for source in sources
    ]
    panels = [
        replace(
            panel,
            name=f"{slug(source.name)}-{panel.name}",
            title=f"{panel.title} ({source.name})",
        )
        for source in sources
        for panel in source.panels
    ]
    said = [f"{source.name}: {note}" for source in sources for note in source.notes]
    title = f"{len(sources)} measurements"
    return Page(title, facts, distinctly_named(panels), [*said, *notes])


def distinctly_named(panels: Iterable[Panel]) -> list[Panel]:
    """The panels, each of whose names only one has: others go on with -2, -3 and so on."""
    taken: set[str] = set()
    found = []
    for panel in panels:
        name, number = panel.name, 1
        while name in taken:
            number += 1
            name = f"{panel.name}-{number}"
        taken.add(name)
        found.append(panel if name == panel.name else replace(panel, name=name))
    return found


def bench_facts(report: dict[str, Any]) -> list[Fact]:
    """What was measured, by which code, where and how. Raises SpeqError for damage."""
    facts = [("bench", str(report["bench"])), ("model", str(report.get("model", "none")))]
    commit = f" at {report['commit']}" if report.get("commit") else ""
    facts.append(("speq", f"{report.get('version', 'of an unknown version')}{commit}"))
    facts.append(("machine", machine_line(report.get("machine"))))
    settings = report.get("settings")
    if not isinstance(settings, dict):
        raise wrong("settings", settings, "an object")
    facts.append(("settings", settings_line(settings)))
    return [fact for fact in facts if fact[1]]


def machine_line(machine: Any) -> str:
    """A machine in one line."""
    if not isinstance(machine, dict):
        return "not recorded"
    memory = machine.get("memory_bytes")
    size = [format_bytes(memory)] if isinstance(memory, int | float) else []
    cores = [f"{machine['cores']} cores"] if "cores" in machine else []
    names = [str(machine[name]) for name in ("processor", "gpu", "system") if machine.get(name)]
    libraries = [f"{name} {machine[name]}" for name in ("python", "torch") if machine.get(name)]
    return ", ".join([*names[:1], *cores, *size, *names[1:], *libraries])


def settings_line(settings: dict[str, Any]) -> str:
    """Settings in one line, but for those that were left to `auto`, and for what a bench keeps
    among them: figures and remarks.
    """
    parts = []
    for name, value in settings.items():
        if name == "run" and isinstance(value, dict):
            parts.append(settings_line(value))
        elif isinstance(value, list) and value and not isinstance(value[0], list | dict):
            parts.append(f"{name} {','.join(map(str, value))}")
        elif value is False or value in UNTOLD or name == "note":
            continue
        elif isinstance(value, str | int | float):
            parts.append(f"{name} {value}")
    return ", ".join(filter(None, parts))
