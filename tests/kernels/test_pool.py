"""Parallel regions of the CPU kernels: results are those of one thread."""

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from speq.kernels import library, ops
from speq.kernels.ops import Activation
from tests.helpers.backends import BUILT_ON_HOST
from tests.helpers.needed import absent

# `make host` builds it, of tests/cpu_pool.
REGIONS = BUILT_ON_HOST.with_name("speq_regions")
SEED = 5

pytestmark = pytest.mark.skipif(library.MISSING["cpu"] is not None, reason="no native kernels")


@pytest.mark.parametrize(
    "case",
    ["sizes", "many", "threads", "exceptions", "nested", "callers", "environment", "forked"],
)
def test_regions_away_from_torch(request: pytest.FixtureRequest, case: str) -> None:
    if not REGIONS.exists():
        absent(request.config, "regions", f"{REGIONS} is built by `make host`")
    ended = subprocess.run([REGIONS, case], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def on_one_thread(compute: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = compute()
    torch.set_num_threads(before)
    return result


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(*shape, generator=generator).bfloat16()


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def layer_of(size: int) -> Callable[[], Tensor]:
    """Some megabytes of weights, so many chunks: a dense product, and experts."""
    inputs, weight = normal(2, size), normal(3 * size, size)
    gate_up, down = normal(4, 2 * size, size), normal(4, size, size)
    ids, table = torch.tensor([[0, 2], [3, 2]]), torch.arange(4)

    def compute() -> Tensor:
        out = torch.empty(2, 2, size, dtype=torch.bfloat16)
        ops.moe_grouped(inputs, ids, table, gate_up, down, Activation("silu"), out)
        return torch.cat([ops.linear(inputs, weight).flatten(), out.flatten()])

    return compute


@pytest.mark.usefixtures("three_threads")
def test_results_are_those_of_one_thread() -> None:
    compute = layer_of(600)
    expected = on_one_thread(compute)
    for _ in range(20):
        assert torch.equal(bits_of(compute()), bits_of(expected))


@pytest.mark.usefixtures("three_threads")
def test_callers_at_the_same_time_do_not_disturb_one_another() -> None:
    computations = [layer_of(size) for size in (300, 400, 500)]
    expected = [on_one_thread(compute) for compute in computations]
    with ThreadPoolExecutor(3) as callers:
        found = [
            callers.submit(lambda compute=compute: [compute() for _ in range(10)])
            for compute in computations
        ]
        for alone, results in zip(expected, found, strict=True):
            assert all(torch.equal(bits_of(each), bits_of(alone)) for each in results.result())


@pytest.mark.usefixtures("three_threads")
def test_all_threads_flush_denormals_where_the_caller_does() -> None:
    inputs = torch.full((1, 512), 2.0**-100)
    weight = torch.full((2048, 512), 2.0**-40)  # products of 2 ** -140, which is denormal
    assert ops.linear(inputs, weight).eq(2.0**-131).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for _ in range(20):
            assert ops.linear(inputs, weight).eq(0).all()
    finally:
        torch.set_flush_denormal(False)
