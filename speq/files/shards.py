"""The safetensors files of a folder, and the file of each tensor."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from speq.errors import CheckpointError
from speq.files.json_file import read_json
from speq.files.model_folder import recognise
from speq.files.regular_file import check_link
from speq.files.safetensors_file import SafetensorsFile, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Shards:
    """Open files by name, and tensors by name with their file.

    index, single  names of the folder's index and of its only file; if both exist, the single file
                   counts, as in transformers
    called         maps a tensor's name on disk to its name here; None: the same

    Raises SpeqError if a file is missing, damaged or does not match the index.
    """

    def __init__(
        self,
        path: Path,
        index: str = INDEX,
        single: str = SINGLE,
        called: Callable[[str], str] | None = None,
    ) -> None:
        self.path, self._called = path, called
        self.files: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, tuple[SafetensorsFile, TensorInfo]] = {}
        self.has_metadata = True
        try:
            self._open(index, single)
        except BaseException:
            self.close()
            raise

    def _open(self, index: str, single: str) -> None:
        for stored, file_name in self._weight_map(index, single).items():
            if file_name not in self.files:
                self.files[file_name] = self._file(file_name)
            file = self.files[file_name]
            name = stored if self._called is None else self._called(stored)
            if file.stored.get(name) != stored:
                raise CheckpointError(
                    f"{file.path} lacks tensor {stored}, which {index} says it holds; download "
                    "both again"
                )
            if name in self.tensors:
                raise CheckpointError(
                    f"{self.path} holds tensor {stored} under two names; download it again"
                )
            self.tensors[name] = (file, file.tensors[name])

    def _file(self, name: str) -> SafetensorsFile:
        return SafetensorsFile(self.path / name, self._called)

    def _weight_map(self, index: str, single: str) -> dict[str, str]:
        for name in (index, single):
            check_link(self.path / name)
        if (self.path / index).exists() and not (self.path / single).is_file():
            return self._present(index)
        if not (self.path / single).exists():
            found = recognise(self.path)
            what, remedy = found or ("", "download or convert the model to those")
            raise CheckpointError(
                f"{self.path} holds neither {single} nor {index}{', but ' if what else ''}{what}; "
                f"only safetensors checkpoints are read: {remedy}"
            )
        self.files[single] = self._file(single)
        return dict.fromkeys(self.files[single].stored.values(), single)

    def _present(self, index: str) -> dict[str, str]:
        """Read an index, and check that all its files are present."""
        names = read_weight_map(self.path / index)
        self.has_metadata = isinstance(read_json(self.path / index).get("metadata"), dict)
        for file_name in sorted(set(names.values())):
            check_link(self.path / file_name)
            if not os.path.isfile(self.path / file_name):
                raise CheckpointError(
                    f"{self.path / index} names shard {file_name}, which is absent; download it"
                )
        return names

    def fingerprint(self, more: bytes = b"") -> str:
        """Digest of every file's header and size, of 64 blocks of 4 KiB spread over it, and of
        `more`.

        Hashing 100 GB would take minutes at every start; headers and samples change with any
        retraining.
        """
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            digest.update(f"{name}:{file.size}:".encode())
            digest.update(file.header)
            for block in file.samples(64):
                digest.update(block)
        digest.update(more)
        return digest.hexdigest()[:32]

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def read_weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor from an index. Raises SpeqError unless it names only files of
    its folder.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for file_name in names.values():
        named = isinstance(file_name, str) and file_name not in ("", "..")
        if not named or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index} names {file_name!r}, not a file of that folder; download the index again"
            )
    return names
