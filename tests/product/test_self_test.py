"""Layers of ours beside those of the installed transformers: what differs is found before a model
is loaded, and what ours are given under a name that they do not know is refused.
"""

import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import SpeqError
from speq.heads.draft_head import VisibleKV
from speq.kernels.decoder_ops import Heads
from speq.layers import arguments
from speq.layers.arguments import cache_name
from speq.layers.fused_attention import DecodeBatch, FusedAttention
from speq.layers.offloaded_experts import OffloadedExperts
from speq.models import delta_net, kimi_delta, mamba, self_test, short_conv
from speq.models.attention import attend_in_blocks
from speq.models.families import FAMILIES
from speq.models.kv_cache import KVCache
from speq.models.layer_range import LayerRange, MissingLayer
from speq.models.opened import open_model
from speq.models.packed_batch import BatchSpan, cache_of
from speq.models.self_test import check_transformers, fill
from speq.version import TESTED_TRANSFORMERS, is_tested, transformers_version
from tests.helpers import tiny_models
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import WITH_STATES, config_of

STAND_INS = {
    "qwen3_next": (delta_net.DeltaNet, "cache_params"),
    "qwen3_5_moe": (delta_net.DeltaNet, "cache_params"),
    "lfm2_moe": (short_conv.ShortConv, "past_key_values"),
    "granitemoehybrid": (mamba.Mamba, "cache_params"),
    "nemotron_h": (mamba.Mamba, "cache_params"),
    "qwen4_exp": (delta_net.DeltaNet, "cache_params"),
    "kimi_linear": (kimi_delta.KimiDelta, "cache_params"),
    "glm5_next": (kimi_delta.KimiDelta, "cache_params"),
    "bailing_hybrid": (kimi_delta.KimiDelta, "cache_params"),
}
Folder = Callable[[str], Path]


def text_config(family: str, **overrides: Any) -> Any:
    return FAMILIES[family].built_config(config_of(family, **overrides).get_text_config())


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """No family was compared before, nor is one after that."""
    before = set(self_test._passed)
    self_test._passed.clear()
    yield
    self_test._passed.clear()
    self_test._passed.update(before)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_layers_compute_what_those_of_transformers_do(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "speq"):
        check_transformers(FAMILIES[family], text_config(family))
    assert "cannot compare" not in caplog.text
    assert torch.equal(torch.get_rng_state(), state)


