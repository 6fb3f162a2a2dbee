"""Experts published in MXFP4, as those of gpt_oss are: the output is that of the words that they
stand for.

Another family, whose experts have no biases, is written that way too.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bench.lab import codec as bench_codec
from speq import Generator, SpeqError
from speq.experts.expert_store import expert_slot, read_matrices
from speq.models.dequantised import load_dequantized
from speq.models.opened import open_model
from speq.quantizing.models import pack
from tests.helpers.cells import Cell, loaded, outcomes
from tests.helpers.mxfp4_files import MXFP4_FAMILIES, write_mxfp4
from tests.helpers.often import often
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

NEW_TOKENS = 60
PROMPT = [*range(40, 60)]


@pytest.fixture(scope="module", params=MXFP4_FAMILIES)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A model in MXFP4, packed, and the words that it stands for."""
    root, family = tmp_path_factory.mktemp("mxfp4"), request.param
    width = {"qwen3_moe": "moe_intermediate_size", "gpt_oss": "intermediate_size"}[family]
    sizes = {"hidden_size": 96, width: 64}
    source = write_model(root / "16", family, torch.bfloat16, **sizes)
    model = write_mxfp4(root / "model", root / "words", source)
    pack(model, root / "packed")
    return model, root / "packed", root / "words"


@pytest.mark.parametrize(
    "cell",
    often(
        [
            Cell(3, "half", "own", codec="mxfp4", drafter="ngram", readers=4),
            Cell(3, "two slots", "own", "packed", codec="mxfp4", drafter="ngram"),
            Cell(0, "two slots", "own", codec="mxfp4", drafter="ngram"),
        ],
        quick=1,
        wide=1,
    ),
)
def test_greedy_tokens_are_those_of_the_words(cell: Cell, made: tuple[Path, Path, Path]) -> None:
    model, packed, words = made
    expected = greedy_tokens(load_plain(words), PROMPT, NEW_TOKENS)
    folder = packed if cell.store == "packed" else model
    generator, _ = loaded(cell, folder, "auto", "float32", len(PROMPT) + NEW_TOKENS)
    result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    seen = outcomes(generator.last_run.decode)
    assert result.stats["codec"] == "mxfp4"
    assert generator.runtime.plan.items["draft"] == 0
    generator.close()
    assert result.token_ids == expected
    assert bool(seen) == (cell.draft_length > 0)


def test_words_of_experts_are_those_of_transformers(made: tuple[Path, Path, Path]) -> None:
    model, packed, _ = made
    tensors = load_file(model / "model.safetensors")
    for folder in (model, packed):
        opened = open_model(folder)
        slot = expert_slot(opened.store)
        for layer in range(opened.store.num_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            gate_up, down = (
                convert_moe_packed_tensors(
                    tensors[f"{prefix}{name}_blocks"], tensors[f"{prefix}{name}_scales"]
                ).mT
                for name in ("gate_up_proj", "down_proj")
            )
            for expert in range(opened.store.num_experts):
                found = read_matrices(opened.store, layer, expert, slot)
                rows = torch.cat([gate_up[expert, 0::2], gate_up[expert, 1::2]])
                assert torch.equal(found[0].view(torch.int16), rows.contiguous().view(torch.int16))
                assert torch.equal(
                    found[1].view(torch.int16), down[expert].contiguous().view(torch.int16)
                )
        opened.close()


def test_no_draft_is_offered_that_is_as_large(
    made: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy_tokens(load_plain(made[2]), PROMPT, 8)
    generator = Generator.from_pretrained(made[0], "64MiB", dtype="float32")
    assert generator.runtime.residency_plan.drafter == "none"
    assert generator.generate(PROMPT, max_new_tokens=8, ignore_eos=True).token_ids == expected
    generator.close()
    assert "an INT4 draft would be about as large as the experts themselves" in caplog.text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gate_up_proj_scales", "lacks its scales, .*gate_up_proj_scales"),
        ("down_proj_blocks", "lacks down_proj of expert 0|has dtype torch.uint8"),
    ],
)
def test_parts_that_are_absent(
    name: str, sentence: str, made: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    for file in made[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{name}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=sentence):
        open_model(tmp_path)


def test_transformers_makes_the_same_words_of_gpt_oss(made: tuple[Path, Path, Path]) -> None:
    """Of the checkpoint as it is published, with its own dequantisation, and so the same tokens."""
    model, _, words = made
    if json.loads((model / "config.json").read_text())["model_type"] != "gpt_oss":
        return
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    ours = load_plain(words, torch.bfloat16)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    opened = open_model(model)
    loaded = load_dequantized(opened.checkpoint, lambda name: True, dtype=torch.bfloat16)
    opened.close()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_entropy_of_codes(made: tuple[Path, Path, Path]) -> None:
    """By hand, of all experts together: two codes to a byte, and a byte for each 32 of them."""
    model, _, _ = made
    [row] = bench_codec.run(str(model), bench_codec.CodecSettings()).rows
    codes = Counter[int]()
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_blocks"):
            packed = tensor.flatten().tolist()
            codes.update(byte & 15 for byte in packed)
            codes.update(byte >> 4 for byte in packed)
    total = codes.total()
    entropy = -sum(n / total * math.log2(n / total) for n in codes.values())
    assert (row["codec"], row["encode_gb_per_s"]) == ("mxfp4", None)
    assert row["entropy_bits"] == pytest.approx(entropy + 8 / 32)
    assert row["bits_per_weight"] >= 4.25 > row["entropy_bits"]
