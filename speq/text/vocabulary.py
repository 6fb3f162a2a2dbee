"""Properties of single tokens: special ones, bytes, and names."""

import codecs
import json
from itertools import islice
from typing import Any

# Decoded form of bytes that are not a character.
REPLACEMENT = "\ufffd"
# Error handler for invalid UTF-8 of single-byte tokens: byte by byte, as in tokenizers.
EACH_BYTE = "speq.each_byte"
# Context tokens before the tokens to decode.
CONTEXT_TOKENS = 6
# Most bytes of a character after its first one.
MORE_BYTES = 3


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):  # an encoding error
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


class Vocabulary:
    """Tokens of one tokenizer, of any kind.

    special      text of each special token, by id; decoding omits these
    knows_bytes  the bytes of tokens that may end within a character are known: all tokens of a
                 byte-level tokenizer, or the single bytes of one with byte fallback. If not, a text
                 that ends in U+FFFD may be incomplete
    errors       Python's codec error handler for bytes that are not UTF-8
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._token_of = None if backend is None else backend.id_to_token
        self._byte_level = kinds_of(getattr(backend, "decoder", None)) == ["ByteLevel"]
        self.special = special_tokens(tokenizer)
        self._bytes = {} if self._byte_level else single_bytes(tokenizer)
        self.knows_bytes = self._byte_level or bool(self._bytes)
        self.errors = "replace" if self._byte_level else EACH_BYTE
        self._in_text: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Decode tokens, without special ones."""
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def bytes_of(self, token_id: int) -> bytes | None:
        """Bytes that a token adds to any text, if known; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is not None or self._token_of is None:
            return known
        token = self._token_of(token_id)
        if token is None:
            known = b""
        elif self._byte_level:
            known = byte_level_bytes(token)
        if self._byte_level:
            self._bytes[token_id] = known or b""
        return known

    def context(self, token_ids: list[int]) -> list[int]:
        """Select the last context tokens such that decoding them, and what follows, is complete."""
        if self._byte_level:
            return []  # a token's text does not depend on others
        tail = (token_id for token_id in reversed(token_ids) if token_id not in self.special)
        last = [*islice(tail, CONTEXT_TOKENS + MORE_BYTES)][::-1]
        usual = last[-CONTEXT_TOKENS:]
        starts = range(max(len(last) - CONTEXT_TOKENS, 0), -1, -1)
        return next((last[at:] for at in starts if self._is_whole(last[at:])), usual)

    def _is_whole(self, token_ids: list[int]) -> bool:
        return REPLACEMENT not in self.decode(token_ids)

    def holds_special(self, text: str) -> bool:
        """True if a text contains that of a special token."""
        return any(special and special in text for special in self.special.values())

    def data(self, token_id: int) -> bytes:
        """Bytes of a token within a text; special tokens by their names."""
        if token_id in self.special:
            return self.special[token_id].encode()
        known = self.bytes_of(token_id)
        return self._text(token_id).encode() if known is None else known

    def name(self, token_id: int) -> str:
        """A token's text within a text; of a part of a character, its bytes as `bytes:\\xf0`."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token_id: int) -> str:
        """Decode a token after itself, so that what is dropped at the beginning of a text is
        included.
        """
        if token_id not in self._in_text:
            twice = self.decode([token_id, token_id])
            self._in_text[token_id] = twice[len(self.decode([token_id])) :]
        return self._in_text[token_id]


def kinds_of(decoder: Any) -> list[str]:
    """Names of a decoder's stages."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder.items()
    return {token_id: str(token.content) for token_id, token in added if token.special}


def single_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Find tokens such as <0xF0>, if decoding treats them as bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    id_of = tokenizer.get_vocab().get if backend is None else backend.token_to_id
    letter = id_of("<0x41>")
    if letter is None or tokenizer.decode([letter], clean_up_tokenization_spaces=False) != "A":
        return {}
    ids = {id_of(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    return {token_id: data for token_id, data in ids.items() if token_id is not None}


def byte_level_bytes(token: str) -> bytes:
    """Decode a token of a byte-level tokenizer; one with other characters is its own text."""
    try:
        return bytes(BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def byte_characters() -> dict[str, int]:
    """Map the characters of byte-level tokens to bytes, as in GPT-2: printable ones map to
    themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    made = {chr(byte): byte for byte in printable}
    return made | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTES = byte_characters()
