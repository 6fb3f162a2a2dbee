"""Plain torch versions of the ops over compact experts.

csrc/compact.h has the layout of records, speq/kernels/compact_layout.py their sizes. A matrix is
viewed here as [Q, B, 4, 64]: quads, blocks, rows of a quad, columns of a block, which is the order
of the streams; elements past its edges are absent.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speq.kernels import windows
from speq.kernels.compact_layout import (
    BLOCK_COLUMNS,
    LINE_BYTES,
    QUAD_ROWS,
    SLACK_BYTES,
    CompactLayout,
)
from speq.kernels.reference import (
    Activation,
    check_ids,
    empty_expert,
    grouped_records,
    matrices_of,
    run_experts,
)

CLASSES = 8
ESCAPE = 7
HAS_EXCEPTIONS = 1 << 31


def encode_lossless_out(
    gate_up_proj: Tensor,
    down_proj: Tensor,
    record: Tensor,
    nbytes: Tensor,
    first: int = 0,
    end: int = 3,
) -> None:
    """Encode matrices of one expert losslessly into `record`, if it has room.

    gate_up_proj  [2F, H], gate over up, or [F, H] without a gate, and down_proj [H, F], bfloat16
    record        [R] uint8; nbytes [1] int64: bytes of the record, whether it fits or not
    first, end    which of gate, up and down are encoded; those before were, into the same record
                  and nbytes. Both are known once the last is encoded, here with all the others.
    """
    if end < 3:
        return
    matrices = matrices_of(gate_up_proj, down_proj)
    encode_lossless_matrices(
        _layout(gate_up_proj, down_proj, lossless=True), matrices, record, nbytes
    )


def encode_lossless_matrices(
    layout: CompactLayout, matrices: list[Tensor], record: Tensor, nbytes: Tensor
) -> None:
    """Run `encode_lossless_out` on the bfloat16 matrices of a layout."""
    head, planes, bytes_, quads = [], [], [], []
    if len(matrices) == 2:  # of a gate that is not there
        head.append(F.pad(torch.arange(ESCAPE), (0, 1)))
    for matrix in matrices:
        words = _words(matrix)
        high = words >> 8
        counts = torch.bincount(high.flatten(), minlength=256)
        frequent = torch.argsort(counts, descending=True, stable=True)[:ESCAPE]
        of = torch.full((256,), ESCAPE)
        of[frequent] = torch.arange(ESCAPE)
        classes = of[high]
        head += [F.pad(frequent, (0, 1))]
        planes.append(_pack_classes(F.pad(classes, (0, -classes.shape[1] % 8))))
        bytes_.append(words & 0xFF)
        escapes = _blocks(classes, -1) == ESCAPE
        quads += _streams_of(len(matrix), escapes, _blocks(high, 0))
    _write([torch.cat(head)], planes + bytes_, quads, record, nbytes)


def decode_lossless_out(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode a record bit-exactly into gate_up_proj [2F, H] and down_proj [H, F]."""
    matrices = matrices_of(gate_up_proj, down_proj)
    decode_lossless_matrices(_layout(gate_up_proj, down_proj, lossless=True), record, matrices)


