"""Qwen4-Exp: features of n-grams from a table on disk, and tokens that an indexer selects."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator
from speq.errors import Broken, SpeqError
from speq.files.range_file import RangeFile
from speq.files.row_table import RowTable, TablePart
from speq.files.safetensors_file import SafetensorsFile
from speq.models.layer_range import LayerRange
from speq.models.ngram_layer import NGramFeatures, TableOnDisk
from speq.models.opened import open_model
from speq.quantizing.models import quantize
from tests.helpers.tiny_models import EOS, FAMILIES, greedy_tokens, load_plain, write_model

pytestmark = pytest.mark.skipif("qwen4_exp" not in FAMILIES, reason="transformers lacks the family")

FILE = "model.safetensors"
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
RUN: dict[str, Any] = {"dtype": "float32", "draft_length": 3, "profile": "none"}
Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    "prompt",
    [
        [EOS, 5, EOS, EOS, 7, 8, EOS],
        [3],
        [*range(40), EOS, *range(60, 110), EOS, 9],
    ],
    ids=["ends", "one", "long"],
)
def test_n_grams_end_where_a_text_does(prompt: list[int], tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny("qwen4_exp"), "64MiB", **RUN)
    expected = greedy_tokens(load_plain(tiny("qwen4_exp")), prompt, 24)
    assert generator.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == expected
    generator.close()


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_layers_with_other_features(gate: str, tmp_path: Path) -> None:
    """Two layers with tables, longer n-grams and another gate."""
    more = {"ngram_size": 4, "ple_layer_ids": [2, 3], "ple_embed_dim": 36, "output_gate_type": gate}
    model = write_model(tmp_path / "model", "qwen4_exp", **more)
    generator = Generator.from_pretrained(model, "64MiB", **RUN)
    prompt = [(7 * at * at + 3 * at) % 256 for at in range(70)]
    expected = greedy_tokens(load_plain(model), prompt, 24)
    assert generator.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == expected
    generator.close()


def test_a_table_stays_on_disk(tiny: Folder) -> None:
    """Neither a plan nor a run counts it; its rows are those of its parts together."""
    stored = load_file(tiny("qwen4_exp") / FILE)
    whole = torch.cat([stored[f"{TABLE}.shard_{at}.weight"] for at in range(5)])
    generator = Generator.from_pretrained(tiny("qwen4_exp"), "64MiB", **RUN)
    model = generator.runtime.model
    (table,) = (each for each in model.body.modules() if isinstance(each, TableOnDisk))
    assert not [*table.parameters(), *table.buffers()]
    ids = torch.tensor([[0, len(whole) - 1, 7], [7, len(whole) // 2, 3]])
    assert torch.equal(table(ids), whole[ids])
    opened = open_model(tiny("qwen4_exp"))
    assert opened.shape.tables == (tuple(whole.shape),)
    assert opened.shape.resident_bytes(torch.float32) == model.nbytes
    opened.close()
    generator.close()


def test_a_run_holds_no_second_copy_of_convolutions(tiny: Folder) -> None:
    """The weights of features are the checkpoint's alone, whatever passes have run."""
    generator = Generator.from_pretrained(tiny("qwen4_exp"), "64MiB", **RUN)
    generator.generate([*range(30)], max_new_tokens=12, ignore_eos=True)
    features = [
        each.forward
        for name, each in generator.runtime.model.body.named_modules()
        if name.endswith(".ple")
    ]
    assert len(features) == 1
    for each in features:
        assert isinstance(each, NGramFeatures)
        weight = each._module.conv1d.weight
        assert each.weight.data_ptr() == weight.data_ptr()
        assert each.weight.untyped_storage().nbytes() == weight.untyped_storage().nbytes()
        assert not any(isinstance(held, torch.Tensor) for held in vars(each).values())
    generator.close()


@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_read_over_the_ends_of_parts(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setattr(RangeFile, "read_cached", lambda *of: False)
    whole = torch.arange(60.0).view(12, 5)
    save_file({"a": whole[:7].clone(), "b": whole[7:].clone()}, tmp_path / FILE)
    with SafetensorsFile(tmp_path / FILE) as file, RangeFile(tmp_path / FILE) as own:
        parts = [
            TablePart(own, file.tensors[each].offset, rows) for each, rows in (("a", 7), ("b", 5))
        ]
        table = RowTable(parts, 5, torch.float32)
        ids = torch.tensor([11, 6, 7, 0, 6])
        assert torch.equal(table.read(ids), whole[ids])
        assert torch.equal(table.read(ids[:1]), whole[ids[:1]])
        every = torch.arange(12).view(3, 4)
        assert torch.equal(table.read(every), whole[every])
        with pytest.raises(Broken, match="row 12 of a table of 12 rows"):
            table.read(torch.tensor([12]))
        table.close()


def changed(source: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a model whose tensors were changed."""
    to.mkdir()
    for file in source.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / FILE)
    change(tensors)
    save_file(tensors, to / FILE, metadata={"format": "pt"})
    return to


def test_constants_of_hashes_may_be_missing(tiny: Folder, tmp_path: Path) -> None:
    def fewer(tensors: dict[str, Tensor]) -> None:
        names = [name for name, tensor in tensors.items() if tensor.dtype == torch.int64]
        assert len(names) == 3
        for name in names:
            del tensors[name]

    generator = Generator.from_pretrained(
        changed(tiny("qwen4_exp"), tmp_path / "fewer", fewer), "64MiB", **RUN
    )
    expected = greedy_tokens(load_plain(tiny("qwen4_exp")), [*range(30)], 12)
    made = generator.generate([*range(30)], max_new_tokens=12, ignore_eos=True)
    assert made.token_ids == expected
    generator.close()


def test_damaged_tables_are_refused(tiny: Folder, tmp_path: Path) -> None:
    def shorter(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{TABLE}.shard_4.weight"]

    model = changed(tiny("qwen4_exp"), tmp_path / "shorter", shorter)
    with pytest.raises(SpeqError, match=r"rows of table .*ngram_embedding; config.json makes it"):
        Generator.from_pretrained(model, "64MiB", **RUN)

    def narrower(tensors: dict[str, Tensor]) -> None:
        name = f"{TABLE}.shard_2.weight"
        tensors[name] = tensors[name][:, :3].contiguous()

    model = changed(tiny("qwen4_exp"), tmp_path / "narrower", narrower)
    with pytest.raises(SpeqError, match=r"shard_2.weight has shape .* its rows 8 wide"):
        Generator.from_pretrained(model, "64MiB", **RUN)


def test_what_the_family_does_not_run_in_is_refused(tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"pass on several rows of a token, .* run it on one"):
        open_model(tiny("qwen4_exp"), part=LayerRange(0, 2))
    with pytest.raises(SpeqError, match="layers mix several rows of a token"):
        quantize(tiny("qwen4_exp"), out=tmp_path / "out")


def test_counts_of_experts_and_tables_are_in_the_config_alone(tiny: Folder) -> None:
    text = json.loads((tiny("qwen4_exp") / "config.json").read_text())["text_config"]
    opened = open_model(tiny("qwen4_exp"))
    ((rows, width),) = opened.shape.tables
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    assert width * heads == text["ple_embed_dim"]
    assert rows % text["make_ngram_vocab_size_divisible_by"] == 0
    assert rows > heads * text["ngram_vocab_size_base"]
    opened.close()
