"""Encoding into compact records, and checks of records."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speq.errors import UnsupportedError
from speq.kernels import library
from speq.kernels.checks import check_tensor
from speq.kernels.compact_layout import STREAMS_END, CompactLayout


def encode_whole(
    op: str,
    layout: CompactLayout,
    *parts: Tensor,
    prepare: Callable[[Tensor], None] = lambda record: None,
) -> Tensor:
    """Encode parts with an op into a record [R] uint8 of exact size.

    prepare  is given the record before it is written
    """
    # To count a lossless one first takes half as long as to encode it. A copy in fresh memory may
    # take longer than both. The streams of a residual one would be made twice: it is copied from
    # room for the largest, whose unwritten pages take no memory.
    room = torch.empty(0 if layout.lossless else layout.most_bytes, dtype=torch.uint8)
    record = torch.empty(encode_into(op, layout, room, *parts), dtype=torch.uint8)
    prepare(record)
    if layout.lossless:
        encode_into(op, layout, record, *parts)
    else:  # torch would copy with all threads, and callers encode in several at a time
        record.numpy()[:] = room[: len(record)].numpy()
    return record


def encode_into(
    op: str, layout: CompactLayout, record: Tensor, *parts: Tensor, part: Sequence[int] = ()
) -> int:
    """Encode parts with an op into `record`, if it has room. Return the bytes needed.

    part  see `compact_ops.Part`; empty: all

    Raises SpeqError for a record that no index can describe.
    """
    *matrices, before = part or (0,)
    nbytes = torch.tensor([before])
    library.call(op, *parts, record, nbytes, *matrices)
    streams = int(nbytes) - layout.fixed_bytes
    if streams >= STREAMS_END:
        sizes = " and ".join(f"[{rows}, {columns}]" for rows, columns in layout.matrices)
        raise UnsupportedError(
            f"escapes of {sizes} take {streams} bytes, and a compact record has room for fewer "
            f"than {STREAMS_END}; keep these weights raw"
        )
    return int(nbytes)


def check_records(name: str, records: Tensor, dims: int, least_bytes: int) -> None:
    """Raise ValueError unless `records`, one or slots of them, can hold one of so many bytes."""
    shape = (None,) * dims
    check_tensor(name, records, shape, (torch.uint8,), records.device, strided=dims == 2)
    if records.shape[-1] < least_bytes:
        raise ValueError(
            f"{name} has {records.shape[-1]} bytes to a record; those of this shape have at least "
            f"{least_bytes}"
        )
