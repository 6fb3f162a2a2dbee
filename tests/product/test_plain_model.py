"""Transformers' own model with experts read a layer at a time: logits are those of the whole."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from speq import SpeqError
from speq.measure import agreement, plain_model
from speq.measure.report import read_prompts
from speq.models.opened import open_model
from tests.helpers.cells import Folder
from tests.helpers.packed_files import Nvfp4Kind, write_packed
from tests.helpers.tiny_models import load_plain, write_model

OF_PICTURES = ("gemma4", "qwen3_vl_moe", "glm4v_moe")
FAMILIES = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "lfm2_moe",
    "mixtral",
    *OF_PICTURES,
)
SEQUENCES = [[*range(3, 40)], [9, 8, 7], [*range(100, 40, -1)]]
CPU = torch.device("cpu")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_model, "fits", lambda *arguments: False)


def logits_of(folder: Path) -> list[torch.Tensor]:
    whole = load_plain(folder)
    with torch.inference_mode():
        return [whole(torch.tensor([ids])).logits[0] for ids in SEQUENCES]


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_model(family: str, tiny: Folder) -> None:
    """Alone bit for bit, and together but for the order of sums."""
    wanted = logits_of(tiny(family))
    with closing(open_model(tiny(family))) as opened:
        plain = plain_model.load_plain(opened, torch.float32, CPU)
        assert plain.streamed
        for ids, logits, together in zip(SEQUENCES, wanted, plain.logits(SEQUENCES), strict=True):
            (alone,) = plain.logits([ids])
            # transformers' whole model of pictures and text is another class.
            assert family in OF_PICTURES or torch.equal(alone, logits)
            for found in (alone, together):
                torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("streamed")
def test_logits_of_experts_in_codes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    source = write_model(tmp_path / "16", "qwen3_moe", torch.bfloat16, **sizes)
    kind = Nvfp4Kind("modelopt", "nvfp4")
    model = write_packed(tmp_path / "model", tmp_path / "words", source, kind)
    wanted = logits_of(tmp_path / "words")
    with closing(open_model(model)) as opened:
        plain = plain_model.load_plain(opened, torch.float32, CPU)
        for ids, logits in zip(SEQUENCES, wanted, strict=True):
            assert torch.equal(plain.logits([ids])[0], logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_memory_does_not_hold(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    with closing(open_model(model)) as opened:
        whole, least = plain_model.needed_bytes(opened, getattr(torch, dtype))
    assert least < whole

    def run(free: int) -> bool:
        monkeypatch.setattr(plain_model, "available_bytes", lambda: free)
        texts = read_prompts(None, 3)
        return agreement.run(str(model), texts, memory_budget="64MiB", dtype=dtype).passed

    made: list[bool] = []
    load = plain_model.load_plain

    def watched(*arguments: object) -> plain_model.PlainModel:
        loaded = load(*arguments)
        made.append(loaded.streamed)
        return loaded

    monkeypatch.setattr(agreement, "load_plain", watched)
    assert run(whole) and run(whole - 1) and run(least)
    assert made == [False, True, True]
    with pytest.raises(SpeqError, match="for one layer's experts and all else in"):
        run(least - 1)
