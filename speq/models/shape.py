"""The sizes of a model that its memory depends on, from config.json alone."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from speq.errors import CheckpointError, UnsupportedError
from speq.experts.expert_names import GATE_UP
from speq.experts.expert_store import ExpertLayout
from speq.files.checkpoint import Checkpoint
from speq.files.json_file import read_json
from speq.kernels import library, many_rows
from speq.kernels.checks import EXACT_DTYPES
from speq.kernels.grouping import most_fused_rows
from speq.kernels.ops import HIDDEN_ACTS, Activation
from speq.layers.indexer import uses_earlier_choice
from speq.models.attention import AttentionShape, KVShapes, elements
from speq.models.bounds import MOST, check_sizes
from speq.models.dense import packable_modules
from speq.models.dense_parts import DenseShape, dense_shapes
from speq.models.families import family_of
from speq.models.family import Family
from speq.models.kv_cache import KVCache
from speq.models.layer_range import LayerRange, build_part, own_layers
from speq.models.ngram_layer import tables_in
from speq.models.own_head import has_own_head
from speq.models.states import NO_STATES, StateShape

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


NO_EXPERTS = (
    "describes a model without routed experts, so there is nothing to offload; give a "
    "Mixture-of-Experts model"
)
CONFIG_AGAIN = "download config.json again, or correct that value"
# Bytes of one logit on its way to a probability: float32 copies, and a sort for top-p.
LOGIT_TRANSIENT_BYTES = 36
# Bytes of one position of a route in the fused kernels, besides its values: where its expert's rows
# begin, and alignment.
POSITION_BYTES = 128
# Of a dense MLP that has its gate above its up projection.
GATE_UP_WEIGHT = f".{GATE_UP}.weight"
# Tensors that are created in another dtype keep it, whatever the compute dtype.
SKELETON_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of everything but the experts' weights.

    attention         sizes of attention; one layer's scores exist at a time
    dense             rows and columns of the distinct matrices of the embedding, which is the
                      first, and of dense layers
    dense_names       names of their tensors on disk
    other_sizes       elements of each other parameter and buffer in the compute dtype, outside the
                      experts
    tied              whether the head shares the embedding; otherwise a token reads one row of it
    wide_sizes        elements of each tensor held in float32 under a 16-bit compute dtype
    half_wide_sizes   the same, under float16 alone
    own_bytes         bytes of tensors with a dtype of their own
    draft_layers      dense layers that a draft may run on codes
    max_context       tokens the model can attend over
    states            layers that keep states in place of KV
    streams           rows that a token has between layers
    tables            rows and width of each table that stays on disk, outside all other sizes
    part              the layers that these are sizes of; None: all. A part without ends has no
                      vocabulary: it neither embeds nor scores tokens
    """

    experts: ExpertLayout
    top_k: int
    activations: tuple[Activation, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    dense_width: int
    attention: AttentionShape
    dense: tuple[tuple[int, int], ...]
    dense_names: tuple[str, ...]
    other_sizes: tuple[int, ...]
    tied: bool
    wide_sizes: tuple[int, ...]
    half_wide_sizes: tuple[int, ...]
    own_bytes: int
    draft_layers: tuple[DenseShape, ...]
    max_context: int
    states: StateShape = NO_STATES
    streams: int = 1
    tables: tuple[tuple[int, int], ...] = ()
    part: LayerRange | None = None

    @property
    def activation(self) -> Activation:
        """Activation of the first MoE layer's experts, as measurements take it for all."""
        return self.activations[0]

    @property
    def embedding(self) -> tuple[int, int]:
        """Rows and columns of the embedding; (0, 0) for a part without ends."""
        return self.dense[0] if self.part is None or self.part.has_ends else (0, 0)

    @property
    def resident_weights(self) -> int:
        """Parameters outside the experts."""
        dense = sum(rows * columns for rows, columns in self.dense)
        return dense + sum(self.other_sizes) + sum(self.wide_sizes) + sum(self.half_wide_sizes)

    @property
    def kv_elements_per_token(self) -> int:
        return sum(elements(kv_shapes) for kv_shapes in self.kv_layers)

    @property
    def kv_layers(self) -> list[KVShapes]:
        """(heads, width) of keys and of values in each layer with KV."""
        layers = range(self.num_layers) if self.part is None else self.part.layers
        by_layer = self.attention.by_layer or (self.attention.kv_shapes,) * layers.stop
        return [by_layer[layer] for layer in layers if layer not in self.states.layers]

    def cache(
        self,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        number: int = 0,
        snapshots: int = 0,
    ) -> KVCache:
        """Allocate the cache of one sequence of up to `capacity` tokens.

        number     KV slot
        snapshots  copies of its states that it keeps at most
        """
        kv_shapes, by_layer = self.attention.kv_shapes, self.attention.by_layer
        own = None if self.part is None else self.part.layers
        layers = self.num_layers if own is None else own.stop
        states = self.states
        return KVCache(
            *(layers, kv_shapes, capacity, dtype, device, number, states, own, by_layer),
            snapshots=snapshots,
        )

    def resident_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of everything but experts as plain weights, computing in `dtype`."""
        dense = sum(rows * columns for rows, columns in self.dense)
        return dense * dtype.itemsize + sum(self.other_bytes(dtype)) + self.own_bytes

    def other_bytes(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes of each tensor outside `dense` and `own_bytes`, computing in `dtype`."""
        wide = max(dtype.itemsize, torch.float32.itemsize)
        half_wide = wide if dtype == torch.float16 else dtype.itemsize
        return (
            *(elements * dtype.itemsize for elements in self.other_sizes),
            *(elements * wide for elements in self.wide_sizes),
            *(elements * half_wide for elements in self.half_wide_sizes),
        )

    def workspace_bytes(self, rows: int, scored: int, context: int, dtype: torch.dtype) -> int:
        """Upper estimate of one pass's memory on the CPU: activations and kernels."""
        attention = self.attention.block_bytes(rows, context, dtype)
        activations = self._activation_bytes(rows, scored, context, dtype) + attention
        # Native ops add up experts' outputs as they lie.
        summed = 0 if dtype in EXACT_DTYPES else self._summed_bytes(rows, dtype)
        return activations + summed + self.cpu_kernel_bytes(rows, dtype)

    def cpu_kernel_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Bytes that the CPU's kernels of exact experts hold while they run `rows` rows.

        Native ones hold rows in float32, the reference an expert converted to the compute dtype.
        """
        experts = self.experts
        float32_rows = rows * (self.top_k * experts.expert_width + experts.hidden_size)
        return max(
            self.experts.weights * dtype.itemsize,
            float32_rows * 4,
            many_rows.scratch_bytes(rows, self.dense, dtype),
        )

    def gpu_kernel_bytes(
        self, rows: int, dtype: torch.dtype, words: torch.dtype, plain_bytes: int
    ) -> int:
        """Bytes that a GPU's kernels of experts hold while they run `rows` rows.

        words        dtype of the experts as published
        plain_bytes  bytes of one expert decoded out of its slot; 0 if the slot holds plain weights

        A fused kernel holds the positions of a block: rows and intermediates in float32 and, for
        INT4, the grouping by expert. Experts run one at a time take one decoded expert, one
        converted to the compute dtype, the places of the routes, and an expert's rows: gathered,
        and then in the order of its codes or its results. Intermediates between projections are
        counted in `activation_bytes`.
        """
        experts, kernels = self.experts, library.KERNELS["cuda"]
        hidden, width = experts.hidden_size, experts.expert_width
        block_rows = min(rows, max(kernels.call_rows(self.top_k), 1))
        positions = block_rows * self.top_k
        fused = positions * (4 * (hidden + width + positions) + POSITION_BYTES)
        if rows <= most_fused_rows(kernels, self.top_k):
            return fused
        converted = 0 if dtype == words else self.experts.weights * dtype.itemsize
        index_bytes = 2 * 8 * rows * self.top_k
        gathered = 2 * rows * hidden * dtype.itemsize
        return max(fused, plain_bytes + converted + index_bytes + gathered)

    def activation_bytes(self, rows: int, scored: int, context: int, dtype: torch.dtype) -> int:
        """Upper estimate of the activations of one pass on a GPU.

        rows     tokens in the pass; scored: tokens whose logits are computed
        context  tokens attended over
        """
        size, attention = dtype.itemsize, self.attention
        expanded = attention.expanded_width * context * size
        scores = 2 * attention.score_heads * rows * context * max(size, 4)
        summed = self._summed_bytes(rows, dtype)
        return self._activation_bytes(rows, scored, context, dtype) + expanded + scores + summed

    def _summed_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Outputs of all experts of the rows, weighted and widened to be added up."""
        size = dtype.itemsize
        return rows * self.top_k * self.hidden_size * (size + max(size, 4))

    def _activation_bytes(self, rows: int, scored: int, context: int, dtype: torch.dtype) -> int:
        """Activations without those of one layer's attention over its keys and values.

        Sum of the peaks, although they do not coincide: attention's rows and mask, the dense or
        shared feed-forward, the routed experts' outputs, and logits turned into distributions.
        """
        size = dtype.itemsize
        experts, attention = self.experts, self.attention
        per_row = (
            8 * self.hidden_size * self.streams + 4 * attention.query_width + 4 * self.dense_width
        )
        per_row += 4 * experts.expert_width + self.top_k * self.hidden_size
        routes = rows * len(experts.layers) * (4 * experts.num_experts + 16 * self.top_k)
        activations = rows * (per_row + context) * size
        masks = 3 * rows * context
        logits = scored * self.vocab_size * (size + LOGIT_TRANSIENT_BYTES)
        return activations + masks + routes + logits


def hf_config(checkpoint: Checkpoint) -> Any:
    """Read the checkpoint's configuration with transformers; heads are tied if its tensors are."""
    config = config_in(checkpoint.path)
    config.tie_word_embeddings = config.tie_word_embeddings and not has_own_head(checkpoint)
    return config


def read_config(content: dict[str, Any], path: Path, family: Family) -> Any:
    """Read a config.json with transformers, by another type's class where it lacks this one."""
    built = family.built_as
    if built is None or content["model_type"] in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    return AutoConfig.for_model(**content | {"model_type": built.model_type})


def config_in(path: Path) -> Any:
    """Read the configuration in a folder with transformers; that of the text model, if there are
    others. The folder need not have weights.
    """
    content = read_json(path / "config.json")
    family = family_of(content, path)
    check_sizes(family.config(content, path), path / "config.json")
    try:
        whole = read_config(content, path, family)
        config = family.built_config(whole.get_text_config())
    except Exception as error:  # transformers raises many kinds for a bad config
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path / 'config.json'} is refused by transformers: {reason[:300]}; {CONFIG_AGAIN}"
        ) from error
    # The outer configuration counts, where it says so.
    config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", config.tie_word_embeddings)
    if config.dtype is None:
        config.dtype = whole.dtype
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # models are built for plain weights
    return config


