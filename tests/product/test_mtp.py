"""A checkpoint's own layer that predicts tokens ahead: what is read, computed and refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.heads.head_text import HeadText
from speq.heads.mtp_file import mtp_of
from speq.heads.mtp_head import MtpHead
from speq.models.opened import open_model
from tests.helpers.head_walk import assert_pieces_make_the_whole
from tests.helpers.mtp_files import FILE, mtp_in_numpy, write_mtp
from tests.helpers.tiny_models import VOCAB, drawn_tokens, greedy_tokens, load_plain

HIDDEN = 64
Folder = Callable[[str], Path]


@pytest.fixture
def model(tiny: Folder, tmp_path: Path) -> Path:
    return write_mtp(tmp_path / "model", tiny("glm4_moe"), seed=1)


class Ends:
    """As much of a model as a head asks for: its embedding and its head."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, model: Path) -> None:
        tensors = load_file(model / FILE)
        self.table, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]

    def tokens(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids)

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.table[token_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.head.T


class Whole:
    """A text at once, in numpy."""

    def __init__(self, model: Path, features: Tensor) -> None:
        self.model, self.features = model, features
        self.config = AutoConfig.from_pretrained(model)
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        self.table = load_file(model / FILE)[prefix + "embed_tokens.weight"].double()

    def at(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """What the layer makes of the last token, and its scores of all tokens."""
        rows = self.features.double()
        while True:
            embedded = self.table[token_ids[1 : len(rows) + 1]]
            found = mtp_in_numpy(self.model, self.config, embedded, rows)
            if len(rows) == len(token_ids) - 1:
                return torch.from_numpy(found["feature"][-1]), torch.from_numpy(found["scores"][-1])
            rows = torch.cat([rows, torch.from_numpy(found["feature"][-1:])])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("own", [(), ("embed_tokens", "shared_head.head")])
def test_pieces_make_the_whole(own: tuple[str, ...], tiny: Folder, tmp_path: Path) -> None:
    """Prompts in chunks, then rounds: a chain, a tree, what was accepted."""
    path = write_mtp(tmp_path / "model", tiny("glm4_moe"), seed=2, own=own)
    opened = open_model(path)
    source = mtp_of(opened)
    assert source.owned == tuple(f"{name}.weight" for name in own)
    head = source.held(torch.float32, torch.device("cpu"))
    opened.close()
    assert_pieces_make_the_whole(
        HeadText(Ends(path), head, 200),  # type: ignore[arg-type]
        torch.randn(40, HIDDEN),
        lambda features: Whole(path, features),
        VOCAB,
        chunks=(1, 6, 9),
        rounds=(2, 0),
        nodes=3,
        atol=2e-5,
    )


def test_many_rows_are_read_at_once(model: Path) -> None:
    """A prompt, whose rows see one another by a mask."""
    opened = open_model(model)
    head = mtp_of(opened).held(torch.float32, torch.device("cpu"))
    opened.close()
    features, tokens = torch.randn(120, HIDDEN), [(7 * at) % VOCAB for at in range(120)]
    text = HeadText(Ends(model), head, 200)  # type: ignore[arg-type]
    text.hear(tokens, features)
    close(text.root(3).feature, Whole(model, features).at([*tokens, 3])[0])


def test_tokens_are_the_exact_models(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chains and trees, greedy and drawn, of a layer that knows nothing."""
    plain = load_plain(model)
    prompt = [*range(40, 60)]
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    greedily = greedy_tokens(plain, prompt, 30)
    drawn = drawn_tokens(plain, prompt, 30, SamplingParams(**options))
    for nodes in (None, 8):
        with caplog.at_level(logging.WARNING, logger="speq"):
            generator = Generator.from_pretrained(
                model,
                "8MiB",
                drafter="head",
                head="mtp",
                dtype="float32",
                draft_length=3,
                draft_nodes=nodes,
            )
        assert "no use for" not in caplog.text
        result = generator.generate(prompt, max_new_tokens=30, ignore_eos=True)
        assert result.token_ids == greedily
        assert result.stats["draft_length_mean"] > 0
        made = generator.generate(prompt, max_new_tokens=30, ignore_eos=True, **options)
        assert made.token_ids == drawn
        generator.close()


def test_the_layer_takes_its_share_of_the_budget(model: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "draft_length": 2, "context_length": 64}
    options |= {"drafter": "head", "head": "mtp"}
    generator = Generator.from_pretrained(model, "8MiB", **options)
    plan, head = generator.runtime.plan, generator.runtime._loaded.head
    assert isinstance(head, MtpHead)
    tensors = load_file(model / FILE)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    mine = [n for n in tensors if n.startswith("model.layers.3.") and not n.endswith(copies)]
    dense_bytes = sum(tensors[name].nbytes for name in mine if ".experts." not in name)
    slot_bytes = 3 * 64 * 32 * 4
    assert plan.items["head"] == head.nbytes == dense_bytes + 8 * slot_bytes
    held = sum(each.nbytes for each in [*head.layer.parameters(), *head.layer.buffers()])
    rotary = sum(each.nbytes for each in head.layer.rotary.buffers())
    assert held - rotary == dense_bytes
    smallest = sum(plan.items.values()) - (plan.slots - 2) * slot_bytes
    generator.close()
    with pytest.raises(SpeqError, match="smallest workable budget") as error:
        Generator.from_pretrained(model, smallest - 8 * slot_bytes, **options)
    assert "\n" not in str(error.value)


def test_what_is_no_layer_is_refused(model: Path, tiny: Folder, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(SpeqError) as error:
            Generator.from_pretrained(path, "8MiB", drafter="head", head="mtp", dtype="float32")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no tensor model.layers.3.eh_proj.weight" in refused(tiny("glm4_moe"))
    sentence = refused(tiny("olmoe"))
    assert "family olmoe" in sentence and "it reads those of glm4_moe" in sentence
    whole = load_file(model / FILE)

    def changed(**tensors: Tensor | None) -> Path:
        kept = {n: t for n, t in (whole | tensors).items() if t is not None}
        save_file(kept, model / FILE, metadata={"format": "pt"})
        return model

    name = "model.layers.3.hnorm.weight"
    assert f"lacks tensor {name}" in refused(changed(**{name: None}))
    assert f"{name} has shape [63]" in refused(changed(**{name: torch.ones(63)}))
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert "lacks up_proj of expert 5 in layer 3" in refused(changed(**{name: None}))
    without = {name: None for name in whole if "layers.3.mlp.experts." in name}
    assert "holds no experts of layer 3" in refused(changed(**without))
    config = json.loads((model / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
