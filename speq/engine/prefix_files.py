"""Prefix cache on disk: what chunks of prompts left in KV caches, in files, for later runs.

A file has the KV that one chunk wrote, and the states after it. Its name is a digest of all that
these bits depend on: the model's files and what computes, the owner, the tokens up to the chunk's
end, and where the passes over them ended. So a file with that name has what running the chunk again
would give, and nothing is compared but checksums.
"""

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from speq.errors import FileError
from speq.files.atomic_file import PARTIAL_NAME, replacing
from speq.files.range_file import bytes_of
from speq.files.regular_file import check_regular
from speq.kernels.checksum import crc32_of

logger = logging.getLogger("speq")

MAGIC = b"speq-prefix-1\n"
SUFFIX = ".prefix"
CHECKSUM_BYTES = 4


@dataclass(slots=True)
class PrefixFiles:
    """Files of a folder that is made if it is not there.

    limit_bytes  most bytes of all files; those that were used longest ago go first
    identity     names the model's files and what computes
    """

    folder: Path
    limit_bytes: int
    identity: str
    _writes: bool = True

    def name(self, owner: str, token_ids: Sequence[int], ends: Sequence[int]) -> str:
        """Name the file of the last chunk of some tokens, whose passes had these ends."""
        return name_of(self.identity, owner, token_ids, ends) + SUFFIX

    def has(self, name: str) -> bool:
        return os.path.exists(self.folder / name)  # False as well where the disk does not say

    def read(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Fill tensors from a file. One that is damaged is reported and removed: return False."""
        path = self.folder / name
        try:
            check_regular(path)
            with path.open("rb") as file:
                fill(file, tensors)
        except (OSError, FileError) as error:
            logger.warning("%s is removed, and its tokens are run again: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return False
        with suppress(OSError):  # time of the last use
            os.utime(path)
        return True

    def write(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Write a file, if it is not there. After an error no more are written."""
        path = self.folder / name
        nbytes = nbytes_of(tensors)
        if not self._writes or nbytes > self.limit_bytes or self.has(name):
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(nbytes)
            with replacing(path) as file:
                os.fchmod(file.fileno(), 0o600)  # prompts can be guessed from it
                store(file, tensors)
        except OSError as error:
            self._writes = False
            logger.warning("no more prompts are kept in %s: %s", self.folder, error.strerror)

    def _make_room(self, nbytes: int) -> None:
        """Remove the files used longest ago, until another one fits into the limit."""
        found = []
        for entry in os.scandir(self.folder):
            partial = PARTIAL_NAME.fullmatch(entry.name)
            if (partial[1] if partial else entry.name).endswith(SUFFIX):
                with suppress(FileNotFoundError):  # another process removed it
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, stat.st_size, entry.path, partial is None))
        total = nbytes + sum(size for _, size, _, _ in found)
        for _, size, path, whole in sorted(found):
            if total <= self.limit_bytes:
                return
            if whole:
                Path(path).unlink(missing_ok=True)
                total -= size


def name_of(identity: str, owner: str, token_ids: Sequence[int], ends: Sequence[int]) -> str:
    """A digest of all that the KV of a chunk depends on."""
    digest = hashlib.sha256(json.dumps([identity, owner, [*ends]]).encode())
    digest.update(array("q", token_ids).tobytes())
    return digest.hexdigest()[:40]


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the file that `store` writes."""
    return len(MAGIC) + sum(tensor.nbytes + CHECKSUM_BYTES for tensor in tensors)


def store(file: IO[bytes], tensors: Sequence[Tensor]) -> None:
    """Write tensors one behind the other, each with its checksum."""
    file.write(MAGIC)
    for tensor in tensors:
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        file.write(bytes_of(data))
        file.write(crc32_of(data).to_bytes(CHECKSUM_BYTES, "little"))


def fill(file: IO[bytes], tensors: Sequence[Tensor]) -> None:
    """Read what `store` wrote into tensors of the same sizes. Raises SpeqError for other content;
    no byte reaches a tensor before its checksum was compared.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise FileError("it does not begin as such a file does")
    for tensor in tensors:
        data = torch.empty(tensor.nbytes, dtype=torch.uint8)
        read = file.readinto(bytes_of(data))  # type: ignore[attr-defined]
        checksum = file.read(CHECKSUM_BYTES)
        if read != data.nbytes or len(checksum) != CHECKSUM_BYTES:
            raise FileError("its end is missing")
        if crc32_of(data) != int.from_bytes(checksum, "little"):
            raise FileError("its bytes differ from their checksum")
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
    if file.read(1):
        raise FileError("it is longer than such a file")
