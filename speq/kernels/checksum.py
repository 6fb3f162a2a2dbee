"""CRC-32 of bytes in memory, as in zlib: by carry-less products if the processor has them.

Packed experts are verified as they are read. A core computes 1 to 4 GB/s with zlib, and about 13
with carry-less products.
"""

import ctypes
import zlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from speq.errors import Broken
from speq.kernels.library import CPU_LIBRARY, MISSING

# (address, bytes, CRC of what goes before) -> CRC
Native = Callable[[int, int, int], int]


def crc32_of(data: Tensor) -> int:
    """CRC-32 of a contiguous uint8 tensor on the CPU. Releases the GIL."""
    if data.dtype != torch.uint8 or not (data.is_contiguous() and data.is_cpu):
        raise Broken(
            f"a checksum is asked of {data.dtype} on {data.device}; bytes in a row have one"
        )
    native = native_crc32()
    if native is not None:
        return native(data.data_ptr(), data.nbytes, 0)
    return zlib.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


@cache
def native_crc32() -> Native | None:
    """Our native CRC-32; None if zlib's is as fast, or no library with it is built."""
    if MISSING["cpu"] is not None:
        return None
    library = ctypes.CDLL(str(CPU_LIBRARY))
    if not hasattr(library, "speq_has_crc32") or not library.speq_has_crc32():
        return None
    native = library.speq_crc32
    native.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32]
    native.restype = ctypes.c_uint32
    found: Native = native
    return found
