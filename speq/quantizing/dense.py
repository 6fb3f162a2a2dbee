"""Quantization of a decoder layer's dense layers by the Hessians of their inputs.

Layers with the same input tensor, such as q, k and v, share one Hessian.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speq.errors import CheckpointError
from speq.layers.dense_linear import DenseLinear
from speq.layers.dense_matrix import RawMatrix
from speq.quantizing.expert import quantise_matrix, round_matrix
from speq.quantizing.gptq import QuantisedMatrix
from speq.quantizing.lanes import CALIBRATION, DRAFT, ROUNDED, RecordingBackend
from speq.quantizing.settings import QuantizeSettings


@dataclass(slots=True)
class InputHessian:
    """Hessian X'X [K, K] float32 of the inputs of some layers; `tokens` rows."""

    hessian: Tensor
    tokens: int = 0

    def add(self, given: Tensor) -> None:
        rows = given.flatten(0, -2).float()
        self.hessian.addmm_(rows.t(), rows)
        self.tokens += len(rows)


@dataclass(slots=True)
class DenseLayers:
    """Dense layers of one decoder layer to quantise, by module name."""

    layers: Mapping[str, DenseLinear]
    settings: QuantizeSettings
    _inputs: dict[str, InputHessian] = field(default_factory=dict)
    _quantised: dict[str, QuantisedMatrix] | None = None
    _running: str = ""

    @contextmanager
    def in_lane(self, lane: str, backend: RecordingBackend) -> Iterator[None]:
        """Run a window of a lane inside the block: recorded, on codes, or on rounded codes."""
        if not self.layers or lane not in (CALIBRATION, DRAFT, ROUNDED):
            yield
        elif lane == CALIBRATION:
            with self._overheard():
                yield
        else:
            self._run_on(lane)
            backend.drafts = True
            try:
                yield
            finally:
                backend.drafts = False

    @contextmanager
    def _overheard(self) -> Iterator[None]:
        window: list[tuple[Tensor, InputHessian]] = []
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hook = layer.register_forward_pre_hook(partial(self._hear, name, window))
                hooks.callback(hook.remove)
            yield

    def _hear(
        self, name: str, window: list[tuple[Tensor, InputHessian]], layer: nn.Module, args: Any
    ) -> None:
        given = args[0]
        heard = next((inputs for tensor, inputs in window if tensor is given), None)
        if heard is None:
            size = given.shape[-1]
            heard = self._inputs.get(name) or InputHessian(torch.zeros(size, size))
            heard.add(given)
            window.append((given, heard))
        self._inputs[name] = heard

    def _run_on(self, lane: str) -> None:
        """Install the lane's matrices as the draft's."""
        if lane == self._running:
            return
        for name, matrix in self._matrices(lane).items():
            words = matrix.dequantise()
            self.layers[name].draft = RawMatrix(words.to(self.layers[name].exact.words().dtype))
        self._running = lane

    def _matrices(self, lane: str) -> dict[str, QuantisedMatrix]:
        if lane == DRAFT:
            return self.quantise()
        return {
            name: round_matrix(layer.exact.words().float(), self.settings)
            for name, layer in self.layers.items()
        }

    def quantise(self) -> dict[str, QuantisedMatrix]:
        """Quantise each. Raises SpeqError if weights or inputs are not finite."""
        if self._quantised is None:
            self._quantised = {
                name: self._quantise(name, layer.exact.words().float())
                for name, layer in self.layers.items()
            }
            self._inputs.clear()
        return self._quantised

    def _quantise(self, name: str, matrix: Tensor) -> QuantisedMatrix:
        if self.settings.method == "rtn" or name not in self._inputs:
            return round_matrix(matrix, self.settings)
        inputs = self._inputs[name]
        for values in (matrix, inputs.hessian):
            if not bool(torch.isfinite(values).all()):
                raise CheckpointError(
                    f"{name} holds or is given values that are not finite; is the checkpoint "
                    "whole, and does it run in its own dtype?"
                )
        return quantise_matrix(matrix, inputs.hessian, inputs.tokens, self.settings)[0]

    def leave(self) -> None:
        """Free the layer's codes and Hessians."""
        for layer in self.layers.values():
            layer.draft = None
