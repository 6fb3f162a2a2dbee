"""A folder of texts as windows of tokens, in an order given by a seed; the ends are held out."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError
from speq.files.regular_file import read_text

# Characters of a piece of text; windows take pieces from all files in turn.
PIECE_CHARACTERS = 8192
# Share of each file's end that is held out for evaluation, and most characters of it.
HELD_OUT_SHARE, HELD_OUT_CHARACTERS = 0.05, 100_000

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Text files by name.

    texts     the part to train on
    held_out  the end of each
    """

    texts: dict[str, str]
    held_out: dict[str, str]

    @classmethod
    def of_folder(cls, folder: Path) -> "Texts":
        """Read a folder's .txt files. Raises SpeqError if it is not a folder or has no text."""
        if not folder.is_dir():
            raise FileError(
                f"texts {str(folder)!r} is not a folder; give one that holds .txt files"
            )
        texts, held_out = {}, {}
        for path in sorted(folder.glob("*.txt")):
            text = read_text(path, "give texts in UTF-8")
            kept = len(text) - min(int(HELD_OUT_SHARE * len(text)), HELD_OUT_CHARACTERS)
            texts[path.name], held_out[path.name] = text[:kept], text[kept:]
        if not any(text.strip() for text in texts.values()):
            raise FileError(f"texts {str(folder)!r} holds no .txt file with text; give some pages")
        return cls(texts, held_out)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for part in (self.texts, self.held_out):
            for name, text in part.items():
                digest.update(f"{name}:{len(text)}:".encode())
                digest.update(text.encode())
        return digest.hexdigest()[:32]

    @property
    def ends(self) -> "Texts":
        """The held-out parts, as texts of their own."""
        return Texts(self.held_out, {})

    def pieces(self, seed: int) -> list[str]:
        """Split the training part into pieces, in an order given by the seed."""
        found = [piece for text in self.texts.values() for piece in pieces_of(text)]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
        return [found[at] for at in order.tolist()]

    def windows(
        self, encode: Encode, length: int, end_id: int | None, seed: int
    ) -> Iterator[Tensor]:
        """Yield windows [length] int64 of the training part, with an end-of-text token after each
        piece. Texts are encoded lazily.
        """
        ids: list[int] = []
        for piece in self.pieces(seed):
            ids += encode(piece)
            if end_id is not None:
                ids.append(end_id)
            while len(ids) >= length:
                yield torch.tensor(ids[:length])
                del ids[:length]

    def prompts(self, encode: Encode, length: int, count: int) -> list[list[int]]:
        """Take the beginnings of up to `count` held-out pieces, from all files in turn."""
        by_file = [pieces_of(text) for text in self.held_out.values()]
        turns = range(max((len(pieces) for pieces in by_file), default=0))
        found = (pieces[turn] for turn in turns for pieces in by_file if turn < len(pieces))
        encoded = (encode(piece)[:length] for piece in found)
        whole = (ids for ids in encoded if len(ids) == length)
        return [ids for ids, _ in zip(whole, range(count), strict=False)]


def pieces_of(text: str) -> list[str]:
    """Split a text into pieces that end at a line break if possible."""
    pieces, start = [], 0
    while start < len(text):
        end = min(start + PIECE_CHARACTERS, len(text))
        line = text.rfind("\n", start + PIECE_CHARACTERS // 2, end) + 1
        end = line if line and end < len(text) else end
        pieces.append(text[start:end])
        start = end
    return [piece for piece in pieces if piece.strip()]