def decode_lossless_matrices(layout: CompactLayout, record: Tensor, matrices: list[Tensor]) -> None:
    """Run `decode_lossless_out` into the matrices of a layout."""
    sections = _Sections(layout, record)
    tables = sections.take((1 if len(matrices) == 1 else 3) * CLASSES).view(-1, CLASSES)
    tables = tables[-len(matrices) :].long()
    index = sections.index()
    planes = [
        sections.take(rows * -(-columns // 8) * 3).view(rows, -1)
        for rows, columns in layout.matrices
    ]
    bytes_ = [sections.take(rows * columns).view(rows, -1) for rows, columns in layout.matrices]
    streams = sections.rest()
    for matrix, table, plane, low, entries in zip(
        matrices, tables, planes, bytes_, index, strict=True
    ):
        columns = matrix.shape[1]
        classes = _unpack_classes(plane)[:, :columns]
        escapes = _blocks(classes, -1) == ESCAPE
        high = _blocks(table[classes], 0)
        high[escapes] = _read_escapes(escapes, entries, streams)
        _store(matrix, _unblock(high, matrix.shape) << 8 | low.long())


def encode_residual_out(
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    record: Tensor,
    nbytes: Tensor,
    first: int = 0,
    end: int = 3,
) -> None:
    """Encode residuals of an expert's matrices over INT4 codes into `record`, if it has room.

    gate_up_*, down_*  qweight and scales of the same matrices, see `linear_int4`
    For the rest see `encode_lossless_out`.
    """
    if end < 3:
        return
    matrices = matrices_of(gate_up_proj, down_proj)
    width = down_proj.shape[1]
    codes = [*_parts(gate_up_qweight, gate_up_scales, width), (down_qweight, down_scales)]
    encode_residual_matrices(
        _layout(gate_up_proj, down_proj, lossless=False), matrices, codes, record, nbytes
    )


def encode_residual_matrices(
    layout: CompactLayout,
    matrices: list[Tensor],
    codes: list[tuple[Tensor, Tensor]],
    record: Tensor,
    nbytes: Tensor,
) -> None:
    """Run `encode_residual_out` on the matrices of a layout, with the qweight and scales of
    each.
    """
    bytes_, quads = [], []
    for matrix, pair in zip(matrices, codes, strict=True):
        words, (values, scales) = _words(matrix), windows.codes_and_scales(*pair)
        bytes_.append(words & 0xFF)
        quads += _streams_of(
            len(matrix),
            _blocks(windows.escapes(words, values, scales), 0) == 1,
            _blocks(words >> 8, 0),
            _blocks(values == 0, 0) == 1,
            _blocks(windows.zero_classes(words, scales), 0),
        )
    _write([], bytes_, quads, record, nbytes)


def decode_residual_out(
    record: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> None:
    """Decode a residual record over its codes, bit-exactly."""
    matrices = matrices_of(gate_up_proj, down_proj)
    width = down_proj.shape[1]
    codes = [*_parts(gate_up_qweight, gate_up_scales, width), (down_qweight, down_scales)]
    decode_residual_matrices(
        _layout(gate_up_proj, down_proj, lossless=False), record, codes, matrices
    )


def decode_residual_matrices(
    layout: CompactLayout,
    record: Tensor,
    codes: list[tuple[Tensor, Tensor]],
    matrices: list[Tensor],
) -> None:
    """Run `decode_residual_out` into the matrices of a layout, with the qweight and scales of
    each.
    """
    sections = _Sections(layout, record)
    index = sections.index()
    bytes_ = [sections.take(rows * columns).view(rows, -1) for rows, columns in layout.matrices]
    streams = sections.rest()
    for matrix, pair, low, entries in zip(matrices, codes, bytes_, index, strict=True):
        values, scales = windows.codes_and_scales(*pair)
        zero = _blocks(values == 0, 0) == 1
        classes, exceptions = _front(len(matrix), zero, entries, streams)
        classes = _unblock(classes, matrix.shape)
        high = torch.where(
            values == 0,
            windows.zero_high_bytes(classes, scales),
            windows.high_bytes(low.long(), values, scales),
        )
        escapes = exceptions | (zero & (_blocks(classes, 0) == ESCAPE))
        blocks = _blocks(high, 0)
        blocks[escapes] = _read_escapes(escapes, entries, streams)
        _store(matrix, _unblock(blocks, matrix.shape) << 8 | low.long())


moe_grouped_lossless_out = grouped_records(decode_lossless_out, 0)


def moe_grouped_residual_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    base_slots: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    input_perm: Tensor | None,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run `moe_grouped_out` over residual records in `slots` [S, slot_bytes] uint8.

    base_slots         [E] int64: base slot of each expert's codes; for gate_up_*, down_* and
                       input_perm see `moe_int4_out`
    The matrices of a record are in the order of the codes: the columns of gate_up in that of
    input_perm.
    """
    hidden_size, width = down_qweight.shape[1], down_qweight.shape[2] * 2

    def words_of(expert: int, slot: int) -> tuple[Tensor, ...]:
        base = int(base_slots[expert])
        check_ids("base_slots", base_slots[expert], len(down_qweight), "base slots")
        words = empty_expert(hidden_size, width, activation, slots.device)
        codes = gate_up_qweight[base], gate_up_scales[base], down_qweight[base], down_scales[base]
        decode_residual_out(slots[slot], *codes, *words)
        return words if input_perm is None else (*words, input_perm[base])

    places = slot_table, len(slots)
    biases = gate_up_bias, down_bias
    run_experts(hidden_states, topk_ids, *places, words_of, activation, out, *biases)


class _Sections:
    """Reader of the sections of a record, one after another."""

    def __init__(self, layout: CompactLayout, record: Tensor) -> None:
        self._layout, self._record, self._at = layout, record, 0

    def take(self, nbytes: int) -> Tensor:
        part = self._record[self._at : self._at + nbytes]
        self._at += -(-nbytes // LINE_BYTES) * LINE_BYTES
        return part

    def index(self) -> list[Tensor]:
        """Index entries of each matrix, with the final one."""
        quads = [-(-rows // QUAD_ROWS) for rows, _ in self._layout.matrices]
        entries = self.take(4 * (sum(quads) + 1)).long().view(-1, 4)
        places = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24], device=entries.device)
        whole = (entries * places).sum(1)
        starts = [sum(quads[:at]) for at in range(len(quads))]
        return [whole[first : first + n + 1] for first, n in zip(starts, quads, strict=True)]

    def rest(self) -> Tensor:
        return self._record[self._at :].long()


def _layout(gate_up_proj: Tensor, down_proj: Tensor, lossless: bool) -> CompactLayout:
    hidden_size, width = down_proj.shape
    return CompactLayout.of_expert(hidden_size, width, lossless, len(gate_up_proj) != width)


def _parts(qweight: Tensor, scales: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(qweight.split(rows), scales.split(rows), strict=True))


def _words(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int16).long() & 0xFFFF


def _store(matrix: Tensor, words: Tensor) -> None:
    matrix.view(torch.int16).copy_(torch.where(words >= 1 << 15, words - (1 << 16), words))


def _blocks(matrix: Tensor, absent: int) -> Tensor:
    """View [N, K] as [Q, B, 4, 64], with `absent` past the edges."""
    rows, columns = matrix.shape
    padded = F.pad(matrix.long(), (0, -columns % BLOCK_COLUMNS, 0, -rows % QUAD_ROWS), value=absent)
    return padded.unflatten(1, (-1, BLOCK_COLUMNS)).unflatten(0, (-1, QUAD_ROWS)).transpose(1, 2)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def _pack_classes(classes: Tensor) -> Tensor:
    """Pack [N, 8C] values below 8 into [N, 3C] bytes, lowest bits first."""
    places = torch.tensor([1 << 3 * at for at in range(8)], device=classes.device)
    whole = (classes.unflatten(1, (-1, 8)) * places).sum(2)
    return torch.stack([whole >> 8 * at & 0xFF for at in range(3)], dim=2).flatten(1)


def _unpack_classes(plane: Tensor) -> Tensor:
    places = torch.tensor([1, 1 << 8, 1 << 16], device=plane.device)
    whole = (plane.long().unflatten(1, (-1, 3)) * places).sum(2)
    return torch.stack([whole >> 3 * at & 7 for at in range(8)], dim=2).flatten(1)


def _streams_of(
    rows: int,
    escapes: Tensor,
    escaped: Tensor,
    zero: Tensor | None = None,
    classes: Tensor | None = None,
) -> list[tuple[bytes, bool]]:
    """Encode the front and back streams of each quad, and whether it has exceptions, of a matrix of
    `rows`.
    """
    quads = []
    for quad in range(len(escapes)):
        front, back = bytearray(), b""
        exceptional = zero is not None and bool((escapes[quad] & ~zero[quad]).any())
        for block in range(escapes.shape[1]):
            for row in range(min(QUAD_ROWS, rows - quad * QUAD_ROWS)):
                mask = escapes[quad, block, row]
                back = bytes(escaped[quad, block, row][mask].tolist()) + back
                if zero is not None and classes is not None:
                    front += _front_of(
                        classes[quad, block, row][zero[quad, block, row]],
                        mask & ~zero[quad, block, row] if exceptional else None,
                    )
        quads.append((bytes(front) + back, exceptional))
    return quads


def _front_of(classes: Tensor, exceptions: Tensor | None) -> bytes:
    """Encode a block's row in the front stream."""
    whole = sum(value << 3 * at for at, value in enumerate(classes.tolist()))
    front = whole.to_bytes(-(-3 * len(classes) // 8), "little")
    if exceptions is None:
        return front
    columns = torch.where(exceptions)[0].tolist()
    return front + bytes([len(columns), *columns])


def _write(
    head: list[Tensor],
    planes: list[Tensor],
    quads: list[tuple[bytes, bool]],
    record: Tensor,
    nbytes: Tensor,
) -> None:
    """Write sections one after another, each at a whole line. Rows past the edges have no
    streams.
    """
    entries, at = [], 0
    for stream, exceptional in quads:
        entries.append(at | (HAS_EXCEPTIONS if exceptional else 0))
        at += len(stream)
    entries.append(at)
    index = b"".join(entry.to_bytes(4, "little") for entry in entries)
    sections = [bytes(part.flatten().tolist()) for part in head]
    sections += [index, *(bytes(part.flatten().tolist()) for part in planes)]
    whole = b"".join(part + bytes(-len(part) % LINE_BYTES) for part in sections)
    whole += b"".join(stream for stream, _ in quads) + bytes(SLACK_BYTES)
    nbytes.fill_(len(whole))
    if len(whole) <= len(record):
        record[: len(whole)].copy_(torch.frombuffer(bytearray(whole), dtype=torch.uint8))


def _read_escapes(escapes: Tensor, entries: Tensor, streams: Tensor) -> Tensor:
    """Read the bytes of the back streams, in the order of the escapes [Q, B, 4, 64]."""
    counts = escapes.sum(3).flatten(1)
    ends = (entries[1:] & HAS_EXCEPTIONS - 1).unsqueeze(1)
    starts = (ends - counts.cumsum(1)).view(escapes.shape[:3])
    ranks = escapes.long().cumsum(3) - 1
    return streams[(starts.unsqueeze(3) + ranks)[escapes].clamp(0, len(streams) - 1)]


def _front(rows: int, zero: Tensor, entries: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Read the classes of words with code 0, and the exceptions among the others, [Q, B, 4, 64]."""
    classes, exceptions = torch.zeros_like(zero, dtype=torch.long), torch.zeros_like(zero)
    for quad, entry in enumerate(entries[:-1].tolist()):
        at = entry & HAS_EXCEPTIONS - 1
        for block in range(zero.shape[1]):
            for row in range(min(QUAD_ROWS, rows - quad * QUAD_ROWS)):
                mask = zero[quad, block, row]
                count = int(mask.sum())
                size = -(-3 * count // 8)
                whole = int.from_bytes(bytes(streams[at : at + size].tolist()), "little")
                values = [whole >> 3 * rank & 7 for rank in range(count)]
                classes[quad, block, row][mask] = torch.tensor(
                    values, dtype=torch.long, device=zero.device
                )
                at += size
                if entry & HAS_EXCEPTIONS:
                    columns = streams[at + 1 : at + 1 + int(streams[at])]
                    exceptions[quad, block, row, columns % BLOCK_COLUMNS] = True
                    at += 1 + len(columns)
    return classes, exceptions
