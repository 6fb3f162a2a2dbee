"""Embeddings that stay on disk: their rows, what is planned, and what a spoilt file does."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import speq
from speq import Generator
from speq.errors import SpeqError
from speq.layers.dense_linear import DenseEmbedding
from speq.models.table_on_disk import RowsOnDisk
from speq.planning import model_spec
from tests.helpers.cells import Cell
from tests.helpers.cells import loaded as cell_loaded
from tests.helpers.often import often
from tests.helpers.tiny_models import WALKED, greedy_tokens, load_plain

PROMPT = [5, 17, 40, 3, 22, 9, 17, 17]
Folder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def small_tables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_spec, "LEAST_TABLE_BYTES", 1)


@contextlib.contextmanager
def running(folder: Path, budget: str = "half", dtype: str = "float32", **of: str) -> Iterator:
    cell = Cell(of.pop("draft_length", 0), budget, of.pop("draft", "own"), **of)
    generator, _ = cell_loaded(cell, folder, "auto", dtype, 64)
    try:
        yield generator
    finally:
        generator.close()


def table_of(generator: Generator) -> RowsOnDisk | None:
    embedding = generator.runtime.model._hf_model.get_input_embeddings()
    assert isinstance(embedding, DenseEmbedding)
    return embedding.table if isinstance(embedding.table, RowsOnDisk) else None


def is_tied(folder: Path) -> bool:
    names = load_file(next(folder.glob("*.safetensors")))
    return not any("head" in name for name in names)


@pytest.mark.parametrize("family", often([*WALKED], quick=4, wide=8))
def test_tokens_are_those_of_the_model(family: str, tiny: Folder) -> None:
    folder = tiny(family)
    with running(folder) as generator:
        table = table_of(generator)
        assert (table is None) == is_tied(folder)
        result = generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        spec = generator.runtime._loaded.model_spec
        assert generator.runtime.model.nbytes == spec.non_expert_bytes
        if table is not None:
            stored = load_plain(folder).get_input_embeddings().weight.detach()
            assert torch.equal(table.words(), stored)
    assert result.token_ids == greedy_tokens(load_plain(folder, torch.float32), PROMPT, 24)


@pytest.mark.parametrize("dense", ["raw", "lossless"])
def test_experts_get_its_memory(
    dense: str, tiny_bfloat16: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, tokens, held = [], [], []
    folder = tiny_bfloat16("qwen3_moe")
    for least in (1 << 30, 1):
        monkeypatch.setattr(model_spec, "LEAST_TABLE_BYTES", least)
        with running(folder, dtype="bfloat16", dense=dense) as generator:
            slots.append(generator.runtime.engine.offload.loader.cache.num_slots)
            spec = generator.runtime._loaded.model_spec
            held.append(spec.dense.sizes[0])
            assert spec.dense.sizes == tuple(generator.runtime.model.dense_sizes)
            tokens.append(generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids)
    assert tokens[0] == tokens[1]
    assert held[0] > 0 == held[1]
    assert slots[1] > slots[0]


def test_where_all_experts_fit_it_is_in_memory(tiny: Folder) -> None:
    with running(tiny("qwen3_moe"), "all") as generator:
        assert table_of(generator) is None


def test_drafts_read_it_too(tiny: Folder) -> None:
    folder = tiny("qwen3_moe")
    with running(folder, draft_length=3) as generator:
        assert table_of(generator) is not None
        result = generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        assert result.stats["draft_length_mean"] > 0
    assert result.token_ids == greedy_tokens(load_plain(folder, torch.float32), PROMPT, 24)


def test_another_dtype_than_on_disk_is_in_memory(tiny_bfloat16: Folder) -> None:
    with running(tiny_bfloat16("qwen3_moe"), dtype="float32") as generator:
        assert table_of(generator) is None


def test_plan_counts_it_as_a_run_does(tiny: Folder) -> None:
    folder = tiny("qwen3_moe")
    with running(folder) as generator:
        spec, budget = generator.runtime._loaded.model_spec, generator.runtime.plan.budget
        planned = speq.plan(folder, budget, context_length=64).model_spec
    assert planned.table_on_disk and planned.non_expert_bytes == spec.non_expert_bytes


def test_a_spoilt_one_in_a_pack_is_refused(tiny: Folder, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe")
    speq.pack(folder, tmp_path / "pack")
    with running(tmp_path / "pack") as generator:
        assert table_of(generator) is not None
    (shard,) = (tmp_path / "pack").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    length = int.from_bytes(content[:8], "little")
    first, _ = json.loads(content[8 : 8 + length])["model.embed_tokens.weight"]["data_offsets"]
    content[8 + length + first + 100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SpeqError, match=r"embed_tokens\.weight is not what was packed"):
        running(tmp_path / "pack").__enter__()


def test_rows_are_of_the_file_that_was_opened(tiny: Folder, tmp_path: Path) -> None:
    """Also where another one has taken its name."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("qwen3_moe"), folder)
    with running(folder) as generator:
        table = table_of(generator)
        assert table is not None
        before = table.words()
        for shard in folder.glob("*.safetensors"):
            shard.with_suffix(".new").write_bytes(bytes(shard.stat().st_size))
            shard.with_suffix(".new").replace(shard)
        assert torch.equal(table.words(), before)


def test_its_threads_end_with_the_model(tiny: Folder) -> None:
    with running(tiny("qwen3_moe")) as generator:
        table = table_of(generator)
        assert table is not None
        table.words()
    with pytest.raises(RuntimeError, match="after shutdown"):
        table._table._threads.submit(int)
