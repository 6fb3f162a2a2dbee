"""Options of `speq batch` beside those of a run and of sampling, and the files that follow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.errors import OptionError
from speq.options.declared import Option, Options
from speq.options.kinds import File, Text


@dataclass(frozen=True, slots=True)
class BatchFileSettings(Options):
    """Which requests, and where their answers go."""

    requests: Annotated[
        Path,
        Option(
            "JSON Lines with a request in each.",
            File("a file of requests", readable=True),
            argument=True,
        ),
    ]
    answers: Annotated[
        Path,
        Option(
            "File to write: a line for each request, in their order. Requests that fail also go "
            "to a second one, with `.failed` before the end of its name.",
            File("a file"),
            argument=True,
        ),
    ]
    served_model_name: Annotated[
        str | None,
        Option(
            "What requests in OpenAI's form call the model; default: the folder's name, or the "
            "hub id.",
            Text("a name"),
        ),
    ] = None

    @property
    def failed(self) -> Path:
        """The file of requests that failed."""
        return self.answers.with_name(f"{self.answers.stem}.failed{self.answers.suffix}")

    @property
    def unfinished(self) -> Path:
        """The folder with what is done, until all is."""
        return self.answers.with_name(f"{self.answers.name}.unfinished")

    def check_together(self) -> None:
        """Raise SpeqError for answers that would replace what is asked."""
        for path in (self.answers, self.failed):
            if path.exists() and self.requests.exists() and path.samefile(self.requests):
                raise OptionError(
                    f"requests and answers are both {path}; give another file for the answers"
                )