def skeleton(
    family: Family, config: Any, where: object, part: LayerRange | None = None
) -> nn.Module:
    """Build the model, or a part of it, on the meta device, without experts, in bfloat16."""
    try:
        with build_part(family, part), torch.device("meta"):
            # From a copy, because it writes the dtype into it.
            return AutoModelForCausalLM.from_config(
                deepcopy(config), dtype=SKELETON_DTYPE, attn_implementation=family.attention_by
            )
    except Exception as error:  # an impossible config can fail anywhere in the model's code
        raise CheckpointError(
            f"no {family.model_type} model can be built from {where}{_nulls(config, error)}: "
            f"{type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; {CONFIG_AGAIN}"
        ) from error


def _nulls(config: Any, error: Exception) -> str:
    """Name the null fields after an error of the model's code that may be due to one."""
    if "NoneType" not in str(error):
        return ""
    usual = type(config)()
    nulls = [
        name
        for name, value in sorted(vars(config).items())
        if value is None and (name in MOST or getattr(usual, name, None) is not None)
    ]
    return f", where {' and '.join(nulls)} is null" if nulls else ""


def shape_of(
    family: Family, config: Any, where: object, part: LayerRange | None = None
) -> ModelShape:
    """Compute the sizes of a model, or of a part of it, from its configuration. Raises SpeqError
    for what is not supported.
    """
    num_experts, expert_width = (
        getattr(config, family.num_experts),
        getattr(config, family.expert_width),
    )
    top_k = one_top_k(config, family.top_k, where)
    check_config(config, num_experts, top_k, family.top_k, where)
    family.check(config, num_experts, where)
    if part is not None and family.streams is not None:
        raise UnsupportedError(
            f"{where} is of family {family.model_type}, whose layers pass on several rows of a "
            "token, which speq does not send between machines; run it on one"
        )
    model = skeleton(family, config, where, part)
    layers = tuple(family.moe_blocks(model))
    shares = part is not None and not family.stand_ins
    if shares and part is not None and uses_earlier_choice(own_layers(model.model)[0]):
        raise CheckpointError(
            f"layer {part.first} of {where} attends to what the indexer of a layer before it "
            "chooses; let its stage begin at a layer with an indexer of its own"
        )
    if not layers and part is not None:
        raise CheckpointError(
            f"layers {part.first} to {part.last - 1} of {where} have no routed experts: give that "
            "stage more layers"
        )
    if not layers:
        raise CheckpointError(f"{where} {NO_EXPERTS}")
    hidden_act = "silu" if family.hidden_act is None else getattr(config, family.hidden_act)
    if hidden_act not in HIDDEN_ACTS:
        raise UnsupportedError(
            f"{where} has the activation {hidden_act!r}; supported are {', '.join(HIDDEN_ACTS)}"
        )
    activations = family.activations(config, layers)
    for layer, (_, limit) in zip(layers, activations, strict=True):
        if not limit > 0:
            raise CheckpointError(
                f"{where} clamps the experts of layer {layer} at {limit}; a limit must be above 0: "
                "download config.json again, or correct that value"
            )
    dense: dict[int, tuple[int, int]] = {}
    dense_names: dict[int, str] = {}
    for name, module in packable_modules(model, family.routers(model)):
        dense[id(module.weight)] = module.weight.shape[0], module.weight.shape[1]
        dense_names.setdefault(id(module.weight), f"{name}.weight")
    shared = [p.shape[0] for n, p in model.named_parameters() if family.names.is_up(n)]
    shared += [p.shape[0] // 2 for n, p in model.named_parameters() if n.endswith(GATE_UP_WEIGHT)]
    others = [*model.named_parameters(), *model.named_buffers()]
    others = [(name, tensor) for name, tensor in others if id(tensor) not in dense]
    has_ends = part is None or part.has_ends
    own = [tensor for _, tensor in others if tensor.dtype != SKELETON_DTYPE]
    following = [(name, tensor) for name, tensor in others if tensor.dtype == SKELETON_DTYPE]
    # transformers loads these in float32 under any dtype of 16 bits, and under float16 alone.
    kept: Any = model
    wide, half_wide = (
        {name for name, _ in following if any(part in name for part in parts or ())}
        for parts in (kept._keep_in_fp32_modules_strict, kept._keep_in_fp32_modules)
    )

    def elements_of(names: set[str]) -> tuple[int, ...]:
        return tuple(tensor.numel() for name, tensor in following if name in names)

    return ModelShape(
        experts=ExpertLayout(
            layers,
            num_experts,
            family.expert_columns(config),
            expert_width,
            family.names,
            family.stacked,
            family.biased,
            family.normed,
            family.gated,
        ),
        top_k=top_k,
        activations=activations,
        num_layers=config.num_hidden_layers if part is None else len(part.layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size if has_ends else 0,
        dense_width=max(shared, default=0),
        attention=family.attention(config),
        dense=tuple(dense.values()),
        dense_names=tuple(dense_names.values()),
        other_sizes=elements_of({name for name, _ in following} - wide - half_wide),
        tied=config.tie_word_embeddings if has_ends else True,
        wide_sizes=elements_of(wide),
        half_wide_sizes=elements_of(half_wide - wide),
        own_bytes=sum(tensor.nbytes for tensor in own),
        draft_layers=dense_shapes(model, family.names),
        max_context=max_context(config, where),
        states=states_of(family, config, part),
        streams=family.streams_of(config),
        tables=tables_in(model),
        part=part,
    )


def states_of(family: Family, config: Any, part: LayerRange | None) -> StateShape:
    """States of the layers of a model, or of a part of it."""
    states = family.states(config)
    return states if part is None else states.among(part.layers)


def one_top_k(config: Any, name: str, where: object) -> Any:
    """Number of experts of a token, which some configs give layer by layer. Raises SpeqError if
    layers differ or it is not a number.

    name  the config's attribute
    """
    given = getattr(config, name)
    layers = set(given[: config.num_hidden_layers]) if isinstance(given, list) else {given}
    if len(layers) != 1:
        raise CheckpointError(
            f"{where} gives layers different numbers of experts for a token, {sorted(layers)}; "
            "speq runs models that have one number for all: give another model"
        )
    return layers.pop()


def check_config(config: Any, num_experts: Any, top_k: Any, name: str, where: object) -> None:
    """Raise SpeqError for values with which transformers would fail in a pass.

    name  name of top_k in the config
    """
    if num_experts is None:
        raise CheckpointError(f"{where} {NO_EXPERTS}")
    if not isinstance(num_experts, int) or num_experts < 1:
        raise CheckpointError(
            f"{where} has {num_experts} experts a layer; it must be at least 1: speq runs "
            "Mixture-of-Experts models"
        )
    if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"{where} has {name} {top_k!r}; it must be from 1 to the {num_experts} "
            "experts of a layer"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 0:
        raise CheckpointError(
            f"{where} has sliding_window {window}; it must be 0, which is none, or more"
        )


def max_context(config: Any, where: object) -> int:
    """Longest context of a model in this implementation.

    Rotary embeddings of type longrope change factors for a whole pass that exceeds the original
    context. Beyond it the output would depend on the shape of the pass, so the context ends there.
    YaRN states its own limit: publishers tell users to add it and to change nothing else.
    """
    limit = int(config.max_position_embeddings)
    whole = getattr(config, "rope_parameters", None) or {}
    # Some families have parameters for each kind of layers.
    nested = [each for each in whole.values() if isinstance(each, dict)]
    for rope in nested or [whole]:
        original = rope.get("original_max_position_embeddings") or limit
        if rope.get("rope_type") == "longrope":
            limit = min(limit, int(original))
        if rope.get("rope_type") == "yarn" and rope.get("factor"):
            limit = max(limit, int(original * rope["factor"]))
    if limit < 1:
        raise CheckpointError(f"{where} allows a context of {limit} tokens; it must be at least 1")
    return limit
