"""The sizes of a published EAGLE-3 head, from its config.json.

Its features are the inputs of layers 2, L // 2 and L - 3 of L, side by side, as in EAGLE's own code
(SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py), and in vLLM
(`get_eagle3_aux_hidden_state_layers`) and SGLang (`set_eagle3_layers_to_capture`) when a config
names no layers. A config may name the layers that they enter in `eagle_aux_hidden_state_layer_ids`,
as vLLM reads it, or the layers that they leave below `eagle_config`, as SGLang reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speq.errors import FileError
from speq.heads.head_matrix import held_sizes
from speq.models.shape import ModelShape

LOOKED_UP = "embedding"  # the weight of which passes read rows only
LAYERS = "eagle_aux_hidden_state_layer_ids"
# Fields of a config that rotary embeddings depend on.
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
# Types whose frequencies depend on the length of the sequence.
MOVING_ROPES = ("dynamic", "longrope")
# Larger than any of a head's sizes: a damaged number could exhaust memory.
MOST = 1 << 22
OTHER_HEAD = "give a head that was made for this model"


@dataclass(frozen=True, slots=True, eq=False)
class EagleShape:
    """Sizes and settings of an EAGLE-3 head.

    tapped         layers of the exact model whose inputs are its features
    target_size    hidden size of that model; hidden_size: of the head
    num_heads      of queries; num_kv_heads: of keys and values; head_width: of each
    width          of its MLP
    vocab_size     of the exact model; draft_vocab_size: tokens that it can predict
    epsilon        of its norms
    norm_first     whether the residual around attention is normed (`norm_before_residual`)
    frequencies    of its rotary embeddings [head_width / 2]; turn_scale: factor of cosines and
                   sines
    own_embedding, own_head  whether it has an embedding and a head, or uses the exact model's
    """

    captured_layers: tuple[int, ...]
    target_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    width: int
    vocab_size: int
    draft_vocab_size: int
    epsilon: float
    norm_first: bool
    frequencies: Tensor
    turn_scale: float
    own_embedding: bool
    own_head: bool

    @property
    def window(self) -> None:
        """No limit: it attends to all tokens."""

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return ((self.num_kv_heads, self.head_width),) * 2

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_width

    @property
    def maps(self) -> bool:
        """True if it predicts only some of the exact model's tokens."""
        return self.own_head and self.draft_vocab_size != self.vocab_size

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d, w, n = self.hidden_size, self.width, self.num_heads * self.head_width
        yield "fc", (d, len(self.captured_layers) * self.target_size)
        yield "embedding_norm", (d,)
        yield "feature_norm", (d,)
        yield "qkv", (n + self.kv_elements_per_token, 2 * d)
        yield "output", (d, n)
        yield "mlp_norm", (d,)
        yield "gate_up", (2 * w, d)
        yield "down", (d, w)
        yield "norm", (d,)
        if self.own_embedding:
            yield "embedding", (self.vocab_size, d)
        if self.own_head:
            yield "head", (self.draft_vocab_size, d)

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each of them, and of the ids of its tokens."""
        weights = [
            size
            for name, shape in self.tensors()
            for size in held_sizes(shape, dtype, looked_up=name == LOOKED_UP)
        ]
        return weights + [self.draft_vocab_size * torch.int64.itemsize] * self.maps

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        d, n = self.hidden_size, self.num_heads * self.head_width
        products = rows * (10 * d + 6 * n + 3 * self.width)
        if dtype.itemsize == 2:  # matrices in eight bits make two, and add them
            products += rows * (3 * n + 4 * self.width)
        activations = products + 4 * context * n
        scores = 2 * rows * context * self.num_heads
        said = 48 * vocab_size + 12 * self.draft_vocab_size
        return (activations + scores) * max(dtype.itemsize, 4) + said

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Bytes of the captured inputs, held once separately and once side by side."""
        return 2 * rows * len(self.captured_layers) * self.target_size * dtype.itemsize