def swallowing(stand_in: Any, name: str) -> Callable[..., Tensor]:
    """The call of a stand-in that knows the KV cache by one name, and takes all others."""
    own = stand_in.__call__

    def called(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        made: Tensor = own(self, hidden_states, **{name: given.get(name)})
        return made

    return called


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_cache_under_another_name_is_found(
    family: str, monkeypatch: pytest.MonkeyPatch, tiny: Folder
) -> None:
    """A stand-in that does not know the name begins each pass as if it were a whole text."""
    stand_in, _ = STAND_INS[family]
    monkeypatch.setattr(stand_in, "__call__", swallowing(stand_in, "cache_of_another_name"))
    monkeypatch.setattr(arguments, "CACHE_NAMES", (*arguments.CACHE_NAMES, "cache_of_another_name"))
    kind = {"lfm2_moe": "conv"}.get(family, "linear_attention")
    version = re.escape(transformers_version())
    said = f"transformers {version}, a layer of kind {kind} of family {family} does not compute"
    with pytest.raises(SpeqError, match=said):
        open_model(tiny(family))
    if FAMILIES[family].streams is not None:  # runs in no stages
        return
    with pytest.raises(SpeqError, match=said):  # no stage is loaded either
        open_model(tiny(family), part=LayerRange(1, 3))


def test_a_cache_that_ours_are_not_given_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CACHE_NAMES", ("cache_of_another_name",))
    with pytest.raises(SpeqError, match=r"Lfm2MoeModel.forward .* by no name that speq knows"):
        check_transformers(FAMILIES["lfm2_moe"], text_config("lfm2_moe"))


def test_experts_of_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if gate and up had changed their places."""
    given = self_test.replace_experts

    def exchanged(*arguments: Any) -> tuple[Tensor, Tensor]:
        gate_up, down = given(*arguments)
        return gate_up.roll(gate_up.shape[1] // 2, dims=1), down

    monkeypatch.setattr(self_test, "replace_experts", exchanged)
    with pytest.raises(SpeqError, match=r"a layer of family mixtral .*a prompt: by"):
        check_transformers(FAMILIES["mixtral"], text_config("mixtral"))


def test_compared_once_for_each_kind_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    own = fill

    def filled(model: Any, seed: int) -> None:
        built.append(len(model.model.layers))
        own(model, seed)

    monkeypatch.setattr(self_test, "fill", filled)
    lfm2 = FAMILIES["lfm2_moe"]
    for _ in range(2):
        check_transformers(lfm2, text_config("lfm2_moe"))
    assert built == [3]  # up to the first layer of attention
    check_transformers(lfm2, text_config("lfm2_moe", layer_types=["conv"] * 3))
    assert built == [3, 2]  # the first layer is dense
    many = {"num_hidden_layers": 12, "first_k_dense_replace": 3}
    check_transformers(FAMILIES["deepseek_v3"], text_config("deepseek_v3", **many))
    assert built == [3, 2, 4]


def test_models_that_transformers_cannot_run_small_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_test, "fill", lambda model, seed: 1 / 0)
    with caplog.at_level(logging.WARNING, "speq"):
        check_transformers(FAMILIES["mixtral"], text_config("mixtral"))
    assert "cannot compare its layers" in caplog.text
    assert "ZeroDivisionError" in caplog.text


class Mixer(torch.nn.Module):
    """What the stand-ins want of a module that they stand in for."""

    num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel_size = 1, 1, 2, 2, 2
    n_groups, num_heads, ssm_state_size, head_dim = 1, 1, 2, 2


Mixer.__module__ = "transformers.models.qwen3_next.modeling_qwen3_next"


@pytest.mark.parametrize("stand_in", [delta_net.DeltaNet, mamba.Mamba, short_conv.ShortConv])
def test_stand_ins_are_given_a_cache_or_refuse(stand_in: Any) -> None:
    mixer = Mixer()
    call, rows = stand_in(mixer), torch.zeros(1, 1, 2)
    with pytest.raises(SpeqError, match="is given the KV cache by no name"):
        call(rows, attention_mask=None)
    with pytest.raises(SpeqError, match=r"transformers .* passes state_of_sequence to .* not know"):
        call(rows, cache=None, state_of_sequence=object())
    with pytest.raises(SpeqError, match="by cache and past_key_values"):
        call(rows, cache=None, past_key_values=None)
    with pytest.raises(SpeqError, match="passes seq_idx to"):
        call(rows, cache=None, seq_idx=torch.zeros(1, 1))


def test_other_modules_refuse_what_they_do_not_know() -> None:
    rows = torch.zeros(1, 2, 4)
    assert MissingLayer()(rows, cache=None, attention_mask=None, position_ids=None) is rows
    with pytest.raises(SpeqError, match="passes second_stream to MissingLayer"):
        MissingLayer()(rows, second_stream=rows)
    with pytest.raises(TypeError):
        OffloadedExperts(None, 3)  # type: ignore[call-arg]
    heads = torch.zeros(1, 2, 1, 4)
    mask, sinks = torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.zeros(2)
    with pytest.raises(SpeqError, match="passes softcap to attention"):
        attend_in_blocks(Mixer(), heads, heads, heads, mask, 0.5, sinks, softcap=3.0)
    linear = torch.nn.Identity()
    attention = FusedAttention(linear, 0, lambda: None, (linear,) * 3, Heads(1.0, None, None))
    with pytest.raises(SpeqError, match="passes cache to FusedAttention"):
        attention(rows[0], attention_mask=DecodeBatch([], None, torch.empty(0)), cache=None)
    layer = KVCache(1, ((2, 4), (2, 4)), 3, torch.float32, torch.device("cpu")).layers[0]
    with pytest.raises(TypeError):
        layer.update(heads, heads, more=1)


def test_caches_are_told_what_attention_is_given() -> None:
    """As transformers 5.24 tells them: what else attention was given, in a dictionary."""
    entries = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    cache = KVCache(1, ((2, 4), (2, 4)), 3, torch.float32, torch.device("cpu"))
    for held in (VisibleKV(cache.layers[0]), cache, cache_of([BatchSpan(cache, 0, 1, None)])):
        for got, given in zip(
            held.update(*entries, 0, kwargs={"use_cache": True}), entries, strict=True
        ):
            assert torch.equal(got, given)
        with pytest.raises(TypeError):
            held.update(*entries, 0, state_of_text=1)


def test_prompts_give_the_rule_as_many_keys_as_values(tiny: Folder) -> None:
    """transformers 5.17 has keys that value heads share repeated in front of its rule."""
    family = FAMILIES["qwen3_next"]
    model, _, _ = self_test.run_own_pass(family, text_config("qwen3_next"), 2, 1)
    net = delta_net.DeltaNet(model.model.layers[1].linear_attn)
    given: list[torch.Size] = []
    own = net._chunked

    def chunked(*inputs: Tensor, **others: Any) -> Any:
        given.extend(each.shape[:3] for each in inputs)
        return own(*inputs, **others)

    net._chunked = chunked
    net(torch.randn(1, 5, self_test.HIDDEN_SIZE), cache=None)
    assert given == [(1, 5, 4)] * 3


def test_names_of_caches() -> None:
    assert cache_name(lambda hidden, cache: None) == "cache"
    assert cache_name(lambda hidden, past_key_values=None: None) == "past_key_values"
    with pytest.raises(SpeqError, match="by no name that speq knows"):
        cache_name(lambda hidden, **others: None)


def test_versions_that_were_tested() -> None:
    oldest, pinned, newest = TESTED_TRANSFORMERS
    for version in (oldest, pinned, newest, "5.18.0", "5.20.3"):
        assert is_tested(version), version
    for version in ("5.16.9", "5.24.1", "5.25.0", "6.0", "5.23.0rc1", "5.24.0.dev0"):
        assert not is_tested(version), version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, minor, _ = newest.split(".")
    bounds = f"transformers>={oldest.removesuffix('.0')},<{major}.{int(minor) + 1}"
    assert bounds in project["dependencies"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TRANSFORMERS ?= transformers=={pinned}\n" in makefile


def test_other_versions_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_test, "transformers_version", lambda: "5.99.0")
    with caplog.at_level(logging.WARNING, "speq"):
        check_transformers(FAMILIES["mixtral"], text_config("mixtral"))
    (record,) = caplog.records
    assert record.getMessage().startswith("transformers 5.99.0 was not tested with speq")
