"""Training data of a head: windows of tokens, with the exact model's last hidden states and
experts.

The model's own engine computes them once, under its memory budget, so a head can be trained for a
model larger than memory. Each kind has a file with one window after another. A journal has the
number of complete windows.
"""

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest, FeatureDrafter
from speq.engine.request import Request
from speq.errors import Broken, present
from speq.files.journal import Journal
from speq.files.range_file import bytes_of
from speq.routing import Route
from speq.runtime import Runtime

TOKENS, FEATURES, ROUTES = "tokens.bin", "features.bin", "routes.bin"
ID_DTYPE = torch.int32


class Window(NamedTuple):
    """A window: tokens [M], features [M, H], and each token's experts in each MoE layer [M, L,
    K].
    """

    tokens: Tensor
    features: Tensor
    routes: Tensor


class HeldOut(NamedTuple):
    """A window that is not trained on.

    guessed  by layer, from the second on: experts [M, K] that its router predicts one layer early
    """

    window: Window
    guessed: list[Tensor]


class FeatureRecorder(FeatureDrafter):
    """A drafter that drafts nothing and records the features it observes."""

    needs_int4: ClassVar[bool] = False

    def __init__(self) -> None:
        self._features: list[Tensor] = []

    def common_prefix_length(self, prompt_token_ids: list[int]) -> int:
        return 0

    def reset(self, count: int, of: "FeatureRecorder") -> None:
        self._features = []

    def observe_verified(self, token_ids: list[int], features: Tensor) -> None:
        self._features.append(features.cpu())

    def propose(self, asked: DraftRequest) -> Draft:
        return Draft()

    def features(self) -> Tensor:
        """Features [T, H] of the observed tokens."""
        return torch.cat(self._features)


class RouteRecorder:
    """Recorder of the routes of a prompt's passes; used as `LayerStream.on_route`.

    guesses  also record what the next layer's router would choose one layer early
    """

    def __init__(self, num_layers: int, guesses: bool) -> None:
        self._used: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._guessed: list[list[Tensor]] | None = None
        if guesses:
            self._guessed = [[] for _ in range(num_layers - 1)]

    def __call__(self, layer: int, route: Route) -> None:
        self._used[layer].append(route.host_ids.to(ID_DTYPE))
        if self._guessed is not None and layer < len(self._guessed):
            guess = route.predict_next_layer([*range(len(route.topk_ids))])
            guess = present(guess, f"layer {layer} has no prediction of the next one")
            self._guessed[layer].append(torch.tensor(guess.ids, dtype=ID_DTYPE))

    def used(self) -> Tensor:
        """Experts [T, L, K] of the observed tokens."""
        return torch.stack([torch.cat(parts) for parts in self._used], dim=1)

    def guessed(self) -> list[Tensor]:
        """Predicted experts [T, K] by layer, from the second on."""
        return [torch.cat(parts) for parts in self._guessed or []]


def window_of(runtime: Runtime, token_ids: Tensor) -> Window:
    """Run the exact model over a window [M]; the result is in host memory."""
    return _run_window(runtime, token_ids, guesses=False).window


def held_out_of(runtime: Runtime, token_ids: Tensor) -> HeldOut:
    """Run the exact model over a held-out window, with the routers' predictions."""
    return _run_window(runtime, token_ids, guesses=True)


def _run_window(runtime: Runtime, token_ids: Tensor, guesses: bool) -> HeldOut:
    engine, recorder = runtime.reserve(len(token_ids) + 1), FeatureRecorder()
    engine.recorder.begin_run(runtime.begin_stats(0.0))
    routes = RouteRecorder(len(runtime.shape.experts.layers), guesses)
    before, engine.drafters[0] = engine.drafters[0], recorder
    engine.offload.stream.on_route = routes
    try:
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
        engine.prefill(Request(token_ids.tolist(), sampling))
    finally:
        engine.drafters[0] = before
        engine.offload.stream.on_route = None
    return HeldOut(Window(token_ids, recorder.features(), routes.used()), routes.guessed())


@dataclass(slots=True)
class FeatureFile:
    """Windows on disk: features in the model's dtype, tokens and experts as int32.

    journal  has an entry {"window": CRC-32 of all} for each complete window
    length   tokens of a window
    routed   MoE layers, and experts of a token in each
    """

    folder: Path
    journal: Journal
    length: int
    hidden_size: int
    dtype: torch.dtype
    routed: tuple[int, int]

    def __post_init__(self) -> None:
        """Drop the first window that differs from the journal, and all after it."""
        count = sum("window" in entry for entry in self.journal.entries)
        for at in range(count):
            try:
                whole = self._crc32(self.read(at)) == self.journal.entries[at]["window"]
            except OSError:
                whole = False
            if not whole:
                self.journal.forget(at)
                break

    def __len__(self) -> int:
        return sum("window" in entry for entry in self.journal.entries)

    def _parts(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of each part of a window, in order."""
        return [
            (TOKENS, (self.length,), ID_DTYPE),
            (FEATURES, (self.length, self.hidden_size), self.dtype),
            (ROUTES, (self.length, *self.routed), ID_DTYPE),
        ]

    def append(self, windows: Iterable[Window]) -> None:
        """Append windows. They are on disk when this returns."""
        if self.journal.entries and "window" not in self.journal.entries[-1]:
            raise Broken("windows were appended past the end of the features")
        dtypes = [dtype for _, _, dtype in self._parts()]
        at = len(self)
        made = [
            Window(*(part.to(dtype) for part, dtype in zip(window, dtypes, strict=True)))
            for window in windows
        ]
        for part, (name, shape, dtype) in enumerate(self._parts()):
            descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(at * size_of(shape, dtype))
                for window in made:
                    file.write(bytes_of(window[part].contiguous().view(-1).view(torch.uint8)))
                file.flush()
                os.fsync(file.fileno())
        self.journal.add(*({"window": self._crc32(window)} for window in made))

    def read(self, at: int) -> Window:
        """Read a window. Raises OSError if it is missing."""
        parts = []
        for name, shape, dtype in self._parts():
            data = torch.empty(size_of(shape, dtype), dtype=torch.uint8)
            with (self.folder / name).open("rb") as file:
                file.seek(at * len(data))
                if file.readinto(bytes_of(data)) != len(data):
                    raise OSError(f"{name} ends within window {at}")
            parts.append(data.view(dtype).view(shape))
        return Window(*parts)

    def batch(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Read windows: tokens [B, M] int64 and features [B, M, H] float32."""
        tokens, features, _ = zip(*map(self.read, windows), strict=True)
        return torch.stack(tokens).long(), torch.stack(features).float()

    @staticmethod
    def _crc32(window: Window) -> int:
        found = 0
        for part in window:
            found = zlib.crc32(bytes_of(part.contiguous().view(-1).view(torch.uint8)), found)
        return found


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
