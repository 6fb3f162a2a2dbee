"""What torch's allocator on a GPU takes beyond tensors: by its rules, segment after segment."""

import pytest

from speq.devices.allocator import (
    BLAS_BYTES,
    LARGE_SEGMENT_BYTES,
    MOST_BLAS_BYTES,
    SMALL_SEGMENT_BYTES,
    blas_bytes,
    overhead_bytes,
    segment_bytes,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([512] * 4096, 2 * MIB),  # to the last block
        ([512] * 4097, 4 * MIB),
        ([513] * 2048, 2 * MIB),  # two blocks each
        ([513] * 2049, 4 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([8 * MIB] * 4, 40 * MIB),  # two to a segment: a fifth of it is lost
        ([8 * MIB, 8 * MIB, 4 * MIB], 20 * MIB),  # what is left is used
        ([8 * MIB, 8 * MIB, 4 * MIB, 2 * MIB], 40 * MIB),
        ([9 * MIB, 10 * MIB - 512, MIB + 1], 20 * MIB),  # to the last block
        ([9 * MIB, 10 * MIB - 512, MIB + 513], 40 * MIB),
        ([8 * MIB, 8 * MIB, MIB], 22 * MIB),  # small ones have segments of their own
        ([5 * MIB, 9 * MIB, 6 * MIB, 6 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([101 * MIB, 1], 104 * MIB),
    ],
)
def test_segments_are_as_the_allocators(sizes: list[int], taken: int) -> None:
    assert segment_bytes(sizes) == taken


def test_the_tightest_rest_is_used() -> None:
    """Of 4 and 3 MiB left, the one of 3 takes 3, and so the other still takes 4."""
    sizes = [8 * MIB, 8 * MIB, 9 * MIB, 8 * MIB]  # 4 MiB left, and 3
    assert segment_bytes([*sizes, 3 * MIB, 4 * MIB]) == 40 * MIB
    assert segment_bytes([*sizes, 4 * MIB, 3 * MIB]) == 40 * MIB
    assert segment_bytes([*sizes, 4 * MIB, 4 * MIB]) == 60 * MIB


def test_cublas_takes_more_on_later_cards() -> None:
    """CUBLAS_WORKSPACE_CONFIG's defaults: `:4096:2:16:8`, and 32 MiB from Hopper on."""
    assert {major: blas_bytes(major) for major in (7, 8)} == {7: 8519680, 8: 8519680}
    assert {blas_bytes(major) for major in (9, 10, 12)} == {32 * MIB}


def test_overhead_is_what_no_tensor_has() -> None:
    still_open = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
    assert overhead_bytes([]) == MOST_BLAS_BYTES + still_open
    # cuBLAS's workspace comes out of a segment of 20 MiB, whose rest a tensor of 8 MiB has.
    assert overhead_bytes([8 * MIB], workspace_bytes=BLAS_BYTES) == 20 * MIB - 8 * MIB + still_open
    assert overhead_bytes([100 * MIB]) == overhead_bytes([])
    assert overhead_bytes([101 * MIB - 1]) == overhead_bytes([]) + MIB + 1


def test_recorded_passes_have_a_stream_and_two_pools() -> None:
    still_open = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
    more = overhead_bytes([], recorded=True) - overhead_bytes([])
    assert more == MOST_BLAS_BYTES + 2 * still_open
