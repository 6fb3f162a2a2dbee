"""The Mamba-2 layers of granitemoehybrid and nemotron_h (arXiv:2405.21060) over a cache with
rollback.

transformers runs one token by one rule and several by another, and cannot roll a state back. Here
all tokens run one after another.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speq.errors import UnsupportedError
from speq.kernels import decoder_ops
from speq.kernels.decoder_ops import RMSNorm
from speq.kernels.recurrent import RecurrentSizes, mix_inputs, mix_one_by_one, selective_scan
from speq.layers.arguments import find_cache
from speq.models.dense_parts import ONLY_PART
from speq.models.recurrent_cache import RecurrentMixer, RecurrentRows, RecurrentState
from speq.models.states import StateShape, layers_of_kind


class Mamba(RecurrentMixer):
    """Replacement of a Mamba-2 module's forward."""

    def __init__(self, module: Any) -> None:
        sizes = RecurrentSizes(
            module.n_groups,
            module.num_heads,
            module.ssm_state_size,
            module.head_dim,
            module.conv_kernel_size,
        )
        super().__init__(module, sizes)
        # Weight of groups' norms, made at the first pass.
        self._ones: Tensor | None = None

    def __call__(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Map hidden_states [1, T, H] to [1, T, H].

        given  arguments that `find_cache` reads
        """
        module, sizes = self._module, self.sizes
        cache = find_cache(self, given)
        width = sizes.value_heads * sizes.value_width
        projected = module.in_proj(hidden_states)[0]
        gate, inputs, step = projected.split([width, sizes.channels, sizes.value_heads], 1)
        # Nemotron's have a least step, of which transformers' own steps of one token know nothing.
        steps = functional.softplus(step.float() + module.dt_bias.float())
        steps = steps.clamp(*module.time_step_limit)
        rows = RecurrentRows(inputs, self.rates() * steps, steps)
        made = self.run(rows, cache)
        normed = self._gated_norm(made.flatten(1), gate).to(hidden_states.dtype)
        out: Tensor = module.out_proj(normed[None])
        return out

    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """Run a few tokens after a state; see `RecurrentParts`."""
        mixed = mix_one_by_one(windows, self.weight, self._module.conv1d.bias)
        return self._scan(state, mixed, decays, betas)

    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run many tokens after a state. Return [T, heads, width] float32 and the new state.

        windows  [T, taps, channels] of their inputs
        """
        mixed, state = mix_inputs(windows, self.weight, self._module.conv1d.bias), state.clone()
        return self._scan(state, mixed, rows.decays, rows.betas), state

    def _scan(self, state: Tensor, mixed: Tensor, decays: Tensor, steps: Tensor) -> Tensor:
        """mixed [T, channels]: values, keys and queries, as the model has them"""
        sizes = self.sizes
        keys = sizes.key_heads * sizes.key_width
        values, key, query = mixed.float().split([mixed.shape[1] - 2 * keys, keys, keys], 1)
        out = selective_scan(state, torch.cat([query, key, values], 1), decays, steps)
        skipped = values.view(out.shape) * self._module.D.float()[:, None]
        return out + skipped

    def _gated_norm(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Norm of groups of [T, width] float32 times the SiLU of their gates."""
        norm = self._module.norm
        gated = rows * functional.silu(gates.float())
        groups = gated.view(-1, norm.group_size)
        if decoder_ops.takes(groups):
            if self._ones is None:
                self._ones = groups.new_ones(norm.group_size)
            normed = decoder_ops.rms_norm(groups, RMSNorm(self._ones, norm.variance_epsilon))
        else:
            spread = groups.square().mean(-1, keepdim=True)
            normed = groups * torch.rsqrt(spread + norm.variance_epsilon)
        return normed.view(gated.shape) * norm.weight.float()


def mamba_states(config: Any) -> StateShape:
    """States of the layers that a config of granitemoehybrid calls linear attention."""
    sizes = RecurrentSizes(
        config.mamba_n_groups,
        config.mamba_n_heads,
        config.mamba_d_state,
        config.mamba_d_head,
        config.mamba_d_conv,
    )
    return StateShape(
        layers_of_kind(config, "linear_attention"), RecurrentState(sizes, "mamba", Mamba)
    )


def nemotron_states(config: Any) -> StateShape:
    """States of the layers that a config of nemotron_h calls linear attention."""
    sizes = RecurrentSizes(
        config.n_groups,
        config.mamba_num_heads,
        config.ssm_state_size,
        config.mamba_head_dim,
        config.conv_kernel,
    )
    return StateShape(
        layers_of_kind(config, "linear_attention"), RecurrentState(sizes, ONLY_PART, Mamba)
    )


def check_mamba(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for limits of steps, which no published model has."""
    least, most = config.time_step_limit or (0.0, math.inf)
    if least > 0 or most < math.inf:
        raise UnsupportedError(
            f"{where} has time_step_limit {[least, most]}; speq knows Mamba-2 layers without "
            "limits: give a model whose limits are 0 and infinity"
        )
