"""Fixtures of several files of kernels' tests."""

from collections.abc import Iterator

import pytest
import torch

from speq.kernels import library
from tests.helpers.backends import (
    CPU_BACKENDS,
    CUDA_BACKENDS,
    ISAS,
    backend_named,
    cuda_device,
    need_backend,
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    need_backend(request, "cpu", request.param)
    before = library.isa()
    library.limit_isa(request.param)
    yield request.param
    library.limit_isa(before)


@pytest.fixture(params=[*CPU_BACKENDS, *CUDA_BACKENDS])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where ops run: on each instruction set, and as on a GPU, on the host or on one."""
    if request.param.startswith("cpu"):
        for _ in backend_named(request):
            yield torch.device("cpu")
    else:
        yield from cuda_device(request)
