"""Self-test: our layers compare with those of the installed transformers.

transformers may change a layer's arguments and their names. So before a model is loaded, a tiny one
of the same configuration with random weights runs a prompt and some steps. Its hidden states are
compared with those of transformers' own pass over the whole sequence.
"""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from speq.devices.device import Processor
from speq.errors import UnsupportedError
from speq.experts.expert_names import GATE_UP, Stacked
from speq.kernels import decoder_ops, ops
from speq.kernels.ops import MAX_LINEAR_ROWS, Activation, ExpertBiases
from speq.layers.offloaded_experts import BiasedExperts, OffloadedExperts
from speq.models.attention import IN_BLOCKS
from speq.models.family import Family
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, quiet_transformers
from speq.models.ngram_layer import TABLE
from speq.models.packed_batch import SequenceTokens
from speq.routing import Route
from speq.version import TESTED, is_tested, transformers_version

logger = logging.getLogger("speq")

# Sizes of the tiny model, for the fields that its configuration has. Heads keep their widths, which
# rotary embeddings depend on.
SIZES = {
    "vocab_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_sliding_attention_heads": 4,
    "share_expert_dim": 16,
    "num_global_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_topk": 16,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "indexer_n_heads": 2,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
    "o_lora_rank": 16,
    "ple_embed_dim": 64,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 64,
    "n_group": 2,
    "topk_group": 1,
}
HIDDEN_SIZE, EXPERTS, TOP_K = 64, 8, 2
# A prompt longer than the fused decoder takes, then a few tokens, and two steps.
PASSES = (MAX_LINEAR_ROWS + 1, 5, 1, 1)
# Rows that every kernel of experts takes at a time.
ROWS = 16
# Relative to the largest hidden state. Other orders of sums differ some hundred times less, and a
# lost state some hundred times more.
TOLERANCE = 1e-3
# Rounding may choose another expert, but not with all of these seeds.
SEEDS = (1, 2, 3)

_passed: set[tuple[str, tuple[str, ...]]] = set()


class PlainBackend:
    """Backend that runs the weights of transformers' own experts.

    words  weights of each MoE layer: [E, 2F, H], or [E, F, H] without a gate, and [E, H, F]
    """

    drafts: ClassVar[bool] = False

    def __init__(
        self, words: list[tuple[Tensor, Tensor]], activations: Sequence[Activation]
    ) -> None:
        self._words, self._activations = words, activations
        self.biases: list[ExpertBiases] = []

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        out = hidden_states.new_empty(*route.topk_ids.shape, hidden_states.shape[1])
        table = torch.arange(EXPERTS)
        biases = self.biases[layer] if self.biases else None
        parts = (each.split(ROWS) for each in (hidden_states, route.topk_ids, out))
        for rows, topk_ids, part in zip(*parts, strict=True):
            words = self._words[layer]
            ops.moe_grouped(rows, topk_ids, table, *words, self._activations[layer], part, biases)
        return decoder_ops.combine(out, route.topk_weights, hidden_states.dtype)


def check_transformers(family: Family, config: Any) -> None:
    """Compare once per process for each family and its kinds of layers. Warn of an untested version
    of transformers.

    config  a checkpoint's configuration as transformers reads it

    Raises SpeqError if layers differ.
    """
    types: list[str] = list(getattr(config, "layer_types", None) or [])
    key = family.model_type, tuple(sorted({*types}))
    if key in _passed:
        return
    version = transformers_version()
    if not is_tested(version):
        logger.warning("transformers %s was not tested with speq; %s were", version, TESTED)
    layers = 1 + max((types.index(kind) for kind in {*types}), default=0)
    with quiet_transformers(), torch.inference_mode():
        found = compare_models(family, config, layers)
        # Find the fewest first layers that differ.
        for fewer in range(1, layers if found else 1):
            less = compare_models(family, config, fewer)
            if less is not None:
                found, layers = less, fewer
                break
    if found is not None:
        kind = f"layer of kind {types[layers - 1]}" if types else "layer"
        raise UnsupportedError(
            f"with transformers {version}, a {kind} of family {family.model_type} does not compute "
            f"what transformers' own does ({found}), and tokens would be wrong; install {TESTED}"
        )
    _passed.add(key)


def compare_models(family: Family, config: Any, layers: int) -> str | None:
    """Describe how tiny models differ from transformers' own with every seed; None if they agree
    with one. They have `layers` layers, or as many more as it takes to have experts.
    """
    found = None
    for seed in SEEDS:
        try:
            model, words, theirs = run_own_pass(family, config, layers, seed)
        except Exception as error:  # an unusual configuration, which cannot be tested
            logger.warning(
                "speq cannot compare its layers with those of transformers %s: %s: %s",
                transformers_version(),
                type(error).__name__,
                " ".join(str(error).split())[:200],
            )
            return None
        try:
            found = difference(family, model, words, theirs)
        except Exception as error:  # transformers may call them with anything
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if found is None:
            return None
    return found


def run_own_pass(
    family: Family, config: Any, layers: int, seed: int
) -> tuple[Any, list[tuple[Tensor, Tensor]], Tensor]:
    """Build a tiny transformers model and run its own pass. Return it with our experts in place of
    its own, their weights, and the hidden states [T, H] of the pass.
    """
    tiny = tiny_config(family, config, layers)
    with family.with_experts(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            tiny, dtype=torch.float32, attn_implementation="eager"
        )
    model = model.to_empty(device="cpu").eval()
    blocks = [block for layer in model.model.layers if (block := block_of(family, layer))]
    if not blocks and layers < config.num_hidden_layers:
        return run_own_pass(family, config, min(2 * layers, config.num_hidden_layers), seed)
    fill(model, seed)
    model.config._experts_implementation = "eager"
    theirs = model.model(input_ids=token_ids()[None], use_cache=False).last_hidden_state[0]
    model.set_attn_implementation(IN_BLOCKS)
    words = [replace_experts(family, block, model.config) for block in blocks]
    return model, words, theirs


