"""How the matrices of a model outside its experts are held, and the memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from speq.kernels.compact_layout import CompactLayout
from speq.kernels.library import KERNELS, Kernels

# Bits a weight that records usually take, experts' as well, by the form.
USUAL_BITS = {"lossless": 11.4, "residual": 8.9}


@dataclass(frozen=True, slots=True)
class DenseForm:
    """The matrices of dense layers and of the embedding, in the order of `ModelShape.dense`.

    name         raw, lossless or residual
    sizes        bytes that each takes
    words_bytes  of each as words of the compute dtype
    packed       a pack holds the records: loading reads them, and words only of what stays words
    """

    name: str
    sizes: tuple[int, ...]
    words_bytes: tuple[int, ...]
    packed: bool = False

    @classmethod
    def raw(cls, shapes: Sequence[tuple[int, int]], itemsize: int) -> Self:
        """Words of so many bytes each."""
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
        """The smallest records there can be; words where those take no more, and where kernels take
        no record of a matrix.
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
        """As `least`, with records of the size that they usually have."""
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

    def known(self, sizes: Sequence[int]) -> Self:
        """The same, its records made."""
        return replace(self, sizes=tuple(sizes))

    def in_pack(self, sizes: Sequence[int | None]) -> Self:
        """The same, with the sizes that a pack tells. None: of a matrix that it does not hold."""
        known = [
            nbytes if found is None else found
            for nbytes, found in zip(self.sizes, sizes, strict=True)
        ]
        return replace(self, sizes=tuple(known), packed=None not in sizes)

    def loading_bytes(self, threads: int, converted_bytes: int) -> int:
        """What loading takes beside what it leaves, at the most.

        threads          matrices that are encoded at a time
        converted_bytes  of tensors that are stored in another dtype: while they are converted they
                         are held twice

        Words of a matrix lie beside its record, and the record is copied once out of memory for
        the largest there can be. The largest matrices come first, when few records are there.
        """
        if self.name == "raw" or self.packed:
            return converted_bytes
        order = sorted(range(len(self.sizes)), key=lambda at: -self.words_bytes[at])
        held = most = 0
        for turn, at in enumerate(order):
            under_way = order[turn : turn + threads]
            taken = sum(self.words_bytes[each] + 2 * self.sizes[each] for each in under_way)
            most = max(most, held + taken)
            held += self.sizes[at]
        saved = sum(self.words_bytes) - self.nbytes
        return max(converted_bytes, most - self.nbytes, 0) + min(converted_bytes, saved)
