"""Windows of INT4 codes against their definition, and counts of what they leave untold."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.kernels.ops import quantize_int4
from speq.kernels.windows import (
    ESCAPE_CLASS,
    escapes,
    high_bytes,
    window_starts,
    words_of,
    zero_classes,
    zero_high_bytes,
)
from speq.quantizing.expert import ExpertConstants, FloatExpert, QuantisedExpert
from speq.quantizing.gptq import QuantisedMatrix, nearest_decodable
from speq.quantizing.residual import residual_of
from tests.helpers.expert_problems import SILU
from tests.reference.windows import codes_left, high_bytes_of_zero, told, window_of

WORDS = torch.arange(65536, dtype=torch.int32)
# Common ones, the ends of float16 (subnormal, largest), what is none, and those next to a power of
# two, where products are truncated.
SCALES = (
    *(0.0123, 0.00789, 1.0, 0.99951171875, 1.0009765625, 3.1416, 6.1e-5, 5.9e-7, 2**-24, 65504.0),
    *(0.0, -0.0, -0.0123, -(2**-24), math.inf, -math.inf, math.nan),
)


def half(scale: float) -> Tensor:
    return torch.tensor(scale, dtype=torch.float16)


def test_words_of_weights() -> None:
    values = torch.tensor([1.0, -2.5, 0.0, -0.0, math.inf, 2.0**-133], dtype=torch.bfloat16)
    expected = [0x3F80, 0xC020, 0, 0x8000, 0x7F80, 1]
    assert words_of(values).tolist() == expected
    assert words_of(values.float()).tolist() == expected


@pytest.mark.parametrize("scale", SCALES)
def test_every_word_under_every_code(scale: float) -> None:
    """A word is told, and then comes back from its low byte, or has an escape."""
    held = float(half(scale))
    for code in [*range(-8, 0), *range(1, 8)]:
        window = torch.tensor(window_of(code, held), dtype=torch.int32)
        value = torch.tensor(code, dtype=torch.int8)
        assert int(window_starts(value, half(scale))) == window[0]
        untold = escapes(WORDS, value, half(scale))
        assert torch.equal(WORDS[~untold], window)
        assert torch.equal(high_bytes(window & 0xFF, value, half(scale)), window >> 8)
    classes = high_bytes_of_zero(held)
    found = zero_classes(WORDS, half(scale))
    assert torch.equal(escapes(WORDS, torch.tensor(0), half(scale)), found == ESCAPE_CLASS)
    high = torch.tensor([-1 if byte is None else byte for byte in classes], dtype=torch.int32)
    named = found != ESCAPE_CLASS
    assert torch.equal(high[found[named]], WORDS[named] >> 8)
    assert torch.equal(zero_high_bytes(found[named], half(scale)), WORDS[named] >> 8)
    assert torch.equal(named, torch.isin(WORDS >> 8, high))


@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("size", [1.0, 0.02, 1e-5, 1e3])
def test_rounding_leaves_no_exceptions(size: float, group_size: int) -> None:
    generator = torch.Generator().manual_seed(group_size)
    weights = torch.randn(512, 1024, generator=generator).exp() * size
    weights *= torch.randn(512, 1024, generator=generator).sign()
    exact = weights.bfloat16()
    packed, scales = quantize_int4(exact, group_size)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).to(torch.int32) - 8
    untold = escapes(words_of(exact), codes, scales.repeat_interleave(group_size, dim=1))
    assert not (untold & (codes != 0)).any()
    assert untold.any()


def test_the_nearest_of_the_codes_that_are_left() -> None:
    """For words around and far beyond a scale, and every code that GPTQ could have wanted."""
    generator = torch.Generator().manual_seed(0)
    count = 400
    scales = (torch.rand(count, generator=generator) * 0.03 + 1e-4).half()
    sizes = torch.randn(count, generator=generator).mul_(2).exp_()
    exact = (scales * sizes * torch.randn(count, generator=generator).sign()).bfloat16().float()
    exact[:8] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 3e-3, -3e-3])
    beyond = 0
    for wanted in range(-8, 8):
        values = torch.full((count,), float(wanted))
        found = nearest_decodable(values, exact, scales)
        for word, scale, code in zip(
            words_of(exact).tolist(), scales.tolist(), found.tolist(), strict=True
        ):
            left = codes_left(word, scale)
            assert code == min(left, key=lambda other: abs(other - wanted))
            beyond += code != 0 and not told(word, int(code), scale)
    assert 0 < beyond < 16 * count // 4


def test_a_scale_of_zero_leaves_code_0() -> None:
    exact, scales = torch.tensor([1e-9, -1e-9, 0.0, -0.0]), torch.zeros(4, dtype=torch.float16)
    assert nearest_decodable(torch.zeros(4), exact, scales).tolist() == [0] * 4


def quantised(outputs: int, inputs: int, groups: Tensor, wild: Tensor) -> QuantisedMatrix:
    """Codes of any kind in the `wild` [N] outputs, of 0 and the word's sign in others."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator, dtype=torch.uint8)
    codes[:, ~wild] = 8
    scales = torch.rand(int(groups.max()) + 1, outputs, generator=generator).half()
    return QuantisedMatrix(codes, scales, groups.to(torch.int32))


