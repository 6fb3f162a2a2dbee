"""Token ids in, text out, piece by piece, up to a stop string."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from speq.errors import SpeqError
from speq.files.json_file import read_json
from speq.files.regular_file import check_folder

# What decoding makes of bytes that do not yet form a character.
REPLACEMENT = "\ufffd"
# Tokens of the context that are looked at.
CONTEXT_TOKENS = 6


class TextStream:
    """Decodes a growing list of tokens. The pieces add up to the text of all of them.

    A piece is held back while its last character is incomplete or while it may be the beginning of
    a stop string; what follows a stop string, and the string itself, is never given out. Special
    tokens have no text, so they cannot stop it either.

    context_ids  the tokens of the text that is gone on from: some tokenizers put the space before
                 a word into its token, and drop it where the word begins a text
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...] = (), context_ids: list[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = [] if context_ids is None else context_ids[-CONTEXT_TOKENS:]
        self._prefix = 0  # tokens before this one are needed no more
        self._read = len(self._ids)  # tokens before this one have been decoded
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    def write(self, token_id: int, last: bool) -> bool:
        """Feed a token, the last one or not, and keep its piece; return whether it `stopped`."""
        piece = self.feed(token_id)
        if last and not self.stopped:
            piece += self.finish()
        self._pieces.append(piece)
        return self.stopped

    def take(self) -> list[str]:
        """The pieces of the tokens that were written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed(self, token_id: int) -> str:
        """Text that is certain now that `token_id` has come."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._prefix : self._read])
        rest = self._decode(self._ids[self._prefix :])[len(known) :]
        self._prefix = self._read = len(self._ids)
        return self._release(rest, final=True)

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, piece: str, final: bool = False) -> str:
        text = self._held + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else self._stop_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = [
            n
            for stop in self._stop
            for n in range(1, min(len(stop) - 1, len(text)) + 1)
            if text.endswith(stop[:n])
        ]
        return max(lengths, default=0)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
TOKENIZER_CONFIG = "tokenizer_config.json"
# Some times the largest in use; a template is a page of text.
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_BYTES = {
    "*.json": 256 << 20,
    "*.model": 256 << 20,
    "*.txt": 256 << 20,
    "*.jinja": MAX_TEMPLATE_CHARACTERS,
    "chat_template.json": MAX_TEMPLATE_CHARACTERS,
    TOKENIZER_CONFIG: 16 << 20,
    "special_tokens_map.json": 16 << 20,
    "added_tokens.json": 16 << 20,
}
TOKENIZER_AGAIN = "download its tokenizer files again, all of them"


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a model folder. Raises SpeqError where it is absent or of no use."""
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        raise SpeqError(
            f"{path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); {TOKENIZER_AGAIN}"
        )
    check_folder(path, MAX_BYTES)
    if (path / TOKENIZER_CONFIG).exists():
        check_tokenizer_config(path / TOKENIZER_CONFIG)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        # Some damage shows only when it is used.
        tokenizer.decode(tokens_of(tokenizer, "a b"), skip_special_tokens=True)
    except Exception as error:  # tokenizers raise many kinds for a bad file
        raise SpeqError(
            f"the tokenizer in {path} cannot be loaded: {' '.join(str(error).split())[:300]}; "
            f"{TOKENIZER_AGAIN}"
        ) from error
    return tokenizer


def check_tokenizer_config(path: Path) -> None:
    """Raise SpeqError for values that a tokenizer takes and stumbles over later."""
    config = read_json(path)
    length = config.get("model_max_length")
    if isinstance(length, bool) or not (length is None or isinstance(length, int | float)):
        raise SpeqError(
            f"{path} has model_max_length {length!r:.40}; it must be a number: download it again"
        )
    templates = config.get("chat_template") or []
    for named in templates if isinstance(templates, list) else [templates]:
        template = named.get("template") if isinstance(named, dict) else named
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS:
            found = f"of {len(template)} characters" if isinstance(template, str) else "of no text"
            raise SpeqError(
                f"{path} has a chat_template {found}; it must be a text of at most "
                f"{MAX_TEMPLATE_CHARACTERS}: download it again"
            )


def tokens_of(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. Raises SpeqError where it is none, such as bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpeqError(
            f"the prompt holds {text[error.start]!r} at character {error.start}, which is no "
            "Unicode text; give text that was decoded from UTF-8"
        ) from error
    # Without its warning of texts beyond the model's context: these are refused in our own words.
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])
