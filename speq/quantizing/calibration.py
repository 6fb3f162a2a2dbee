"""Calibration text as windows of tokens of one length; some are held out for evaluation."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError
from speq.files.json_file import parse_json
from speq.files.regular_file import read_text
from speq.quantizing.settings import QuantizeSettings

logger = logging.getLogger("speq")

FIELDS = ("prompt", "text")
# Held-out windows per calibration window, and their maximum.
HELD_OUT_SHARE = 1 / 8
MAX_HELD_OUT = 16
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Windows of a text: calibration [C, M] and held_out [V, M] int64. C or V may be 0."""

    calibration: Tensor
    held_out: Tensor

    def digest(self) -> str:
        """Digest of the tokens, and of which are held out."""
        sizes = f"{list(self.calibration.shape)}{list(self.held_out.shape)}"
        digest = hashlib.sha256(sizes.encode())
        for windows in (self.calibration, self.held_out):
            digest.update(windows.contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]


def read_texts(path: Path) -> list[str]:
    """Read the texts of JSON Lines with a `prompt` or `text` in each row, or of a plain text file.

    Raises SpeqError if the file is absent, not text, or empty.
    """
    if not path.is_file():
        raise FileError(
            f"calibration {str(path)!r} is not a file; give JSON Lines (.jsonl) with a `prompt` or "
            "`text` in each row, or a text file; a data set of the hub must be saved as one first"
        )
    content = read_text(path, "give a text in UTF-8, or JSON Lines")
    texts = [content]
    if path.suffix == ".jsonl":
        lines = enumerate(content.split("\n"), start=1)
        texts = [_text_of(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not any(text.strip() for text in texts):
        raise FileError(f"calibration {path} holds no text; give some pages of it")
    return texts


def _text_of(line: str, where: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise FileError(f"{where} is not JSON: {error}; write an object in each row") from error
    found = [row[field] for field in FIELDS if field in row] if isinstance(row, dict) else []
    if not found or not isinstance(found[0], str):
        raise FileError(
            f"{where} is not a JSON object with a string under `prompt` or `text`; write one there"
        )
    return found[0]


def tokenise(texts: list[str], encode: Encode, vocab_size: int, end_id: int | None) -> Tensor:
    """Tokenise texts into [N] int64, with an end-of-text token after each, if there is one."""
    ids: list[int] = []
    for text in texts:
        ids += encode(text)
        if end_id is not None:
            ids.append(end_id)
    tokens = torch.tensor(ids, dtype=torch.int64)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise FileError(
            f"the tokenizer makes token {int(tokens.max())} of the calibration text and the model "
            f"knows {vocab_size}; give the model's own tokenizer"
        )
    return tokens


def calibration_of(tokens: Tensor, settings: QuantizeSettings) -> Calibration:
    """Choose windows of a text's tokens [N] by the seed, in text order.

    Raises SpeqError if the text is shorter than a window.
    """
    length = settings.sequence_length
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    found = len(windows)
    if not found:
        raise FileError(
            f"the calibration text has {len(tokens)} tokens and a sequence length of {length} was "
            "asked for; give more text or a shorter --sequence-length"
        )
    wanted = min(max(int(settings.samples * HELD_OUT_SHARE), 1), MAX_HELD_OUT)
    held_out = min(wanted, -(-found // 9)) if found > 1 else 0
    count = min(settings.samples, found - held_out)
    if count < settings.samples:
        logger.warning(
            "the calibration text has %d windows of %d tokens, %d of them held out; %d samples "
            "were asked for: more text makes a better draft",
            found,
            length,
            held_out,
            settings.samples,
        )
    drawn = torch.randperm(found, generator=torch.Generator().manual_seed(settings.seed))
    chosen, rest = drawn[:count].sort().values, drawn[count : count + held_out].sort().values
    return Calibration(windows[chosen], windows[rest])
