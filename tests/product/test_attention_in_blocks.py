"""Attention of many rows in blocks, beside numpy in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speq.models import attention
from speq.models.attention import AttentionShape, attend_in_blocks
from speq.models.kv_cache import attention_mask, causal_mask
from speq.models.packed_batch import mask_of
from speq.models.tree import Tree


def by_hand(query: Any, key: Any, value: Any, mask: Any, scale: float, sinks: Any) -> Any:
    """[T, heads, V] of one sequence, one row and head at a time."""
    heads, rows, _ = query.shape
    out = np.zeros((rows, heads, value.shape[2]))
    for head in range(heads):
        of = head * key.shape[0] // heads
        for row in range(rows):
            scores = key[of][mask[row]] @ query[head, row] * scale
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            shares = np.exp(scores - scores.max())
            shares = (shares / shares.sum())[: mask[row].sum()]
            out[row, head] = shares @ value[of][mask[row]]
    return out


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masks() -> dict[str, Tensor]:
    """[1, 1, T, N]: prompts of which some tokens are cached, windows, a tree, and a batch."""
    of_chain = torch.arange(70, 170)[None]
    tree = Tree.of((-1, 0, 0, 2))
    roots, depths = torch.tensor([30]), torch.tensor(tree.depths())
    both = [causal_mask(torch.arange(9, 12)[None], 12, None), causal_mask(of_chain, 170, 20)]
    return {
        "prompt": causal_mask(torch.arange(100)[None], 100, None),
        "chunk": causal_mask(of_chain, 170, None),
        "window": causal_mask(of_chain, 170, 7),
        "one row": causal_mask(torch.tensor([[40]]), 41, None),
        "tree": attention_mask(roots, depths, tree.visible(), 34, None),
        "batch": mask_of(both),
    }


# Query heads, key heads, width of keys and of values.
SIZES = {
    "grouped": (8, 2, 16, 16),
    "one each": (3, 3, 8, 8),
    "narrow values": (4, 4, 24, 16),
    "one for all": (5, 1, 20, 20),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_give_what_the_formula_gives(
    dtype: torch.dtype,
    native: bool,
    kind: str,
    sizes: str,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BLOCK_ROWS", 48)
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 20_000)
    heads, kv_heads, width, of_values = SIZES[sizes]
    mask = masks()[kind]
    rows, seen = mask.shape[2:]
    query, key, value = (
        drawn(1, count, tokens, columns, seed=at).to(dtype)
        for at, (count, tokens, columns) in enumerate(
            [(heads, rows, width), (kv_heads, seen, width), (kv_heads, seen, of_values)]
        )
    )
    given = drawn(heads, seed=9).to(dtype) if sinks else None
    before = [each.clone() for each in (query, key, value)]
    found, _ = attend_in_blocks(nn.Identity(), query, key, value, mask, 0.25, given, native=native)
    assert found.shape == (1, rows, heads, of_values) and found.dtype == dtype
    wanted = by_hand(
        *(each[0].double().numpy() for each in (query, key, value)),
        mask[0, 0].numpy(),
        0.25,
        None if given is None else given.double().numpy(),
    )
    atol = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2e-2)
    np.testing.assert_allclose(found[0].double().numpy(), wanted, atol=atol)
    assert all(torch.equal(*each) for each in zip(before, (query, key, value), strict=True))


def test_bytes_of_blocks_are_bounded() -> None:
    shape = AttentionShape(((2, 64), (2, 64)), 1024, 8, 0, 2048)
    small, large = (shape.block_bytes(rows, 8192, torch.bfloat16) for rows in (16, 4096))
    assert small == 3 * 16 * 1024 * 2 + 8 * 16 * 8192 * 4
    assert large == 3 * 256 * 1024 * 2 + attention.BLOCK_ELEMENTS * 4
    wide = shape.block_bytes(4096, 1 << 20, torch.float32)
    assert wide == 3 * 256 * 1024 * 4 + 8 * (1 << 20) * 6
