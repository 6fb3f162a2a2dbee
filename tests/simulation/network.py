"""A network between pipeline stages that delays, loses, damages and repeats what is sent.

It stands in the place of a gloo group: bytes of a connection arrive in order, as TCP's do, or not
at all. Each stage has a clock of its own. A message says when it arrives, and the clock of who
waits for it leaps there, so that nobody waits.
"""

import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from speq.pipeline.wire import UNUSED_TAG

DISTURBANCES = ("late", "lost", "closed")
# Of those on the way who can change bytes: signatures tell.
FORGERIES = ("flipped", "twice")
DELAYS_S = (0.5, 30.0, 300.0, 1e7)
NEVER_S = float("inf")
# Real time in which the other side has long done its work: nobody speaks any more.
HANG_S = 60.0


@dataclass(frozen=True)
class Part:
    """What is sent at once. tensor None: the connection has ended."""

    tensor: Tensor | None
    arrives_s: float = 0.0


@dataclass
class Fault:
    """What happens to a message of one stage, after so many others of it."""

    kind: str
    rank: int
    skipped: int
    number: int


class SimulatedNetwork:
    """Connections from each of `count` stages to the next.

    struck   messages that did not arrive in time as they were sent
    pass_by  called where a wait begins, which Ctrl-C may interrupt
    """

    def __init__(self, count: int, pass_by: Callable[[], None]) -> None:
        self.count, self.struck, self.pass_by = count, 0, pass_by
        self.begin()

    def begin(self) -> None:
        """Connect stages anew."""
        count = self.count
        self._incoming: list[queue.Queue[Part]] = [queue.Queue() for _ in range(count)]
        self._clocks_s = [0.0] * count
        self._ended, self._cut = set[int](), set[int]()
        self._sent: list[list[Part]] = [[] for _ in range(count)]
        self._fault: Fault | None = None

    def group(self, rank: int) -> "SimulatedGroup":
        return SimulatedGroup(self, rank)

    def plan(self, fault: Fault) -> None:
        self._fault = fault

    def calm(self) -> None:
        self._fault = None

    def end(self, rank: int) -> None:
        """Close a stage's connections, as the end of its process does."""
        if rank not in self._ended:
            self._ended.add(rank)
            self._incoming[(rank + 1) % self.count].put(Part(None))

    def send(self, rank: int, tensor: Tensor) -> None:
        target = (rank + 1) % self.count
        if rank in self._ended or target in self._ended:
            raise RuntimeError("Connection reset by peer")
        part = Part(tensor.clone(), self._clocks_s[rank])
        whole = self._whole(rank, part)
        if whole and self._fault is not None and self._fault.rank == rank:
            self._fault.skipped -= 1
            if self._fault.skipped < 0:
                fault, self._fault = self._fault, None
                self.struck += 1
                part = self._struck(fault, part)
        if rank in self._cut:
            part = Part(part.tensor, NEVER_S)
        self._incoming[target].put(part)

    def _whole(self, rank: int, part: Part) -> bool:
        """Note a part; say whether it is the last of a message, which has two."""
        sent = self._sent[rank]
        if len(sent) == 2:
            sent.clear()
        sent.append(part)
        return len(sent) == 2

    def _struck(self, fault: Fault, part: Part) -> Part:
        rank, rng = fault.rank, random.Random(fault.number)
        assert part.tensor is not None
        if fault.kind == "late":
            self._clocks_s[rank] += rng.choice(DELAYS_S)
            return Part(part.tensor, self._clocks_s[rank])
        if fault.kind == "lost":  # and all that is sent behind it
            self._cut.add(rank)
        elif fault.kind == "closed":
            self.end(rank)
            raise RuntimeError("Connection reset by peer")
        elif fault.kind == "flipped":
            at = rng.randrange(part.tensor.numel())
            part.tensor[at] ^= 1 << rng.randrange(8)
        else:
            for each in [*self._sent[rank]]:
                self._incoming[(rank + 1) % self.count].put(each)
        return part

    def receive(self, rank: int, into: Tensor, wait_s: float) -> None:
        if rank in self._ended:
            raise RuntimeError("Connection closed")
        self.pass_by()
        part = self._incoming[rank].get(timeout=HANG_S)
        if part.tensor is None:
            self._fail(rank, "Connection closed by peer")
        late_s = part.arrives_s - self._clocks_s[rank] - wait_s
        if late_s > 0:
            self._clocks_s[rank] += wait_s
            self._fail(rank, f"Timed out waiting {wait_s * 1000:.0f}ms for recv operation")
        self._clocks_s[rank] = max(self._clocks_s[rank], part.arrives_s)
        if part.tensor.numel() * part.tensor.itemsize != into.numel() * into.itemsize:
            self._fail(rank, "Message of another length")
        into.view(torch.uint8).copy_(part.tensor.view(torch.uint8))

    def _fail(self, rank: int, sentence: str) -> None:
        """gloo closes a stage's connections when one of its waits fails."""
        self.end(rank)
        raise RuntimeError(sentence)


@dataclass
class SimulatedGroup:
    """A stage's place in a network: what `GlooRing` asks of a gloo group."""

    network: SimulatedNetwork
    rank: int

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> "Work":
        assert rank == (self.rank + 1) % self.network.count
        return Work(lambda wait_s: self.network.send(self.rank, tensors[0]))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> "Work":
        assert rank == (self.rank - 1) % self.network.count
        if tag == UNUSED_TAG:
            return Work(lambda wait_s: self.network._fail(self.rank, "Timed out"))
        return Work(lambda wait_s: self.network.receive(self.rank, tensors[0], wait_s))


@dataclass
class Work:
    """A transfer that was begun, and happens when it is waited for."""

    happen: Callable[[float], Any]

    def wait(self, timeout: timedelta) -> None:
        self.happen(timeout.total_seconds())
