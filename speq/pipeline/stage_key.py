"""Signatures of what pipeline stages tell each other: HMAC-SHA256 (RFC 2104) with a key of all.

Each stage adds a random nonce to what it tells at the rendezvous. The messages of a run are signed
over all nonces and their number, so that those of another run, or of another place, are refused.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speq.errors import PeerError
from speq.files.regular_file import read_keys

NONCE_BYTES, TAG_BYTES = 16, 32
MARK = "signed:"
REMEDY = "give all stages the same stage_key_file, or none of them"


@dataclass(frozen=True, slots=True)
class StageKey:
    """The key of all stages; secret None: nothing is signed."""

    secret: bytes | None = None
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    @classmethod
    def read(cls, path: Path | None) -> "StageKey":
        """Read the first key of a file. Raises SpeqError for a file that others may read."""
        return cls(None if path is None else read_keys(path)[0].encode())

    @property
    def tag_bytes(self) -> int:
        return 0 if self.secret is None else TAG_BYTES

    def tag(self, *parts: bytes) -> bytes:
        """Sign parts, of which none can pass for a piece of another."""
        if self.secret is None:
            return b""
        made = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in parts:
            made.update(len(part).to_bytes(8, "little"))
            made.update(part)
        return made.digest()

    def sign(self, name: str, text: str) -> str:
        """Sign what this stage tells under a name, with its nonce."""
        if self.secret is None:
            return text
        tag = self.tag(name.encode(), self.nonce, text.encode())
        return f"{MARK}{tag.hex()}{self.nonce.hex()}{text}"

    def verify(self, name: str, told: bytes, who: str) -> tuple[str, bytes]:
        """Return what a stage told under a name, and its nonce. Raises SpeqError if it was signed
        with another key, or if one of the two has none.
        """
        text = told.decode("utf-8", "replace")
        signed = text.startswith(MARK)
        if signed != (self.secret is not None):
            raise PeerError(
                f"{who} signs its messages and this stage does not; {REMEDY}"
                if signed
                else f"{who} does not sign its messages; {REMEDY}"
            )
        if not signed:
            return text, b""
        tag, rest = text[len(MARK) :][: 2 * TAG_BYTES], text[len(MARK) + 2 * TAG_BYTES :]
        nonce, rest = rest[: 2 * NONCE_BYTES], rest[2 * NONCE_BYTES :]
        try:
            given = bytes.fromhex(nonce)
            wanted = self.tag(name.encode(), given, rest.encode())
            sound = hmac.compare_digest(bytes.fromhex(tag), wanted)
        except ValueError:
            sound = False
        if not sound:
            raise PeerError(f"{who} signs its messages with another key; {REMEDY}")
        return rest, given


@dataclass(slots=True)
class MessageSignatures:
    """Signatures of one stage's messages in a run.

    session  made of the nonces of all stages
    sent, received  messages so far
    """

    key: StageKey
    session: bytes
    sent: int = 0
    received: int = 0

    @classmethod
    def of(cls, key: StageKey, nonces: Sequence[bytes]) -> "MessageSignatures":
        return cls(key, hashlib.sha256(b"".join(nonces)).digest())

    def next_sent(self, sender: int, *parts: bytes) -> bytes:
        """Sign the next message of stage `sender`, this one."""
        self.sent += 1
        return self._tag(sender, self.sent, *parts)

    def check_received(self, sender: int, tag: bytes, *parts: bytes) -> None:
        """Raise SpeqError unless this is the next message of stage `sender`."""
        self.received += 1
        if not hmac.compare_digest(tag, self._tag(sender, self.received, *parts)):
            raise PeerError(
                f"a message that came as stage {sender}'s is not signed by it; look after the "
                "network, and start all stages again"
            )

    def _tag(self, sender: int, number: int, *parts: bytes) -> bytes:
        counted = sender.to_bytes(8, "little") + number.to_bytes(8, "little")
        return self.key.tag(self.session, counted, *parts)
