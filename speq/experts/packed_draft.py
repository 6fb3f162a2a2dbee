"""The INT4 draft in a packed model: the codes under its residual experts.

draft.bin  an expert's parts in the order of `Int4Layout.shapes`; expert after expert, without gaps
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speq.errors import FileError, SpeqError
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout, expert_of, group_columns
from speq.files.range_file import RangeFile
from speq.units import Done

DRAFT_FILE = "draft.bin"


@dataclass(frozen=True, slots=True)
class TiedDraft:
    """The draft that a store's experts must be decoded with.

    digest  `Int4Arena.digest` of it
    source  fingerprint of the source of its codes; None in packs of earlier versions
    """

    layout: Int4Layout
    digest: str
    source: str | None = None

    def entry(self) -> dict[str, Any]:
        return {
            "group_size": self.layout.group_size,
            "permuted": self.layout.permuted,
            "digest": self.digest,
            "source": self.source,
        }

    @classmethod
    def of(cls, entry: Any, hidden_size: int, expert_width: int, gated: bool) -> "TiedDraft":
        """Parse a manifest's entry. Raises ValueError, TypeError or KeyError if it is damaged."""
        group_size, permuted, digest = (entry[k] for k in ("group_size", "permuted", "digest"))
        if group_size is not None:
            for columns in (hidden_size, expert_width):
                size = group_columns(group_size, columns) if type(group_size) is int else 0
                if size <= 0 or columns % size or size % 2:
                    raise ValueError(f"group_size {group_size!r}")
        source = entry.get("source")
        if type(permuted) is not bool or not isinstance(digest, str):
            raise ValueError(f"{entry!r} is not a draft")
        if source is not None and not isinstance(source, str):
            raise ValueError(f"{entry!r} is of no source")
        layout = Int4Layout(hidden_size, expert_width, group_size, permuted, gated)
        return cls(layout, digest, source)

    def check_source(self, path: Path, other: Int4Layout, fingerprint: str) -> None:
        """Raise SpeqError if a draft that is not loaded yet cannot be the one of the pack `path`.

        other, fingerprint  its layout, and its fingerprint or its source's
        """
        known = {self.digest, self.source} if self.source else {fingerprint}
        if other.shapes != self.layout.shapes or fingerprint not in known:
            raise _other_draft(path)

    def check(self, path: Path, arena: Int4Arena) -> None:
        """Raise SpeqError unless an arena holds the codes that the pack `path` was made with."""
        if arena.digest() != self.digest:
            raise _other_draft(path)


def _other_draft(path: Path) -> SpeqError:
    return FileError(
        f"{path} holds residuals of another draft, or its {DRAFT_FILE} is damaged; leave the draft "
        "to be auto, which is the one it was packed with, or pack the model again"
    )


class PackedDraft:
    """Reader of draft.bin; opening it checks its size. Raises SpeqError."""

    label = "loading the draft"

    def __init__(self, folder: Path, tied: TiedDraft, count: int) -> None:
        self.layout = tied.layout
        self.fingerprint = tied.digest
        self._file = RangeFile(folder / DRAFT_FILE)
        if self._file.size != count * self.layout.nbytes:
            self._file.close()
            raise FileError(
                f"{self._file.path} has {self._file.size} bytes and {count} experts take "
                f"{count * self.layout.nbytes}; pack the model again"
            )

    def expert(self, at: int) -> Int4Expert:
        record = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        self._file.read_into(at * self.layout.nbytes, record)
        return expert_of(record, self.layout)

    def fill(self, arena: Int4Arena, progress: Done | None = None) -> None:
        for base_slot, at in enumerate(arena.held):
            arena.put(base_slot, self.expert(at))
            if progress is not None:
                progress(base_slot + 1, len(arena.held))

    def close(self) -> None:
        self._file.close()
