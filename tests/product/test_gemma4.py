"""What is gemma4's own: the part of a model of pictures and text that is of text, entries whose
widths differ by layer, experts and routers on the layer itself, and a cap of logits.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.devices.device import Processor
from speq.experts.expert_store import expert_slot
from speq.models import moe_model
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from speq.quantizing.models import quantize
from speq.routing import Route
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.tiny_models import drawn_tokens, experts_alone, greedy_tokens, load_plain

Folder = Callable[[str], Path]
PROMPT = [*range(40, 80)]  # longer than the window
CPU = torch.device("cpu")


@pytest.fixture
def model(tiny: Folder, tmp_path: Path) -> Path:
    """One that may be changed."""
    shutil.copytree(tiny("gemma4"), tmp_path / "model", ignore=shutil.ignore_patterns(".speq"))
    return tmp_path / "model"


def change(model: Path, **changes: object) -> None:
    """Of the text's configuration."""
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= changes
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.wide
def test_tokens_are_those_of_the_model_with_its_pictures(folders: Folders) -> None:
    """Plain transformers runs the whole of it."""
    plain = load_plain(folders.float32("gemma4"))
    assert plain.model.vision_tower is not None
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    greedy = greedy_tokens(plain, PROMPT, 32)
    drawn = drawn_tokens(plain, PROMPT, 32, SamplingParams(**options))
    assert len(set(greedy)) > 10
    for cell, sampling, expected in (
        (Cell(3, "half", "own"), {}, greedy),
        (Cell(5, "two slots", "own", trees="small"), options, drawn),
    ):
        path, draft = folders.of("gemma4", cell)
        generator, _ = loaded(cell, path, draft, "float32", len(PROMPT) + 32)
        made = generator.generate(PROMPT, max_new_tokens=32, ignore_eos=True, **sampling)
        assert made.token_ids == expected
        assert made.stats["draft_length_mean"] > 0
        generator.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_of_pictures_is_left_on_the_disk(dtype: torch.dtype, tiny: Folder) -> None:
    path = tiny("gemma4")
    opened, stored = open_model(path), load_file(path / "model.safetensors")
    made = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    text = [
        tensor.numel()
        for name, tensor in stored.items()
        if name.startswith("model.language_model.") and ".experts." not in name
    ]
    rotary = made.body.rotary_emb
    assert isinstance(rotary, torch.nn.Module)
    own = sum(buffer.nbytes for buffer in rotary.buffers())
    # What embeddings are multiplied by is no tensor of the file.
    assert made.nbytes == (sum(text) + 1) * dtype.itemsize + own
    assert made.nbytes == opened.shape.resident_bytes(dtype)
    rest = sum(t.nbytes for n, t in stored.items() if n.startswith("model.language_model."))
    rest -= sum(t.nbytes for n, t in stored.items() if ".experts." in n)
    assert opened.converted_bytes(torch.bfloat16) == rest
    opened.close()


def test_entries_are_as_wide_as_each_layers_heads(tiny: Folder) -> None:
    opened = open_model(tiny("gemma4"))
    cache = opened.shape.cache(40, torch.bfloat16, CPU)
    shapes = [tuple(tuple(part.shape) for part in layer.tensors) for layer in cache.layers]
    assert shapes == [((1, 2, 40, 16),) * 2] * 2 + [((1, 1, 40, 32),) * 2]
    assert opened.shape.kv_elements_per_token == 2 * (2 * 2 * 16) + 2 * 32
    assert cache.nbytes == 40 * 2 * opened.shape.kv_elements_per_token
    opened.close()


@torch.inference_mode()
def test_logits_are_capped(tiny: Folder) -> None:
    path = tiny("gemma4")
    opened, plain = open_model(path), load_plain(path)
    made = moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    hidden = 20 * torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    by_hand = hidden.double() @ plain.lm_head.weight.double().T
    assert by_hand.abs().max() > 40
    wanted = 30 * torch.tanh(by_hand / 30)
    torch.testing.assert_close(made.logits(hidden).double(), wanted, rtol=1e-5, atol=1e-4)
    opened.close()


class Heard:
    """A bank without experts, which asks what the next router would say."""

    drafts = False

    def __init__(self) -> None:
        self.said: list[Tensor | None] = []
        self.logits: list[Tensor | None] = []

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self.said.append(None if route.next_router is None else route.next_router([0, 2]))
        self.logits.append(route.router_logits)
        return torch.zeros_like(hidden_states)


