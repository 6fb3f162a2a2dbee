"""The GPU architectures that libspeq_cuda.so has code for, read from the file without loading it.

CMake names them (CMAKE_CUDA_ARCHITECTURES): "90-real" is machine code for compute capability 9.0,
"90-virtual" is PTX, which the driver compiles, and "90" is both.
"""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

# Marker before them in the file: csrc/cuda/architectures.cpp.
MARK = b"speq_cuda_architectures:"
# Compute capability of a GPU: major and minor.
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Architectures:
    """Capabilities with machine code, and those with PTX."""

    machine_code: tuple[Capability, ...]
    ptx: tuple[Capability, ...]

    @classmethod
    def parse(cls, text: str) -> "Architectures":
        """Parse names separated by spaces. Raises ValueError for unknown ones."""
        code, ptx = [], []
        for name in text.split():
            parts = re.fullmatch(r"(\d+)(\d)(-real|-virtual)?", name)
            if parts is None:
                raise ValueError(f"architecture {name!r} is not understood")
            capability = int(parts[1]), int(parts[2])
            if parts[3] != "-virtual":
                code.append(capability)
            if parts[3] != "-real":
                ptx.append(capability)
        return cls(tuple(code), tuple(ptx))

    @classmethod
    def of_library(cls, path: Path) -> "Architectures":
        """Read a compiled library's. Raises ValueError for a file without any."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(MARK)
            end = data.find(b"\0", start)
            if start < 0 or end < 0:
                raise ValueError(f"{path} does not say which cards it was built for")
            return cls.parse(data[start + len(MARK) : end].decode("ascii", "replace"))

    def run_on(self, capability: Capability) -> bool:
        """True if code can run on a GPU: machine code runs on its major capability from its minor
        one up, and PTX on every GPU that is not older.
        """
        major, minor = capability
        return any(major == of[0] and minor >= of[1] for of in self.machine_code) or any(
            capability >= of for of in self.ptx
        )

    def __str__(self) -> str:
        code = [f"{of[0]}.{of[1]}" for of in self.machine_code if of not in self.ptx]
        ptx = [f"{of[0]}.{of[1]} and later" for of in self.ptx]
        return ", ".join((*code, *ptx))
