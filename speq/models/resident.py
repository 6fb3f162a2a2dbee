"""Weights in memory of their own.

The loader leaves weights of the checkpoint's dtype where safetensors mapped their files. There the
system fetches them at the first pass, a page at a time, and drops them when it likes: a budget that
says they are in memory would be wrong, and so would every measurement.
"""

import bisect
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from speq.files.alignment import aligned_bytes
from speq.files.checkpoint import Checkpoint
from speq.files.checksums import TensorCheck
from speq.files.range_file import ENDS_BYTES, RangeFile, bytes_of

MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Region:
    """Addresses at which a file is mapped, from `offset` on."""

    start: int
    end: int
    offset: int
    path: str


def mapped_regions() -> list[Region]:
    """Files mapped into this process, by address; none where the system does not tell."""
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


def make_resident(model: nn.Module, checkpoint: Checkpoint, check: TensorCheck) -> None:
    """Read parameters and buffers that the checkpoint's files are mapped for into memory.

    They are compared by `check`, which raises SpeqError.
    """
    files = {os.path.realpath(file.path): file for file in checkpoint.files.values()}
    regions = [region for region in mapped_regions() if region.path in files]
    starts = [region.start for region in regions]
    ends = aligned_bytes(1, ENDS_BYTES)[0]
    for tensor in chain(model.parameters(), model.buffers()):
        address = tensor.data_ptr()
        at = bisect.bisect_right(starts, address) - 1
        if at < 0 or address + tensor.nbytes > regions[at].end:
            continue
        assert tensor.is_contiguous()
        region = regions[at]
        file, offset = files[region.path], region.offset + address - region.start
        made = read(file, offset, tensor.data, ends)
        check.compare(file, offset, bytes_of(made.view(-1).view(torch.uint8)))
        tensor.data = made


def read(file: RangeFile, offset: int, like: Tensor, ends: Tensor) -> Tensor:
    """A tensor like another, whose bytes lie at `offset` of a file."""
    made = torch.empty_like(like)
    file.read_scattered(offset, made.view(-1).view(torch.uint8), ends)
    return made
