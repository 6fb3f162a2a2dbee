"""Overhead of torch's allocator on a device, beyond the requested tensors.

It takes device memory in segments and cuts tensors out of them (c10/cuda/CUDACachingAllocator.cpp
and c10/core/AllocatorConfig.h, torch 2.10 to 2.13, with default settings).
"""

from collections.abc import Iterable

# kMinBlockSize: sizes are rounded up to its multiples.
BLOCK_BYTES = 512
# kSmallSize: tensors up to it come out of segments of kSmallBuffer.
SMALL_BYTES, SMALL_SEGMENT_BYTES = 1 << 20, 2 << 20
# kMinLargeAlloc: those below it come out of segments of kLargeBuffer.
LARGE_BYTES, LARGE_SEGMENT_BYTES = 10 << 20, 20 << 20
# kRoundLarge: larger ones have a segment each, rounded up to its multiples.
ROUND_BYTES = 2 << 20
# Temporary tensors, such as activations: a partly used segment of each kind.
OPEN_BYTES = SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES
# Memory pools of recorded passes: the draft's and the verifications'.
RECORDED_POOLS = 2
# cuBLAS's workspace in torch, per stream that multiplies; cublasLt shares it
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize, getCUDABlasLtWorkspace).
BLAS_BYTES = 2 * (4096 << 10) + 8 * (16 << 10)
# The workspace for compute capability 9.0 and later, which is the largest.
HOPPER_MAJOR, MOST_BLAS_BYTES = 9, 32 << 20


def blas_bytes(major: int) -> int:
    """Bytes of cuBLAS's workspace on a GPU, by the major number of its compute capability."""
    return MOST_BLAS_BYTES if major >= HOPPER_MAJOR else BLAS_BYTES


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def segment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments for tensors of these sizes, allocated in order and all kept."""
    total = 0
    rests: dict[int, list[int]] = {SMALL_SEGMENT_BYTES: [], LARGE_SEGMENT_BYTES: []}
    for size in sizes:
        block = max(round_up(size, BLOCK_BYTES), BLOCK_BYTES)
        if block >= LARGE_BYTES:
            total += round_up(block, ROUND_BYTES)
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
    """Bytes of GPU memory beyond tensors of these sizes, slots and activations.

    sizes            of tensors that are kept, in the order of allocation
    recorded         whether passes are recorded, which uses a stream and pools of its own
    workspace_bytes  of libraries, per stream that they multiply in
    """
    sizes = list(sizes)
    workspaces, pools = (2, 1 + RECORDED_POOLS) if recorded else (1, 1)
    segments = segment_bytes([*[workspace_bytes] * workspaces, *sizes])
    return segments - sum(sizes) + pools * OPEN_BYTES
