"""The plain torch versions of ops, which judge the kernels and run where there are none, against
their definitions in double precision: tests/reference, which shares no code with them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.kernels import (
    reference,
    reference_compact,
    reference_decoder,
    reference_dense,
    reference_recurrent,
)
from speq.kernels.decoder_ops import RouterRule
from speq.kernels.ops import Activation
from speq.kernels.scaled_words import fp8_words, mxfp4_words
from tests.reference import compact_record, decoder, experts, int4, scaled
from tests.reference.int4 import codes_of, spread, unpacked

HIDDEN, WIDTH, EXPERTS, SLOTS, ROWS, TOP_K = 96, 40, 9, 11, 7, 3
Random = Callable[..., Tensor]


@pytest.fixture
def random() -> Random:
    generator = torch.Generator().manual_seed(17)
    return lambda *shape: torch.randn(*shape, generator=generator)


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def routed() -> tuple[Tensor, Tensor]:
    """Experts of rows, some of them several times, and their slots, the first expert in none."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(EXPERTS, (ROWS, TOP_K), generator=generator)
    ids[0], ids[1] = torch.tensor([2, 0, 2]), torch.tensor([0, 5, 8])
    return ids, torch.randperm(SLOTS, generator=generator)[:EXPERTS]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("limit", [math.inf, 0.6])
