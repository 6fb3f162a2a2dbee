"""Messages that no stage would send: each is refused in a sentence, and the stage goes on."""

import copy
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.config import RunConfig
from speq.errors import EngineLost, SpeqError
from speq.load import load
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings, current_versions
from speq.pipeline.first_stage import RingStages
from speq.pipeline.later_stage import Stage, with_run_settings
from speq.pipeline.settings import with_stages
from speq.pipeline.wire import MessageKind, StageMessage, sizes_of, unpack
from speq.runtime import Runtime
from tests.helpers.stages import MOST_BYTES, PATIENCE_S, closing_opened

CONTEXT, CHUNK, HIDDEN, ROW_BYTES = 100, 80, 64, 64 * 4
# In the place of any entry of a message.
ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 7, 99, 100, 101, 4097, 1 << 40, 10**300, 1.5, float("nan"), True, None),
    *("", "x", "erase", "take", "settle", [], [[]], [0], [0, 0], [1, 0], [-1, -1], {}, {"a": 1}),
    *([0, 1, None], [[0, 1, None]] * 2, ["x"] * 3, "é" * 999, [[[[[[]]]]]]),
)


@dataclass
class SocketRing:
    """One of two stages, at an end of a pair of sockets."""

    number: int
    connection: socket.socket
    count: int = 2

    def send(self, message: StageMessage, wait_s: float | None = None) -> None:
        self.write(*message.pack())

    def write(self, head: Tensor, payload: Tensor) -> None:
        try:
            self.connection.sendall(head.numpy().tobytes() + payload.numpy().tobytes())
        except OSError as error:
            raise SpeqError("the other stage is gone") from error

    def receive(self, wait_s: float) -> StageMessage:
        self.connection.settimeout(PATIENCE_S)
        head = torch.frombuffer(bytearray(self._bytes(32)), dtype=torch.int64)
        kind, text_bytes, row_bytes = sizes_of(head, MOST_BYTES)
        payload = bytearray(self._bytes(text_bytes + row_bytes))
        return unpack(kind, text_bytes, torch.frombuffer(payload, dtype=torch.uint8))

    def _bytes(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            try:
                piece = self.connection.recv(count - len(found))
            except ConnectionResetError:  # it left before it had taken all
                piece = b""
            if not piece:
                raise SpeqError("the other stage is gone")
            found += piece
        return found


@dataclass
class Peer:
    """Whoever is the first stage of a stage that runs in a thread; failures: what that raised."""

    ring: SocketRing
    failures: list[BaseException] = field(default_factory=list)

    def asked(self, message: StageMessage) -> StageMessage:
        self.ring.send(message)
        return self.ring.receive(PATIENCE_S)


@contextmanager
def runtime_of(model: Path) -> Iterator[Runtime]:
    """Of the second of two stages."""
    config = with_stages(RunConfig.of("64MiB", drafter="ngram", dtype="float32", max_batch=2))
    with ExitStack() as stack:
        opened = stack.enter_context(closing_opened(model, "1,2", 2, False))
        runtime = Runtime(load(opened, with_run_settings(config, RunSettings.of(config))))
        stack.callback(runtime.engine.close)
        yield runtime


@contextmanager
def served(runtime: Runtime) -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    peer = Peer(SocketRing(1, ours))

    def serve() -> None:
        try:
            Stage(runtime, SocketRing(2, theirs)).serve()
        except BaseException as error:
            peer.failures.append(error)
        theirs.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield peer
    finally:
        ours.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def rows_of(count: int, seed: int) -> Tensor:
    made = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return made.view(-1).view(torch.uint8)


def passing(texts: Any, changes: Any, reading: bool = False) -> StageMessage:
    count = sum(text[1] for text in texts)
    content = {"texts": texts, "reading": reading, "changes": changes}
    return StageMessage(MessageKind.PASS, content, rows_of(count, count))


# Prompts of two texts, of which one is run at once; a tree of which a branch is kept, and what
# follows it; and the text anew.
SOUND = (
    StageMessage(MessageKind.RESERVE, {"context": CONTEXT, "chunk": CHUNK}),
    passing([[0, 70, None]], [], True),
    passing([[1, 5, None]], [[0, "length", 70], [0, "settle", None]], True),
    passing([[0, 4, [-1, 0, 0, 2]], [1, 2, None]], [[1, "length", 5], [1, "settle", None]]),
    passing([[0, 1, None], [1, 1, None]], [[0, "keep_path", [0, 2, 3]], [1, "length", 6]]),
    passing([[0, 2, None]], [[0, "length", 73], [0, "settle", None], [1, "erase", None]]),
)


def answers(peer: Peer) -> list[StageMessage]:
    return [peer.asked(message) for message in SOUND]


def damaged(message: StageMessage, rng: random.Random) -> StageMessage:
    content, rows, kind = copy.deepcopy(message.content), message.rows, message.kind
    how = rng.random()
    if how < 0.1:
        kind = rng.choice([MessageKind.RESERVE, MessageKind.PASS])
    elif how < 0.25:
        count = rng.choice([0, 1, ROW_BYTES - 1, ROW_BYTES, len(rows) - 1, len(rows) + 1])
        rows = torch.cat([rows, rows, rows_of(2, 3)])[: max(count, 0)]
    elif how < 0.35:
        name = rng.choice([*content, "more"])
        if content.pop(name, content) is content:
            content[name] = rng.choice(ODD)
    for _ in range(rng.randint(0 if how < 0.35 else 1, 2)):
        place: Any = content
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            place[key] = copy.deepcopy(rng.choice(ODD))
            break
    return StageMessage(kind, content, rows)


FAMILIES = ["qwen2_moe", "lfm2_moe", pytest.param("qwen3_next", marks=pytest.mark.wide)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_goes_on_after_damaged_messages(family: str, tiny: Callable[[str], Path]) -> None:
    """And its answers to sound ones are, bit for bit, what they were."""
    rng, refused = random.Random(5), 0
    with runtime_of(tiny(family)) as runtime, served(runtime) as peer:
        wanted = answers(peer)
        assert [each.kind for each in wanted] == [each.kind for each in SOUND]
        for number in range(600):
            at = rng.randrange(len(SOUND))
            if number % 8 == 0:  # from a sound beginning, too
                for message in SOUND[:at]:
                    peer.asked(message)
            answer = peer.asked(damaged(SOUND[at], rng))
            if answer.kind is MessageKind.FAILED:
                refused += 1
                sentence = answer.content["sentence"]
                assert sentence.startswith("stage 2 of 2: "), sentence
                assert "\n" not in sentence and len(sentence) < 400, sentence
                assert not answer.content["ended"]
        assert refused > 400
        found = answers(peer)
        assert all(
            one.content == other.content and torch.equal(one.rows, other.rows)
            for one, other in zip(wanted, found, strict=True)
        )
        peer.ring.send(StageMessage(MessageKind.CLOSE))
    assert not peer.failures


def test_bytes_that_are_no_message_end_a_stage_in_a_sentence(tiny: Callable[[str], Path]) -> None:
    rng = random.Random(6)
    with runtime_of(tiny("qwen2_moe")) as runtime:
        for _ in range(60):
            head, payload = SOUND[rng.randrange(len(SOUND))].pack()
            which = rng.randrange(4)
            if which == 0:
                head[rng.randrange(4)] = rng.choice([-1, 0, 9, 1 << 40, -(1 << 62)])
            elif which == 1:
                at = rng.randrange(int(head[2]))
                payload[at] = rng.randrange(256)
            elif which == 2:
                payload = payload[: rng.randrange(len(payload))]
            else:
                deep = (b"[" * 200_000, b'{"a":' * 100_000, b'{"a":' + b"9" * 9999 + b"}")
                payload = torch.frombuffer(bytearray(rng.choice(deep)), dtype=torch.uint8)
                head[2], head[3] = len(payload), 0
            with served(runtime) as peer:
                peer.ring.write(head, payload)
                peer.ring.connection.shutdown(socket.SHUT_WR)
            assert all(isinstance(error, SpeqError) for error in peer.failures), peer.failures


@pytest.mark.parametrize(
    "answer",
    [
        StageMessage(MessageKind.RESERVE, {}),
        StageMessage(MessageKind.RESERVE, {"context": 8, "chunk": "x"}),
        StageMessage(MessageKind.RESERVE, {"context": 8, "chunk": 0}),
        StageMessage(MessageKind.CHECK),
        StageMessage(MessageKind.FAILED, {"sentence": ["x"], "ended": 1}),
    ],
)
def test_the_first_stage_takes_no_odd_answer(answer: StageMessage) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        SocketRing(2, theirs).send(answer)
        stages = RingStages(SocketRing(1, ours), PATIENCE_S)
        for _ in range(2):  # and asks no more
            with pytest.raises(EngineLost):
                stages.reserve(8)


SHARED = {
    "dtype": "float32",
    "sums": "auto",
    "drafter": "ngram",
    "draft_length": None,
    "context_length": 64,
    "max_batch": 2,
}


def test_shared_options_are_options() -> None:
    taken: list[tuple[str, Any]] = []
    for name, value in product(SHARED, ODD):
        try:
            found = RunSettings.of_json(json.dumps(SHARED | {name: value}).encode())
        except SpeqError as error:
            assert "the first stage sent settings that this version does not understand" in str(
                error
            )
            continue
        assert getattr(found, name) == value
        taken.append((name, value))
    assert taken == [
        *(("draft_length", value) for value in (0, 1, 2, 7, None)),
        *(("context_length", each) for each in (1, 2, 7, 99, 100, 101, 4097, 1 << 40, 10**300)),
        *[("context_length", None), ("max_batch", 1), ("max_batch", 2), ("max_batch", 7)],
    ]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 99_999, b'{"dtype": "float32"}']
)
def test_what_is_agreed_on_is_json(text: bytes) -> None:
    with pytest.raises(SpeqError, match="that this version does not understand"):
        RunSettings.of_json(text)
    with pytest.raises(SpeqError, match="that this version does not understand"):
        ModelFingerprint.of_json(text, "stage 2 of 2")
    odd = {"model": "a", "versions": current_versions(), "counts": {"a": 1}}
    with pytest.raises(SpeqError, match="that this version does not understand"):
        ModelFingerprint.of_json(json.dumps(odd).encode(), "stage 2 of 2")


def test_shared_options_come_as_they_went() -> None:
    shared = RunSettings("bfloat16", "canonical", "head", 3, None, 4)
    assert RunSettings.of_json(shared.to_json().encode()) == shared
