"""What is Step-3.7's own: a limit for each layer, experts of a layer in three tensors, and its two
places on disk.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from speq import Generator, SpeqError
from speq.kernels.ops import SILU_BEFORE_LIMIT, Activation
from speq.measure.plan import plan
from speq.models.opened import open_model
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
pytestmark = pytest.mark.skipif("step3p7" not in FAMILIES, reason="transformers lacks step3p7")
# As Step-3.7-Flash's text_config has them: older names, and three layers more in lists.
LAYERS, AHEAD = 45, 3
PUBLISHED: dict[str, Any] = {
    "model_type": "step3p5",
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": AHEAD,
    "vocab_size": 128896,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    "moe_layers_enum": ",".join(str(layer) for layer in range(3, LAYERS)),
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 3.0,
    "sliding_window": 512,
    "layer_types": ["full_attention", *3 * ["sliding_attention"]] * 12,
    "rope_theta": [5000000.0, *3 * [10000.0]] * 12,
    "partial_rotary_factors": [0.5, *3 * [1.0]] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
    },
    "swiglu_limits": [*43 * [0.0], 7.0, 7.0, *AHEAD * [0.0]],
    "swiglu_limits_shared": [*43 * [0.0], 16.0, 16.0, *AHEAD * [0.0]],
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}


def test_a_limit_for_each_layer(tiny: Folder) -> None:
    opened = open_model(tiny("step3p7"))
    names = (SILU_BEFORE_LIMIT,) * 2
    wanted = tuple(map(Activation, names, (math.inf, 0.05)))
    assert opened.shape.activations == wanted
    opened.close()


@pytest.mark.parametrize("limits", [None, [0.0, 0.0, None]])
def test_no_limits(limits: list[float | None] | None, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "step3p7", swiglu_limits=limits)
    opened = open_model(path)
    assert [each.limit for each in opened.shape.activations] == [math.inf] * 2
    opened.close()


def test_limits_are_of_their_layer(tmp_path: Path) -> None:
    """The limit of one layer in the other makes other tokens."""
    prompt, made = [*range(40, 60)], []
    for limits in ([0.0, 0.0, 0.01], [0.0, 0.01, 0.0]):
        path = write_model(tmp_path / str(limits), "step3p7", swiglu_limits=limits)
        generator = Generator.from_pretrained(path, "64MiB", draft="none")
        made.append(generator.generate(prompt, max_new_tokens=20, ignore_eos=True).token_ids)
        generator.close()
        assert made[-1] == greedy_tokens(load_plain(path), prompt, 20)
    assert made[0] != made[1]


def test_a_model_of_text_alone(tiny: Folder, tmp_path: Path) -> None:
    """As Step-3.5-Flash is published."""
    source, path = tiny("step3p7"), tmp_path / "alone"
    path.mkdir()
    config = json.loads((source / "config.json").read_text())["text_config"]
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["OfText"]}))
    tensors = load_file(source / "model.safetensors")
    text = {name: each for name, each in tensors.items() if name.startswith(("model.", "lm_head."))}
    assert len(text) < len(tensors)
    save_file(text, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    prompt = [*range(40, 60)]
    generator = Generator.from_pretrained(path, "64MiB", draft="none")
    found = generator.generate(prompt, max_new_tokens=20, ignore_eos=True).token_ids
    generator.close()
    assert found == greedy_tokens(load_plain(source), prompt, 20)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_published_configuration_is_planned(wrapped: bool, tmp_path: Path) -> None:
    """Of 288 experts of 1280 in 42 layers."""
    content = {"model_type": "step3p7", "text_config": PUBLISHED} if wrapped else PUBLISHED
    (tmp_path / "config.json").write_text(json.dumps(content))
    shape = plan(tmp_path, "48GiB").model_spec.shape
    assert (len(shape.experts.layers), shape.experts.layers[0]) == (42, 3)
    assert (shape.experts.num_experts, shape.top_k) == (288, 8)
    assert [each.limit for each in shape.activations] == [*40 * [math.inf], 7.0, 7.0]
    assert shape.attention.kv_shapes == ((8, 128), (8, 128))
    assert shape.attention.query_width == 96 * 128
    assert shape.experts.weights == 3 * 1280 * 4096


def test_what_is_no_limit_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "step3p7")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["swiglu_limits"] = [0.0, 0.0, -7.0]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeqError, match=r"clamps the experts of layer 2 at -7.0; .* above 0"):
        open_model(path)


@pytest.mark.parametrize(
    ("name", "value"), [("use_bidirectional_attention", True), ("gating", "elementwise")]
)
def test_what_no_model_of_the_family_has_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    content = {"model_type": "step3p7", "text_config": PUBLISHED | {name: value}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(SpeqError, match=f"has {name} {value!r}; .* published so"):
        plan(tmp_path, "48GiB")


def test_a_configuration_without_its_text_part_is_refused(tmp_path: Path) -> None:
    content = PUBLISHED | {"model_type": "step3p7"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(SpeqError, match=r"has no text_config, .* with model_type 'step3p5'"):
        plan(tmp_path, "48GiB")
