"""Few tokens walked through a model by ourselves, beside transformers' own pass over them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from speq.kernels import many_rows
from speq.layers.fused_attention import FusedAttention
from speq.layers.fused_modules import FusedNorm, FusedRouter
from speq.models.fused_decoder import POSITIONS, FusedDecoder, RotaryTable
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.packed_batch import SequenceTokens
from speq.models.tree import Tree
from tests.helpers.some_experts import PROMPT, SomeExperts, loaded
from tests.helpers.tiny_models import BY_WALKED, FAMILIES, WALKED, write_model

MORE = 9


@torch.inference_mode()
def passes(
    model: MoEModel, cache: KVCache, count: int, parents: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden states of tokens behind a text: walked where that can be, and with a mask.

    parents  of a tree's nodes behind the root; None: a chain
    """
    tokens = [at * 7 % 256 for at in range(PROMPT + count)]
    model.forward(SomeExperts(), [SequenceTokens(cache, tokens[:PROMPT])])
    cache.advance(PROMPT)
    tree = None if parents is None else Tree.of(parents)
    more = [SequenceTokens(cache, tokens[PROMPT:], tree)]
    walks, model._fused = model._fused, False
    masked = model.forward(SomeExperts(), more)
    model._fused = walks
    return model.forward(SomeExperts(), more), masked


