"""What kernels run on in tests: each instruction set of the processor, a GPU, and the CUDA kernels
on the host, which `make sanitize` builds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels import library
from tests.helpers.needed import absent

# The shim binds the ops of a GPU under a name of their own, beside the processor's.
ON_HOST = library.FOLDER / "libspeq_cuda_on_host.so"
HOST_NAMESPACE = "speq_cuda_on_host"


@dataclass(frozen=True)
class Backend:
    name: str
    device: str = "cpu"
    namespace: str = "speq"

    def run(self, op: str, *arguments: Any) -> None:
        """Run an op whose last argument, on the CPU, is its output."""
        *inputs, out = (x.to(self.device) if isinstance(x, Tensor) else x for x in arguments)
        getattr(getattr(torch.ops, self.namespace), f"{op}_out").default(*inputs, out)
        if self.device != "cpu":
            arguments[-1].copy_(out)


CPU_BACKENDS = [f"cpu-{isa}" for isa in library.ISAS]
CUDA_BACKENDS = ["cuda_on_host", pytest.param("cuda", marks=pytest.mark.gpu)]


def backend_named(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that a fixture's parameter names, while the test runs."""
    kind, _, isa = request.param.partition("-")
    reason = reason_absent(kind, isa)
    if reason is not None:
        absent(request.config, kind, reason)
    if kind == "cpu":
        before = library.isa()
        library.limit_isa(isa)
        yield Backend(request.param)
        library.limit_isa(before)
    elif kind == "cuda":
        yield Backend("cuda", device="cuda")
    else:
        load_host_ops()
        yield Backend("cuda_on_host", namespace=HOST_NAMESPACE)


def reason_absent(kind: str, isa: str) -> str | None:
    if kind == "cpu":
        return None if isa in library.supported_isas() else f"this processor has no {isa}"
    if kind == "cuda":
        reason = library.MISSING["cuda"]
        return reason or (None if torch.cuda.is_available() else "torch sees no CUDA device")
    return None if ON_HOST.exists() else "CUDA kernels for the host are built by `make sanitize`"


@cache
def load_host_ops() -> torch.library.Library:
    """Declare the ops as the library does, in the namespace that the shim's library binds."""
    declared = torch.library.Library(HOST_NAMESPACE, "DEF")
    for op in library.ops_of("cuda"):
        declared.define(f"{op}_out{library.OPS[op][0]}")
    torch.ops.load_library(str(ON_HOST))
    return declared
