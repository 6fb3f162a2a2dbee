"""A widened model computes what its source does, and its weights are not mere copies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from speq import Generator
from speq.bench.widen import Settings, run
from speq.bench.widen_words import shared_out
from speq.errors import SpeqError
from tests.helpers.full_disk import room_is
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
PROMPT = [*range(30, 70)]


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        return load_plain(path, torch.float32)(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("heads", ["copy", "keep"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("tied", [False, True])
def test_wide_model_computes_the_same(tmp_path: Path, heads: str, noise: float, tied: bool) -> None:
    """A float32 model with dense layers and biases: the same but for the order of sums."""
    source = write_model(tmp_path / "source", "qwen2_moe", tie_word_embeddings=tied)
    run(str(source), tmp_path / "wide", Settings(192, 96, noise, heads))
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (config["hidden_size"], config["moe_intermediate_size"]) == (192, 96)
    assert config["num_attention_heads"] == (12 if heads == "copy" else 4)
    exact, wide = logits(source), logits(tmp_path / "wide")
    assert (wide - exact).abs().max() < 1e-3 * exact.abs().max()


@pytest.fixture(scope="module")
def doubled(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("widened") / "wide"
    made = run(str(bundled), path, Settings(512, 128))
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0 <= files - made["bytes"] < 1 << 20
    return path


@pytest.mark.wide
def test_bundled_model_widened_says_the_same(bundled: Path, doubled: Path) -> None:
    """In bfloat16 words, computed in float32: greedy tokens, and through slots and a draft."""
    expected = greedy_tokens(load_plain(bundled, torch.float32), PROMPT, 40)
    assert greedy_tokens(load_plain(doubled, torch.float32), PROMPT, 40) == expected
    generator = Generator.from_pretrained(doubled, "160MiB", dtype="float32", draft_length=3)
    result = generator.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    generator.close()
    assert result.token_ids == expected
    assert result.stats["route_recall"] > 0.9
    assert result.stats["hit_rate"] < 1


@pytest.mark.wide
def test_what_lies_beside_the_weights_comes_along(bundled: Path, doubled: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (doubled / name).read_bytes() == (bundled / name).read_bytes()
    assert json.loads((doubled / "widened.json").read_text()) == {
        "source": "tiny-moe",
        "hidden_size": 512,
        "expert_width": 128,
        "noise": 1.0,
        "heads": "copy",
        "seed": 0,
        "draft_noise": 0.0,
    }


def tensor(path: Path, name: str) -> Tensor:
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(path / index[name], "pt") as file:
        return file.get_tensor(name)


@pytest.mark.wide
def test_same_seed_same_weights(bundled: Path, doubled: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    run(str(bundled), again, Settings(512, 128))
    run(str(bundled), other, Settings(512, 128, seed=1))
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert torch.equal(tensor(again, name), tensor(doubled, name))
    assert not torch.equal(tensor(other, name), tensor(doubled, name))


@pytest.mark.parametrize("count", [2, 8, 22])
def test_copies_add_up_to_the_weight(count: int) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    parts = shared_out(weight, count, 1.0, torch.Generator().manual_seed(3))
    assert parts.shape == (64, 96, count)
    assert parts.dtype == torch.bfloat16
    exact = weight.double()
    scale = exact.square().mean().sqrt()
    # Finer than rounding one copy of that size would be.
    error = (parts.double().sum(2) - exact).abs()
    assert error.mean() < scale / count * 2**-9
    # The noise is of the size that was asked for, less what summing to zero takes.
    spread = (parts.double() - exact.unsqueeze(2) / count).square().mean().sqrt() * count
    assert spread == pytest.approx(float(scale) * (1 - 1 / count) ** 0.5, rel=0.03)


def test_copies_without_noise_are_equal() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(4)).bfloat16()
    parts = shared_out(weight, 4, 0.0, torch.Generator())
    assert torch.equal(parts, (weight / 4).unsqueeze(2).expand(-1, -1, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 500}, "hidden_size is 500; it must be a multiple of the source's 256"),
        ({"hidden_size": 128}, "hidden_size is 128; it must be at least 256"),
        ({"expert_width": 100}, "expert_width is 100; it must be a multiple of the source's 64"),
        ({"noise": -1.0}, "noise is -1.0; it must be from 0 to"),
        ({"noise": float("nan")}, "noise is nan; it must be from 0 to"),
        ({"heads": "drop"}, "heads is 'drop'; it must be one of copy, keep"),
        ({"seed": -1}, "seed is -1; it must be from 0 to"),
    ],
)
def test_nonsense_is_refused(
    bundled: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpeqError, match=message):
        run(str(bundled), tmp_path / "wide", Settings(**settings))
    assert not (tmp_path / "wide").exists()


def test_what_cannot_be_written_is_said(
    bundled: Path, tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpeqError, match="is of family 'mixtral'; only qwen2_moe widens"):
        run(str(tiny("mixtral")), tmp_path / "wide", Settings())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(SpeqError, match="full exists already; give a folder that is empty"):
        run(str(bundled), tmp_path / "full", Settings())
    room_is(monkeypatch, 1 << 20)
    with pytest.raises(SpeqError, match=r"takes .* GiB and 1 MiB of disk are left at"):
        run(str(bundled), tmp_path / "wide", Settings())