@pytest.mark.parametrize("count", [1, MORE])
@pytest.mark.parametrize("family", WALKED)
def test_walk_is_transformers_pass(family: str, count: int, tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny(family), torch.float32)
    assert isinstance(model.body.forward, FusedDecoder)
    chain, tree = passes(model, cache, count)
    assert chain.shape == tree.shape == (1, count, 64)
    torch.testing.assert_close(chain, tree, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", BY_WALKED)
def test_trees_are_walked_as_well(family: str, tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny(family), torch.float32)
    parents = [0, 0, 1, 1, 2, 4, 6, 3]
    walked, masked = passes(model, cache, MORE, parents)
    torch.testing.assert_close(walked, masked, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
def test_a_branch_is_walked_as_its_chain(window: int | None, tmp_path: Path) -> None:
    """Bit for bit, in 16 bits as well, of more rows than torch would be left to run."""
    sliding = {"use_sliding_window": window is not None, "sliding_window": window}
    path = write_model(tmp_path / "model", "qwen3_moe", torch.bfloat16, **sliding)
    model, cache = loaded(path, torch.bfloat16)
    tokens = [at * 7 % 256 for at in range(PROMPT + 33)]
    model.forward(SomeExperts(), [SequenceTokens(cache, tokens[:PROMPT])])
    cache.advance(PROMPT)
    parents = [at * at % (at + 1) for at in range(32)]
    tree = SequenceTokens(cache, tokens[PROMPT:], Tree.of(parents))
    branches = model.forward(SomeExperts(), [tree])[0]
    for node in (0, 1, 7, 20, 32):
        above = [node]
        while above[0]:
            above.insert(0, parents[above[0] - 1])
        chain = SequenceTokens(cache, [tokens[PROMPT + at] for at in above])
        alone = model.forward(SomeExperts(), [chain])[0]
        assert torch.equal(branches[above], alone)


def test_walk_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    """In bfloat16 most numbers are the same to the last bit, which needs each rounding in place."""
    path = write_model(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    chain, tree = passes(*loaded(path, torch.bfloat16), MORE)
    # Without AVX-512 torch's products of bfloat16 are ours in float32, and last bits differ.
    native = many_rows.has_native_product(torch.bfloat16)
    torch.testing.assert_close(chain, tree, rtol=0.1, atol=0.1 if native else 0.15)
    assert (chain == tree).float().mean() > (0.5 if native else 0.2)


def test_sliding_layers_look_back_as_far_as_they_may(tmp_path: Path) -> None:
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    path = write_model(tmp_path / "model", "qwen2_moe", layer_types=kinds, **options)
    chain, tree = passes(*loaded(path, torch.float32), MORE)
    torch.testing.assert_close(chain, tree, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_fused_parts_give_transformers_results(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Path]
) -> None:
    """Norms round where theirs do, and routers choose what theirs choose."""
    model, _ = loaded(tiny(family), dtype)
    generator = torch.Generator().manual_seed(3)
    norms = [each for each in model.body.modules() if isinstance(each.forward, FusedNorm)]
    assert bool(norms) == (family != "phimoe")
    for norm in norms:
        rows = torch.randn(9, len(norm.weight), generator=generator).to(dtype)  # type: ignore[arg-type]
        ours, wanted = norm(rows), type(norm).forward(norm, rows)
        torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=1e-5)
        assert dtype == torch.float32 or (ours == wanted).float().mean() > 0.99
    near = 1e-5 if dtype == torch.float32 else 4e-2
    for block in model._family.moe_blocks(model._hf_model).values():
        router: Any = block.router
        assert isinstance(router.forward, FusedRouter) == (family not in ("phimoe", "deepseek_v4"))
        if getattr(router, "tid2eid", None) is not None:  # token ids choose
            continue
        rows = torch.randn(9, 64, generator=generator).to(dtype)
        given = rows[None] if block.of_sequence else rows
        found = router(given, *block.router_inputs)
        wanted = type(router).forward(router, given, *block.router_inputs)
        torch.testing.assert_close(found[0], wanted[0], rtol=near, atol=near)
        same = (found[2].sort().values == wanted[2].sort().values).all(-1)
        assert same.all() if dtype == torch.float32 else same.float().mean() > 0.6
        torch.testing.assert_close(
            found[1][same].sort().values, wanted[1][same].sort().values, rtol=near, atol=near
        )
        assert found[1].dtype == wanted[1].dtype


def test_doubles_run_as_transformers_has_it(tiny: Callable[[str], Path]) -> None:
    model, _ = loaded(tiny("qwen2_moe"), torch.float64)
    forwards = {type(module.forward) for module in model.body.modules()}
    assert not forwards & {FusedDecoder, FusedAttention, FusedNorm, FusedRouter}


def test_clipped_projections_run_as_transformers_has_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "olmoe", clip_qkv=0.5)
    model, cache = loaded(path, torch.float32)
    assert not isinstance(model.body.forward, FusedDecoder)
    chain, tree = passes(model, cache, MORE)
    torch.testing.assert_close(chain, tree, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_given_up_is_gone_at_once(tiny: Callable[[str], Path]) -> None:
    model, _ = loaded(tiny("qwen3_moe"), torch.float32)
    layer: Any = model.dense["model.layers.0.self_attn.q_proj"].exact
    weight = ref(layer.weight)
    del layer
    gc.disable()  # nobody looks for what holds itself
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_turns_are_computed_once_for_many_positions() -> None:
    asked: list[list[int]] = []

    def rotary_emb(like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(position_ids[0].tolist())
        angles = position_ids[..., None] * torch.tensor([1.0, 0.1])
        return angles.cos(), angles.sin()

    table, like = RotaryTable(rotary_emb, ahead=True), torch.zeros(3, 8)
    for start in (5, 6, POSITIONS + 2, POSITIONS + 3, 2):
        positions = table.at(start, like)
        angles = torch.arange(start, start + 3)[:, None] * torch.tensor([1.0, 0.1])
        assert positions.start == start
        assert torch.equal(positions.cos, angles.cos())
        assert torch.equal(positions.sin, angles.sin())
    firsts = [5, POSITIONS + 3, 2]
    assert asked == [[*range(first, first + POSITIONS)] for first in firsts]
    asked.clear()
    table = RotaryTable(rotary_emb, ahead=False)
    for start in (5, 6):
        assert torch.equal(
            table.at(start, like).cos[0], rotary_emb(like, torch.tensor([[start]]))[0][0, 0]
        )
    assert asked[::2] == [[5, 6, 7], [6, 7, 8]]
