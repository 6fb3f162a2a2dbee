"""Random models at the sizes of published ones, in all dimensions that cost next to nothing: the
vocabulary, heads and their widths, latents, experts and how many a token takes, groups, windows,
rotary scaling, contexts. Hidden states and experts are narrow, and layers few.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.paths import DATA
from tests.helpers.tiny_models import EOS, of_options, write_random

# What a configuration says of its files, and not of the model.
OF_FILES = ("architectures", "model_type", "dtype", "torch_dtype", "quantization_config")
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # Large enough that logits are far apart and ties do not decide.
    "initializer_range": 0.15,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """
    model    a folder of `tests/data` that has its published config.json
    layers   how many; lists that have an entry a layer are cut to as many
    other    options that are not as published
    prompt   its tokens, from all over the vocabulary
    dtype    what is computed in: float64 where rounding in float32 grows until it turns tokens
    """

    model: str
    layers: int = 2
    other: dict[str, Any] = field(default_factory=dict)
    prompt: int = 24
    dtype: str = "float32"

    @property
    def published(self) -> dict[str, Any]:
        """What config.json says of the model of text."""
        (path,) = DATA.glob(f"*/{self.model}/config.json")
        content: dict[str, Any] = json.loads(path.read_text())
        return dict(content.get("text_config", content))

    @property
    def family(self) -> str:
        return str(self.published["model_type"]).removesuffix("_text")

    @property
    def options(self) -> dict[str, Any]:
        """Of the small model."""
        published, layers = self.published, self.published["num_hidden_layers"]
        options: dict[str, Any] = {}
        for name, value in (published | NARROW).items():
            listed = isinstance(published.get(name), list) and len(published[name]) == layers
            if listed:
                value = value[: self.layers] if name not in NARROW else [value] * self.layers
            options[name] = value
        if "kv_lora_rank" not in options:
            width = published["hidden_size"] // published["num_attention_heads"]
            options.setdefault("head_dim", width)
        options |= {"num_hidden_layers": self.layers, **self.other}
        return {name: value for name, value in options.items() if name not in OF_FILES}

    def write(self, path: Path) -> Path:
        return write_random(path, self.family, of_options(self.family, self.options))

    @property
    def long(self) -> bool:
        return self.prompt > 1000

    @property
    def prompt_token_ids(self) -> list[int]:
        """The first and the last token of the vocabulary among them."""
        size, draws = self.options["vocab_size"], random.Random(1)
        return [0, *(draws.randrange(size) for _ in range(self.prompt - 2)), size - 1]


# Of the published lists of layers, one of each kind.
BOTH_ATTENTIONS = {"layer_types": ["sliding_attention", "full_attention"]}
# As DeepSeek's models are published with it.
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# Latents and heads as published, but fewer heads: each has 192 columns of 1,536 inputs.
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
# Long contexts cost what attention does: few heads, few experts, and few tokens to choose from.
FEW = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1000}

SHAPES = {
    "201,088 tokens, past windows of 128": Shape("gpt-oss-20b", prompt=140),
    "128 experts with biases": Shape("gpt-oss-120b"),
    "151,936 tokens, 128 experts, 4 KV heads": Shape("Qwen3-30B-A3B"),
    "60 experts, shared ones": Shape("Qwen1.5-MoE-A2.7B"),
    "512 experts, top 10": Shape(
        "Qwen3-Next-80B-A3B-Instruct",
        2,
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "248,320 tokens, delta rule in 3 of 4": Shape("Qwen3.5-35B-A3B", 4),
    "latents of 512, 256 experts in groups": Shape(
        "DeepSeek-V3", 2, {"first_k_dense_replace": 1, "n_group": 8, **FOUR_HEADS}
    ),
    "latents without latent queries": Shape("DeepSeek-V2-Lite", 2, {"rope_scaling": YARN}),
    "heads of 256 and 512": Shape("gemma-4-26B-A4B-it", 2, BOTH_ATTENTIONS),
    "five windows, then none": Shape("gemma-4-26B-A4B-it", 6),
    "16 experts by a mixer": Shape("Phi-3.5-MoE-instruct"),
    "200,064 tokens, 256 experts": Shape("MiniMax-M2"),
    "196,608 tokens": Shape("Solar-Open-100B"),
    "20 heads on 4, tied": Shape("ERNIE-4.5-21B-A3B-PT", 3, {"moe_layer_end_index": 2}),
    "64 experts, scaled turns": Shape("Hunyuan-A13B-Instruct"),
    "convolutions, then attention": Shape("LFM2-8B-A1B", 4),
    # Of the usual spread so many layers make nothing but a token again and again.
    "48 layers": Shape(
        "Qwen3-30B-A3B",
        48,
        {"hidden_size": 32, "num_experts": 8, "head_dim": 32, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 1000}
        | {"initializer_range": 0.5},
    ),
    "4,200 of context, windows of 128": Shape(
        "gpt-oss-20b", 2, {"num_local_experts": 8, **FEW}, prompt=4200
    ),
    "4,096 of context, crossed by the text": Shape(
        "Qwen3-30B-A3B", 2, {"num_experts": 8, **FEW}, prompt=4090
    ),
    "4,096 of latents, past what they scale": Shape(
        "DeepSeek-V2-Lite",
        2,
        {"rope_scaling": YARN, "n_routed_experts": 8, **FEW, "num_key_value_heads": 2},
        prompt=4090,
    ),
    "4,096 of states": Shape(
        "Qwen3-Next-80B-A3B-Instruct",
        4,
        {"num_experts": 8, "num_experts_per_tok": 4, **FEW}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        prompt=4090,
    ),
    "4,096 of convolutions": Shape("LFM2-8B-A1B", 4, {"num_experts": 8, **FEW}, prompt=4090),
    "windows of 1,024, passed": Shape(
        "gemma-4-26B-A4B-it",
        2,
        {"num_experts": 8, "top_k_experts": 4, "num_global_key_value_heads": 1}
        | BOTH_ATTENTIONS
        | FEW,
        prompt=1100,
        dtype="float64",
    ),
}
