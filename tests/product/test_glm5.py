"""GLM-5.3: pools of tokens that an indexer selects, beside states and several rows of a token."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from speq import Generator
from speq.errors import SpeqError
from speq.models.hidden_state_capture import HiddenStateCapture
from speq.models.layer_range import LayerRange
from speq.models.opened import open_model
from speq.models.pooled_attention import PoolIndexer
from speq.planning.model_spec import ModelSpec
from speq.quantizing.models import quantize
from tests.helpers.tiny_models import (
    FAMILIES,
    config_of,
    greedy_tokens,
    load_plain,
    write_model,
)

pytestmark = pytest.mark.skipif("glm5_next" not in FAMILIES, reason="transformers lacks the family")

FILE, ROWS = "model.safetensors", 60
RUN: dict[str, Any] = {"dtype": "float32", "profile": "none"}
Folder = Callable[[str], Path]


def tokens_of(model: Path, prompt: list[int], count: int, **options: Any) -> list[int]:
    generator = Generator.from_pretrained(model, "64MiB", **(RUN | {"draft_length": 3} | options))
    try:
        return list(generator.generate(prompt, max_new_tokens=count, ignore_eos=True).token_ids)
    finally:
        generator.close()


class Rows:
    """Rows of a sequence at an indexer, and what transformers' own selects for each of them in
    steps of one token: sets of positions.
    """

    def __init__(self, kpool: int, topk: int) -> None:
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

        torch.manual_seed(3)
        config = config_of("glm5_next", index_kpool=kpool, index_topk=topk).get_text_config()
        self.config, self.indexer = config, Glm5NextTextIndexer(config, 1).eval()
        for tensor in self.indexer.parameters():
            tensor.data.normal_()
        self.hidden = torch.randn(ROWS, config.hidden_size)
        self.latents = torch.randn(ROWS, config.q_lora_rank)

    @torch.no_grad()
    def steps(self, path: list[int]) -> set[int]:
        """What the last of the rows in `path` attends to, one after the other."""
        cache, chosen = DynamicCache(config=self.config), torch.empty(0)
        for row in path:
            # The cache counts tokens by their keys.
            nothing = torch.zeros(1, 1, 1, 1)
            cache.update(nothing, nothing, 1)
            given = self.hidden[None, row : row + 1], self.latents[None, row : row + 1]
            chosen = self.indexer(*given, torch.ones(1, 1, dtype=torch.bool), cache)
        return {path[int(each)] for each in chosen.flatten() if each >= 0}


def sets_of(chosen: Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in chosen]


@pytest.mark.parametrize(("kpool", "topk"), [(4, 16), (1, 8), (5, 5)])
def test_each_row_selects_as_in_a_step_of_its_own(kpool: int, topk: int) -> None:
    """In a prompt, and in trees, whose branches have pools of their own behind the same tokens."""
    rows = Rows(kpool, topk)
    expected = [rows.steps([*range(end)]) for end in range(1, ROWS + 1)]
    assert max(map(len, expected)) == topk + kpool - 1
    ours = PoolIndexer(rows.indexer)
    given = rows.hidden[None], rows.latents[None]
    layer = SimpleNamespace(update_indexer=lambda keys: keys)
    with torch.no_grad():
        mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
        assert sets_of(ours.select(*given, mask, layer)) == expected
        parents = [-1, 0, 0, 1, 1, 2, 4, 6, 3]
        paths = [[50]]
        for node, parent in enumerate(parents[1:], start=1):
            paths.append([*paths[parent], 50 + node])
        for node, path in enumerate(paths):
            mask[50 + node, 50:] = False
            mask[50 + node, path] = True
        found = sets_of(ours.select(*given, mask, layer))[50:59]
    assert found == [rows.steps([*range(50), *path]) for path in paths]


@pytest.mark.parametrize("draft_length", [0, 1, 5])
@pytest.mark.parametrize("drafter", ["int4", "ngram"])
@pytest.mark.parametrize("count", [3, 13, 70])
def test_states_and_pools_are_rolled_back(
    count: int, drafter: str, draft_length: int, tiny: Folder
) -> None:
    """From before the first pool is left out to long after."""
    prompt = [(7 * at * at + 3 * at) % 97 for at in range(count)]
    prompt += prompt[: count // 2]
    expected = greedy_tokens(load_plain(tiny("glm5_next")), prompt, 40)
    options = {"drafter": drafter, "draft_length": draft_length}
    assert tokens_of(tiny("glm5_next"), prompt, 40, **options) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"index_kpool": 1, "index_topk": 8},
        {"index_kpool": 16, "index_topk": 16, "indexer_types": ["full", "full", "full"]},
        {"linear_lower_bound": None, "hc_mult": 2, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.5},
    ],
    ids=["tokens", "wide", "gates"],
)
def test_other_pools_rows_and_gates(more: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm5_next", **more)
    prompt = [(5 * at * at + at) % 256 for at in range(75)]
    expected = greedy_tokens(load_plain(model), prompt, 24)
    assert tokens_of(model, prompt, 24) == expected


def test_the_vision_part_and_later_layers_are_left(tiny: Folder, tmp_path: Path) -> None:
    """An MTP layer is published behind the last."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny("glm5_next").glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny("glm5_next") / FILE)
    assert any(name.startswith("model.visual.") for name in tensors)
    for part in ("shared_head.norm.weight", "enorm.weight", "self_attn.q_a_proj.weight"):
        tensors[f"model.language_model.layers.3.{part}"] = torch.ones(64)
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    opened = open_model(model)
    assert opened.shape.streams == 4
    assert not [name for name in opened.shape.dense_names if "visual" in name or ".3." in name]
    opened.close()
    expected = greedy_tokens(load_plain(tiny("glm5_next")), [*range(30)], 12)
    assert tokens_of(model, [*range(30)], 12) == expected


