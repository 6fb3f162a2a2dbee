"""Attention over what an indexer chooses: the choice itself, contexts below and above what it
chooses, its keys in caches and plans, and what is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from speq import Generator
from speq.errors import SpeqError
from speq.kernels.decoder_ops import Positions
from speq.layers.indexer import Indexer
from speq.models.kv_cache import KVCache
from speq.models.layer_range import LayerRange
from speq.models.opened import open_model
from speq.quantizing.models import quantize
from tests.helpers.fp8_files import PUBLISHERS, write_fp8
from tests.helpers.tiny_models import (
    INDEXED,
    config_of,
    greedy_tokens,
    load_plain,
    write_model,
)

pytestmark = pytest.mark.skipif(not INDEXED, reason="transformers has none of the families")
Folder = Callable[[str], Path]
CLASSES = {
    "deepseek_v32": modeling_deepseek_v32.DeepseekV32Indexer,
    "glm_moe_dsa": modeling_glm_moe_dsa.GlmMoeDsaIndexer,
}
ROWS, TOP_K = 60, 16


class Rows:
    """Rows of a sequence at an indexer, and what transformers chooses for each in a step of one
    token: sets of positions.
    """

    def __init__(self, family: str, spread: float = 1.0) -> None:
        torch.manual_seed(3)
        self.config = config = config_of(family)
        self.indexer = CLASSES[family](config, 0).eval()
        for name, tensor in self.indexer.named_parameters():
            tensor.data.normal_(std=spread if "weights_proj" in name else 1.0)
        self.hidden = torch.randn(ROWS, config.hidden_size)
        self.latents = torch.randn(ROWS, config.q_lora_rank)
        angles = torch.randn(ROWS, config.qk_rope_head_dim // 2).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    @torch.no_grad()
    def steps(self, path: list[int]) -> set[int]:
        """What the last of the rows in `path` attends to, one after the other."""
        cache, chosen = DynamicCache(config=self.config), torch.empty(0)
        for end, row in enumerate(path, start=1):
            turns = self.cos[None, row : row + 1], self.sin[None, row : row + 1]
            given = self.hidden[None, row : row + 1], self.latents[None, row : row + 1]
            seen = torch.ones(1, 1, end, dtype=torch.bool)
            chosen = self.indexer(*given, turns, seen, None, cache)
        return {path[int(each)] for each in chosen.flatten()}

    def places(self, rows: slice, parents: list[int] | None = None) -> tuple[Any, ...]:
        """Arguments of `Indexer.choose_cached`, without what is cached."""
        tree = None if parents is None else torch.tensor(parents)
        positions = Positions(rows.start, self.cos[rows], self.sin[rows], tree)
        return self.hidden[rows], self.latents[rows], positions, rows.start


def sets_of(chosen: Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in chosen]


@pytest.mark.parametrize("spread", [1.0, 0.0])
@pytest.mark.parametrize("family", INDEXED)
def test_each_row_chooses_as_in_a_step_of_its_own(family: str, spread: float) -> None:
    """In a prompt, behind a cache and in trees; with a spread of 0 all scores are equal."""
    rows = Rows(family, spread)
    expected = [rows.steps([*range(end)]) for end in range(1, ROWS + 1)]
    assert [len(each) for each in expected[:20]] == [*range(1, 17), 16, 16, 16, 16]
    indexer = Indexer(rows.indexer)
    with torch.no_grad():
        seen = torch.ones(1, ROWS, ROWS, dtype=torch.bool).tril()
        whole = indexer(rows.hidden[None], rows.latents[None], (rows.cos[None], rows.sin[None]),
                        seen, None, cache=None)  # fmt: skip
        assert sets_of(whole[0]) == expected
        cached = torch.zeros(ROWS, rows.config.index_head_dim)
        assert indexer.choose_cached(*rows.places(slice(0, TOP_K)), cached) is None
        for part in (slice(TOP_K, 40), slice(40, 41), slice(41, ROWS)):
            chosen = indexer.choose_cached(*rows.places(part), cached)
            assert chosen is not None
            assert chosen.shape == (part.stop - part.start, part.stop)
            assert sets_of(chosen) == expected[part]
        parents = [-1, 0, 0, 1, 1, 2, 4]
        chosen = indexer.choose_cached(*rows.places(slice(50, 57), parents), cached)
        assert chosen is not None
        for node, found in enumerate(sets_of(chosen)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            assert found == rows.steps([*range(50), *(50 + each for each in path)])


def tokens_of(model: Path, prompt: list[int], count: int, **options: Any) -> list[int]:
    options = {"dtype": "float32", "draft_length": 3} | options
    generator = Generator.from_pretrained(model, "64MiB", **options)
    try:
        return list(generator.generate(prompt, max_new_tokens=count, ignore_eos=True).token_ids)
    finally:
        generator.close()


@pytest.mark.parametrize("family", INDEXED)
@pytest.mark.parametrize(("prompt", "count"), [(4, 12), (9, 40), (100, 40)])
def test_contexts_below_and_above_what_is_chosen(
    family: str, prompt: int, count: int, tiny: Folder
) -> None:
    """16 tokens are chosen, and the longest prompt runs in passes of both kinds."""
    ids = [*range(3, 3 + prompt)]
    expected = greedy_tokens(load_plain(tiny(family)), ids, count)
    assert tokens_of(tiny(family), ids, count) == expected


def test_a_context_of_which_all_is_chosen_is_dense(tmp_path: Path) -> None:
    """The tokens are those of DeepSeek-V3 with the same weights."""
    model = write_model(tmp_path / "model", "deepseek_v32", index_topk=512)
    dense = write_model(tmp_path / "dense", "deepseek_v3", rope_interleave=True)
    weights = load_file(model / "model.safetensors")
    left = {name: each for name, each in weights.items() if ".indexer." not in name}
    assert left.keys() == load_file(dense / "model.safetensors").keys() < weights.keys()
    save_file(left, dense / "model.safetensors", metadata={"format": "pt"})
    ids = [*range(3, 103)]
    found = tokens_of(model, ids, 40)
    assert found == greedy_tokens(load_plain(dense), ids, 40)
    sparse = write_model(tmp_path / "sparse", "deepseek_v32")
    save_file(weights, sparse / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(sparse, ids, 40) != found


@pytest.mark.parametrize("family", INDEXED)
def test_keys_of_indexers_are_cached_and_planned(family: str, tiny: Folder) -> None:
    opened = open_model(tiny(family))
    opened.close()
    indexers = 3 if family == "deepseek_v32" else 2
    assert opened.shape.kv_elements_per_token == 3 * (24 + 8) + indexers * 16
    cache = opened.shape.cache(10, torch.float32, torch.device("cpu"))
    assert isinstance(cache, KVCache)
    assert cache.nbytes == 10 * 4 * opened.shape.kv_elements_per_token
    assert len(cache.entries(0, 3)) == 6 + indexers


def test_stages_begin_with_an_indexer(tiny: Folder) -> None:
    with pytest.raises(SpeqError, match=r"layer 1 of .* let its stage begin at a layer with an"):
        open_model(tiny("glm_moe_dsa"), part=LayerRange(1, 3))


def test_quantising_layers_that_use_another_ones_choice(tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="what the indexer of a layer before them chose"):
        quantize(tiny("glm_moe_dsa"), out=tmp_path / "out")


@pytest.mark.parametrize("name", ["blocks", "powers of 2"])
def test_fp8_as_published(name: str, tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """With scales of blocks as float32, or as their exponents of 2."""
    model, words = tmp_path / "model", tmp_path / "words"
    write_fp8(model, words, tiny_bfloat16("deepseek_v32"), publisher=PUBLISHERS[name])
    ids = [*range(3, 40)]
    expected = greedy_tokens(load_plain(words), ids, 20)
    assert tokens_of(model, ids, 20) == expected
