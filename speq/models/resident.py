"""Weights in allocated memory.

The loader leaves weights of the checkpoint's dtype in mapped files. There the system reads them in
the first pass, page by page, and may drop them at any time. A budget that counts them as resident
would be wrong, and so would every measurement.
"""

import bisect
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from speq.errors import Broken
from speq.files.alignment import allocate_aligned, prefer_huge_pages
from speq.files.checkpoint import Checkpoint
from speq.files.checksums import TensorCheck
from speq.files.range_file import ENDS_BYTES, bytes_of
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.units import Progress, no_progress, track

MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Region:
    """Addresses where a file is mapped, from `offset` on."""

    start: int
    end: int
    offset: int
    path: str


def mapped_regions() -> list[Region]:
    """Files mapped into this process, by address; empty if the system does not tell."""
    regions = []
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            regions.append(Region(start, end, int(offset, 16), path[0]))
    return regions


class MappedWeights:
    """Reader of a checkpoint's mapped weights into allocated memory.

    `check` compares what is read, and raises SpeqError. Several threads may read at a time.
    """

    def __init__(self, checkpoint: Checkpoint, check: TensorCheck) -> None:
        self._files = {os.path.realpath(file.path): file for file in checkpoint.files.values()}
        self._regions = [region for region in mapped_regions() if region.path in self._files]
        self._starts = [region.start for region in self._regions]
        self._check = check
        self._names = {
            (file.path, info.offset): name
            for name, (file, info) in checkpoint.tensors.items()
            if info.nbytes
        }

    def _place(self, tensor: Tensor) -> tuple[SafetensorsFile, int] | None:
        """Find the file that is mapped for a tensor, and its offset there; None: there is none."""
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address + tensor.nbytes > self._regions[at].end:
            return None
        if not tensor.is_contiguous():
            raise Broken(f"a tensor of shape {list(tensor.shape)} is not contiguous in its file")
        region = self._regions[at]
        return self._files[region.path], region.offset + address - region.start

    def name(self, tensor: Tensor) -> str | None:
        """Name of the checkpoint's tensor that `tensor` maps whole and unchanged; None: there is
        none.
        """
        file, offset = self._place(tensor) or (None, 0)
        if file is None:
            return None
        name = self._names.get((file.path, offset))
        if name is None:
            return None
        stored = file.tensors[name]
        same = stored.dtype == tensor.dtype and tuple(stored.shape) == tuple(tensor.shape)
        return name if same else None

    def whole(self, tensor: Tensor) -> tuple[SafetensorsFile, TensorInfo] | None:
        """The file that a tensor maps whole and unchanged, and its place there; None: there is
        none.
        """
        name, place = self.name(tensor), self._place(tensor)
        return None if name is None or place is None else (place[0], place[0].tensors[name])

    def leave(self, tensor: Tensor) -> None:
        """Exclude a tensor from reading and comparing, since something replaces it."""
        file, offset = self._place(tensor) or (None, 0)
        if file is not None:
            self._check.leave(file, offset)

    def words(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to allocated memory; return it as it is if no file is mapped for it."""
        file, offset = self._place(tensor) or (None, 0)
        if file is None:
            return tensor
        made = torch.empty_like(tensor)
        prefer_huge_pages(made)
        words = made.view(-1).view(torch.uint8)
        file.read_scattered(offset, words, allocate_aligned(1, ENDS_BYTES)[0])
        self._check.compare(file, offset, bytes_of(words))
        return made


def make_resident(
    model: nn.Module, mapped: MappedWeights, progress: Progress = no_progress
) -> None:
    """Read a model's mapped parameters and buffers into allocated memory."""
    tensors = [*chain(model.parameters(), model.buffers())]
    for tensor in track("loading weights", tensors, len(tensors), progress):
        tensor.data = mapped.words(tensor.data)