def test_what_the_family_does_not_run_in_is_refused(tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"pass on several rows of a token, .* run it on one"):
        open_model(tiny("glm5_next"), part=LayerRange(0, 2))
    with pytest.raises(SpeqError, match="layers mix several rows of a token"):
        quantize(tiny("glm5_next"), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"index_kpool_always_select_tail": False}, "the first tokens see nothing"),
        ({"indexer_types": ["full", "shared", "full"]}, "layer 1 is to use the selection"),
        (
            {"layer_types": ["indexed_attention"] * 3, "indexer_types": ["full", *["shared"] * 2]},
            "layer 2 is to use the selection",
        ),
        ({"swiglu_limit": 0.0}, r"layer 1 at 0.0; a limit must be above 0"),
        ({"index_topk": 0}, r"index_topk 0, index_kpool 4 .* at least one pool"),
    ],
)
def test_configurations_that_cannot_run(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "glm5_next", **more)
    with pytest.raises(SpeqError, match=said):
        open_model(model)


def test_a_plan_counts_what_the_published_model_has(tmp_path: Path) -> None:
    """GLM-5.3-Flash has 321 billion parameters, a vision part of 0.6 and an MTP layer of 7.5 among
    them.
    """
    AutoConfig.for_model("glm5_next", text_config={}, dtype="bfloat16").save_pretrained(tmp_path)
    spec = ModelSpec.of_config("GLM-5.3-Flash", tmp_path, "auto")
    shape = spec.shape
    assert spec.count == 42 * 288
    assert shape.experts.weights == 3 * 4096 * 2048
    assert shape.resident_weights + spec.count * shape.experts.weights == pytest.approx(313e9, 0.01)
    # Latents, and an indexer's keys and weights, of a quarter of the layers.
    assert shape.kv_elements_per_token == 11 * (512 + 2 * 128)
    assert len(shape.states.layers) == 34
    assert {each.limit for each in shape.activations} == {10.0}


def test_drafters_read_the_mean_of_a_tokens_rows() -> None:
    """Of rows side by side, as Qwen4-Exp passes them on, and one above the other."""
    layer, streams = nn.Identity(), torch.randn(5, 4, 8)
    capture = HiddenStateCapture(cast(Any, SimpleNamespace(layers=[layer])), (0,), 4)
    for given in (streams, streams.flatten(1)):
        layer(given[None])
        torch.testing.assert_close(capture.take(), streams.mean(1))
