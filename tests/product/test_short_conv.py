"""lfm2_moe: what its short convolutions compute and take back, and what is its own on disk."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from speq import Generator, SpeqError
from speq.devices.device import Processor
from speq.drafts.draft_source import dense_draft, open_draft
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models import moe_model
from speq.models.conv_inputs import PENDING
from speq.models.dense_parts import ATTENTION, HEAD, MLP
from speq.models.length import Length
from speq.models.opened import open_model
from speq.models.short_conv import ConvLayer
from speq.models.states import BatchStateLayer
from speq.models.tree import Tree
from tests.helpers.quantising import SETTINGS, quantise_to
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_fused, write_model

FAMILY = "lfm2_moe"
TAPS, CHANNELS = 4, 6
CPU = torch.device("cpu")
Folder = Callable[[str], Path]
FILE = "model.safetensors"


class Parts:
    weight = torch.randn(CHANNELS, TAPS, generator=torch.Generator().manual_seed(3))
    bias = torch.randn(CHANNELS, generator=torch.Generator().manual_seed(4))


PARTS = Parts()


def inputs_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(seed))


def new_layer() -> tuple[ConvLayer, Length]:
    length = Length()
    return ConvLayer(TAPS, CHANNELS, torch.float32, CPU, length), length


def alone(inputs: Tensor) -> Tensor:
    """One token after another, each of which stays."""
    layer, length = new_layer()
    out = []
    for row in inputs:
        out.append(layer.run(row[None], PARTS))
        length.count += 1
        length.settled = length.count
    return torch.cat(out)


def test_tokens_are_those_of_the_convolution() -> None:
    """torch's own, of a text with nothing before it."""
    inputs = inputs_of(11, 1)
    before = functional.pad(inputs.double().T[None], (TAPS - 1, 0))
    weight = PARTS.weight.double()[:, None]
    wanted = functional.conv1d(before, weight, PARTS.bias.double(), groups=CHANNELS)[0].T
    np.testing.assert_allclose(alone(inputs).numpy(), wanted.numpy(), atol=1e-6)


def test_chunks_of_any_length_are_bit_for_bit_tokens_alone() -> None:
    """Prompts of more tokens than may be given up among them."""
    counts = [1, 2, MAX_LINEAR_ROWS + 9, 3, MAX_LINEAR_ROWS, MAX_LINEAR_ROWS + 1, 1]
    inputs, out = inputs_of(sum(counts), 2), []
    layer, length = new_layer()
    length.reading = True
    for chunk in inputs.split(counts):
        out.append(layer.run(chunk, PARTS))
        length.count += len(chunk)
        length.settled = length.count
    assert torch.equal(torch.cat(out), alone(inputs))


@pytest.mark.parametrize("count", [MAX_LINEAR_ROWS, MAX_LINEAR_ROWS + 1, PENDING])
def test_any_number_of_tokens_can_be_given_up(count: int) -> None:
    """As a verification's, whose number says nothing: prompts alone need not go back."""
    before, drafted, following = inputs_of(3, 21), inputs_of(count, 22), inputs_of(2, 23)
    layer, length = new_layer()
    layer.run(before, PARTS)
    length.count = length.settled = 3
    layer.run(drafted, PARTS)
    length.count = length.settled = 4  # the pending token alone stands
    kept = torch.cat([before, drafted[:1], following])
    assert torch.equal(layer.run(following, PARTS), alone(kept)[-2:])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_given_up_leaves_no_trace(seed: int) -> None:
    """Drafts of other inputs, verifications of which a part stands, one text after another."""
    rng = random.Random(seed)
    layer, length = new_layer()
    for text in range(2):
        length.count, length.settled, length.sequence = 0, 0, text
        kept, made = [], []
        for turn in range(12):
            length.settled = root = length.count
            drafted = rng.randint(0, 6)
            for at in range(drafted):
                layer.run(inputs_of(1, 1000 * seed + 50 * turn + at), PARTS)
                length.count += 1
            length.count = root
            inputs = inputs_of(1 + drafted, 7000 * (seed + 1) + 100 * text + turn)
            out = layer.run(inputs, PARTS)
            stands = rng.randint(1, 1 + drafted)
            length.count += stands
            kept.append(inputs[:stands])
            made.append(out[:stands])
        assert torch.equal(torch.cat(made), alone(torch.cat(kept)))