def eagle_shape(
    content: dict[str, Any], where: Path, model: ModelShape, own: tuple[bool, bool]
) -> EagleShape:
    """Read the sizes in a config.json, also one of vLLM's speculators.

    own  whether the checkpoint has an embedding and a head

    Raises SpeqError if they are invalid, not supported, or of another model's head.
    """
    layer = content.get("transformer_layer_config")  # speculators nests a Llama's config
    config = {**layer, **content} if isinstance(layer, dict) else content
    check_kind(config, where)
    hidden_size = whole(config, "hidden_size", where)
    heads = whole(config, "num_attention_heads", where)
    head_width = whole(config, "head_dim", where, default=hidden_size // heads)
    vocab_size = whole(config, "vocab_size", where)
    target_size = whole(config, "target_hidden_size", where, default=hidden_size)
    own_embedding, own_head = own
    for name, given, wanted in (
        ("hidden_size", target_size, model.hidden_size),
        ("vocab_size", vocab_size, model.vocab_size),
    ):
        if given != wanted:
            raise FileError(
                f"{where} is of a head for a model of {name} {given} and this model's is {wanted}; "
                f"{OTHER_HEAD}"
            )
    frequencies, turn_scale = rotary(config, heads, head_width, where)
    shape = EagleShape(
        captured_layers=tapped_layers(config, model.num_layers, where),
        target_size=target_size,
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=whole(config, "num_key_value_heads", where, default=heads),
        head_width=head_width,
        width=whole(config, "intermediate_size", where),
        vocab_size=vocab_size,
        draft_vocab_size=whole(config, "draft_vocab_size", where, default=vocab_size),
        epsilon=number(config, "rms_norm_eps", where, default=1e-6),
        norm_first=bool(config.get("norm_before_residual", False)),
        frequencies=frequencies,
        turn_scale=turn_scale,
        own_embedding=own_embedding,
        own_head=own_head,
    )
    check_whole(shape, where)
    return shape


def check_kind(config: dict[str, Any], where: Path) -> None:
    """Raise SpeqError for configs of other heads and for unsupported settings."""
    kind = str(config.get("speculators_model_type") or "")
    names = [kind] if kind else config.get("architectures") or []
    known = isinstance(names, list) and any(
        "eagle3" in str(name).lower() or str(name) == "LlamaForCausalLM" for name in names
    )
    if not known:
        raise FileError(
            f"{where} has architectures {names!r:.80}; speq reads EAGLE-3 heads with a "
            "Llama layer: give the folder of one"
        )
    nested = config.get("eagle_config")
    features = nested.get("use_aux_hidden_state", True) if isinstance(nested, dict) else True
    wanted = {
        "num_hidden_layers": (config.get("num_hidden_layers", 1), 1),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "logit_scale": (config.get("logit_scale", 1), 1),
        "use_aux_hidden_state": (features, True),
    }
    for name, (given, only) in wanted.items():
        if given != only:
            raise FileError(
                f"{where} has {name} {given!r:.40}; speq reads heads of EAGLE-3 where it is "
                f"{only!r}: give another head"
            )


def check_whole(shape: EagleShape, where: Path) -> None:
    """Raise SpeqError for inconsistent sizes."""
    if shape.num_heads % shape.num_kv_heads or shape.head_width % 2:
        raise FileError(
            f"{where} has {shape.num_heads} heads of {shape.head_width} over "
            f"{shape.num_kv_heads} of keys; heads of keys must divide those of queries, and a "
            "head's width must be even: download it again, or give another head"
        )
    if shape.draft_vocab_size > shape.vocab_size:
        raise FileError(
            f"{where} has draft_vocab_size {shape.draft_vocab_size} and vocab_size "
            f"{shape.vocab_size}; it must not be larger than vocab_size: download it again"
            ", or give another head"
        )
    if not shape.own_head and shape.draft_vocab_size != shape.vocab_size:
        raise FileError(
            f"{where} has draft_vocab_size {shape.draft_vocab_size}, but the head has no tensor "
            "lm_head.weight of that size; download the head again, or give another one"
        )
    if shape.hidden_size != shape.target_size and not (shape.own_embedding and shape.own_head):
        raise FileError(
            f"{where} has hidden_size {shape.hidden_size} for a model of {shape.target_size}; such "
            "a head needs embed_tokens.weight and lm_head.weight of its own: download it again"
            ", or give another head"
        )


def tapped_layers(config: dict[str, Any], num_layers: int, where: Path) -> tuple[int, ...]:
    """Layers of the exact model whose inputs are a head's features."""
    given: Any = config.get(LAYERS)
    nested = config.get("eagle_config")
    if given is None and isinstance(nested, dict) and nested.get(LAYERS) is not None:
        given = nested[LAYERS]
        if isinstance(given, list):
            given = [at + 1 if type(at) is int else at for at in given]
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    numbers = isinstance(given, list) and all(type(at) is int for at in given)
    if not numbers or given != sorted(set(given)) or not 0 <= given[0] <= given[-1] < num_layers:
        raise FileError(
            f"{where} takes the inputs of layers {given!r:.60}; in a model of {num_layers} "
            f"layers they must be different, in rising order: {OTHER_HEAD}"
        )
    return tuple(given)


def rotary(
    config: dict[str, Any], heads: int, head_width: int, where: Path
) -> tuple[Tensor, float]:
    """Frequencies [head_width / 2] of rotary embeddings, and the factor of cosines and sines."""
    given = {name: config[name] for name in ROPE if config.get(name) is not None}
    try:
        llama = LlamaConfig(
            num_attention_heads=heads,
            hidden_size=heads * head_width,
            head_dim=head_width,
            **given,
        )
        rope = LlamaRotaryEmbedding(llama)
        if rope.rope_type in MOVING_ROPES:
            raise ValueError(f"rotary embeddings of type {rope.rope_type}")
    except Exception as error:  # transformers raises many kinds for a bad config
        raise FileError(
            f"{where} has rotary embeddings that speq lacks: {' '.join(str(error).split())[:200]}; "
            "give another head, or correct that value"
        ) from error
    return rope.inv_freq, float(rope.attention_scaling)


def whole(config: dict[str, Any], name: str, where: Path, default: int | None = None) -> int:
    """Read a size. Raises SpeqError for an invalid one."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= MOST:
        raise FileError(
            f"{where} has {name} {value!r:.40}; it must be a whole number from 1 to {MOST}: "
            "download it again, or give another head"
        )
    return value


def number(config: dict[str, Any], name: str, where: Path, default: float) -> float:
    """Read a number between 0 and 1. Raises SpeqError for an invalid one."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise FileError(
            f"{where} has {name} {value!r:.40}; it must be above 0 and below 1: download it again"
            ", or give another head"
        )
    return float(value)
