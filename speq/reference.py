"""Plain torch versions of every kernel, of the same name: the oracle of the tests, and what runs
where there is no native one. Readable before fast."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

INT4_ZERO_POINT = 8
INT4_MAX = 7
UNPACK_ROWS = 512

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round a matrix to symmetric INT4, one scale for `group_size` neighbours of a row.

    weight   [N, K], any float dtype; K a multiple of group_size, group_size even
    returns  qweight [N, K / 2] uint8, two codes per byte, low nibble first, zero point 8;
             scales [N, K / group_size] float16
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    largest = torch.finfo(torch.float16).max
    scales = (groups.abs().amax(2) / INT4_MAX).clamp(max=largest).to(torch.float16)
    # Divide by the scale as stored; where it rounds to zero so do the weights.
    divisor = scales.float().where(scales > 0, torch.inf)
    codes = (groups / divisor.unsqueeze(2)).round().clamp(-INT4_ZERO_POINT, INT4_MAX)
    codes = (codes + INT4_ZERO_POINT).to(torch.uint8).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def unpack_int4_out(qweight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantise into out [N, K]: code * scale, rounded once to out's dtype.

    Some rows at a time: float32 copies of a whole expert would be larger than the expert.
    """
    for rows in zip(*(part.split(UNPACK_ROWS) for part in (qweight, scales, out)), strict=True):
        packed, steps, target = rows
        codes = torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1)
        values = (codes.float() - INT4_ZERO_POINT).unflatten(1, (steps.shape[1], -1))
        target.copy_((values * steps.float().unsqueeze(2)).flatten(1))


def swiglu(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, activation: str
) -> Tensor:
    """One expert: down(act(gate(x)) * up(x)), of x [R, H], gate_up [2F, H] and down [H, F]."""
    gate, up = F.linear(hidden_states, gate_up_proj).chunk(2, dim=-1)
    return F.linear(ACTIVATIONS[activation](gate) * up, down_proj)


def moe_grouped(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: str,
    out: Tensor,
) -> None:
    """Run rows through the exact experts that lie in slots, grouped by expert (MoE-SpeQ 3.4.4).

    hidden_states  [T, H]
    topk_ids       [T, K] int64
    slot_table     [E] int64: the slot of each expert, negative where it is in none
    gate_up_proj   [S, 2F, H] in the checkpoint's dtype; converted, expert by expert, to
    down_proj      [S, H, F]  that of hidden_states
    out            [T, K, H]: row (t, j) is the unweighted output of expert topk_ids[t, j]; rows
                   whose expert is in no slot are left as they are
    """
    for expert in topk_ids.unique().tolist():
        slot = int(slot_table[expert])
        if slot < 0:
            continue
        rows, ranks = torch.where(topk_ids == expert)
        inputs = hidden_states[rows]
        gate_up = gate_up_proj[slot].to(inputs.dtype)
        out[rows, ranks] = swiglu(inputs, gate_up, down_proj[slot].to(inputs.dtype), activation)


def combine(outputs: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over the experts of each route: [T, K, H], [T, K] -> [T, H].

    Accumulated in float32 at least, over the places of the route and not in the order in which
    experts came, so that the result does not depend on what lay in slots.
    """
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return (outputs.to(wide) * topk_weights.to(wide).unsqueeze(2)).sum(1).to(dtype)


def moe_int4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base_slots: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    activation: str,
    unpack: Callable[[Tensor, Tensor, Tensor], None] = unpack_int4_out,
) -> Tensor:
    """Run rows through INT4 experts, one dequantising product per expert and projection.

    hidden_states  [T, H]; topk_ids, topk_weights [T, K]
    base_slots     [E] int64: where each expert's codes lie
    gate_up, down  (qweight, scales): [N, 2F, H / 2], [N, 2F, H / g]; [N, H, F / 2], [N, H, F / g]
    returns        [T, H]
    """
    num_rows, top_k = topk_ids.shape
    outputs = hidden_states.new_empty(num_rows, top_k, hidden_states.shape[1])
    matrices = [
        hidden_states.new_empty(qweight.shape[1], 2 * qweight.shape[2])
        for qweight, _ in (gate_up, down)
    ]
    for expert in topk_ids.unique().tolist():
        slot = int(base_slots[expert])
        for (qweight, scales), matrix in zip((gate_up, down), matrices, strict=True):
            unpack(qweight[slot], scales[slot], matrix)
        rows, ranks = torch.where(topk_ids == expert)
        outputs[rows, ranks] = swiglu(hidden_states[rows], matrices[0], matrices[1], activation)
    return combine(outputs, topk_weights, hidden_states.dtype)
