"""Panels of `speq bench codec`: bits a weight, and speeds."""

from speq.dashboard.bench_panels.picture import by_figure, picture
from speq.dashboard.bench_panels.rows import Column, Row, label, rows_of, table_of
from speq.dashboard.panel import Panel

CODEC = label("codec", "codec")
BITS = Column("bits a weight", "bits_per_weight")
SLOT = Column("bits a weight of a slot", "slot_bits_per_weight")
ENTROPY = Column("entropy of a weight, bits", "entropy_bits")
ENCODE = Column("encoding, GB/s", "encode_gb_per_s")
DECODE = Column("decoding, GB/s", "decode_gb_per_s")
COPY = Column("copying, GB/s", "copy_gb_per_s")


def panels(report: Row) -> list[Panel]:
    """What weights take with each codec, and how fast it is."""
    rows = rows_of(report, (CODEC, BITS, SLOT, ENTROPY, ENCODE, DECODE, COPY))
    return [
        picture(
            "bits",
            "Bits that a weight takes",
            "Lower is smaller, and no code without loss comes below the entropy.",
            by_figure(
                rows,
                CODEC,
                [("as records", BITS, None), ("of a slot", SLOT, None), ("entropy", ENTROPY, None)],
            ),
            "bars",
            (CODEC.title, "bits a weight"),
            table_of(rows, (CODEC, BITS, SLOT, ENTROPY)),
        ),
        picture(
            "speeds",
            "How fast codecs are",
            "Higher is faster, in bytes of plain words; copying is what memory gives at best.",
            by_figure(
                rows,
                CODEC,
                [("encoding", ENCODE, None), ("decoding", DECODE, None), ("copying", COPY, None)],
            ),
            "points",
            (CODEC.title, "speed, GB/s"),
            table_of(rows, (CODEC, ENCODE, DECODE, COPY)),
        ),
    ]
