"""What torch's allocator on a device takes beyond the tensors that it is asked for.

It takes memory of the device in segments, and cuts tensors out of them (c10/cuda/
CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, torch 2.10 to 2.13, by default settings).
"""

from collections.abc import Iterable

# kMinBlockSize: sizes are rounded up to its multiples.
BLOCK_BYTES = 512
# kSmallSize: tensors up to it come out of segments of kSmallBuffer.
SMALL_BYTES, SMALL_SEGMENT_BYTES = 1 << 20, 2 << 20
# kMinLargeAlloc: those below it come out of segments of kLargeBuffer.
LARGE_BYTES, LARGE_SEGMENT_BYTES = 10 << 20, 20 << 20
# kRoundLarge: larger ones have a segment each, of its multiples.
ROUND_BYTES = 2 << 20
# Slots, and activations, which come and go: a segment of each kind that is not full.
OPEN_BYTES = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
# Pools that recorded passes take memory out of: the draft's, and the verifications'.
RECORDED_POOLS = 2
# What torch gives cuBLAS to work in, in any stream that multiplies; cublasLt works in the same
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize, getCUDABlasLtWorkspace).
BLAS_BYTES = 2 * (4096 << 10) + 8 * (16 << 10)
# The same by compute capability 9.0 and later, and the most there is.
HOPPER_MAJOR, MOST_BLAS_BYTES = 9, 32 << 20


def blas_bytes(major: int) -> int:
    """cuBLAS's workspace on a GPU, by the first number of its compute capability."""
    return MOST_BLAS_BYTES if major >= HOPPER_MAJOR else BLAS_BYTES


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def segment_bytes(sizes: Iterable[int]) -> int:
    """What is taken in segments for tensors of so many bytes, in their order, all of them kept."""
    total = 0
    rests: dict[int, list[int]] = {SMALL_SEGMENT_BYTES: [], LARGE_SEGMENT_BYTES: []}
    for size in sizes:
        block = max(up_to(size, BLOCK_BYTES), BLOCK_BYTES)
        if block >= LARGE_BYTES:
            total += up_to(block, ROUND_BYTES)
            continue
        segment = SMALL_SEGMENT_BYTES if block <= SMALL_BYTES else LARGE_SEGMENT_BYTES
        open_rests = rests[segment]
        fitting = [rest for rest in open_rests if rest >= block]
        if fitting:
            rest = min(fitting)
            open_rests.remove(rest)
        else:
            rest = segment
            total += segment
        if rest > block:
            open_rests.append(rest - block)
    return total


def overhead_bytes(
    sizes: Iterable[int], recorded: bool = False, workspace_bytes: int = MOST_BLAS_BYTES
) -> int:
    """What is taken of a GPU beyond tensors of so many bytes, slots and activations.

    sizes            of tensors that are kept, in the order in which they are made
    recorded         whether passes are recorded, which has a stream and pools of its own
    workspace_bytes  of libraries, for each stream that they multiply in
    """
    sizes = list(sizes)
    workspaces, pools = (2, 1 + RECORDED_POOLS) if recorded else (1, 1)
    segments = segment_bytes([*[workspace_bytes] * workspaces, *sizes])
    return segments - sum(sizes) + pools * OPEN_BYTES
