"""Random models in published shapes: sizes, names, floors, and a run from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import SpeqError
from speq.bench.runs.shapes import run
from speq.bench.settings import ShapesSettings
from speq.bench.shapes.floor import MachineRates, floor_of
from speq.bench.shapes.published import BY_NAME, SHAPES, shape_of
from speq.bench.shapes.random_checkpoint import checkpoint, config_of, plan_tensors
from speq.bench.shapes.routes import clairvoyant_misses, lru_hits, routes_of
from speq.models.families import FAMILIES
from speq.models.opened import open_model

THIN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}


@pytest.fixture
def thin(tmp_path: Path) -> Path:
    folder = tmp_path / "thin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THIN))
    return folder


@pytest.mark.parametrize("name", BY_NAME)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = config_of(BY_NAME[name])
    plans = plan_tensors(config, FAMILIES[config.model_type])
    weights = sum(torch.Size(plan.shape).numel() for plan in plans)
    assert weights == pytest.approx(BY_NAME[name].parameters, rel=0.005)


def test_names_are_the_published_ones() -> None:
    config = config_of(shape_of("qwen3-30b-a3b", 1))
    plans = {p.name: p.shape for p in plan_tensors(config, FAMILIES["qwen3_moe"])}
    layer = "model.layers.0"
    assert plans[f"{layer}.mlp.experts.127.gate_proj.weight"] == (768, 2048)
    assert plans[f"{layer}.mlp.experts.0.up_proj.weight"] == (768, 2048)
    assert plans[f"{layer}.mlp.experts.5.down_proj.weight"] == (2048, 768)
    others = {name: shape for name, shape in plans.items() if ".experts." not in name}
    assert others == {
        "model.embed_tokens.weight": (151_936, 2048),
        f"{layer}.self_attn.q_proj.weight": (4096, 2048),
        f"{layer}.self_attn.k_proj.weight": (512, 2048),
        f"{layer}.self_attn.v_proj.weight": (512, 2048),
        f"{layer}.self_attn.o_proj.weight": (2048, 4096),
        f"{layer}.self_attn.q_norm.weight": (128,),
        f"{layer}.self_attn.k_norm.weight": (128,),
        f"{layer}.mlp.gate.weight": (128, 2048),
        f"{layer}.input_layernorm.weight": (2048,),
        f"{layer}.post_attention_layernorm.weight": (2048,),
        "model.norm.weight": (2048,),
        "lm_head.weight": (151_936, 2048),
    }
    assert len(plans) == len(others) + 3 * 128


def test_caches_by_hand() -> None:
    # Behind a warm-up of 100 tokens: experts 0, 1, 2 in turn, two slots.
    routes = [[at % 3] for at in range(400)]
    assert lru_hits(routes, 2) == 0
    assert lru_hits(routes, 3) == 1
    # Who knows the future keeps the two that come next: one of three tokens misses.
    assert clairvoyant_misses(routes, 2) == pytest.approx(1 / 3)
    assert clairvoyant_misses(routes, 3) == 0


def test_routes_are_skewed_as_published_ones() -> None:
    routes = routes_of(128, 8)
    assert all(len(set(chosen)) == 8 for chosen in routes)
    hits = [lru_hits(routes, slots) for slots in (19, 38, 64)]
    assert hits == pytest.approx([0.74, 0.89, 0.96], abs=0.08)


def test_floors_by_hand(thin: Path, tmp_path: Path) -> None:
    checkpoint(shape_of(str(thin), None), tmp_path / "model", 0)
    opened = open_model(tmp_path / "model")
    try:
        shape = opened.shape
    finally:
        opened.close()
    rates = MachineRates(1e9, 1e6, 1e9)
    floor = floor_of(shape, 1 << 30, 10, rates)
    attention = 2 * (4 * 32 * 64) + 2 * (2 * 32 * 64)
    dense = 3 * (attention + 16 * 64 + 2 * 64 + 2 * 32) + 64
    chosen = 3 * 4 * (3 * 64 * 32)
    read_bytes = (dense + 256 * 64 + chosen) * 11.3 / 8 + 10 * 2 * 3 * 2 * 2 * 32
    assert floor.moved_bytes == 0
    assert floor.token_s == pytest.approx(read_bytes / 1e9, rel=0.01)
    flops = 2 * 10 * (dense + chosen) + 2 * 3 * 100 * 4 * 32
    assert floor.prompt_s == pytest.approx(flops / 1e9, rel=0.01)
    # Without room for a single expert, each that is chosen comes over the link.
    assert floor_of(shape, 0, 10, rates).token_s == pytest.approx(chosen * 11.3 / 8 / 1e6)


def test_a_run_from_end_to_end(thin: Path, tmp_path: Path) -> None:
    settings = ShapesSettings(
        ("2MiB",), tmp_path / "model", layers=2, contexts=(8, 40), max_new_tokens=4, rounds=1
    )
    report = run(str(thin), settings)
    assert [row["context"] for row in report.rows] == [8, 40]
    assert all(row["tpot_ratio"] > 1 and row["again_s"] is None for row in report.rows)
    # It is written once: another run takes it, and one of other shapes refuses.
    before = (tmp_path / "model" / "shapes.json").stat().st_mtime_ns
    assert len(run(str(thin), settings).rows) == 2
    assert (tmp_path / "model" / "shapes.json").stat().st_mtime_ns == before
    with pytest.raises(SpeqError, match="holds something else"):
        checkpoint(shape_of(str(thin), 3), tmp_path / "model", 0)


def test_refusals(thin: Path, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"neither a folder with a config\.json nor one of qwen3"):
        shape_of("qwen9", None)
    with pytest.raises(SpeqError, match="layers is 4 and thin has 3"):
        shape_of(str(thin), 4)
    with pytest.raises(SpeqError, match="contexts go up to 510"):
        run(str(thin), ShapesSettings(("2MiB",), tmp_path / "model", contexts=(510,)))
    config = THIN | {"model_type": "gpt_oss"}
    (thin / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeqError, match="of family 'gpt_oss', which is not written here"):
        checkpoint(shape_of(str(thin), None), tmp_path / "other", 0)


def test_every_row_says_its_source() -> None:
    assert all(shape.source and shape.parameters > 1e9 for shape in SHAPES)
