"""What stages say to each other: messages that go around a ring, from each to the one behind it.

A message is four numbers, then JSON and perhaps rows of hidden states as bytes. Nothing is ever
unpickled. The first stage speaks, each of the others adds to it or passes it on, and what comes
around is the answer.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.files.json_file import parse_json
from speq.pipeline.waiting import Waiter

MAGIC = 0x7370657131  # "speq1"
MAX_JSON_BYTES = 1 << 20
# Of messages, and of a wait that is to fail.
TAG, NOBODY_SENDS = 0, 1
# Until connections that are closed have been noticed here.
REST_S = 5.0
OTHER_PROTOCOL = "run the same version of speq on all machines"


class MessageKind(IntEnum):
    """RESERVE: lay out memory; PASS: run rows; FAILED: a stage could not; CLOSE: the run is over;
    CHECK: whether all are there.
    """

    RESERVE = 1
    PASS = 2
    FAILED = 3
    CLOSE = 4
    CHECK = 5


@dataclass(frozen=True, slots=True)
class Message:
    """content: what JSON can say. rows: bytes of hidden states [T * H * itemsize] uint8."""

    kind: MessageKind
    content: dict[str, Any] = field(default_factory=dict)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def packed(self) -> tuple[Tensor, Tensor]:
        """The numbers [4] int64, and the bytes behind them."""
        text = json.dumps(self.content).encode()
        head = torch.tensor([MAGIC, self.kind, len(text), self.rows.numel()])
        return head, torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), self.rows])


def sizes_of(head: Tensor, most_row_bytes: int) -> tuple[MessageKind, int, int]:
    """The kind of a message, and bytes of its JSON and rows. Raises SpeqError for odd numbers."""
    magic, kind, text_bytes, row_bytes = head.tolist()
    known = magic == MAGIC and kind in list(MessageKind)
    if not known or not 0 < text_bytes <= MAX_JSON_BYTES or not 0 <= row_bytes <= most_row_bytes:
        raise SpeqError(f"a stage sent what is no message of this version; {OTHER_PROTOCOL}")
    return MessageKind(kind), text_bytes, row_bytes


def unpacked(kind: MessageKind, text_bytes: int, payload: Tensor) -> Message:
    """Raises SpeqError for what is no JSON object."""
    try:
        content = parse_json(bytes(payload[:text_bytes].numpy()))
    except ValueError as error:
        raise SpeqError(f"a stage sent what is no JSON ({error}); {OTHER_PROTOCOL}") from error
    if not isinstance(content, dict):
        raise SpeqError(f"a stage sent JSON that is no object; {OTHER_PROTOCOL}")
    # A copy: bytes behind a text are not aligned as words are.
    return Message(kind, content, payload[text_bytes:].clone())


class Ring(Protocol):
    """The stage before this one, and the one behind it.

    number, count  of this stage, from 1 on, and of all
    """

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, message: Message, wait_s: float | None = None) -> None:
        """To the stage behind, which receives it within that time, or the usual one. Raises
        SpeqError where it is gone.
        """

    def receive(self, wait_s: float) -> Message:
        """From the stage before. Raises SpeqError where it is gone, or silent for so long."""


class GlooRing:
    """Over torch.distributed's gloo, tensor by tensor.

    group           ranks are numbers less one
    most_row_bytes  of a message
    wait_s          that sending may take, where nothing else is said: it ends when the stage
                    behind receives
    """

    def __init__(
        self, group: Any, number: int, count: int, most_row_bytes: int, wait_s: float
    ) -> None:
        self._group = group
        self.number, self.count = number, count
        self._most_row_bytes, self._wait_s = most_row_bytes, wait_s
        self._waiter = Waiter()

    @property
    def _behind(self) -> int:
        return self.number % self.count

    @property
    def _before(self) -> int:
        return (self.number - 2) % self.count

    def send(self, message: Message, wait_s: float | None = None) -> None:
        with self._breaking_off():
            self._waiter.do(partial(self._send, message, wait_s or self._wait_s))

    def receive(self, wait_s: float) -> Message:
        with self._breaking_off():
            return self._waiter.do(partial(self._receive, wait_s))

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Where the block is interrupted, close all connections: what waits there then fails, and
        so does whatever the other stages wait for. A wait that lasts would outlive the interpreter.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                with suppress(RuntimeError):
                    # Nobody sends that. gloo closes connections where a wait takes too long.
                    nothing = self._group.recv([torch.zeros(1)], self._before, NOBODY_SENDS)
                    nothing.wait(timedelta(milliseconds=1))
                self._waiter.rest(REST_S)
            raise

    def _send(self, message: Message, wait_s: float) -> None:
        for part in message.packed():
            self._wait(self._behind, partial(self._sent, part), wait_s)

    def _sent(self, part: Tensor) -> Any:
        return self._group.send([part], self._behind, TAG)

    def _received(self, part: Tensor) -> Any:
        return self._group.recv([part], self._before, TAG)

    def _receive(self, wait_s: float) -> Message:
        head = torch.zeros(4, dtype=torch.int64)
        self._wait(self._before, partial(self._received, head), wait_s)
        kind, text_bytes, row_bytes = sizes_of(head, self._most_row_bytes)
        payload = torch.empty(text_bytes + row_bytes, dtype=torch.uint8)
        self._wait(self._before, partial(self._received, payload), wait_s)
        return unpacked(kind, text_bytes, payload)

    def _wait(self, rank: int, begin: Callable[[], Any], wait_s: float) -> None:
        try:
            begin().wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            late = "Timed out" in str(error)
            what = f"was silent for {wait_s:g} s" if late else "has ended, or cannot be reached"
            raise SpeqError(
                f"stage {rank + 1} of {self.count} {what}; look at its output, and start all "
                "stages again"
            ) from error
