"""A small checkpoint of text as it is published beside pictures: its configuration within another,
its names behind a prefix, the experts of a layer in one tensor, and other parts' tensors about.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Parts of names in a family's files, and what its model has in their place.
RENAMED: dict[str, list[tuple[str, str]]] = {
    "minimax_m3_vl": [
        *(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        (".block_sparse_moe.e_score", ".mlp.gate.e_score"),
        *((".block_sparse_moe.", ".mlp."), (".self_attn.index_", ".self_attn.indexer.")),
    ],
    "nemotron_h": [("backbone.", "model.")],
    "kimi_linear": [
        *((".block_sparse_moe.", ".mlp."), (".self_attn.f_", ".self_attn.forget_gate.f_")),
    ],
    "glm5_next": [(".self_attn.f_", ".self_attn.forget_gate.f_")],
    "bailing_hybrid": [
        (".attention.dense.", ".self_attn.o_proj."),
        (".attention.f_proj.", ".self_attn.forget_gate.f_proj."),
        (".attention.", ".self_attn."),
    ],
    "mimo_v2_flash": [(".attention_sink_bias", ".sinks")],
    "sarvam_moe": [
        (".attention.dense.", ".self_attn.o_proj."),
        (".attention.", ".self_attn."),
        (".word_embeddings.", ".embed_tokens."),
    ],
    "step3p7": [
        (".share_expert.", ".mlp.shared_experts."),
        *((".moe.gate.", ".mlp.gate."), (".moe.router_bias", ".mlp.gate.e_score_correction_bias")),
    ],
    "hy_v3": [
        (".shared_mlp.", ".shared_experts."),
        *(
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
        ),
    ],
    **{
        whole: [("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")]
        for whole in ("mistral3", "kimi_k25")
    },
    "deepseek_v4": [
        *((".attn.", ".self_attn."), (".ffn.", ".mlp."), ("head.weight", "lm_head.weight")),
        *((".indexer.compressor.", ".compressor.indexer."), (".wq_a.", ".q_a_proj.")),
        (".self_attn.indexer.w", ".self_attn.compressor.indexer.w"),
        *((".indexer.wq_b.", ".indexer.q_b_proj."), (".wq_b.", ".q_b_proj.")),
        (".indexer.weights_proj.", ".indexer.scorer.weights_proj."),
        *((".wkv.", ".kv_proj."), (".wgate.", ".gate_proj."), (".wo_b.", ".o_b_proj.")),
        (".shared_experts.w1.", ".shared_experts.gate_proj."),
        (".shared_experts.w3.", ".shared_experts.up_proj."),
        (".shared_experts.w2.", ".shared_experts.down_proj."),
    ],
    "laguna": [
        (".shared_expert.", ".shared_experts."),
        (".experts.e_score_correction_bias", ".gate.e_score_correction_bias"),
    ],
}
# Families whose model has a gate above an up projection in one matrix.
JOINED = ("minimax_m3_vl",)
FILE, PREFIX = "model.safetensors", "model.language_model."
GATE = ".gate_proj.weight"
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<at>\d+)\.(?P<projection>\w+)\.weight$")


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a folder's only file, by the names that the model of text has for them."""
    config, made = json.loads((path / "config.json").read_text()), {}
    family = config["model_type"]
    for name, tensor in load_file(path / FILE).items():
        for on_disk, own in [(PREFIX, "model."), *RENAMED.get(family, [])]:
            name = name.replace(on_disk, own)
        if ".query_key_value." in name:
            kv = config["num_key_value_heads"] * config["head_dim"]
            parts = tensor.split([len(tensor) - 2 * kv, kv, kv])
            for each, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                made[name.replace("query_key_value", each)] = part
            continue
        made[name] = tensor
    gates = [name for name in made if name.endswith(GATE)] if family in JOINED else []
    for name in gates:
        parts = made.pop(name), made.pop(name.replace(GATE, ".up_proj.weight"))
        made[name.replace(GATE, ".gate_up_proj.weight")] = torch.cat(parts)
    return made


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, those of experts alone as tensors of all experts of a layer."""
    made, alone = {}, dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        match = EXPERT.match(name)
        if match is None:
            made[name] = tensor
        else:
            key = match["experts"], match["projection"]
            alone.setdefault(key, {})[int(match["at"])] = tensor
    stacks = {key: torch.stack([of[at] for at in sorted(of)]) for key, of in alone.items()}
    for experts, projection in stacks:
        if projection == "down_proj":
            parts = stacks[experts, "gate_proj"], stacks[experts, "up_proj"]
            made[f"{experts}.gate_up_proj"] = torch.cat(parts, 1)
            made[f"{experts}.down_proj"] = stacks[experts, "down_proj"]
    return made


def put_beside_pictures(path: Path, model_type: str) -> None:
    """Rewrite a model of text, as `save_pretrained` wrote it, as a part of one of that type."""
    text = json.loads((path / "config.json").read_text())
    whole = {
        "architectures": ["OfPicturesAndText"],
        "model_type": model_type,
        "image_token_id": 250,
        "text_config": {key: text[key] for key in text if key != "architectures"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"model_type": f"{model_type}_vision", "depth": 1, "hidden_size": 8},
    }
    (path / "config.json").write_text(json.dumps(whole))
    plain = stored_tensors(path)
    tensors = {
        f"{PREFIX}{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in fused(plain).items()
    }
    dtype, hidden = plain["model.embed_tokens.weight"].dtype, text["hidden_size"]
    others = {
        # Names of layers and of embeddings, and numbers of layers, as those of text have.
        "model.visual.blocks.0.attn.qkv.weight": (24, 8),
        "model.visual.layers.7.mlp.gate.weight": (8, 8),
        "model.visual.pos_embed.weight": (16, 8),
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.layers.0.mlp.gate.weight": (8, hidden),
        "mtp.layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": (32, hidden),
    }
    generator = torch.Generator().manual_seed(5)
    for name, shape in others.items():
        tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