@pytest.mark.parametrize("seed", range(4))
def test_each_path_of_a_tree_is_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randint(3, 20)
    parents = [rng.randint(0, at) for at in range(nodes - 1)]
    before, inputs = inputs_of(2, 11), inputs_of(nodes, 12 + seed)  # fewer than taps look back at
    layer, length = new_layer()
    layer.run(before, PARTS)
    length.count = length.settled = len(before)
    length.tree = tree = Tree.of(parents)
    out = layer.run(inputs, PARTS)

    def path_to(node: int) -> list[int]:
        return [*path_to(tree.parents[node]), node] if node >= 0 else []

    for node in range(nodes):
        wanted = alone(torch.cat([before, inputs[path_to(node)]]))
        assert torch.equal(out[node], wanted[-1])
    # The same, node by node, as trees are drafted.
    drafted = []
    for node in range(nodes):
        length.tree = Tree.of(parents[:node], rows=1)
        drafted.append(layer.run(inputs[node : node + 1], PARTS))
        length.count += 1
    assert torch.equal(torch.cat(drafted), out)
    # A path is kept, and the text goes on behind it.
    length.count, length.tree = len(before), tree
    layer.run(inputs, PARTS)
    path, following = path_to(nodes - 1), inputs_of(5, 99)
    layer.keep(len(before), torch.tensor(path) + len(before))
    length.count, length.tree = len(before) + len(path), None
    length.settled = length.count
    wanted = alone(torch.cat([before, inputs[path], following]))
    assert torch.equal(layer.run(following, PARTS), wanted[-5:])


def test_texts_side_by_side_are_each_alone() -> None:
    texts, counts = [new_layer() for _ in range(3)], [2, 1, 4]
    inputs = [inputs_of(count, 30 + at) for at, count in enumerate(counts)]
    out = BatchStateLayer([layer for layer, _ in texts], counts).run(torch.cat(inputs), PARTS)
    for found, each in zip(out.split(counts), inputs, strict=True):
        assert torch.equal(found, alone(each))


@pytest.mark.parametrize("prompt", [2, 5, MAX_LINEAR_ROWS + 4])
def test_another_sequence_goes_on_from_copied_inputs(prompt: int) -> None:
    inputs, other, following = inputs_of(prompt, 41), inputs_of(4, 42), inputs_of(3, 43)
    layer, length = new_layer()
    length.reading = True
    layer.run(inputs, PARTS)
    length.count = length.settled = prompt
    snapshot = layer.new_snapshot()
    layer.save(snapshot)
    length.reading = False
    layer.run(other, PARTS)
    length.count = length.settled = prompt + 4
    layer.run(other, PARTS)
    expected = alone(torch.cat([inputs, following]))[-3:]
    fresh, its = new_layer()
    for each, at in ((fresh, its), (layer, length)):
        at.count = at.settled = prompt
        each.restore(snapshot)
        assert torch.equal(each.run(following, PARTS), expected)


# The model


PROMPT, TOKENS = [*range(40, 60)], 24


def tokens(model: Path, **options: Any) -> list[int]:
    given = {"dtype": "float32", "draft_length": 3, "prefix_reuse": "tokens"} | options
    generator = Generator.from_pretrained(model, "16MiB", **given)
    try:
        generator.generate(PROMPT[:12], max_new_tokens=4, ignore_eos=True)
        # Begins as the text before: nothing of that may be taken.
        result = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        assert result.stats["draft_length_mean"] > 0
        return result.token_ids
    finally:
        generator.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_of_experts_is_loaded_in_float32(dtype: torch.dtype, tiny: Folder) -> None:
    opened = open_model(tiny(FAMILY))
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    stored = load_file(tiny(FAMILY) / FILE)
    for layer in opened.shape.experts.layers:
        bias = model.body.layers[layer].feed_forward.expert_bias  # type: ignore[index, union-attr]
        assert isinstance(bias, Tensor)
        assert bias.dtype == torch.float32
        assert bias.abs().max() > 0.05
        assert torch.equal(bias, stored[f"model.layers.{layer}.feed_forward.expert_bias"])
    assert model.nbytes == opened.shape.resident_bytes(dtype)
    opened.close()


def test_which_dense_layers_drafts_run_on_codes(tiny: Folder) -> None:
    """Products of convolutions and attention, and of dense MLPs: no router, and no taps."""
    opened = open_model(tiny(FAMILY))
    found = {shape.name.removeprefix("model."): shape.part for shape in opened.shape.draft_layers}
    conv = {
        f"layers.{at}.conv.{name}": ATTENTION for at in (0, 1) for name in ("in_proj", "out_proj")
    }
    heads = ("q_proj", "k_proj", "v_proj", "out_proj")
    attention = {f"layers.2.self_attn.{name}": ATTENTION for name in heads}
    mlp = {f"layers.0.feed_forward.{name}": MLP for name in ("w1", "w2", "w3")}
    assert found == conv | attention | mlp | {"lm_head": HEAD}
    assert opened.shape.dense_width == 96
    opened.close()


