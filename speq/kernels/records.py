"""Making compact records with the ops that encode, and checks of records."""

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.kernels import library
from speq.kernels.checks import check_tensor
from speq.kernels.compact_layout import STREAMS_END, CompactLayout


def encode_whole(op: str, layout: CompactLayout, *parts: Tensor) -> Tensor:
    """The record that an op makes of its parts, [R] uint8, with no byte behind it."""
    # The size is an upper bound. Pages that nobody writes to take no memory.
    room = torch.empty(layout.most_bytes, dtype=torch.uint8)
    return room[: encode_into(op, layout, room, *parts)].clone()


def encode_into(op: str, layout: CompactLayout, record: Tensor, *parts: Tensor) -> int:
    """The bytes of the record that an op makes of its parts, in `record` where that has room.

    Raises SpeqError for a record that no index can describe.
    """
    nbytes = torch.empty(1, dtype=torch.int64)
    library.call(op, *parts, record, nbytes)
    streams = int(nbytes) - layout.fixed_bytes
    if streams >= STREAMS_END:
        sizes = " and ".join(f"[{rows}, {columns}]" for rows, columns in layout.matrices)
        raise SpeqError(
            f"escapes of {sizes} take {streams} bytes, and a compact record has room for fewer "
            f"than {STREAMS_END}; keep these weights raw"
        )
    return int(nbytes)


def check_records(name: str, records: Tensor, dims: int, layout: CompactLayout) -> None:
    """Raise ValueError unless `records`, one or slots of them, can hold such a record."""
    shape = (None,) * dims
    check_tensor(name, records, shape, (torch.uint8,), records.device, strided=dims == 2)
    if records.shape[-1] < layout.fixed_bytes:
        raise ValueError(
            f"{name} has {records.shape[-1]} bytes to a record; those of this shape have at least "
            f"{layout.fixed_bytes}"
        )
