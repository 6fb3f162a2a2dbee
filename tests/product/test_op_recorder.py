"""Recorded ops of torch and of ours, run on other values than they were recorded with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels import decoder_ops, ops
from speq.kernels.decoder_ops import RMSNorm, RouterRule
from speq.models.op_recorder import OpRecorder, Unrecordable

WIDTH = 12


def functional_ops(rows: Tensor) -> Tensor:
    values, ids = rows.float().topk(3, -1)
    weights = values.softmax(-1) / values.sum(-1, keepdim=True).abs().clamp(min=0.1)
    return torch.cat([weights, ids.float(), functional.silu(rows), rows.sigmoid() * rows], -1)


def in_place(rows: Tensor) -> Tensor:
    made = rows + 1
    made.mul_(rows).clamp_(-3, 3)
    mask = torch.zeros_like(made)
    mask.scatter_(1, made.argmax(-1, keepdim=True), 1.0)
    made[:, 2:4] = rows[:, :2]
    return made * mask + torch.where(made > 0, made, -rows)


def views(rows: Tensor) -> Tensor:
    halves = rows.view(-1, 2, WIDTH // 2).transpose(0, 1)
    return halves.reshape(-1, WIDTH // 2).contiguous().flatten()[None] @ torch.ones(
        rows.numel(), 3, dtype=rows.dtype
    )


def ours(rows: Tensor) -> Tensor:
    norm = RMSNorm(torch.linspace(0.5, 2, WIDTH, dtype=rows.dtype), 1e-6)
    sums, normed = decoder_ops.add_rms_norm(rows, decoder_ops.rms_norm(rows, norm), norm)
    rule = RouterRule(divided=True)
    weights, ids = decoder_ops.route(normed.contiguous(), 3, rule, torch.float32)
    return torch.cat([ops.linear(sums, torch.eye(WIDTH, dtype=rows.dtype)), ids * weights], -1)


def many_layers(rows: Tensor) -> Tensor:
    for _ in range(9):
        rows = functional.gelu(ours(rows)[:, :WIDTH].contiguous()) - rows
    return rows


CALLS: list[Callable[[Tensor], Tensor]] = [functional_ops, in_place, views, ours, many_layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
@torch.inference_mode()
def test_a_recording_gives_what_its_ops_give(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, recorder = torch.zeros(4, WIDTH, dtype=dtype), OpRecorder()
    with recorder:
        result = call(inputs)
    for _ in range(3):
        inputs.copy_(torch.randn(4, WIDTH, generator=generator))
        recorder.run([0])
        assert torch.equal(result, call(inputs.clone()))


@torch.inference_mode()
def test_buffers_are_used_again_by_the_layer_after_the_next() -> None:
    recorder, inputs = OpRecorder(), torch.zeros(1, WIDTH)
    states, kept = [inputs], []
    with recorder:
        for layer in range(8):
            recorder.next_layer()
            states.append(states[-1] + 1)
            if layer == 2:
                recorder.keep(states[-1])
            kept.append(states[-1].data_ptr())
    assert kept[0] == kept[2]
    assert kept[1] == kept[3] == kept[5] == kept[7]
    assert kept[4] == kept[6] != kept[2]
    inputs.fill_(5.0)
    recorder.run([0])
    assert states[-1][0, 0] == 13.0
    assert states[3][0, 0] == 8.0


@torch.inference_mode()
def test_the_host_has_its_part_where_it_was_placed() -> None:
    recorder, inputs, seen = OpRecorder(), torch.zeros(1, WIDTH), []
    with recorder:
        doubled = inputs * 2
        recorder.cut(lambda: seen.append(doubled[0, 0].item()))
        tripled = doubled + inputs
        recorder.cut(lambda: seen.append(tripled[0, 0].item()))
    for value in (1.0, 4.0):
        inputs.fill_(value)
        recorder.run([0])
    assert seen == [2.0, 3.0, 8.0, 12.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows * rows.sum().item(),
        lambda rows: rows[rows > 0],
        lambda rows: rows if bool((rows > 0).any()) else -rows,
    ],
)
@torch.inference_mode()
def test_what_the_host_reads_cannot_be_recorded(read: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unrecordable, match="the host reads the result of"), OpRecorder():
        read(torch.ones(2, WIDTH))
