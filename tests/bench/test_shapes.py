"""`speq bench shapes`: exact shapes, their floors by hand, and a thin model from end to end."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bench.lab import split
from speq.bench.settings import ShapesSettings as Settings
from speq.bench.shapes import checkpoint
from speq.bench.shapes import run as bench
from speq.bench.shapes.checkpoint import ShapedModel, shards_of, write
from speq.bench.shapes.floor import HeldBytes, MeasuredRates, attended_pairs, floor_of, windows
from speq.bench.shapes.published import SHAPES, PublishedShape, shape_named
from speq.bench.shapes.routes import (
    clairvoyant_misses,
    drawn_routes,
    lru_hits,
    most_used_hits,
    popularity,
)
from speq.bench.shapes.tensors import RandomTensor
from speq.cli.bench import show
from speq.devices.device import Processor
from speq.errors import Broken, SpeqError
from speq.models.opened import open_model
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.needed import absent

# Of the published files: tensors of the part of text, and their bytes where an index says them.
FILES = {
    ("Qwen3-30B-A3B", "bf16"): (18_867, 61_064_245_248),
    ("Qwen3.6-35B-A3B", "fp8"): (613 + 250 + 61_440, None),
    ("gpt-oss-20b", "mxfp4"): (459, 13_761_264_768),
    ("Gemma-4-26B-A4B", "bf16"): (657, None),
}
# In place of published sizes.
THIN = {
    **{"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128},
    **{"shared_expert_intermediate_size": 128, "num_experts": 16, "num_local_experts": 16},
    **{"n_routed_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000, "eos_token_id": 1},
}


def thin(name: str) -> PublishedShape:
    """A published model's row with narrow layers and few experts."""
    shape = SHAPES[name]
    config = json.loads(f"{{{shape.fields}}}")
    text = config.get("text_config", config)
    text |= {key: value for key, value in THIN.items() if key in text}
    return replace(shape, name="thin", fields=json.dumps(config)[1:-1])


def of(shape: PublishedShape, weights: str | None = None) -> ShapedModel:
    layers = 4 if "text_config" in shape.fields else 2
    return ShapedModel.of(shape, layers, weights, seed=0)


@pytest.mark.parametrize("name", SHAPES)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    shape = SHAPES[name]
    model = ShapedModel.of(shape, None, None, seed=0)
    if shape.parameters is not None:
        # Qwen rounds to billions.
        assert model.parameters / 1e9 == pytest.approx(shape.parameters, rel=0.01)
    assert sum(tensor.nbytes for tensor in model.tensors) == model.nbytes


@pytest.mark.parametrize(("name", "weights"), FILES)
def test_tensors_are_as_many_as_published_files_have(name: str, weights: str) -> None:
    model = ShapedModel.of(SHAPES[name], None, weights, seed=0)
    count, nbytes = FILES[name, weights]
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors) == count
    assert nbytes in (None, model.nbytes)


@pytest.mark.parametrize(
    ("name", "weights", "codec"),
    [
        ("Qwen3-30B-A3B", "fp8", "fp8"),
        ("Qwen3-30B-A3B", "int4", "int4"),
        ("Qwen3-30B-A3B", "nvfp4", "nvfp4"),
        ("gpt-oss-20b", None, "mxfp4"),
        ("Qwen3.6-35B-A3B", None, "raw"),
    ],
)
def test_checkpoints_are_read_as_they_are_written(
    name: str, weights: str | None, codec: str, tmp_path: Path
) -> None:
    """Names, shapes and formats are those that the loaders ask for; shards are small here."""
    model = of(thin(name), weights)
    assert write(model, tmp_path / "made", shard_bytes=400_000)
    assert not write(model, tmp_path / "made")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == model.nbytes
    for tensor in model.tensors:
        file = tmp_path / "made" / index["weight_map"][tensor.name]
        with safe_open(file, "pt") as opened:
            held = opened.get_tensor(tensor.name)
        assert (tuple(held.shape), held.dtype) == (tensor.shape, tensor.dtype)
        if tensor.spread and held.numel() > 10_000 and held.dtype == torch.bfloat16:
            assert held[..., 1:].float().std() == pytest.approx(tensor.spread, rel=0.1)
    opened_model = open_model(tmp_path / "made")
    assert opened_model.store.codec.name == codec
    opened_model.close()


