"""Streams, events, pinned memory and graphs of a real GPU. Run by `make gpu`."""

import pytest
import torch
from torch import Tensor

from speq.devices.named import find_device
from tests.helpers.stream_rig import EXPERTS, LAYERS, Rig, any_calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("num_records", [3, 6, LAYERS * EXPERTS])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls(num_records: int, seed: int) -> None:
    rig = Rig(find_device("cuda"), num_records)
    any_calls(rig, seed, 2000)
    rig.close()


def test_the_host_goes_on_while_a_copy_is_under_way() -> None:
    """A copy of 256 MiB takes milliseconds; giving it to a stream takes none."""
    device = find_device("cuda")
    source = torch.arange(1 << 25, dtype=torch.int64)
    assert device.pin(source)
    try:
        target = torch.zeros(1 << 25, dtype=torch.int64, device=device.torch)
        stream = device.stream()
        stream.after(device.compute.record())
        before = stream.record()
        stream.copy(target, source)
        behind = stream.record()
        assert not behind.done()
        device.compute.after(behind)
        assert int(target.sum()) == int(source.sum())
        assert behind.done()
        assert 1e-4 < device.elapsed_s(before, behind) < 10
    finally:
        device.unpin(source)


def test_work_goes_on_while_the_host_waits() -> None:
    device = find_device("cuda")
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1

    device.while_waiting(work)
    torch.cuda._sleep(50_000_000)
    device.compute.record().wait()
    device.while_waiting(None)
    assert calls > 10


def test_a_graph_reads_what_its_buffers_hold_when_it_is_replayed() -> None:
    device = find_device("cuda")
    staging = device.staging(4, torch.float32)
    inputs = torch.zeros(4, device=device.torch)
    outputs = torch.zeros(4, device=device.torch)
    graph = device.capture(lambda cut: run(inputs, outputs))
    for turn in range(3):
        staging.fill_(turn)
        device.compute.copy(inputs, staging)
        graph.replay()
        device.compute.copy(staging, outputs)
        device.compute.record().wait()
        assert staging.tolist() == [2.0 * turn + 1] * 4


def run(inputs: Tensor, outputs: Tensor) -> None:
    outputs.copy_(inputs * 2 + 1)
