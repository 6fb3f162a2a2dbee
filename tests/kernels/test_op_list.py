"""Lists of native ops, beside the same ops called one by one."""

import gc
from itertools import pairwise
from weakref import ref

import pytest
import torch
from torch import Tensor

from speq.kernels import library
from speq.kernels.op_list import OpList, starts_of

ALONE = starts_of([0])


def squares(count: int) -> tuple[OpList, Tensor, list[Tensor]]:
    """A list of products by one matrix, each of the one before; its input, and all results."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(24, 24, generator=generator)
    rows = [torch.randn(2, 24, generator=generator) for _ in range(count + 1)]
    ops = OpList()
    with ops.recording():
        for source, target in pairwise(rows):
            library.call("linear", source, matrix, None, target)
    return ops, rows[0], [matrix, *rows[1:]]


def test_a_list_runs_what_was_recorded_on_what_is_there_now() -> None:
    ops, first, (matrix, *results) = squares(4)
    untouched = [each.clone() for each in results]
    for seed in range(3):
        first.copy_(torch.randn(2, 24, generator=torch.Generator().manual_seed(seed)))
        assert ops.run(ALONE, 0) == 0
        expected = first.double()
        for result, before in zip(results, untouched, strict=True):
            expected = expected @ matrix.double().T
            torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-3)
            assert not torch.equal(result, before)


def test_ops_run_again_once_the_recording_has_ended() -> None:
    _, first, (matrix, *_) = squares(1)
    out = torch.zeros(2, 24)
    library.call("linear", first, matrix, None, out)
    torch.testing.assert_close(out, first @ matrix.T, rtol=1e-4, atol=1e-3)


def test_stops_and_where_runs_go_on() -> None:
    ops, matrix = OpList(), torch.eye(3)
    rows = [torch.full((1, 3), float(at)) for at in range(4)]
    with ops.recording():
        library.call("linear", rows[0], matrix, None, rows[1])
    stop = ops.stop()
    with ops.recording():
        library.call("linear", rows[1], matrix, None, rows[2])
        library.call("linear", rows[2], matrix, None, rows[3])
    rows[0].fill_(7.0)
    assert ops.run(ALONE, 0) == stop
    assert [each[0, 0].item() for each in rows] == [7.0, 7.0, 2.0, 3.0]
    rows[1].fill_(9.0)
    before_s = ops.ran_s
    assert ops.run(ALONE, stop) == 0
    assert 0 < before_s < ops.ran_s
    assert [each[0, 0].item() for each in rows] == [7.0, 9.0, 9.0, 9.0]


def test_a_gate_opens_for_ids_that_a_table_has() -> None:
    """Straight runs pass it, and say so; others stop, and so do straight ones without an entry."""
    ops, matrix = OpList(), torch.eye(3)
    ids, table = torch.tensor([2, 0]), torch.tensor([5, -1, 0, -1])
    rows = [torch.zeros(1, 3) for _ in range(3)]
    gate = ops.gate(ids, table)
    with ops.recording():
        library.call("linear", rows[0], matrix, None, rows[1])
    end = ops.end()
    with ops.recording():
        library.call("linear", rows[1], matrix, None, rows[2])
    rows[0].fill_(4.0)
    assert ops.run(ALONE, 0) == gate
    assert ops.passed() == []
    assert ops.run(ALONE, 0, straight=True) == 0
    ((following, start_s, end_s),) = ops.passed()
    assert following == gate
    assert 0 < start_s <= end_s
    assert rows[2][0, 0] == 4.0
    ids[1] = 3
    rows[0].fill_(6.0)
    assert ops.run(ALONE, 0, straight=True) == gate
    assert ops.passed() == []
    rows[1].fill_(8.0)
    assert ops.run(ALONE, end, straight=True) == 0
    assert rows[2][0, 0] == 8.0


def test_a_gate_without_a_table_is_always_open() -> None:
    ops = OpList()
    gate = ops.gate(torch.tensor([1 << 40]), None)
    ops.end()
    assert ops.run(ALONE, 0) == gate
    assert ops.run(ALONE, 0, straight=True) == 0


def attention_over(sequence: int, ops: OpList, keys: Tensor) -> Tensor:
    """Record attention of one token of a sequence over a cache of its own. Return its keys."""
    width = keys.shape[1]
    queries, values, out = (torch.zeros(1, width) for _ in range(3))
    cos, sin = torch.ones(1, width), torch.zeros(1, width)
    cached = [torch.zeros(1, 12, width) for _ in range(2)]
    with ops.recording():
        library.call(
            *("attention", queries, keys, values, None, None, 0.0, cos, sin),
            *(*cached, sequence, 1 << 40, 0.5, None, out, None),
        )
    return cached[0][0, :, 0]


def test_attention_writes_where_each_run_begins() -> None:
    keys, ops = torch.zeros(1, 8), OpList()
    seen = [attention_over(sequence, ops, keys) for sequence in range(2)]
    for start in range(5):
        keys.fill_(float(start + 1))
        ops.run(starts_of([start, 7 - start]), 0)
        assert seen[0].tolist() == [*range(1, start + 2), *[0] * (11 - start)]
        assert seen[1].tolist() == [*[0] * (7 - start), *range(start + 1, 0, -1), *[0] * 4]


def test_a_run_has_a_start_for_each_sequence() -> None:
    ops = OpList()
    attention_over(2, ops, torch.zeros(1, 8))
    with pytest.raises(RuntimeError, match="has sequence 2; its run was given 2"):
        ops.run(starts_of([0, 0]), 0)


def test_an_op_that_fails_says_why() -> None:
    ops = OpList()
    with ops.recording():
        library.call("combine", torch.zeros(2, 3, 4), torch.zeros(2, 5), torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="do not fit together"):
        ops.run(ALONE, 0)


def test_tensors_live_as_long_as_their_list() -> None:
    ops, first, (matrix, *results) = squares(2)
    seen = [ref(matrix.untyped_storage()), ref(results[0])]
    last = results[-1]
    del matrix, results
    gc.collect()
    first.fill_(1.0)
    ops.run(ALONE, 0)
    assert torch.isfinite(last).all()
    del ops
    gc.collect()
    assert seen[1]() is None