def record_of(exact: list[list[float]], draft: list[list[tuple[int, float]]]) -> dict[str, Any]:
    """Bytes of a matrix [N, K] in a residual record, from the description, weight by weight."""
    found = dict.fromkeys(("zeros", "zero_escapes", "exceptions", "bytes"), 0)
    for first in range(0, len(exact), 4):
        rows = range(first, min(first + 4, len(exact)))
        found["bytes"] += 4
        flagged = 0
        per_block = 0
        for start in range(0, len(exact[0]), 64):
            columns = range(start, min(start + 64, len(exact[0])))
            for row in rows:
                zeros = 0
                per_block += 1
                for column in columns:
                    code, scale = draft[row][column]
                    (word,) = words_of(torch.tensor([exact[row][column]])).tolist()
                    known = told(word, code, scale)
                    zeros += code == 0
                    found["zero_escapes"] += code == 0 and not known
                    flagged += code != 0 and not known
                    # The low byte, and the high one where nothing tells it.
                    found["bytes"] += 1 if known else 2
                found["zeros"] += zeros
                found["bytes"] += math.ceil(3 * zeros / 8)
        found["exceptions"] += flagged
        # A quad with exceptions counts them in every block of every row, and has their columns.
        found["bytes"] += per_block + flagged if flagged else 0
    return found


def test_bytes_of_a_record() -> None:
    """Rows that are no whole quads, columns that are no whole blocks, inputs out of order."""
    hidden, width = 72, 90
    generator = torch.Generator().manual_seed(7)
    matrices = [
        torch.randn(2 * width, hidden, generator=generator).mul_(0.7).bfloat16().float(),
        torch.randn(hidden, width, generator=generator).mul_(0.7).bfloat16().float(),
    ]
    groups = [
        torch.randperm(hidden, generator=generator) // 24,
        torch.randperm(width, generator=generator) // 30,
    ]
    wild = torch.arange(2 * width) % 90 < 20
    gate_up = quantised(2 * width, hidden, groups[0], wild)
    down = quantised(hidden, width, groups[1], wild[:hidden])
    order = [sorted(range(len(each)), key=lambda k, g=each: (int(g[k]), k)) for each in groups]
    parts = (
        (matrices[0], gate_up, order[1], order[0]),
        (matrices[0], gate_up, [width + row for row in order[1]], order[0]),
        (matrices[1], down, list(range(hidden)), order[1]),
    )
    total = dict.fromkeys(("zeros", "zero_escapes", "exceptions", "bytes"), 0)
    for matrix, draft, rows, columns in parts:
        group = draft.groups.tolist()
        pairs = [
            [(int(draft.codes[k, n]) - 8, float(draft.scales[group[k], n])) for k in columns]
            for n in rows
        ]
        values = [[float(matrix[n, k]) for k in columns] for n in rows]
        for name, count in record_of(values, pairs).items():
            total[name] += count
    exact = FloatExpert(matrices[0], matrices[1], ExpertConstants(SILU))
    found = residual_of(exact, QuantisedExpert(gate_up, down, "gptq", 0.0))
    assert found.weights == 3 * hidden * width
    assert (found.zeros, found.zero_escapes, found.exceptions) == (
        total["zeros"],
        total["zero_escapes"],
        total["exceptions"],
    )
    assert min(found.zero_escapes, found.exceptions) > 100
    # The end of the last quad has an entry in the index, too.
    assert found.record_bytes == total["bytes"] + 4
    assert found.bits_per_weight == 8 * found.record_bytes / found.weights
