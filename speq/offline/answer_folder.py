"""Answers until all are there: kept in the order in which they came, whatever ends the process.

A folder holds them, and a journal with a line for each: its number, its bytes and their CRC-32, how
many tokens it took, and why it failed. An answer counts once its line is on the disk.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speq.errors import FileError
from speq.files.alone import lock_folder
from speq.files.atomic_file import make_folder, replacing, writing
from speq.files.journal import Journal
from speq.files.json_file import parse_json
from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestFile

logger = logging.getLogger("speq")

JOURNAL, ANSWERS = "journal", "answers.jsonl"
REMEDY = "free some space: answers so far are kept, and the same command continues from there"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer in the folder. offset, nbytes: where its line lies in the file of answers."""

    offset: int
    nbytes: int
    prompt_tokens: int
    new_tokens: int
    error: str | None


@dataclass(slots=True)
class AnswerFolder:
    """kept: what is answered, by the number of the request."""

    folder: Path
    journal: Journal
    kept: dict[int, StoredAnswer] = field(default_factory=dict)
    _end: int = 0

    @classmethod
    def of(cls, folder: Path, header: dict[str, Any]) -> "AnswerFolder":
        """Open a folder that is empty, or that an earlier run left.

        header  what answers depend on: "requests", "model" and "options", by name

        Raises SpeqError where an earlier run had another one.
        """
        with writing(folder, REMEDY):
            journal = Journal(folder / JOURNAL, header, (JOURNAL, ANSWERS).__contains__)
            differing = differences(journal.header, header)
            if differing:
                raise FileError(
                    f"{folder} holds answers that were made with other {', '.join(differing)}; "
                    "give the same to go on with them, or remove that folder to begin anew"
                )
            made = cls(folder, journal)
            made._recover()
        return made

    def _recover(self) -> None:
        path = self.folder / ANSWERS
        path.touch()
        with path.open("rb") as file:
            for at, entry in enumerate(self.journal.entries):
                _, nbytes, crc32, *_ = entry
                if zlib.crc32(file.read(nbytes)) != crc32:
                    logger.warning("%s is damaged behind answer %d: more are made again", path, at)
                    self.journal.forget(at)
                    break
                self._note(entry)
        os.truncate(path, self._end)

    def _note(self, entry: list[Any]) -> None:
        number, nbytes, _, prompt_tokens, new_tokens, error = entry
        self.kept[number] = StoredAnswer(self._end, nbytes, prompt_tokens, new_tokens, error)
        self._end += nbytes

    def add(self, answers: list[AnswerLine]) -> None:
        """Keep answers: they are on the disk when this returns. Raises SpeqError where it is
        full.
        """
        with writing(self.folder, REMEDY):
            entries = []
            with (self.folder / ANSWERS).open("ab") as file:
                for answer in answers:
                    line = json.dumps(answer.content).encode() + b"\n"
                    file.write(line)
                    tokens = answer.prompt_tokens, answer.new_tokens
                    entries.append(
                        [answer.number, len(line), zlib.crc32(line), *tokens, answer.error]
                    )
                file.flush()
                os.fsync(file.fileno())
            self.journal.add(*entries)
        for entry in entries:
            self._note(entry)

    def left(self, file: RequestFile) -> Iterator[int]:
        """Numbers of the requests that have no answer yet."""
        return (number for number in range(len(file)) if number not in self.kept)

    @property
    def failed(self) -> list[int]:
        """Numbers of the requests that failed, in their order."""
        return sorted(number for number, kept in self.kept.items() if kept.error is not None)

    def write(self, requests: RequestFile, answers: Path, failed: Path) -> None:
        """Write both files, each whole or not at all, once every request has its answer; then the
        folder goes. Raises SpeqError where the disk is full: it stays.
        """
        self._write_failed(requests, failed)
        with (
            writing(answers, REMEDY),
            replacing(answers) as out,
            (self.folder / ANSWERS).open("rb") as file,
        ):
            for number in range(len(requests)):
                file.seek(self.kept[number].offset)
                out.write(file.read(self.kept[number].nbytes))
        # First: without it nothing here is taken for unfinished.
        self.journal.path.unlink()
        shutil.rmtree(self.folder)

    def _write_failed(self, requests: RequestFile, path: Path) -> None:
        numbers = self.failed
        with writing(path, REMEDY):
            if not numbers:
                path.unlink(missing_ok=True)
                return
            with replacing(path) as out:
                for request in requests.read(numbers):
                    told = {
                        "line": request.line,
                        "error": self.kept[request.number].error,
                        "request": parse_or_text(request.content),
                    }
                    out.write(json.dumps(told).encode() + b"\n")


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two headers; of their options, which."""
    names = [name for name in now if name != "options" and kept.get(name) != now[name]]
    before, after = kept.get("options", {}), now.get("options", {})
    return names + sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


@contextmanager
def open_answers(path: Path, header: dict[str, Any]) -> Iterator[AnswerFolder]:
    """The folder at a path, new or left by an earlier run, for this process alone.

    Raises SpeqError as `AnswerFolder.of`, and where another process has it.
    """
    make_folder(path)
    sentence = (
        f"another process writes answers to {path}; wait for its end, or give another file for "
        "the answers"
    )
    with lock_folder(path, sentence):
        yield AnswerFolder.of(path, header)


def parse_or_text(content: bytes) -> Any:
    """A request as it was given: a JSON value, or a text where it is none."""
    try:
        return parse_json(content)
    except ValueError:
        return content.decode(errors="replace")
