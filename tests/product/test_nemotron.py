"""Nemotron-H beyond what every family is tested for: the least step of its Mamba layers, experts of
latent rows, experts in fewer bits, parts of layers, and configurations that are refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from speq import Generator
from speq.errors import SpeqError
from speq.models.families import FAMILIES
from speq.models.length import Length
from speq.models.mamba import Mamba, nemotron_states
from speq.models.opened import open_model
from tests.helpers.fp8_files import write_fp8
from tests.helpers.packed_files import FAMILY_KINDS, Int4Kind, Nvfp4Kind, write_packed
from tests.helpers.tiny_models import config_of, greedy_tokens, load_plain, write_model

FAMILY = "nemotron_h"
PROMPT, TOKENS = [*range(40, 70)], 24
# Codecs, and how experts are published for them; None: FP8


def run(model: Path) -> list[int]:
    generator = Generator.from_pretrained(model, "64MiB", dtype="float32", draft_length=3)
    result = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    generator.close()
    return list(result.token_ids)


class Caches:
    """What holds the layer's cache, as a model's caches do."""

    def __init__(self, config: Any) -> None:
        self.length = Length()
        kind = nemotron_states(config).kind
        assert kind is not None
        self.layers = [kind.layer(torch.float32, torch.device("cpu"), self.length)]


def test_steps_have_a_least_length() -> None:
    """In a prompt and token by token alike, as transformers' pass over the whole has it."""
    config = config_of(FAMILY)
    torch.manual_seed(6)
    layer = NemotronHMamba2Mixer(config, 0).eval()
    for name, tensor in layer.named_parameters():
        tensor.data.normal_(std=0.1 if "proj" in name else 0.6)
    layer.dt_bias.data.sub_(8)
    rows = torch.randn(1, 90, config.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = layer(rows)[0]
        ours, caches = Mamba(layer), Caches(config)
        made = []
        for part in rows[0].split([70, 9, *[1] * 11]):
            caches.length.reading = len(part) > 64
            made.append(ours(part[None], cache_params=caches)[0])
            caches.length.count += len(part)
            caches.length.settled = caches.length.count
        torch.testing.assert_close(torch.cat(made), expected, rtol=1e-4, atol=1e-4)
        layer.time_step_limit = (0.0, float("inf"))
        unlike = ours(rows, cache_params=None)[0]
    assert float((unlike - expected).abs().max()) > 1e-3


def test_experts_of_latent_rows(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", FAMILY, moe_latent_size=32)
    opened = open_model(model)
    experts = opened.shape.experts
    opened.close()
    assert (experts.hidden_size, opened.shape.hidden_size, experts.gated) == (32, 64, False)
    assert run(model) == greedy_tokens(load_plain(model), PROMPT, TOKENS)


@pytest.mark.parametrize("kind", FAMILY_KINDS[FAMILY])
def test_experts_in_fewer_bits(kind: Int4Kind | Nvfp4Kind | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    source = write_model(tmp_path / "source", FAMILY, torch.bfloat16, **sizes)
    path, words = tmp_path / "model", tmp_path / "words"
    if kind is None:
        write_fp8(path, words, source)
    else:
        write_packed(path, words, source, kind)
    opened = open_model(path)
    opened.close()
    assert opened.store.codec.name == ("fp8" if kind is None else kind.codec)
    assert run(path) == greedy_tokens(load_plain(words), PROMPT, TOKENS)


def test_names_without_a_backbone(tmp_path: Path) -> None:
    """As other tools save it."""
    model = write_model(tmp_path / "model", FAMILY)
    expected = run(model)
    tensors = load_file(model / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, model / "model.safetensors", metadata={"format": "pt"})
    assert run(model) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("mlp_hidden_act", "silu"), ("use_bias", True), ("mlp_bias", True), ("n_group", 3)],
)
def test_what_no_published_model_has_is_refused(name: str, value: Any) -> None:
    config = config_of(FAMILY, **{name: value})
    with pytest.raises(SpeqError, match=rf"^config has {name} {value!r}"):
        FAMILIES[FAMILY].check(config, config.n_routed_experts, "config")
