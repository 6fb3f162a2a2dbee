"""Graphs of the host's making: what they replay, and what they refuse as CUDA does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speq.devices.device import Cut
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.host_graph import HostGraph, NotRecorded


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with host_device() as made, torch.inference_mode():
        yield made


def on(device: HostDevice, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device.torch)


def copied(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def test_replays_use_what_lies_in_memory_by_then(device: HostDevice) -> None:
    inputs, place = on(device, 1, 2, 3), torch.tensor([0], device=device.torch)
    entries, sums = torch.zeros(4, 3, device=device.torch), on(device, 0)

    def run(cut: Cut) -> None:
        entries.index_copy_(0, place, inputs[None] * 2)
        made = torch.empty_like(inputs)
        made.copy_(entries.sum(0))
        hidden = torch.arange(4, device=device.torch) <= place
        sums.copy_(made.sum() + functional.relu(hidden.sum()))

    graph = device.capture(run)
    inputs.copy_(on(device, 10, 20, 30))
    place.fill_(2)
    graph.replay()
    assert entries.tolist() == [[2, 4, 6], [0, 0, 0], [20, 40, 60], [0, 0, 0]]
    assert sums.tolist() == [132 + 3]
    graph.replay()
    assert sums.tolist() == [132 + 3]


def test_numbers_that_python_knew_stay_as_they_were(device: HostDevice) -> None:
    length = 1
    entries, value = torch.zeros(4, device=device.torch), on(device, 5)

    def run(cut: Cut) -> None:
        entries[length : length + 1] = value

    graph = device.capture(run)
    length, _ = 3, value.fill_(7)
    graph.replay()
    assert entries.tolist() == [0, 7, 0, 0]


def test_what_a_recording_makes_is_nothing_before_a_replay(device: HostDevice) -> None:
    """A GPU records without running; and graphs that share memory spoil each other's."""
    inputs, made = on(device, 3), []

    def doubled(cut: Cut) -> None:
        made.append(inputs * 2)

    first = device.capture(doubled)
    assert made[-1].isnan().all()
    first.replay()
    assert made[-1].tolist() == [6]
    kept = made[-1]
    assert isinstance(first, HostGraph)
    second = device.capture(doubled, first)
    second.replay()
    assert kept.isnan().all()
    assert made[-1].tolist() == [6]


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense reads"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense reads"),
        (lambda x: x.tolist(), "makes host memory"),
        (lambda x: x.cpu(), "makes host memory"),
        (lambda x: x[x > 0], "counts a mask"),
        (lambda x: x.nonzero(), "nonzero reads"),
        (lambda x: x.unique(), "unique2 reads"),
        (lambda x: x + torch.ones(3).to(x.device), "makes host memory"),
        (lambda x: torch.empty(3, dtype=torch.uint8), "makes host memory"),
        (lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device), "host memory"),
    ],
    ids=["item", "bool", "list", "cpu", "mask", "nonzero", "unique", "to", "staging", "tensor"],
)
def test_the_host_has_no_part_in_a_graph(
    refused: Callable[[Tensor], Any], sentence: str, device: HostDevice
) -> None:
    inputs = on(device, 1, 2, 3)
    with pytest.raises(NotRecorded, match=sentence):
        device.capture(lambda cut: refused(inputs))


def test_copies_of_host_memory_are_refused(device: HostDevice) -> None:
    inputs, there = on(device, 1, 2, 3), torch.ones(3)
    with pytest.raises(NotRecorded, match="copy_ uses host memory"):
        device.capture(lambda cut: copied(inputs, there))
    with pytest.raises(NotRecorded, match="copy_ uses host memory"):
        device.capture(lambda cut: copied(there, inputs))


def test_the_host_works_between_the_pieces(device: HostDevice) -> None:
    """At replays alone, and on what the pieces before have made by then."""
    inputs, seen, outputs = on(device, 1), [], on(device, 0)

    def run(cut: Cut) -> None:
        squared, answer = inputs * inputs, torch.empty_like(inputs)

        def work() -> None:
            seen.append(squared.item())
            answer.fill_(100)

        cut(work)
        outputs.copy_(answer + squared)

    graph = device.capture(run)
    assert seen == []
    for value in (3, 5):
        inputs.fill_(value)
        graph.replay()
        assert outputs.tolist() == [100 + value * value]
    assert seen == [9, 25]