@pytest.mark.parametrize("activation", sorted(reference.ACTIVATIONS))
def test_grouped_experts(activation: str, limit: float, biased: bool, random: Random) -> None:
    rows, (ids, slots) = random(ROWS, HIDDEN), routed()
    slots[0] = -1
    outputs = experts.gate_up_rows(activation, WIDTH)
    gate_up, down = random(SLOTS, outputs, HIDDEN) * 0.3, random(SLOTS, HIDDEN, WIDTH) * 0.3
    biases = (random(EXPERTS, outputs), random(EXPERTS, HIDDEN)) if biased else ()
    out, act = torch.full((ROWS, TOP_K, HIDDEN), torch.nan), Activation(activation, limit)
    reference.moe_grouped_out(rows, ids, slots, gate_up, down, act, out, *biases)
    for row in range(ROWS):
        for place, expert in enumerate(ids[row].tolist()):
            if expert == 0:
                assert out[row, place].isnan().all()
                continue
            wanted = experts.expert(
                numbers(rows[row]),
                numbers(gate_up[slots[expert]]),
                numbers(down[slots[expert]]),
                experts.activation_of(activation, limit),
                *(numbers(bias[expert]) for bias in biases),
            )
            np.testing.assert_allclose(out[row, place].numpy(), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("limit", [math.inf, 0.6])
@pytest.mark.parametrize("activation", sorted(reference.ACTIVATIONS))
def test_int4_experts(
    activation: str, limit: float, biased: bool, permuted: bool, random: Random
) -> None:
    """A value on the edge between two INT8 codes may fall to the other one: few outputs differ, by
    little.
    """
    generator = torch.Generator().manual_seed(8)
    rows, (ids, slots), weights = random(ROWS, HIDDEN), routed(), random(ROWS, TOP_K)

    def coded(outputs: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (SLOTS, outputs, columns // 2), generator=generator)
        return codes.byte(), (0.05 * random(SLOTS, outputs, columns // group)).half()

    of_up = experts.gate_up_rows(activation, WIDTH)
    gate_up, down = coded(of_up, HIDDEN, 32), coded(HIDDEN, WIDTH, 8)
    orders = [torch.randperm(HIDDEN, generator=generator) for _ in range(SLOTS)]
    order = torch.stack(orders).int() if permuted else None
    biases = (random(EXPERTS, of_up), random(EXPERTS, HIDDEN)) if biased else ()
    out, act = torch.full((ROWS, HIDDEN), torch.nan), Activation(activation, limit)
    reference.moe_int4_out(rows, ids, weights, slots, *gate_up, *down, order, act, out, *biases)
    close = []
    for row in range(ROWS):
        wanted = np.zeros(HIDDEN)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            slot, seen = int(slots[expert]), numbers(rows[row])
            wanted += weight * experts.expert(
                seen if order is None else seen[order[slot].numpy()],
                unpacked(gate_up[0][slot].numpy(), gate_up[1][slot].numpy()),
                unpacked(down[0][slot].numpy(), down[1][slot].numpy()),
                experts.activation_of(activation, limit),
                *(numbers(bias[expert]) for bias in biases),
                int8=True,
            )
        error = np.abs(out[row].numpy() - wanted).max() / np.abs(wanted).max()
        close.append(error < 1e-5)
        assert error < 0.03
    assert sum(close) > ROWS // 2


def test_codes_are_the_nearest(random: Random) -> None:
    """Of each weight, to a scale that has the largest of its group at 7."""
    weight = random(6, 96)
    weight[1, :32] = 0
    qweight, scales = reference.quantize_int4(weight, 32)
    steps = np.abs(numbers(weight).reshape(6, 3, 32)).max(2) / 7
    assert np.array_equal(numbers(scales), steps.astype(np.float16).astype(np.float64))
    exact = spread(scales.numpy(), 96)
    grid = np.arange(-8, 8)
    for row, column in np.ndindex(6, 96):
        found = codes_of(qweight.numpy())[row, column]
        away = np.abs(grid * exact[row, column] - float(weight[row, column]))
        assert found == 0 if not exact[row, column] else away[found + 8] <= away.min() + 1e-9


def test_rounded_inputs(random: Random) -> None:
    rows = random(4, 100)
    rows[1] *= 1e4
    found = reference.round_to_int8(rows)
    for row, wanted in zip(found, numbers(rows), strict=True):
        np.testing.assert_allclose(row.numpy(), int4.rounded(wanted), rtol=1e-6, atol=0)


def test_norm(random: Random) -> None:
    rows, added, weight = random(5, 33), random(5, 33), random(33)
    sums, out = torch.empty_like(rows), torch.empty_like(rows)
    reference_decoder.rms_norm_out(rows, added, weight, 1e-3, sums, out)
    for row, wanted in zip(out.numpy(), numbers(rows + added), strict=True):
        np.testing.assert_allclose(
            row, decoder.rms_norm(wanted, numbers(weight), 1e-3), rtol=1e-5, atol=1e-6
        )


CHAIN = [-1, 0, 1, 2, 3, 4, 5]
TREE = [-1, 0, 0, 1, 1, 2, 5]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize(("parents", "rows"), [(CHAIN, 7), (TREE, 7), (TREE, 3)])
def test_attention(
    parents: list[int], rows: int, window: int | None, sinks: bool, random: Random
) -> None:
    """Rows are the last of the nodes; each of two heads of keys serves two of queries, and half of
    a head is turned.
    """
    heads, kv_heads, width, rotary, before = 4, 2, 8, 4, 6
    start = before + len(parents) - rows
    queries, keys, values = (random(rows, count * width) for count in (heads, kv_heads, kv_heads))
    norms, angles = (random(width), random(width)), random(rows, rotary // 2).repeat(1, 2)
    cached = random(kv_heads, 20, width), random(kv_heads, 20, width)
    sink, out = random(heads) if sinks else None, torch.empty(rows, heads * width)
    reference_decoder.attention_out(
        queries, keys, values, *norms, 1e-5, angles.cos(), angles.sin(), *cached, start,
        window or 1 << 40, 0.3, torch.tensor(parents) if parents == TREE else None, out, sink,
    )  # fmt: skip

    def head(tensor: Tensor, row: int, at: int, norm: Tensor) -> np.ndarray:
        part = numbers(tensor[row]).reshape(-1, width)[at]
        return decoder.turned(
            decoder.rms_norm(part, numbers(norm), 1e-5),
            numbers(angles[row].cos()),
            numbers(angles[row].sin()),
        )

    for row in range(rows):
        node = len(parents) - rows + row
        seen = decoder.seen_by(node, parents, before, window)
        for at in range(kv_heads):
            mine = cached[0][at, start + row].numpy(), cached[1][at, start + row].numpy()
            np.testing.assert_allclose(mine[0], head(keys, row, at, norms[1]), rtol=1e-4, atol=1e-5)
            assert np.array_equal(mine[1], values[row].reshape(-1, width)[at].numpy())
        for at in range(heads):
            entries = (numbers(each[at // (heads // kv_heads)][seen]) for each in cached)
            beside = None if sink is None else float(sink[at])
            wanted = decoder.attended(head(queries, row, at, norms[0]), *entries, 0.3, beside)
            found = out[row].reshape(-1, width)[at].numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", ["halves", "parted", "neighbours"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(("parents", "rows"), [(CHAIN, 7), (TREE, 3)])
def test_latent_attention(
    parents: list[int], rows: int, chooses: bool, window: int | None, columns: str, random: Random
) -> None:
    heads, key, rotary, value, rank, before = 3, 6, 4, 5, 8, 6
    start = before + len(parents) - rows
    queries, latents = random(rows, heads * (key + rotary)), random(rows, rank + rotary)
    norm, expansion = random(rank), random(heads * (key + value), rank)
    angles, out = random(rows, rotary // 2), torch.empty(rows, heads * value)
    given = angles if columns == "neighbours" else angles.repeat(1, 2)
    cached = random(1, 20, rank), random(1, 20, rotary)
    chosen = random(rows, start + rows) > 0 if chooses else None
    if chosen is not None:
        chosen[range(rows), range(start, start + rows)] = True
    reference_decoder.latent_attention_out(
        queries, latents, norm, 1e-5, expansion, given.cos(), given.sin(), columns != "halves",
        *cached, start, window or 1 << 40, 0.3,
        torch.tensor(parents) if parents == TREE else None, out, chosen,
    )  # fmt: skip

    def turned(part: np.ndarray, row: int) -> np.ndarray:
        angle = numbers(angles[row])
        if columns == "neighbours":
            made = (part[0::2] + 1j * part[1::2]) * np.exp(1j * angle)
            return np.stack([made.real, made.imag], axis=1).reshape(-1)
        if columns == "parted":
            part = np.concatenate([part[0::2], part[1::2]])
        both = np.concatenate([angle, angle])
        return decoder.turned(part, np.cos(both), np.sin(both))

    matrices = numbers(expansion).reshape(heads, key + value, rank)
    for row in range(rows):
        latent, own = numbers(latents[row]), (cached[0][0, start + row], cached[1][0, start + row])
        normed = decoder.rms_norm(latent[:rank], numbers(norm), 1e-5)
        np.testing.assert_allclose(own[0].numpy(), normed, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own[1].numpy(), turned(latent[rank:], row), rtol=1e-4, atol=1e-5)
        seen = decoder.seen_by(len(parents) - rows + row, parents, before, window)
        if chosen is not None:
            seen = [each for each in seen if chosen[row, each]]
        entries, rotated = numbers(cached[0][0][seen]), numbers(cached[1][0][seen])
        for at in range(heads):
            query = numbers(queries[row]).reshape(heads, -1)[at]
            query = np.concatenate([query[:key], turned(query[key:], row)])
            keys = np.concatenate([entries @ matrices[at, :key].T, rotated], axis=1)
            values = entries @ matrices[at, key:].T
            wanted = decoder.attended(query, keys, values, 0.3, None)
            found = out[row].reshape(heads, value)[at].numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"divided": True},
        {"divided": True, "factors": True},
        {"sigmoid": True, "divided": True, "bias": True, "added": 1e-2, "scale": 2.5},
        {"scale": 16.0, "groups": 8, "kept_groups": 3},
        {"sigmoid": True, "bias": True, "groups": 8, "kept_groups": 4, "group_best": 2},
    ],
    ids=str,
)
def test_routes(rule: dict[str, Any], random: Random) -> None:
    logits, weights = random(20, 64) * 3, torch.empty(20, 6)
    ids = torch.empty(20, 6, dtype=torch.int64)
    tensors = {name: random(64).abs() for name in ("bias", "factors") if name in rule}
    given = RouterRule(**rule | tensors)
    reference_decoder.route_out(
        logits, given.bias, given.factors, given.sigmoid, given.rounded, given.divided,
        given.groups, given.kept_groups, given.group_best, given.added, given.scale, weights, ids,
    )  # fmt: skip
    arrays = {name: numbers(tensor) for name, tensor in tensors.items()}
    for row, said in enumerate(numbers(logits)):
        wanted = decoder.routed(said, 6, **rule | arrays)
        assert ids[row].tolist() == [*wanted]
        np.testing.assert_allclose(weights[row].numpy(), [*wanted.values()], rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool, random: Random) -> None:
    """Of 4 of 6 columns of each head."""
    rows, angles = random(3, 12), random(3, 2)
    before = numbers(rows).reshape(3, 2, 6).copy()
    given = angles if interleaved else angles.repeat(1, 2)
    reference_decoder.rotate_out(rows, 6, given.cos(), given.sin(), interleaved)
    for row, head in np.ndindex(3, 2):
        part, turns = before[row, head], np.exp(1j * numbers(angles[row]))
        real, imaginary = (part[0:4:2], part[1:4:2]) if interleaved else (part[:2], part[2:4])
        made = (real + 1j * imaginary) * turns
        pairs = np.stack([made.real, made.imag], axis=1 if interleaved else 0).reshape(-1)
        found = rows.view(3, 2, 6)[row, head].numpy()
        np.testing.assert_allclose(found, [*pairs, *part[4:]], rtol=1e-5, atol=1e-6)


def test_outputs_are_combined(random: Random) -> None:
    outputs, weights = random(4, 3, 10), random(4, 3)
    wanted = np.einsum("tkh,tk->th", numbers(outputs), numbers(weights))
    found = reference.combine(outputs, weights, torch.float32).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule(by_channel: bool, random: Random) -> None:
    """Two heads of keys for four of values."""
    tokens, keys, heads, width, values = 5, 2, 4, 6, 10
    mixed = random(tokens, 2 * keys * width + heads * values)
    of_token = (heads, width) if by_channel else (heads,)
    decays, betas = -random(tokens, *of_token).abs(), random(tokens, heads).sigmoid()
    state, out = random(heads, width, values), torch.empty(tokens, heads, values)
    states = numbers(state)
    reference_recurrent.delta_rule_out(mixed, decays, betas, 1e-6, state, out)
    for token in range(tokens):
        row = numbers(mixed[token])
        parts = row[: keys * width], row[keys * width : 2 * keys * width]
        by_head = [part.reshape(keys, width) for part in parts]
        value = row[2 * keys * width :].reshape(heads, values)
        for head in range(heads):
            query, key = (part[head * keys // heads] for part in by_head)
            given = numbers(decays[token, head]), float(betas[token, head])
            states[head], wanted = decoder.delta_step(
                states[head], query, key, value[head], *given, 1e-6
            )
            np.testing.assert_allclose(out[token, head].numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.numpy(), states, rtol=1e-4, atol=1e-5)


def test_selective_scan(random: Random) -> None:
    """As one matrix of a whole sequence (arXiv:2405.21060, Eq. 6): what each token adds, decayed by
    all tokens after it.
    """
    tokens, groups, heads, width, values = 6, 2, 4, 3, 5
    mixed = random(tokens, 2 * groups * width + heads * values)
    decays, steps = -random(tokens, heads).abs(), random(tokens, heads).sigmoid()
    state, out = torch.zeros(heads, width, values), torch.empty(tokens, heads, values)
    reference_recurrent.selective_scan_out(mixed, decays, steps, state, out)
    queries, keys, given = np.split(numbers(mixed), [groups * width, 2 * groups * width], axis=1)
    for head in range(heads):
        columns = slice(head // 2 * width, head // 2 * width + width)
        sums = np.cumsum(numbers(decays[:, head]))
        stays = np.tril(np.exp(sums[:, None] - sums[None]))
        matrix = stays * (queries[:, columns] @ keys[:, columns].T) * numbers(steps[:, head])
        wanted = matrix @ given[:, head * values : (head + 1) * values]
        np.testing.assert_allclose(out[:, head].numpy(), wanted, rtol=1e-4, atol=1e-5)


# Whole blocks and quads, and parts of them.
SHAPES = [(64, 8), (70, 13), (130, 6)]


def words_of(matrix: Tensor) -> np.ndarray:
    return matrix.view(torch.int16).numpy().view(np.uint16)


def recorded(size: int, encode: Callable[[Tensor, Tensor], None]) -> bytes:
    record, nbytes = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    encode(record, nbytes)
    return record[: int(nbytes)].numpy().tobytes()


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_lossless_records(hidden: int, width: int, spoilt: bool, random: Random) -> None:
    """As the format says, and not only as one decoder reads what one encoder wrote."""
    gate_up, down = (random(*shape).bfloat16() for shape in ((2 * width, hidden), (hidden, width)))
    if spoilt:
        gate_up = gate_up.view(torch.int16).bitwise_xor(0x5555).view(torch.bfloat16)
    record = recorded(
        1 << 16, lambda *out: reference_compact.encode_lossless_out(gate_up, down, *out)
    )
    found = compact_record.lossless(record, [(width, hidden), (width, hidden), (hidden, width)])
    for words, matrix in zip(found, [*gate_up.chunk(2), down], strict=True):
        assert np.array_equal(words, words_of(matrix))
    record = recorded(1 << 16, lambda *out: reference_dense.encode_dense_lossless_out(down, *out))
    assert np.array_equal(compact_record.lossless(record, [(hidden, width)])[0], words_of(down))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 8), (70, 12), (130, 6)])
def test_residual_records(hidden: int, width: int, own: bool, random: Random) -> None:
    """Over codes of the same words, and over codes that say little of them."""
    gate_up, down = (random(*shape).bfloat16() for shape in ((2 * width, hidden), (hidden, width)))
    coded = gate_up if own else random(2 * width, hidden), down if own else random(hidden, width)
    pairs = [reference.quantize_int4(each, 2) for each in coded]
    record = recorded(
        1 << 16,
        lambda *out: reference_compact.encode_residual_out(
            gate_up, down, *pairs[0], *pairs[1], *out
        ),
    )
    codes = [
        (codes_of(qweight.numpy()), spread(scales.numpy(), 2 * qweight.shape[1]))
        for qweight, scales in pairs
    ]
    halves = [tuple(part[at * width : (at + 1) * width] for part in codes[0]) for at in (0, 1)]
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    found = compact_record.residual(record, shapes, [*halves, codes[1]])  # type: ignore[list-item]
    for words, matrix in zip(found, [*gate_up.chunk(2), down], strict=True):
        assert np.array_equal(words, words_of(matrix))


def test_words_of_mxfp4() -> None:
    """Every byte under every exponent that is a number, subnormal words among them."""
    packed = torch.arange(256, dtype=torch.uint8).expand(255, -1).contiguous()
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    with np.errstate(over="ignore"):
        wanted = scaled.mxfp4_values(packed.numpy(), exponents.numpy()).astype(np.float32)
    assert np.array_equal(mxfp4_words(packed, exponents).float().numpy(), wanted)


def test_words_of_fp8() -> None:
    """Every code under scales of all sizes, in blocks of which the last ones are shorter."""
    codes = torch.arange(256, dtype=torch.uint8).expand(200, -1).contiguous()
    scales = torch.tensor([[1e-40, 3.3e-5], [0.7, 1e35]])
    found = words_of(fp8_words(codes.view(torch.float8_e4m3fn), scales))
    wanted = scaled.fp8_words(codes.numpy(), scales.numpy())
    numbers_alone = (codes.numpy() & 0x7F) != 0x7F
    assert np.array_equal(found[numbers_alone], wanted[numbers_alone])
    assert ((found[~numbers_alone] & 0x7FFF) > 0x7F80).all()