def test_memory_is_planned_for_the_inputs_of_convolutions(tiny: Folder) -> None:
    opened = open_model(tiny(FAMILY))
    cache = opened.shape.cache(32, torch.bfloat16, CPU)
    entries = 32 * 2 * 2 * 16 * 2  # of one layer with attention
    assert cache.nbytes == entries + 2 * (2 + 96) * 64 * 2
    assert opened.shape.states.nbytes(torch.bfloat16) == cache.nbytes - entries
    copies = opened.shape.cache(32, torch.bfloat16, CPU, snapshots=2)
    assert copies.nbytes == cache.nbytes + 2 * (2 * 2 * 64 * 2)
    assert opened.shape.states.nbytes(torch.bfloat16, 2) == copies.nbytes - entries
    opened.close()


@pytest.mark.wide
def test_tokens_in_float64(tiny: Folder) -> None:
    plain = load_plain(tiny(FAMILY), torch.float64)
    assert tokens(tiny(FAMILY), dtype="float64") == greedy_tokens(plain, PROMPT, TOKENS)


@pytest.mark.wide
def test_a_gptq_draft_brings_the_codes_of_convolutions(tiny: Folder, tmp_path: Path) -> None:
    """As `speq quantize --dense` writes them, under the names of the checkpoint."""
    out = tmp_path / "gptq"
    quantise_to(out, tiny(FAMILY), replace(SETTINGS, dense=True))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for module in ("1.conv.in_proj", "1.feed_forward.experts.7.w2", "0.feed_forward.w3"):
        assert f"model.layers.{module}.qweight" in index
    opened = open_model(tiny(FAMILY))
    shapes = opened.shape.draft_layers
    source = open_draft(str(out), opened.checkpoint, opened.store, opened.shape.experts, shapes)
    layouts = dense_draft("all", shapes, source).layouts
    assert [name for name, layout in layouts.items() if not layout.brought] == ["lm_head"]
    source.close()
    opened.close()
    expected = greedy_tokens(load_plain(tiny(FAMILY)), PROMPT, TOKENS)
    assert tokens(tiny(FAMILY), draft=str(out), draft_dense="all") == expected


@pytest.mark.wide
def test_experts_of_a_layer_in_one_tensor(tiny: Folder, tmp_path: Path) -> None:
    """As transformers holds them: the same tokens."""
    path = write_fused(tmp_path / "fused", tiny(FAMILY))
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in load_file(path / FILE)
    assert tokens(path) == greedy_tokens(load_plain(path), PROMPT, TOKENS)


@pytest.mark.wide
def test_another_configuration(tmp_path: Path) -> None:
    """Tied, with biases of convolutions and none of experts, more taps, and weights as they are."""
    model = write_model(
        tmp_path / "model",
        FAMILY,
        tie_word_embeddings=True,
        conv_bias=True,
        conv_L_cache=5,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        num_dense_layers=0,
        layer_types=["full_attention", "conv", "conv"],
    )
    assert not any("expert_bias" in name for name in load_file(model / FILE))
    assert tokens(model) == greedy_tokens(load_plain(model), PROMPT, TOKENS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": None}, r"has layer_types None; it must name each of 3 layers 'conv' or"),
        ({"layer_types": ["conv", "conv"]}, r"layer"),
        ({"layer_types": ["conv", "conv", "sliding_attention"]}, r"has layer_types \['conv', 'co"),
        ({"conv_L_cache": 1 << 30}, r"has conv_L_cache 1073741824; it must be at most 1024"),
        ({"conv_L_cache": 0}, r"has conv_L_cache 0; it must be at least 1"),
    ],
)
def test_configurations_that_no_model_has(
    changes: dict[str, Any], message: str, tiny: Folder, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny(FAMILY), path, ignore=shutil.ignore_patterns(".speq"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SpeqError, match=message):
        open_model(path)


def test_tensors_that_are_missing_are_named(tiny: Folder, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny(FAMILY), path, ignore=shutil.ignore_patterns(".speq"))
    whole = load_file(path / FILE)
    for name, message in (
        ("model.layers.1.conv.conv.weight", r"lacks 1 tensors .*layers\.1\.conv\.conv\.weight"),
        ("model.layers.2.feed_forward.expert_bias", r"lacks 1 tensors .*expert_bias"),
        ("model.layers.2.feed_forward.experts.3.w3.weight", "lacks up_proj of expert 3 in layer 2"),
    ):
        kept = {other: tensor for other, tensor in whole.items() if other != name}
        save_file(kept, path / FILE, metadata={"format": "pt"})
        with pytest.raises(SpeqError, match=message):
            Generator.from_pretrained(path, "16MiB", dtype="float32")
