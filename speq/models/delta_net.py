"""The gated delta net of qwen3_next and qwen3_5_moe over a cache with rollback.

transformers runs one token by one rule and several by another, and cannot roll a state back. Here
the layer's cache runs a few tokens one after another, with the results that each would have alone.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import RMSNorm
from speq.kernels.recurrent import RecurrentSizes, delta_steps, mix_inputs, mix_one_by_one
from speq.layers.arguments import find_cache
from speq.models.recurrent_cache import RecurrentMixer, RecurrentRows, RecurrentState
from speq.models.states import StateShape, layers_of_kind


class DeltaNet(RecurrentMixer):
    """Replacement of a delta net's forward."""

    def __init__(self, module: Any) -> None:
        sizes = RecurrentSizes(
            module.num_k_heads,
            module.num_v_heads,
            module.head_k_dim,
            module.head_v_dim,
            module.conv_kernel_size,
        )
        super().__init__(module, sizes)
        # transformers' rule for many tokens at a time.
        family = importlib.import_module(type(module).__module__)
        self._chunked = family.torch_chunk_gated_delta_rule

    def __call__(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Map hidden_states [1, T, H] to [1, T, H].

        given  arguments that `find_cache` reads
        """
        module = self._module
        cache = find_cache(self, given)
        inputs, gate, b, a = self._project(hidden_states)
        decays = self.rates() * functional.softplus(a.float() + module.dt_bias)
        rows = RecurrentRows(inputs, decays, b.sigmoid().float())
        attended = self.run(rows, cache).to(hidden_states.dtype)
        shape = attended.shape
        made = self._gated_norm(attended.flatten(0, 1), gate.reshape(-1, shape[-1]))
        out: Tensor = module.out_proj(made.view(shape).flatten(1)[None])
        return out

    def _gated_norm(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Norm of heads [N, value width], times the SiLU of their gates."""
        norm = self._module.norm
        if not decoder_ops.takes(rows):
            normed: Tensor = norm(rows, gates)
            return normed
        normed = decoder_ops.rms_norm(rows, RMSNorm(norm.weight, norm.variance_epsilon))
        wide = gates.float()
        sigmoid = getattr(norm, "activation", "silu") == "sigmoid"
        return (normed * (wide.sigmoid() if sigmoid else functional.silu(wide))).to(rows.dtype)

    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """Run a few tokens after a state; see `RecurrentParts`."""
        return delta_steps(state, mix_one_by_one(windows, self.weight), decays, betas)

    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run many tokens after a state. Return [T, value heads, value width] float32 and the new
        state.

        windows  [T, taps, channels] of their inputs
        """
        mixed, sizes = mix_inputs(windows, self.weight), self.sizes
        keys = sizes.key_heads * sizes.key_width
        queries, keys, values = (
            part.unflatten(1, (-1, width))[None]
            for part, width in zip(
                mixed.split([keys, keys, mixed.shape[1] - 2 * keys], 1),
                (sizes.key_width, sizes.key_width, sizes.value_width),
                strict=True,
            )
        )
        # Newer versions of transformers repeat the heads within the rule, older ones before it.
        shared = sizes.value_heads // sizes.key_heads
        out, last = self._chunked(
            queries.repeat_interleave(shared, dim=2),
            keys.repeat_interleave(shared, dim=2),
            values,
            g=rows.decays[None],
            beta=rows.betas[None],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0].float(), last[0]

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project to the convolution's inputs [T, channels], the output's gate [T, value heads,
        value width], and strengths and decays before their functions, [T, value heads] each.
        """
        module = self._module
        if hasattr(module, "in_proj_qkvz"):
            parts = module.fix_query_key_value_ordering(
                module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
            )
            query, key, value, gate, b, a = (part[0] for part in parts)
            inputs = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
            return inputs, gate, b, a
        inputs = module.in_proj_qkv(hidden_states)[0]
        gate = module.in_proj_z(hidden_states)[0].unflatten(-1, (-1, module.head_v_dim))
        return inputs, gate, module.in_proj_b(hidden_states)[0], module.in_proj_a(hidden_states)[0]


def delta_states(config: Any) -> StateShape:
    """States of the layers that a config calls linear attention."""
    sizes = RecurrentSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    return StateShape(
        layers_of_kind(config, "linear_attention"), RecurrentState(sizes, "linear_attn", DeltaNet)
    )
