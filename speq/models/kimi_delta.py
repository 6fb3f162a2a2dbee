"""The delta attention of kimi_linear and bailing_hybrid (KDA, arXiv:2510.26692) over a cache with
rollback: a gated delta net whose decays are of each channel of a key.

transformers runs one token by one rule and several by another, and cannot roll a state back. Here
all tokens run one after another.
"""

from typing import Any

import torch
from torch import Tensor

from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import RMSNorm
from speq.kernels.recurrent import RecurrentSizes, delta_steps, mix_inputs, mix_one_by_one
from speq.layers.arguments import find_cache
from speq.models.recurrent_cache import RecurrentMixer, RecurrentRows, RecurrentState
from speq.models.states import StateShape, layers_of_kind


class KimiDelta(RecurrentMixer):
    """Replacement of a delta attention's forward."""

    def __init__(self, module: Any) -> None:
        sizes = sizes_of(module.num_heads, module.head_dim, module.conv_kernel_size)
        super().__init__(module, sizes)

    def __call__(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Map hidden_states [1, T, H] to [1, T, H].

        given  arguments that `find_cache` reads
        """
        module = self._module
        cache = find_cache(self, given)
        projections = (module.q_proj, module.k_proj, module.v_proj)
        inputs = torch.cat([project(hidden_states)[0] for project in projections], 1)
        betas = module.b_proj(hidden_states)[0].sigmoid().float()
        rows = RecurrentRows(inputs, module.forget_gate(hidden_states)[0].float(), betas)
        attended = self.run(rows, cache).to(hidden_states.dtype)
        gates = module.g_proj if hasattr(module, "g_proj") else self._low_rank_gates
        made = self._gated_norm(attended, gates(hidden_states)[0].view(attended.shape))
        out: Tensor = module.o_proj(made.flatten(1)[None])
        return out

    def _low_rank_gates(self, hidden_states: Tensor) -> Tensor:
        gates: Tensor = self._module.g_b_proj(self._module.g_a_proj(hidden_states))
        return gates

    def _gated_norm(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Norm of heads [T, heads, width], times the sigmoid of their gates."""
        norm, heads = self._module.o_norm, rows.flatten(0, 1).float()
        if not decoder_ops.takes(heads):
            normed: Tensor = norm(rows, gates)
            return normed
        normed = decoder_ops.rms_norm(heads, RMSNorm(norm.weight.float(), norm.variance_epsilon))
        return (normed.view(rows.shape) * gates.float().sigmoid()).to(rows.dtype)

    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """Run a few tokens after a state; see `RecurrentParts`."""
        return delta_steps(state, mix_one_by_one(windows, self.weight), decays, betas)

    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run many tokens after a state. Return [T, heads, width] float32 and the new state.

        windows  [T, taps, channels] of their inputs
        """
        mixed, state = mix_inputs(windows, self.weight), state.clone()
        return delta_steps(state, mixed, rows.decays, rows.betas), state


def sizes_of(heads: int, width: int, taps: int) -> RecurrentSizes:
    return RecurrentSizes(heads, heads, width, width, taps, by_channel=True)


def kimi_states(config: Any) -> StateShape:
    """States of the layers that a config calls linear attention."""
    sizes = sizes_of(config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim)
    return StateShape(
        layers_of_kind(config, "linear_attention"), RecurrentState(sizes, "self_attn", KimiDelta)
    )