@torch.inference_mode()
def test_routers_look_at_what_experts_are_given_through_a_norm(tiny: Folder) -> None:
    """By hand: a norm, a scale, a product and a softmax, of rows as a router was given them."""
    path = tiny("gemma4")
    opened, stored = open_model(path), load_file(path / "model.safetensors")
    made = moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    given: list[Tensor] = []
    for layer in made.body.layers:  # type: ignore[union-attr]
        layer.router.register_forward_pre_hook(lambda _, args: given.append(args[0].clone()))
    heard = Heard()
    cache = opened.shape.cache(8, torch.float32, CPU)
    made.forward(heard, [SequenceTokens(cache, [5, 6, 7])])
    opened.close()

    def log_softmax(rows: Tensor, layer: int) -> Tensor:
        router = f"model.language_model.layers.{layer}.router."
        rows = rows.double()
        normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        scaled = normed * stored[router + "scale"].double() / 64**0.5
        return (scaled @ stored[router + "proj.weight"].double().T).log_softmax(-1)

    assert len(given) == 3
    assert heard.said[-1] is None
    for layer, (rows, logits) in enumerate(zip(given, heard.logits, strict=True)):
        assert logits is not None
        torch.testing.assert_close(logits.double(), log_softmax(rows, layer), rtol=1e-4, atol=1e-4)
    for layer, said in enumerate(heard.said[:-1]):
        assert said is not None
        wanted = log_softmax(given[layer][[0, 2]], layer + 1)
        torch.testing.assert_close(said.double(), wanted, rtol=1e-4, atol=1e-4)


def test_experts_alone_are_the_same_records(model: Path, tiny: Folder) -> None:
    tensors = experts_alone(load_file(model / "model.safetensors"))
    assert "model.language_model.layers.2.experts.7.up_proj.weight" in tensors
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    alone, fused = open_model(model), open_model(tiny("gemma4"))
    one, other = expert_slot(alone.store), expert_slot(fused.store)
    for layer, expert in ((0, 0), (1, 3), (2, 7)):
        alone.store.read(layer, expert, one)
        fused.store.read(layer, expert, other)
        assert torch.equal(one, other)
    alone.close()
    fused.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3},
            "has num_kv_shared_layers 1, layers that share the keys and values of others, which "
            "speq does not run",
        ),
        (
            {"hidden_size_per_layer_input": 8},
            "has hidden_size_per_layer_input 8, embeddings of tokens for each layer, which speq",
        ),
        ({"use_bidirectional_attention": "all"}, "has use_bidirectional_attention 'all'"),
        ({"enable_moe_block": False}, "describes a model without routed experts"),
        ({"num_experts": None}, "describes a model without routed experts"),
        ({"top_k_experts": 9}, "has top_k_experts 9; it must be from 1 to the 8 experts"),
        ({"hidden_activation": "mish"}, "has the activation 'mish'"),
        ({"hidden_size": 1 << 20}, "has hidden_size 1048576; it must be at most"),
        ({"num_hidden_layers": 4}, "holds weights of 3 layers"),
        ({"vocab_size": 200}, "embed_tokens.weight has shape .264, 64."),
    ],
)
def test_what_does_not_run_is_refused_by_name(
    changes: dict[str, object], sentence: str, model: Path
) -> None:
    if changes.get("num_hidden_layers") == 4:
        changes = changes | {"layer_types": ["full_attention"] * 4, "per_layer_config": {}}
    change(model, **changes)
    with pytest.raises(SpeqError, match=sentence):
        open_model(model)


def test_it_is_not_quantised_by_what_experts_add(
    tiny: Folder, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody is told to."""
    with caplog.at_level("INFO", logger="speq"):
        Generator.from_pretrained(model, 1 << 30, drafter="int4").close()
    assert "the draft is made by rounding" in caplog.text
    assert "speq quantize" not in caplog.text
    with pytest.raises(SpeqError, match=r"is of family gemma4, which norms the output of exp"):
        quantize(tiny("gemma4"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_missing_is_named(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.language_model.layers.1.router.per_expert_scale"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=r"lacks 1 tensors .* model\.layers\.1\.router\.per_expert"):
        Generator.from_pretrained(model, 1 << 30)


def test_no_tensor_of_pictures_is_warned_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that the text has no use for is."""
    Generator.from_pretrained(model, 1 << 30, draft_length=0).close()
    assert "no use for" not in caplog.text
    tensors = load_file(model / "model.safetensors")
    tensors["model.language_model.layers.1.spare.weight"] = torch.zeros(3)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    Generator.from_pretrained(model, 1 << 30, draft_length=0).close()
    assert "model has no use for, such as model.language_model.layers" in caplog.text


def test_entries_are_taken_from_another_text(tiny: Folder) -> None:
    opened = open_model(tiny("gemma4"))
    one, other = (opened.shape.cache(12, torch.float32, CPU, number) for number in range(2))
    for at, tensor in enumerate(one.tensors()):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * at)
    one.length, one.known = 9, [*range(9)]
    other.take(one, 7)
    assert (other.length, other.known) == (7, [*range(7)])
    for theirs, ours in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(ours[:, :, :7], theirs[:, :, :7])
        assert not ours[:, :, 7:].any()
    opened.close()
