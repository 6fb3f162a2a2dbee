"""What a GGUF file says of a model beside its weights: the architecture, and the tokenizer.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.bench.rivals.packages import rival_package
from speq.errors import CheckpointError, UnsupportedError, checked_int, checked_number
from speq.files.json_file import read_json
from speq.text.tokenizer import TOKENIZER_AGAIN, load_tokenizer

MOST = 2**32 - 1  # that a size in the file can be
# The texts of a comparison are token ids, so that no file's pre-tokeniser is ever run.
PRE_TOKENIZER = "gpt-2"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family that llama.cpp has as well.

    name         llama.cpp's, one of gguf.MODEL_ARCH_NAMES
    check        raises SpeqError for a config that llama.cpp would pass over, given where it was
                 read
    write        adds the keys that only this architecture has
    num_experts  what the config calls the experts of a layer
    """

    name: str
    check: Callable[[dict[str, Any], object], None]
    write: Callable[[Any, dict[str, Any], object], None]
    num_experts: str = "num_experts"


def check_qwen2_moe(config: dict[str, Any], where: object) -> None:
    """Raise SpeqError for what llama.cpp's qwen2moe computes in its one way only."""
    width = head_dim_of(config) * config["num_attention_heads"]
    _check(config, where, norms=False)
    _check_each(where, [("head_dim times heads", width, config["hidden_size"])])


def check_qwen3_moe(config: dict[str, Any], where: object) -> None:
    """Do as `check_qwen2_moe` for qwen3moe."""
    _check(config, where, norms=True)
    _check_each(where, [("attention_bias", config.get("attention_bias", False), False)])


def head_dim_of(config: dict[str, Any]) -> int:
    found: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return found


def _check(config: dict[str, Any], where: object, norms: bool) -> None:
    """norms: whether the weights of a token's experts add up to 1"""
    fields = [
        ("norm_topk_prob", config.get("norm_topk_prob", False), norms),
        ("decoder_sparse_step", config.get("decoder_sparse_step", 1), 1),
        ("mlp_only_layers", config.get("mlp_only_layers") or [], []),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
    ]
    _check_each(where, fields)


def _check_each(where: object, fields: Sequence[tuple[str, Any, Any]]) -> None:
    """fields: name, value and the only value that llama.cpp computes with"""
    for name, given, wanted in fields:
        if given != wanted:
            raise UnsupportedError(
                f"{where} has {name} {given!r}; llama.cpp computes this family with {wanted!r} "
                "only: compare without llama.cpp"
            )


def write_qwen2_moe(writer: Any, config: dict[str, Any], where: object) -> None:
    size = _sizes(config, where)
    writer.add_expert_count(size("num_experts"))
    writer.add_expert_used_count(size("num_experts_per_tok"))
    writer.add_expert_feed_forward_length(size("moe_intermediate_size"))
    writer.add_expert_shared_feed_forward_length(size("shared_expert_intermediate_size"))


def write_qwen3_moe(writer: Any, config: dict[str, Any], where: object) -> None:
    size = _sizes(config, where)
    writer.add_expert_count(size("num_experts"))
    writer.add_expert_used_count(size("num_experts_per_tok"))
    writer.add_expert_feed_forward_length(size("moe_intermediate_size"))
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))


ARCHITECTURES = {
    "qwen2_moe": Architecture("qwen2moe", check_qwen2_moe, write_qwen2_moe),
    "qwen3_moe": Architecture("qwen3moe", check_qwen3_moe, write_qwen3_moe),
}


def architecture_of(config: dict[str, Any], where: object) -> Architecture:
    """The entry for a config.json. Raises SpeqError naming what is supported."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UnsupportedError(
            f"{where} is of family {family!r}, of which no GGUF file is written here; supported "
            f"are {', '.join(sorted(ARCHITECTURES))}: compare without llama.cpp"
        )
    return ARCHITECTURES[family]


def write_config(writer: Any, config: dict[str, Any], where: object) -> None:
    """Add what a config.json says. Raises SpeqError for values that are none."""
    architecture = architecture_of(config, where)
    size = _sizes(config, where)
    writer.add_block_count(size("num_hidden_layers"))
    writer.add_context_length(size("max_position_embeddings"))
    writer.add_embedding_length(size("hidden_size"))
    writer.add_feed_forward_length(size("intermediate_size"))
    writer.add_head_count(size("num_attention_heads"))
    writer.add_head_count_kv(size("num_key_value_heads"))
    writer.add_vocab_size(size("vocab_size"))
    epsilon = checked_number(f"{where}: rms_norm_eps", config.get("rms_norm_eps", 1e-6), 0, 1)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(rope_theta(config, where))
    architecture.check(config, where)
    architecture.write(writer, config, where)


def rope_theta(config: dict[str, Any], where: object) -> float:
    """The base of rotary embeddings. Raises SpeqError for embeddings that are scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        raise UnsupportedError(
            f"{where} has rotary embeddings of type {kind!r}, which no GGUF file is written with "
            "here: compare without llama.cpp"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    return checked_number(f"{where}: rope_theta", theta, 1, 1e12)


def write_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Add the tokens, their types and the merges. Raises SpeqError for a tokenizer without BPE."""
    gguf = rival_package("gguf")
    kind = read_json(folder / "tokenizer.json", TOKENIZER_AGAIN).get("model")
    kind = kind.get("type") if isinstance(kind, dict) else kind
    if kind != "BPE":
        raise UnsupportedError(
            f"{folder / 'tokenizer.json'} has a model of type {kind!r:.40}; only BPE goes into a "
            "GGUF file here: compare without llama.cpp"
        )
    tokenizer = load_tokenizer(folder)
    token_of = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for token_id in range(vocab_size):
        # Models have rows beyond the tokenizer's tokens.
        tokens.append(token_of.get(token_id, f"[PAD{token_id}]"))
        if token_id not in token_of:
            types.append(gguf.TokenType.UNUSED)
        elif token_id in added:
            special = added[token_id].special
            types.append(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    try:
        special_tokens = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read ({error!r:.200}); {TOKENIZER_AGAIN}"
        ) from error
    if not special_tokens.merges:
        raise UnsupportedError(
            f"{folder / 'tokenizer.json'} has no merges, without which llama.cpp loads no model: "
            "compare without llama.cpp"
        )
    special_tokens.chat_template = None  # nobody chats with it
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special_tokens.add_to_gguf(writer, quiet=True)


def _sizes(config: dict[str, Any], where: object) -> Callable[[str], int]:
    """Looks up a field that is a positive whole number, or raises SpeqError."""
    return lambda name: checked_int(f"{where}: {name}", config.get(name), 1, MOST)
