"""What is gpt_oss' own: biases of experts, its activation's numbers, transposed experts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.devices.device import Processor
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot, read_matrices
from speq.files.alignment import ALIGNMENT
from speq.files.range_file import ENDS_BYTES
from speq.models import moe_model
from speq.models.kv_cache import KVCache
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from tests.helpers.gptq_files import Packing, write_gptq
from tests.helpers.tiny_models import experts_alone, greedy_tokens, load_plain

Folder = Callable[[str], Path]
PROMPT = [*range(40, 60)]
HIDDEN, WIDTH, EXPERTS = 64, 96, 8


@pytest.fixture
def model(tiny: Folder, tmp_path: Path) -> Path:
    """One that may be changed."""
    shutil.copytree(tiny("gpt_oss"), tmp_path / "model", ignore=shutil.ignore_patterns(".speq"))
    return tmp_path / "model"


def change(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_biases_are_held_as_kernels_take_them(dtype: torch.dtype, tiny: Folder) -> None:
    """Gate before up, in the dtype that is computed in, and counted."""
    path = tiny("gpt_oss")
    opened, stored = open_model(path), load_file(path / "model.safetensors")
    loaded = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    assert len(loaded.biases) == 3
    for layer, biases in enumerate(loaded.biases):
        prefix = f"model.layers.{layer}.mlp.experts."
        in_turns = stored[f"{prefix}gate_up_proj_bias"].to(dtype)
        assert biases.gate_up.shape == (EXPERTS, 2 * WIDTH)
        assert torch.equal(biases.gate_up[:, :WIDTH], in_turns[:, 0::2])
        assert torch.equal(biases.gate_up[:, WIDTH:], in_turns[:, 1::2])
        assert torch.equal(biases.down, stored[f"{prefix}down_proj_bias"].to(dtype))
    assert loaded.nbytes == opened.shape.resident_bytes(dtype)
    opened.close()


def test_other_families_have_no_biases(tiny: Folder) -> None:
    opened = open_model(tiny("mixtral"))
    loaded = moe_model.load(opened.family, opened.checkpoint, torch.float32, Processor())
    assert loaded.biases == []
    opened.close()


def test_readers_take_room_for_the_largest_matrix(tiny: Folder) -> None:
    """It is read there, and put in order on its way into the slot."""
    plain, turned = open_model(tiny("olmoe")), open_model(tiny("gpt_oss"))
    assert isinstance(turned.store, SafetensorsExpertStore)
    assert plain.store.reading_bytes == ENDS_BYTES + ALIGNMENT
    largest = 2 * WIDTH * HIDDEN * 4
    assert turned.store.reading_bytes == plain.store.reading_bytes + largest + ALIGNMENT
    plain.close()
    turned.close()


def test_sixteen_bits_are_turned_as_they_are(tiny_bfloat16: Folder) -> None:
    path = tiny_bfloat16("gpt_oss")
    opened, alone = open_model(path), experts_alone(load_file(path / "model.safetensors"))
    gate_up, down = read_matrices(opened.store, 1, 5, expert_slot(opened.store))
    names = [f"model.layers.1.mlp.experts.5.{name}.weight" for name in ("gate_proj", "up_proj")]
    wanted = torch.cat([alone[name] for name in names])
    assert torch.equal(gate_up.view(torch.int16), wanted.view(torch.int16))
    wanted = alone["model.layers.1.mlp.experts.5.down_proj.weight"]
    assert torch.equal(down.view(torch.int16), wanted.view(torch.int16))
    opened.close()


@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(tiny: Folder) -> None:
    """In float64, where nothing but an error is left of a difference; of a prompt that reaches
    beyond the windows, in two chunks.
    """
    path = tiny("gpt_oss")
    opened, plain = open_model(path), load_plain(path, torch.float64)
    generator = Generator.from_pretrained(path, "16MiB", dtype="float64", draft="none")
    model, backend = generator.runtime.model, generator.runtime.engine.offload.reader
    shapes, device = opened.shape.attention.kv_shapes, torch.device("cpu")
    cache = KVCache(3, shapes, 128, torch.float64, device)
    tokens = [at * 7 % 256 for at in range(90)]
    found = [model.forward(backend, [SequenceTokens(cache, tokens[:50])])]
    cache.advance(50)
    found.append(model.forward(backend, [SequenceTokens(cache, tokens[50:])]))
    wanted = plain.model(torch.tensor([tokens])).last_hidden_state
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-9, atol=1e-9)
    generator.close()
    opened.close()


@pytest.mark.parametrize(
    ("name", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.5), ("swiglu_limit", None)]
)
def test_other_numbers_of_the_activation_are_refused(
    name: str, value: float | None, model: Path
) -> None:
    change(model, **{name: value})
    wanted = {"swiglu_limit": "7.0", "swiglu_alpha": "1.702"}[name]
    with pytest.raises(SpeqError) as refused:
        open_model(model)
    sentence = str(refused.value)
    assert name in sentence
    assert wanted in sentence or "refused by transformers" in sentence


def test_a_draft_in_an_order_of_its_own_is_refused(model: Path, tmp_path: Path) -> None:
    """Its rows of gate and up would be those of other biases."""
    write_gptq(tmp_path / "draft", model, Packing(desc_act=True, group_size=16))
    with pytest.raises(SpeqError, match=r"\(desc_act\), and the model's experts have biases"):
        Generator.from_pretrained(model, "16MiB", draft=tmp_path / "draft")
    write_gptq(tmp_path / "static", model, Packing(desc_act=False, group_size=16))
    expected = greedy_tokens(load_plain(model), PROMPT, 24)
    generator = Generator.from_pretrained(
        model, "16MiB", draft=tmp_path / "static", dtype="float32", draft_length=3
    )
    result = generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert result.token_ids == expected
    assert result.stats["draft_length_mean"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp.experts.gate_up_proj_bias", "lacks 1 tensors .*gate_up_proj_bias"),
        ("self_attn.sinks", "lacks 1 tensors .*sinks"),
        ("mlp.experts.down_proj", "lacks down_proj of expert 0 in layer 1"),
    ],
)
def test_parts_that_are_absent(name: str, message: str, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=message):
        Generator.from_pretrained(model, "16MiB")


def test_experts_as_other_families_have_them_are_refused(model: Path) -> None:
    """[E, 2F, H]: of these widths no one takes them for [E, H, 2F]."""
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=r"is torch.float32 \[8, 192, 64\]; .* \[8, 64, 192\]"):
        open_model(model)
