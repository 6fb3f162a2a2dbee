"""Messages between pipeline stages, which go around a ring, from each stage to the next.

A message is four numbers, then JSON and perhaps hidden states as bytes. Nothing is unpickled.
Rank 0 sends a message, each later stage changes or forwards it, and the message that returns is the
answer.
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

from speq.errors import PeerError
from speq.files.json_file import parse_json
from speq.pipeline.stage_key import MessageSignatures
from speq.pipeline.waiting import Waiter

MAGIC = 0x7370657131  # "speq1"
MAX_JSON_BYTES = 1 << 20
# Tags of messages, and of a wait that must fail.
TAG, UNUSED_TAG = 0, 1
# Longest wait until closed connections are noticed here.
REST_S = 5.0
OTHER_PROTOCOL = "run the same version of speq on all machines"


class MessageKind(IntEnum):
    """RESERVE memory; PASS: run rows; FAILED: an error; CLOSE the run; CHECK that all are there."""

    RESERVE = 1
    PASS = 2
    FAILED = 3
    CLOSE = 4
    CHECK = 5


@dataclass(frozen=True, slots=True)
class StageMessage:
    """content: JSON values. rows: hidden states as bytes, [T * H * itemsize] uint8."""

    kind: MessageKind
    content: dict[str, Any] = field(default_factory=dict)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return the numbers, [4] int64, and the bytes after them."""
        text = json.dumps(self.content).encode()
        head = torch.tensor([MAGIC, self.kind, len(text), self.rows.numel()])
        return head, torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), self.rows])


def sizes_of(head: Tensor, most_row_bytes: int) -> tuple[MessageKind, int, int]:
    """Parse the numbers: kind, bytes of JSON, bytes of rows. Raises SpeqError if not valid."""
    magic, kind, text_bytes, row_bytes = head.tolist()
    known = magic == MAGIC and kind in list(MessageKind)
    if not known or not 0 < text_bytes <= MAX_JSON_BYTES or not 0 <= row_bytes <= most_row_bytes:
        raise PeerError(f"a stage sent a message of another version; {OTHER_PROTOCOL}")
    return MessageKind(kind), text_bytes, row_bytes


def unpack(kind: MessageKind, text_bytes: int, payload: Tensor) -> StageMessage:
    """Parse a message's bytes. Raises SpeqError if they have no JSON object."""
    try:
        content = parse_json(bytes(payload[:text_bytes].numpy()))
    except ValueError as error:
        raise PeerError(f"a stage sent invalid JSON ({error}); {OTHER_PROTOCOL}") from error
    if not isinstance(content, dict):
        raise PeerError(f"a stage sent JSON that is not an object; {OTHER_PROTOCOL}")
    # A copy: bytes after the JSON are not aligned for wider types.
    return StageMessage(kind, content, payload[text_bytes:].clone())


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.numpy().tobytes()


class Ring(Protocol):
    """Connections to the previous and the next pipeline stage.

    number, count  number of this stage, from 1 on, and of all stages
    """

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, message: StageMessage, wait_s: float | None = None) -> None:
        """Send to the next stage. Raises SpeqError if it is gone or does not receive in time."""

    def receive(self, wait_s: float) -> StageMessage:
        """Receive from the previous stage. Raises SpeqError if it is gone, or silent so long."""


class GlooRing:
    """A ring over torch.distributed's gloo.

    group           its ranks are stage numbers minus 1
    most_row_bytes  most bytes of a message's rows
    wait_s          longest send by default; a send ends when the next stage receives
    signatures      of messages, which follow them
    """

    def __init__(
        self,
        group: Any,
        number: int,
        count: int,
        most_row_bytes: int,
        wait_s: float,
        signatures: MessageSignatures,
    ) -> None:
        self._group = group
        self._signatures = signatures
        self.number, self.count = number, count
        self._most_row_bytes, self._wait_s = most_row_bytes, wait_s
        self._waiter = Waiter()

    @property
    def _next_rank(self) -> int:
        return self.number % self.count

    @property
    def _previous_rank(self) -> int:
        return (self.number - 2) % self.count

    def send(self, message: StageMessage, wait_s: float | None = None) -> None:
        with self._close_on_interrupt():
            self._waiter.do(partial(self._send, message, wait_s or self._wait_s))

    def receive(self, wait_s: float) -> StageMessage:
        with self._close_on_interrupt():
            return self._waiter.do(partial(self._receive, wait_s))

    @contextmanager
    def _close_on_interrupt(self) -> Iterator[None]:
        """Close all connections if the block is interrupted.

        Waits here and in the other stages then fail; a wait that lasts would outlive the
        interpreter.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                with suppress(RuntimeError):
                    # No stage sends this tag, and gloo closes connections when a wait times out.
                    never = self._group.recv([torch.zeros(1)], self._previous_rank, UNUSED_TAG)
                    never.wait(timedelta(milliseconds=1))
                self._waiter.rest(REST_S)
            raise

    def _send(self, message: StageMessage, wait_s: float) -> None:
        for part in self._signed(message):
            self._wait(self._next_rank, partial(self._begin_send, part), wait_s)

    def _signed(self, message: StageMessage) -> tuple[Tensor, Tensor]:
        """A message's numbers and bytes, with its signature behind them."""
        head, payload = message.pack()
        if not self._signatures.key.tag_bytes:
            return head, payload
        tag = self._signatures.next_sent(self.number, raw(head), raw(payload))
        return head, torch.cat([payload, torch.frombuffer(bytearray(tag), dtype=torch.uint8)])

    def _begin_send(self, part: Tensor) -> Any:
        return self._group.send([part], self._next_rank, TAG)

    def _begin_receive(self, part: Tensor) -> Any:
        return self._group.recv([part], self._previous_rank, TAG)

    def _receive(self, wait_s: float) -> StageMessage:
        head = torch.zeros(4, dtype=torch.int64)
        self._wait(self._previous_rank, partial(self._begin_receive, head), wait_s)
        kind, text_bytes, row_bytes = sizes_of(head, self._most_row_bytes)
        count, signatures = text_bytes + row_bytes, self._signatures
        payload = torch.empty(count + signatures.key.tag_bytes, dtype=torch.uint8)
        self._wait(self._previous_rank, partial(self._begin_receive, payload), wait_s)
        payload, tag = payload[:count], raw(payload[count:])
        if tag:
            signatures.check_received(self._previous_rank + 1, tag, raw(head), raw(payload))
        return unpack(kind, text_bytes, payload)

    def _wait(self, rank: int, begin: Callable[[], Any], wait_s: float) -> None:
        try:
            begin().wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            late = "Timed out" in str(error)
            what = f"was silent for {wait_s:g} s" if late else "has ended, or cannot be reached"
            raise PeerError(
                f"stage {rank + 1} of {self.count} {what}; look at its output, and start all "
                "stages again"
            ) from error
