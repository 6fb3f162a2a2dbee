"""Stages with a key: only those that have it take part, and only what they sent is taken."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from speq.errors import FileError, PeerError, SpeqError
from speq.pipeline.rendezvous import Rendezvous, join_ring, open_ring
from speq.pipeline.stage_key import MARK, MessageSignatures, StageKey
from speq.pipeline.wire import MessageKind, StageMessage
from tests.helpers.stages import AGREED, MOST_BYTES, PATIENCE_S, SHARED, free_port

SECRET = b"a-key-of-all-the-stages"


def by_hand(secret: bytes, *parts: bytes) -> bytes:
    """RFC 2104 over each part behind its length."""
    block = secret.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
    for part in parts:
        inner.update(len(part).to_bytes(8, "little") + part)
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner.digest()).digest()


def test_what_is_told_is_signed() -> None:
    key, same = StageKey(SECRET), StageKey(SECRET)
    signed = key.sign("stage 2", '{"a": "ä"}')
    tag = by_hand(SECRET, b"stage 2", key.nonce, '{"a": "ä"}'.encode())
    assert signed == f'{MARK}{tag.hex()}{key.nonce.hex()}{{"a": "ä"}}'
    assert same.verify("stage 2", signed.encode(), "stage 2") == ('{"a": "ä"}', key.nonce)
    assert key.nonce != same.nonce
    others = [
        ("stage 3", signed, key),
        ("stage 2", signed.replace("ä", "b"), key),
        ("stage 2", signed[:-1], key),
        ("stage 2", signed.replace(key.nonce.hex(), same.nonce.hex()), key),
        ("stage 2", MARK + "zz" + signed[len(MARK) + 2 :], key),
        ("stage 2", MARK, key),
        ("stage 2", signed, StageKey(SECRET + b"!")),
    ]
    for name, told, reader in others:
        with pytest.raises(PeerError, match="signs its messages with another key; give all"):
            reader.verify(name, told.encode(), "stage 2 of 2")
    with pytest.raises(PeerError, match="stage 2 of 2 does not sign its messages"):
        key.verify("stage 2", b"{}", "stage 2 of 2")
    with pytest.raises(PeerError, match="signs its messages and this stage does not"):
        StageKey().verify("stage 2", signed.encode(), "stage 2 of 2")
    assert StageKey().verify("a", StageKey().sign("a", "{}").encode(), "b") == ("{}", b"")


def test_messages_are_signed_in_their_order() -> None:
    nonces = [b"1" * 16, b"2" * 16]

    def side(key: bytes = SECRET, of: list[bytes] = nonces) -> MessageSignatures:
        return MessageSignatures.of(StageKey(key), of)

    sender = side()
    first, second = sender.next_sent(1, b"head", b"body"), sender.next_sent(1, b"head", b"body")
    session = hashlib.sha256(b"".join(nonces)).digest()
    counted = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    assert second == by_hand(SECRET, session, counted, b"head", b"body") != first
    receiver = side()
    receiver.check_received(1, first, b"head", b"body")
    receiver.check_received(1, second, b"head", b"body")
    for at, (tag, sent_by, parts, reader) in enumerate(
        [
            (second, 1, (b"head", b"body"), side()),  # the first was left out
            (first, 2, (b"head", b"body"), side()),
            (first, 1, (b"headb", b"ody"), side()),
            (first, 1, (b"head", b"bodY"), side()),
            (first, 1, (b"head", b"body"), side(of=nonces[::-1])),  # of another run
            (first, 1, (b"head", b"body"), side(SECRET + b"!")),
            (first[:-1], 1, (b"head", b"body"), side()),
            (first, 1, (b"head", b"body"), receiver),  # repeated
        ]
    ):
        with pytest.raises(PeerError, match=f"came as stage {sent_by}'s is not signed by it"):
            reader.check_received(sent_by, tag, *parts)
            pytest.fail(f"case {at} was taken")


def meet(one: StageKey, other: StageKey) -> list[Any]:
    """What comes of two stages that meet, each its ring or its error."""
    met, found = f"127.0.0.1:{free_port()}", [None, None]

    def come() -> None:
        try:
            found[1], _ = join_ring(met, 2, AGREED, MOST_BYTES, PATIENCE_S, other)
        except SpeqError as error:
            found[1] = error

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    try:
        found[0] = open_ring(Rendezvous.at(met), AGREED, SHARED, MOST_BYTES, PATIENCE_S, one)
    except SpeqError as error:
        found[0] = error
    coming.join(PATIENCE_S)
    return found


@pytest.mark.parametrize(
    ("theirs", "said"),
    [(SECRET + b"!", "with another key"), (None, "sign"), (SECRET, None)],
)
def test_stages_that_meet(theirs: bytes | None, said: str | None) -> None:
    first, second = meet(StageKey(SECRET), StageKey(theirs))
    if said is not None:
        assert said in str(first) and said in str(second)
        assert "stage_key_file" in str(first) and "stage_key_file" in str(second)
        return
    sending = threading.Thread(target=first.send, args=[StageMessage(MessageKind.CHECK, {"a": 1})])
    sending.start()
    assert second.receive(PATIENCE_S).content == {"a": 1}
    sending.join(PATIENCE_S)
    # One that was written in another run, or by who has no key.
    first._signatures.session = b"another"
    sending = threading.Thread(target=first.send, args=[StageMessage(MessageKind.CHECK, {"a": 2})])
    sending.start()
    with pytest.raises(PeerError, match="came as stage 1's is not signed by it"):
        second.receive(PATIENCE_S)
    sending.join(PATIENCE_S)


def test_a_key_is_private(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET.decode()}\n")
    file.chmod(0o644)
    with pytest.raises(FileError, match="chmod 600"):
        StageKey.read(file)
    file.chmod(0o600)
    assert StageKey.read(file).secret == SECRET
    file.write_text("short\n")
    with pytest.raises(FileError, match=r"key:1 is no key of 16 or more"):
        StageKey.read(file)
    assert StageKey.read(None).secret is None
