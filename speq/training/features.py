"""What a head is trained on: windows of tokens, and the exact model's last hidden states of them.

The model's own engine makes them once, under its memory budget, so that a model larger than memory
can have a head. They lie in one file, window behind window. A journal says how many of them are
whole.
"""

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.decode.drafter import DraftBounds, GoOn
from speq.decode.sequence import Draft, Sequence
from speq.files.journal import Journal
from speq.files.range_file import bytes_of
from speq.layers.draft_experts import OnRoute
from speq.runtime import Runtime

TOKENS, FEATURES = "tokens.bin", "features.bin"
ID_DTYPE = torch.int32


class Ear:
    """A drafter that drafts nothing and keeps what it hears."""

    needs_int4: ClassVar[bool] = False

    def __init__(self) -> None:
        self._heard: list[Tensor] = []

    def begin(self, sequence: Sequence) -> None:
        self._heard = []

    def hear(self, token_ids: list[int], features: Tensor) -> None:
        self._heard.append(features.cpu())

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        return Draft()

    def features(self) -> Tensor:
        """[T, H] of the tokens heard."""
        return torch.cat(self._heard)


def features_of(runtime: Runtime, token_ids: Tensor) -> Tensor:
    """The exact model's last hidden states [M, H] of a window [M], in host memory."""
    engine, ear = runtime.reserve(len(token_ids) + 1), Ear()
    engine.recorder.begin_run(runtime.begin_stats(0.0))
    before, engine.drafter = engine.drafter, ear
    try:
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
        engine.start(Sequence(token_ids.tolist(), sampling))
    finally:
        engine.drafter = before
    return ear.features()


@dataclass(slots=True)
class FeatureFile:
    """Windows on the disk: tokens [M] int32, and features [M, H] in the model's dtype.

    journal  has an entry {"window": CRC-32 of both} for each that is whole
    """

    folder: Path
    journal: Journal
    length: int
    hidden_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Forget windows that are not as the journal says, and all behind them."""
        count = sum("window" in entry for entry in self.journal.entries)
        for at in range(count):
            try:
                whole = self._crc32(*self.read(at)) == self.journal.entries[at]["window"]
            except OSError:
                whole = False
            if not whole:
                self.journal.forget(at)
                break

    def __len__(self) -> int:
        return sum("window" in entry for entry in self.journal.entries)

    def _sizes(self) -> tuple[int, int]:
        return (
            self.length * ID_DTYPE.itemsize,
            self.length * self.hidden_size * self.dtype.itemsize,
        )

    def append(self, windows: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add tokens and features of some windows. They are on the disk when this returns."""
        assert not self.journal.entries or "window" in self.journal.entries[-1]
        at, made = len(self), [(t.to(ID_DTYPE), f.to(self.dtype)) for t, f in windows]
        for part, (name, size) in enumerate(zip((TOKENS, FEATURES), self._sizes(), strict=True)):
            descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(at * size)
                for window in made:
                    file.write(bytes_of(window[part].contiguous().view(-1).view(torch.uint8)))
                file.flush()
                os.fsync(file.fileno())
        self.journal.add(*({"window": self._crc32(*window)} for window in made))

    def read(self, at: int) -> tuple[Tensor, Tensor]:
        """Tokens [M] and features [M, H] of a window. Raises OSError where they are not there."""
        sizes = zip((TOKENS, FEATURES), self._sizes(), (ID_DTYPE, self.dtype), strict=True)
        parts = []
        for name, size, dtype in sizes:
            data = torch.empty(size, dtype=torch.uint8)
            with (self.folder / name).open("rb") as file:
                file.seek(at * size)
                if file.readinto(bytes_of(data)) != size:
                    raise OSError(f"{name} ends within window {at}")
            parts.append(data.view(dtype))
        tokens, features = parts
        return tokens, features.view(self.length, self.hidden_size)

    def batch(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, M] int64 and features [B, M, H] float32."""
        tokens, features = zip(*map(self.read, windows), strict=True)
        return torch.stack(tokens).long(), torch.stack(features).float()

    @staticmethod
    def _crc32(tokens: Tensor, features: Tensor) -> int:
        first = zlib.crc32(bytes_of(tokens.contiguous().view(-1).view(torch.uint8)))
        return zlib.crc32(bytes_of(features.contiguous().view(-1).view(torch.uint8)), first)
