"""Decodes compact records, weight by weight, as csrc/compact.h says that they are laid out."""

import struct

import numpy as np

from tests.reference.windows import high_bytes_of_zero, window_of

LINE, QUAD, BLOCK, ESCAPE = 64, 4, 64, 7
EXCEPTIONS = 1 << 31
Shape = tuple[int, int]


class Sections:
    """Takes what lies in a record, at multiples of 64 bytes, one behind the other."""

    def __init__(self, record: bytes) -> None:
        self.record, self.at = record, 0

    def take(self, size: int) -> bytes:
        part = self.record[self.at : self.at + size]
        assert len(part) == size
        self.at += -(-size // LINE) * LINE
        return part

    def index(self, shapes: list[Shape]) -> list[int]:
        count = sum(-(-rows // QUAD) for rows, _ in shapes) + 1
        return list(struct.unpack(f"<{count}I", self.take(4 * count)))


class Streams:
    """Those of a quad: one from the front, one from the back."""

    def __init__(self, streams: bytes, entry: int, end: int) -> None:
        self.streams, self.exceptional = streams, bool(entry & EXCEPTIONS)
        self.front, self.back = entry % EXCEPTIONS, end % EXCEPTIONS

    def take(self, count: int) -> bytes:
        self.front += count
        return self.streams[self.front - count : self.front]

    def escapes(self, count: int) -> list[int]:
        self.back -= count
        return list(self.streams[self.back : self.back + count])


def runs(rows: int, columns: int, quad: int) -> list[tuple[int, range]]:
    """Rows of blocks of a quad, in the order of its streams: row and columns."""
    blocks = [range(at, min(at + BLOCK, columns)) for at in range(0, columns, BLOCK)]
    return [
        (row, block) for block in blocks for row in range(quad * QUAD, min((quad + 1) * QUAD, rows))
    ]


def bits_of(data: bytes, count: int) -> list[int]:
    """Values of three bits, the lowest first."""
    whole = int.from_bytes(data, "little")
    return [whole >> 3 * at & 7 for at in range(count)]


def lossless(record: bytes, shapes: list[Shape]) -> list[np.ndarray]:
    """The words [N, K] uint16 of each matrix of a lossless record."""
    sections = Sections(record)
    tables = sections.take(8 * len(shapes))
    index = sections.index(shapes)
    planes = [sections.take(rows * 3 * -(-columns // 8)) for rows, columns in shapes]
    lows = [sections.take(rows * columns) for rows, columns in shapes]
    streams, at, found = record[sections.at :], 0, []
    for number, (rows, columns) in enumerate(shapes):
        words, stride = np.zeros((rows, columns), np.uint16), 3 * -(-columns // 8)
        for quad in range(-(-rows // QUAD)):
            part = Streams(streams, index[at], index[at + 1])
            for row, block in runs(rows, columns, quad):
                plane = planes[number][row * stride : (row + 1) * stride]
                classes = bits_of(plane, columns)
                escaped = [column for column in block if classes[column] == ESCAPE]
                high = {column: tables[8 * number + classes[column]] for column in block}
                high |= zip(escaped, part.escapes(len(escaped)), strict=True)
                for column in block:
                    low = lows[number][row * columns + column]
                    words[row, column] = high[column] << 8 | low
            at += 1
        found.append(words)
    return found


def residual(
    record: bytes, shapes: list[Shape], codes: list[tuple[np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """The words of each matrix of a residual record, over codes -8 to 7 and scales, [N, K] both."""
    sections = Sections(record)
    index = sections.index(shapes)
    lows = [sections.take(rows * columns) for rows, columns in shapes]
    streams, at, found = record[sections.at :], 0, []
    for number, (rows, columns) in enumerate(shapes):
        words, (values, scales) = np.zeros((rows, columns), np.uint16), codes[number]
        for quad in range(-(-rows // QUAD)):
            part = Streams(streams, index[at], index[at + 1])
            for row, block in runs(rows, columns, quad):
                zeros = [column for column in block if values[row, column] == 0]
                classes = bits_of(part.take(-(-3 * len(zeros) // 8)), len(zeros))
                of_zero = dict(zip(zeros, classes, strict=True))
                escaped = {column for column in zeros if of_zero[column] == ESCAPE}
                if part.exceptional:
                    escaped |= {block.start + each for each in part.take(part.take(1)[0])}
                high = dict(zip(sorted(escaped), part.escapes(len(escaped)), strict=True))
                for column in block:
                    low = lows[number][row * columns + column]
                    scale = float(scales[row, column])
                    if column in high:
                        byte = high[column]
                    elif column in of_zero:
                        told = high_bytes_of_zero(scale)[of_zero[column]]
                        assert told is not None
                        byte = told
                    else:
                        window = window_of(int(values[row, column]), scale)
                        byte = next(word >> 8 for word in window if word & 0xFF == low)
                    words[row, column] = byte << 8 | low
            at += 1
        found.append(words)
    return found
