"""A model run one decoder layer at a time, over sequences of one length.

A layer's other arguments (mask, positions, rotary embeddings) depend only on the sequence's length.
They are captured once, from a pass in which the layers do nothing, so no family needs code here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from speq.errors import Broken
from speq.layers.offloaded_experts import ExpertBackend
from speq.models.layer_range import returned
from speq.models.moe_model import MoEModel


class LayerwiseModel:
    """Decoder layers of a model as functions of hidden states [T, H], for sequences of T tokens."""

    def __init__(self, model: MoEModel, length: int) -> None:
        self._model = model
        self._layers: list[nn.Module] = list(model.body.layers)  # type: ignore[arg-type]
        self._arguments: list[dict[str, Any]] = [{} for _ in self._layers]
        self.entering(torch.zeros(length, dtype=torch.int64))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @torch.inference_mode()
    def entering(self, token_ids: Tensor) -> Tensor:
        """Input of the first layer [T, H] for the tokens [T] of a sequence."""
        seen: list[Tensor] = []

        def overhear(arguments: dict[str, Any]) -> Any:
            def forward(hidden_states: Tensor, *more: Any, **others: Any) -> Any:
                seen.append(hidden_states)
                if any(each is not None for each in more):
                    raise Broken("a layer was given positional arguments")
                arguments.update(others)
                return returned(hidden_states, others)

            return forward

        for layer, arguments in zip(self._layers, self._arguments, strict=True):
            layer.forward = overhear(arguments)
        try:
            self._model.body(input_ids=token_ids[None].to(self._model.device), use_cache=False)
        finally:
            for layer in self._layers:
                del layer.forward  # the class's own shows again
        return seen[0][0]

    @torch.inference_mode()
    def run(self, layer: int, backend: ExpertBackend, hidden_states: Tensor) -> Tensor:
        """Run one layer: [T, H] in any float dtype to [T, H] in the model's."""
        inputs = hidden_states[None].to(self._model.device, self._model.dtype)
        with self._model.using(backend):
            made = self._layers[layer](inputs, **self._arguments[layer])
        # Some return what their indexer chose besides.
        return (made[0] if isinstance(made, tuple) else made)[0]

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map the last layer's output [N, H] to logits [N, V] float32."""
        inputs = hidden_states.to(self._model.device, self._model.dtype)
        return self._model.logits(self._model.last_norm(inputs)).float()
