"""The form in which a model's dense matrices are held, and its memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from speq.kernels.compact_layout import CompactLayout
from speq.kernels.library import KERNELS, Kernels

# Usual bits per weight of packed matrices and experts, by form.
USUAL_BITS = {"lossless": 11.4, "residual": 8.9}


@dataclass(frozen=True, slots=True)
class DenseForm:
    """Form of the dense layers' and the embedding's matrices, in the order of `ModelShape.dense`.

    name         raw, lossless or residual
    sizes        bytes that each takes
    words_bytes  bytes of each as plain weights of the compute dtype
    packed       the pack holds the packed matrices: loading reads them, and plain weights only
                 where needed
    """

    name: str
    sizes: tuple[int, ...]
    words_bytes: tuple[int, ...]
    packed: bool = False

    @classmethod
    def raw(cls, shapes: Sequence[tuple[int, int]], itemsize: int) -> Self:
        """Plain weights of `itemsize` bytes each."""
        sizes = tuple(rows * columns * itemsize for rows, columns in shapes)
        return cls("raw", sizes, sizes)

    @classmethod
    def least(
        cls,
        name: str,
        shapes: Sequence[tuple[int, int]],
        itemsize: int,
        kernels: Kernels = KERNELS["cpu"],
    ) -> Self:
        """The smallest size that packed matrices can have. Plain weights where those are no larger,
        and where kernels take no packed form of a matrix.
        """
        return cls._of(name, shapes, itemsize, 0, kernels)

    @classmethod
    def usual(
        cls,
        name: str,
        shapes: Sequence[tuple[int, int]],
        itemsize: int,
        kernels: Kernels = KERNELS["cpu"],
    ) -> Self:
        """The usual size of packed matrices; otherwise as `least`."""
        return cls._of(name, shapes, itemsize, USUAL_BITS[name], kernels)

    @classmethod
    def _of(
        cls,
        name: str,
        shapes: Sequence[tuple[int, int]],
        itemsize: int,
        bits: float,
        kernels: Kernels,
    ) -> Self:
        words = cls.raw(shapes, itemsize).sizes
        least = (
            CompactLayout.of_matrix(s, lossless=name == "lossless").fixed_bytes for s in shapes
        )
        records = (
            max(fewest, int(rows * columns * bits / 8))
            for (rows, columns), fewest in zip(shapes, least, strict=True)
        )
        sizes = tuple(
            min(nbytes, record) if kernels.takes_record(record, columns) else nbytes
            for (_, columns), nbytes, record in zip(shapes, words, records, strict=True)
        )
        return cls(name, sizes, words)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def without_table(self) -> Self:
        """The same form of a model whose embedding, the first matrix, stays on disk."""
        return replace(self, sizes=(0, *self.sizes[1:]), words_bytes=(0, *self.words_bytes[1:]))

    def known(self, sizes: Sequence[int]) -> Self:
        """The same form with the sizes of its encoded matrices."""
        return replace(self, sizes=tuple(sizes))

    def in_pack(self, sizes: Sequence[int | None]) -> Self:
        """The same form with the sizes in a pack. None: the pack does not hold the matrix."""
        known = [
            nbytes if found is None else found
            for nbytes, found in zip(self.sizes, sizes, strict=True)
        ]
        return replace(self, sizes=tuple(known), packed=None not in sizes)

    def loading_bytes(self, threads: int, converted_bytes: int) -> int:
        """Upper bound on the memory of loading, beyond what stays afterwards.

        threads          matrices that are encoded at a time
        converted_bytes  bytes of tensors stored in another dtype, which are held twice during
                         conversion

        A matrix's plain weights are held beside its packed form; residuals are copied once from a
        buffer of the largest possible size. The largest matrices come first, when little is packed.
        Records are counted as large as usual, though `least` may have planned smaller ones.
        """
        if self.name == "raw" or self.packed:
            return converted_bytes
        order = sorted(range(len(self.sizes)), key=lambda at: -self.words_bytes[at])
        held = most = 0
        forms = 1 if self.name == "lossless" else 2
        usual = USUAL_BITS[self.name] / 16
        records = [
            max(size, int(words * usual)) if size < words else size
            for size, words in zip(self.sizes, self.words_bytes, strict=True)
        ]
        for turn, at in enumerate(order):
            under_way = order[turn : turn + threads]
            taken = sum(self.words_bytes[each] + forms * records[each] for each in under_way)
            most = max(most, held + taken)
            held += records[at]
        saved = sum(self.words_bytes) - self.nbytes
        return max(converted_bytes, most - self.nbytes, 0) + min(converted_bytes, saved)