def block_of(family: Family, layer: nn.Module) -> nn.Module | None:
    """The block of a layer with transformers' own experts; None if it has none."""
    name = family.names.blocks[0]
    block = getattr(layer, name, None) if name else layer
    experts = getattr(block, family.names.experts, None)
    return block if type(experts).__name__ == family.experts_class else None


def replace_experts(family: Family, block: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Replace a block's experts by ours. Return their weights, [E, 2F, H] and [E, H, F]."""
    experts = getattr(block, family.names.experts)
    ours = (BiasedExperts if family.biased else OffloadedExperts)(config)
    for name, _ in [*ours.named_parameters()]:
        setattr(ours, name, getattr(experts, name))
    setattr(block, family.names.experts, ours)
    gated = hasattr(experts, GATE_UP)
    gate_up = (experts.gate_up_proj if gated else experts.up_proj).data
    down = experts.down_proj.data
    if family.stacked is Stacked.INTERLEAVED:
        in_turns = gate_up.mT
        gate_up = torch.cat([in_turns[:, 0::2], in_turns[:, 1::2]], dim=1)
        down = down.mT
    return gate_up.contiguous(), down.contiguous()


def difference(
    family: Family, model: Any, words: list[tuple[Tensor, Tensor]], theirs: Tensor
) -> str | None:
    """Describe how our passes over a sequence differ from transformers' single pass; None: they do
    not.
    """
    config = model.config
    backend, ours = (
        PlainBackend(words, family.activations(config, family.moe_blocks(model))),
        MoEModel(model, family, Processor(), {}),
    )
    backend.biases = ours.biases
    shape = family.attention(config)
    cache = KVCache(
        config.num_hidden_layers,
        shape.kv_shapes,
        sum(PASSES),
        torch.float32,
        torch.device("cpu"),
        states=family.states(config),
        by_layer=shape.by_layer,
    )
    allowed = TOLERANCE * float(theirs.abs().max())
    for count in PASSES:
        first = cache.length
        rows = slice(first, first + count)
        tokens = SequenceTokens(cache, token_ids()[rows].tolist())
        made = ours.forward(backend, [tokens])[0]
        largest = float((made - theirs[rows]).abs().max())
        if not largest <= allowed:  # also if it is NaN
            what = "a prompt" if not first else f"{count} tokens after {first}"
            return f"{what}: by {largest:.2g}, where values reach {allowed / TOLERANCE:.2g}"
        cache.advance(count)
        cache.settle()
    return None


def token_ids() -> Tensor:
    """Token ids [T] of all passes."""
    return (torch.arange(sum(PASSES)) * 29 + 7) % SIZES["vocab_size"]


def tiny_config(family: Family, config: Any, layers: int) -> Any:
    """Shrink a configuration: the same class, its first layers, and small sizes."""
    given: dict[str, Any] = config.to_dict()
    heads, count = given["num_attention_heads"], config.num_hidden_layers
    shared = (given.get("num_key_value_heads") or heads) < heads
    sizes = SIZES | {
        "hidden_size": HIDDEN_SIZE
        if given.get("head_dim")
        else 2 * (given["hidden_size"] // heads),
        "num_hidden_layers": layers,
        "num_key_value_heads": 1 if shared else 2,
    }
    for name, size in sizes.items():
        if given.get(name):
            given[name] = min(size, given[name])
    for name, value in given.items():
        if isinstance(value, list) and len(value) == count:
            given[name] = value[:layers]
    if "mamba_d_head" in given:
        given["mamba_d_head"] = "auto"  # of the sizes above
    if given.get("compress_rates"):  # windows that the passes complete
        given["compress_rates"] = {
            kind: min(size, 16) for kind, size in given["compress_rates"].items()
        }
    if given.get("index_block_size"):  # one selection for each head of keys, or for all
        given["index_n_heads"] = 1
    if given.get("ple_layer_ids"):  # numbers from 1 on
        given["ple_layer_ids"] = [each for each in given["ple_layer_ids"] if each <= layers]
    given["pad_token_id"] = 0
    # Derived from the rest for heterogeneous layers.
    given.pop("per_layer_config", None)
    tiny = type(config).from_dict(given)
    for name, size in ((family.num_experts, EXPERTS), (family.top_k, TOP_K)):
        setattr(tiny, name, size)
    return tiny


def fill(model: nn.Module, seed: int) -> None:
    """Fill a model with random weights, and its buffers with values in (0, 1), from a generator of
    its own.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "norm" not in name:
            parameter.data.normal_(std=0.2, generator=generator)
        elif "self_attn" in name:  # sharp attention would multiply rounding
            parameter.data.uniform_(0.1, 0.4, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    for module in model.modules():
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.uniform_(generator=generator)
            elif buffer.shape[1:] == (TOP_K,):  # experts of each token id
                first = torch.randint(EXPERTS, buffer.shape[:1], generator=generator)
                buffer.copy_((first[:, None] + torch.arange(TOP_K)) % EXPERTS)
            elif TABLE in dict(module.named_children()):
                model._init_weights(module)  # type: ignore[operator]
            else:
                buffer.zero_()
