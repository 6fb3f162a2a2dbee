"""A file with a request in each line: where they lie in it, and what tells it from other files."""

import hashlib
from array import array
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from speq.errors import FileError, SpeqError
from speq.files.regular_file import check_regular

REMEDY = "give a file of JSON Lines with a request in each"


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request as it stands in its file.

    number  among the requests, from 0
    line    of the file, from 1: blank lines hold no request
    """

    number: int
    line: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RequestFile:
    """digest: SHA-256 of all of it; lines, offsets: of each request, its line and where that
    begins, in bytes.
    """

    path: Path
    digest: str
    lines: "array[int]"
    offsets: "array[int]"

    @classmethod
    def of(cls, path: Path) -> "RequestFile":
        """Raises SpeqError for a file that cannot be read or holds no request."""
        digest, lines, offsets, offset = hashlib.sha256(), array("Q"), array("Q"), 0
        try:
            check_regular(path, REMEDY)
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    digest.update(line)
                    if line.strip():
                        lines.append(number)
                        offsets.append(offset)
                    offset += len(line)
        except (OSError, ValueError) as error:
            if isinstance(error, SpeqError):
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise FileError(f"{path} cannot be read: {reason}; {REMEDY}") from error
        if not lines:
            raise FileError(f"{path} holds no request; {REMEDY}")
        return cls(path, digest.hexdigest(), lines, offsets)

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, numbers: Iterable[int]) -> Generator[RequestLine, None, None]:
        """The requests of these numbers, one after another."""
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self.offsets[number])
                yield RequestLine(number, self.lines[number], file.readline().strip())