def test_shards_hold_so_many_bytes_or_one_tensor() -> None:
    tensors = [RandomTensor(str(size), (size,)) for size in (10, 20, 30, 100, 5, 5)]
    cut = [[tensor.shape[0] for tensor in shard] for shard in shards_of(tensors, 100)]
    assert cut == [[10, 20], [30], [100], [5, 5]]


def test_other_contents_and_full_disks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of(thin("Qwen3-30B-A3B"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(SpeqError, match="holds something else"):
        write(model, tmp_path / "other")
    write(model, tmp_path / "made")
    with pytest.raises(SpeqError, match="holds something else"):
        write(replace(model, seed=1), tmp_path / "made")
    free = type("Usage", (), {"free": model.nbytes - 1})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: free)
    with pytest.raises(SpeqError, match="B are left at"):
        write(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "layers", "weights", "sentence"),
    [
        ("Qwen9", None, None, "neither a published model's nor a folder's"),
        ("gpt-oss-20b", None, "fp8", "published in mxfp4"),
        ("gpt-oss-20b", 25, None, "layers is 25 and gpt-oss-20b has 24"),
    ],
)
def test_nonsense_is_refused(
    given: str, layers: int | None, weights: str | None, sentence: str
) -> None:
    with pytest.raises(SpeqError, match=sentence):
        ShapedModel.of(shape_named(given), layers, weights, seed=0)


def test_floors_are_those_computed_by_hand() -> None:
    """Qwen3-30B-A3B: 48 layers, 8 of 128 experts of 3 x 2048 x 768 weights, 4 KV heads of 128."""
    model = ShapedModel.of(SHAPES["Qwen3-30B-A3B"], None, None, seed=0)
    expert = 3 * 2048 * 768 * 11.4 / 8
    embedding = 151_936 * 2048
    dense = 30_532_122_624 - 48 * 128 * 3 * 2048 * 768
    held = HeldBytes.of(model)
    assert held.expert == pytest.approx(expert)
    assert held.dense == pytest.approx(dense * 11.4 / 8)
    assert held.read_dense == pytest.approx((dense - embedding) * 11.4 / 8)
    rates = MeasuredRates(65e9, 5e9, 1e12)
    floor = floor_of(model, rates, 1 << 40, 8192)
    read = (dense - embedding) * 11.4 / 8 + 48 * 8 * expert + 48 * 2 * 4 * 128 * 8192 * 2
    assert (floor.read_bytes, floor.moved_bytes) == (pytest.approx(read), 0)
    assert floor.tpot_s == pytest.approx(read / 65e9)
    active = dense - 2 * embedding + 48 * 8 * 3 * 2048 * 768
    flops = 2 * active * 8192 + 48 * 2 * (8192 * 8193 / 2) * 32 * 2 * 128
    assert floor.ttft_s == pytest.approx(flops / 1e12)
    least = floor_of(model, rates, 0, 64)
    assert least.moved_bytes == pytest.approx(48 * 8 * expert)  # no slot, so all are moved
    assert least.tpot_s == pytest.approx(least.moved_bytes / 5e9)
    sliding = windows(ShapedModel.of(SHAPES["gpt-oss-20b"], None, None, seed=0))
    assert sliding == [128, float("inf")] * 12
    nemotron = ShapedModel.of(SHAPES["Nemotron-3-Nano-30B-A3B"], None, None, seed=0)
    assert windows(nemotron) == [float("inf")] * 6  # of 52 layers; the others have no KV
    grown = floor_of(nemotron, rates, 1 << 40, 8193).read_bytes
    assert grown - floor_of(nemotron, rates, 1 << 40, 8192).read_bytes == 6 * 2 * 2 * 128 * 2
    assert attended_pairs(5, 2) == 1 + 2 + 2 + 2 + 2


def test_caches_hit_as_often_as_counted_by_hand() -> None:
    routes = [[0], [1], [0], [2], [0], [1]]
    # Of the last four, 0 and 0 are held by the last two used; 2 and 1 are not.
    assert lru_hits([routes], 2) == pytest.approx(2 / 4)
    # Belady keeps 0 and 1, which are needed again; 2 is not.
    assert clairvoyant_misses(routes, 2) == pytest.approx(1 / 4)
    assert clairvoyant_misses(routes, 1) == pytest.approx(2 / 4)
    assert clairvoyant_misses(routes, 3) == 0
    assert most_used_hits([routes], 4, 0.25) == pytest.approx(3 / 6)
    assert most_used_hits([routes], 4, 0.375) == pytest.approx(4 / 6)


