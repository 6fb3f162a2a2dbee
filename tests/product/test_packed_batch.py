"""A pass over several texts: each row comes out as if its text were alone."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq.devices.device import Processor
from speq.engine.verification import EagerVerification
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models import moe_model
from speq.models.kv_cache import KVCache, KVLayer
from speq.models.moe_model import MoEModel
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from speq.models.tree import Tree
from tests.helpers.some_experts import SomeExperts
from tests.helpers.tiny_models import BY_FAMILY, write_model

# Texts of different lengths, and what each has in a pass: tokens, and parents of a tree.
LENGTHS = (29, 3, 51, 12)
# Families of which no part but their experts is left to torch, whose last bits depend on the number
# of rows: not a router, nor the gate of a shared expert.
WALKED_WHOLE = ("qwen3_moe", "olmoe", "mixtral")
CHAINS = (1, 4, 2, 1)
TREES: tuple[tuple[int, ...] | None, ...] = ((0, 0, 1, 1, 2), None, (0, 1, 0, 3, 2, 2), (0,))


def loaded(path: Path, dtype: torch.dtype) -> tuple[MoEModel, list[KVCache]]:
    """A model, and caches that hold a text each."""
    opened = open_model(path)
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    shape, cpu = opened.shape, torch.device("cpu")
    caches = []
    for number, length in enumerate(LENGTHS):
        cache = shape.cache(160, dtype, cpu, number)
        tokens = [(7 * at * at + 31 * number) % 250 for at in range(length)]
        model.prefill(SomeExperts(), SequenceTokens(cache, tokens))
        caches.append(cache)
    opened.close()
    return model, caches


def entries_of(cache: KVCache) -> list[torch.Tensor]:
    """Of layers that keep entries."""
    kept = (layer for layer in cache.layers if isinstance(layer, KVLayer))
    return [tensor for layer in kept for tensor in layer.tensors]


def texts_of(caches: list[KVCache], trees: bool) -> list[SequenceTokens]:
    made = []
    for cache, count, parents in zip(caches, CHAINS, TREES, strict=True):
        tree = Tree.of(parents) if trees and parents is not None else None
        rows = count if tree is None else tree.rows
        tokens = [(11 * at + 3 * cache.number) % 250 for at in range(rows)]
        made.append(SequenceTokens(cache, tokens, tree))
    return made


def alone(model: MoEModel, text: SequenceTokens) -> torch.Tensor:
    return model.forward(SomeExperts(), [text])


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("family", BY_FAMILY)
def test_rows_are_those_of_their_text(
    family: str, trees: bool, tiny: Callable[[str], Path]
) -> None:
    """No row is padding, and experts are asked once for all texts."""
    model, caches = loaded(tiny(family), torch.float32)
    texts = texts_of(caches, trees)
    wanted = torch.cat([alone(model, text) for text in texts], 1)
    entries = [[tensor.clone() for tensor in entries_of(cache)] for cache in caches]
    for cache in caches:
        for tensor in entries_of(cache):
            tensor[:, :, cache.length :] = float("nan")
    experts = SomeExperts()
    found = model.forward(experts, texts)
    assert experts.rows == [wanted.shape[1]] * model.num_moe_layers
    if family in WALKED_WHOLE:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for cache, kept, text in zip(caches, entries, texts, strict=True):
        assert cache.length == LENGTHS[cache.number]
        end = cache.length + len(text.token_ids)
        for tensor, before in zip(entries_of(cache), kept, strict=True):
            torch.testing.assert_close(tensor[:, :, :end], before[:, :, :end])
            assert tensor[:, :, end:].isnan().all()


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v2", "hunyuan_v1_moe"])
def test_many_rows_see_their_own_text(family: str, tiny: Callable[[str], Path]) -> None:
    """More of them than are walked, and turns of positions that depend on a text's length."""
    model, caches = loaded(tiny(family), torch.float32)
    texts = [
        SequenceTokens(cache, [(5 * at + cache.number) % 250 for at in range(MAX_LINEAR_ROWS // 2)])
        for cache in caches
    ]
    walks, model._fused = model._fused, False
    wanted = torch.cat([alone(model, text) for text in texts], 1)
    model._fused = walks
    found = model.forward(SomeExperts(), texts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_rows_in_16_bits_are_the_same_bits(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    model, caches = loaded(path, torch.bfloat16)
    rng = random.Random(7)
    for turn in range(6):
        texts = rng.sample(texts_of(caches, trees=turn % 2 == 1), rng.randint(2, len(caches)))
        verification = EagerVerification(model, SomeExperts())
        scored = verification.score(texts)
        for text, each in zip(texts, scored, strict=True):
            (by_itself,) = verification.score([text])
            assert torch.equal(each.logits, by_itself.logits)
            assert torch.equal(each.features, by_itself.features)
        for text in texts:  # which grow, each by its own count
            text.cache.advance(rng.randint(0, len(text.token_ids)))
