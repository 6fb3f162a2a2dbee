"""What kernels run on in tests: each instruction set of the processor, a GPU, and the CUDA kernels
on the host, which `make sanitize` builds.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels import library
from tests.helpers.needed import absent
from tests.helpers.paths import ROOT

# The shim binds the ops of a GPU under a name of their own, beside the processor's.
ON_HOST = library.FOLDER / "libspeq_cuda_on_host.so"
# `make host` builds them as well, for tests that run little of them.
BUILT_ON_HOST = ROOT / "build" / "host" / ON_HOST.name
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


# Instruction sets of this kind of processor, which it may have or lack.
ISAS = tuple(
    name
    for name in library.ISAS
    if name == "portable" or name.startswith("neon") == (platform.machine() in ("aarch64", "arm64"))
)
CPU_BACKENDS = [f"cpu-{isa}" for isa in ISAS]
CUDA_BACKENDS = ["cuda_on_host", pytest.param("cuda", marks=pytest.mark.gpu)]


def need_backend(request: pytest.FixtureRequest, kind: str, isa: str = "") -> None:
    """Skip a test without that backend, or fail it where the run is said to have one."""
    reason = reason_absent(kind, isa)
    if reason is not None:
        absent(request.config, kind, reason)


def cuda_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a fixture's parameter, one of CUDA_BACKENDS, has ops run as on a GPU."""
    need_backend(request, request.param)
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with cuda_kernels_on_host():
        yield torch.device("cpu")


def backend_named(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that a fixture's parameter names, while the test runs."""
    kind, _, isa = request.param.partition("-")
    need_backend(request, kind, isa)
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


@contextmanager
def cuda_kernels_on_host() -> Iterator[None]:
    """Inside, ops on tensors of the CPU run as they would on a GPU.

    `ops`, `compact_ops` and all above them see the CUDA kernels, built for the host, and their
    limits: rows go in blocks, many rows go through experts one at a time, workspaces are taken. The
    ops that no GPU has (`library.CPU_ONLY`) stay the processor's. torch's own products are torch's.
    """
    load_host_ops()
    ours = getattr(torch.ops, HOST_NAMESPACE)
    on_host = {op: getattr(ours, f"{op}_out").default for op in library.ops_of("cuda")}
    kernels = library.KERNELS["cuda"]
    kernels = replace(kernels, overloads={**kernels.overloads, **on_host})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(library.KERNELS, "cpu", kernels)
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that nobody wrote to is NaN, or the largest whole number."""
    settings = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    # torch fills memory only where it is asked for deterministic algorithms. It may only warn of
    # others: without their workspace in the environment, products on a GPU are among them.
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


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
    built = [path for path in (ON_HOST, BUILT_ON_HOST) if path.exists()]
    torch.ops.load_library(str(built[0]))
    return declared