def test_routes_are_as_skewed_as_published() -> None:
    assert float(popularity(128, 8).sum()) == pytest.approx(8, rel=0.01)
    routes = drawn_routes(128, 8, 2000)
    hits = [most_used_hits([routes], 128, share) for share in (0.05, 0.15, 0.30, 0.50)]
    assert hits == pytest.approx([0.37, 0.74, 0.89, 0.96], abs=0.02)


def thin_settings(tmp_path: Path, **further: Any) -> Settings:
    config: dict[str, Any] = thin("Qwen3-30B-A3B").content(2, None)
    (tmp_path / "thin").mkdir()
    (tmp_path / "thin" / "config.json").write_text(json.dumps(config))
    return Settings(
        budgets=("16MiB",),
        contexts=(4, 24),
        folder=tmp_path / "made",
        max_new_tokens=4,
        rounds=2,
        run={"packed_copy": "none"},
        **further,
    )


def test_thin_model_is_measured_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = thin_settings(tmp_path)
    report = bench.run(str(tmp_path / "thin"), settings)
    assert "of disk in" in capsys.readouterr().err
    assert [(row["context"], row["samples"]) for row in report.rows] == [(4, 2), (24, 2)]
    for row in report.rows:
        assert row["tpot_ratio"] == row["tpot_ms"] / row["tpot_floor_ms"]
        assert row["forecast_error"] == row["forecast_ms"] / row["steady_ms"] - 1
        assert row["first_run_s"] > row["load_s"] > 0
        assert row["peak_bytes"] > 0
    shares = [line["most_used"] for line in report.curve]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.96, abs=0.04)
    show(bench, report)
    assert "least recently used" in capsys.readouterr().out
    assert "random parameters in bf16" in bench.notes(report)[0]


@pytest.mark.wide
def test_llama_cpp_runs_beside(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("llama_cpp") is None:
        absent(request.config, "llama-cpp", "llama-cpp-python is not installed")
    report = bench.run(str(tmp_path / "thin"), thin_settings(tmp_path, llama_cpp=True))
    for row, other in zip(report.rows, report.beside, strict=True):
        assert (other["budget"], other["context"]) == (row["budget"], row["context"])
        assert other["tpot_ratio"] == other["tpot_ms"] / row["tpot_ms"]
        assert other["ttft_s"] > 0
    show(bench, report)
    assert "llama.cpp on the same weights" in capsys.readouterr().out


def test_llama_cpp_that_cannot_run_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    report = bench.run(str(tmp_path / "thin"), thin_settings(tmp_path, llama_cpp=True))
    assert [row["tpot_ms"] for row in report.beside] == [None, None]
    assert "llama.cpp at 16MiB: llama_cpp is not installed" in bench.notes(report)[-1]


def test_the_split_of_a_gpu_and_its_host_on_a_device_that_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens with and without the host's share; and what differs ends the run."""
    monkeypatch.setitem(SHAPES, "thin", thin("Qwen3-30B-A3B"))
    settings = split.SplitSettings(
        *(("42MiB",), "thin", 2, tmp_path / "made"), prompt_tokens=4, max_new_tokens=6, rounds=1
    )
    machine = HostDevice()
    monkeypatch.setattr(split, "find_device", lambda name: machine)
    every = "speq.scheduler.host_share.HostShare.choose"
    monkeypatch.setattr(every, lambda share, missing: [*missing] if share.open else [])
    with host_device(machine), pytest.MonkeyPatch.context() as inside:
        found = {"cpu": Processor(), "cuda": machine}
        inside.setattr("speq.load.find_device", lambda name: found[name])
        rows = split.run(settings).rows
        assert [(row["device"], row["host_compute"]) for row in rows] == [
            *(("cuda", "none"), ("cuda", "auto"), ("cpu", "all"))
        ]
        assert [row["same_tokens"] for row in rows[:2]] == [1, 1]
        assert rows[0]["host_experts"] == 0 < rows[1]["host_experts"]
        assert rows[0]["moved_bytes_per_token"] > 0
        tokens = iter([[[1]], [[2]]])
        inside.setattr(split, "measure", lambda *given, **options: (next(tokens), {}))
        with pytest.raises(Broken, match="tokens depend on the host's share, in 42MiB"):
            split.run(settings)
