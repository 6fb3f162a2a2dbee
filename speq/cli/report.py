"""`speq report`: pages of pictures of what benches and runs wrote."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.options.declared import Option, Options
from speq.options.kinds import File, ListOf


@dataclass(frozen=True, slots=True)
class ReportSettings(Options):
    """What is drawn, and where to."""

    paths: Annotated[
        tuple[Path, ...],
        Option(
            "JSON files of benches and of recorded runs, or folders of them.",
            ListOf(File("a file or a folder"), "a file or several", repeated=True),
            argument=True,
        ),
    ]
    out: Annotated[Path, Option("HTML page to write.", File())]


def report(
    settings: ReportSettings, output: Annotated[opt.Output, Exclude(without=("json",))]
) -> None:
    """Draw what benches and recorded runs wrote as one HTML page.

    The page needs nothing beside it, no network either. Each picture has a table of its numbers.
    In folders, files that are neither of a bench nor of a run are left out, and the page says so.
    """
    from speq.dashboard.page import write_page
    from speq.dashboard.report.report_page import page_of
    from speq.files.atomic_file import check_target

    check_target(settings.out, output.force)
    page = page_of(settings.paths)
    write_page(page, settings.out)
    output.note(f"{settings.out}: {len(page.panels)} pictures")
