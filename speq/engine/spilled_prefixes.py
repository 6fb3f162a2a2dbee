"""KV of prompts' chunks that no KV cache holds any more, in files that end with this process.

One small request takes the KV cache that holds a long prompt. Reading the prompt's KV again takes a
small part of the time of running it.
"""

import logging
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from torch import Tensor

from speq.engine.prefix_files import fill, name_of, nbytes_of, store
from speq.errors import FileError

logger = logging.getLogger("speq")

# A process may have 1,024 files open where nothing else is said.
MOST_FILES = 256


@dataclass(slots=True)
class SpilledPrefixes:
    """Files without names in a folder that is made if it is not there.

    limit_bytes  most bytes of all files; those that were used longest ago go first
    """

    folder: Path
    limit_bytes: int
    _files: OrderedDict[str, tuple[IO[bytes], int]] = field(default_factory=OrderedDict)
    _writes: bool = True

    def name(self, owner: str, token_ids: Sequence[int], ends: Sequence[int]) -> str:
        """Name the last chunk of some tokens, whose passes had these ends."""
        return name_of("", owner, token_ids, ends)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._files.values())

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Fill tensors with what was written. Return False where that failed, and forget it."""
        file, _ = self._files[name]
        try:
            file.seek(0)
            fill(file, tensors)
        except (OSError, FileError) as error:
            logger.warning("a prompt's tokens are run again: %s", error)
            self._drop(name)
            return False
        self._files.move_to_end(name)
        return True

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Write a file, if it is not there. After an error no more are written."""
        nbytes = nbytes_of(tensors)
        if not self._writes or nbytes > self.limit_bytes or self.has(name):
            return
        while self._files and (
            self.nbytes + nbytes > self.limit_bytes or len(self._files) == MOST_FILES
        ):
            self._drop(next(iter(self._files)))
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 -- it stays open
            self._files[name] = file, nbytes
            store(file, tensors)
            file.flush()
        except OSError as error:
            self._writes = False
            if self.has(name):
                self._drop(name)
            logger.warning("no more prompts are kept in %s: %s", self.folder, error.strerror)

    def _drop(self, name: str) -> None:
        file, _ = self._files.pop(name)
        with suppress(OSError):
            file.close()

    def close(self) -> None:
        """Give all of it up."""
        for name in [*self._files]:
            self._drop(name)
