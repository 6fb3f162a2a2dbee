"""Model families: one entry for each, with what transformers' own classes do not say."""

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AutoConfig
from transformers import __version__ as transformers_version

from speq.errors import CheckpointError, DependencyError, UnsupportedError
from speq.experts.expert_names import PROJECTIONS, USUAL_NAMES, ExpertNames, Stacked
from speq.files.text_part import TextModelPart
from speq.kernels.ops import CLAMP_ALPHA, CLAMP_LIMIT, CLAMPED
from speq.layers.gates import (
    GateOf,
    RouterGate,
    corrected_gate,
    deepseek_v2_gate,
    deepseek_v3_gate,
    ernie_gate,
    gemma4_gate,
    laguna_gate,
    lfm2_gate,
    minimax_gate,
    normalized_gate,
    softmax_gate,
    sparse_mixer,
)
from speq.layers.offloaded_experts import (
    BiasedExperts,
    LogitsOf,
    OffloadedExperts,
    first_of,
    log_of_first,
)
from speq.models.attention import (
    BESIDE_SINKS,
    AttentionShape,
    cached_heads,
    cached_latents,
    gated_heads,
    heads_by_layer,
    heads_of_layers,
    heads_with_sinks,
)
from speq.models.bounds import LAYER
from speq.models.delta_net import delta_states
from speq.models.mtp_layer import APART, ERNIE, MtpLayerKind, deepseek_layer, qwen3_next_layer
from speq.models.short_conv import check_short_conv, conv_states
from speq.models.states import NO_STATES, StateShape

# transformers' modules are shared by all threads: two patches at a time would leave ours in place.
_PATCHING = threading.Lock()


class BuiltAs(NamedTuple):
    """A family whose classes compute, for text, what another one's text model does.

    model_type  of the family
    fields      of its configuration that the other's lacks
    """

    model_type: str
    fields: Mapping[str, Any]

    def config(self, config: Any) -> Any:
        """This family's configuration of the other's text model.

        Text has one position for each token, so that a rotary embedding of time, height and width
        is the usual one.
        """
        content = {**config.to_dict(), **self.fields}
        rotary = content.pop("rope_parameters")
        content["rope_parameters"] = {key: rotary[key] for key in rotary if "mrope" not in key}
        del content["model_type"]
        return AutoConfig.for_model(self.model_type, **content)


class MoEBlock(NamedTuple):
    """A block of a loaded model with routed experts.

    router_inputs  arguments of the router besides hidden states
    gate           rule of its choices
    logits_of      finds the logits in what the router returns
    of_sequence    whether the router takes [1, T, H] in place of rows
    """

    experts: OffloadedExperts
    router: nn.Module
    gate: RouterGate
    router_inputs: tuple[Tensor | None, ...] = ()
    logits_of: LogitsOf = first_of
    of_sequence: bool = False

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Router logits of rows [T, H]: [T, E]."""
        return self.logits_of(self.route(hidden_states))

    def route(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What the router returns for rows [T, H]."""
        rows = hidden_states[None] if self.of_sequence else hidden_states
        routed: tuple[Tensor, ...] = self.router.forward(rows, *self.router_inputs)
        return routed


def check_nothing(config: Any, num_experts: int, where: object) -> None:
    """Check nothing: the family has no constraints of its own."""


def no_states(config: Any) -> StateShape:
    """No states: all layers of the family have a KV cache."""
    return NO_STATES


def check_groups(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError unless a token's experts can be chosen within some of equal groups."""
    groups, kept = getattr(config, "n_group", None) or 0, getattr(config, "topk_group", None) or 0
    if not (1 <= kept <= groups and num_experts % groups == 0):
        raise CheckpointError(
            f"{where} has n_group {groups} and topk_group {kept}; n_group must divide the "
            f"{num_experts} experts of a layer, and topk_group must be from 1 to n_group"
        )


def check_deepseek_v2(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for a topk_method that is unknown, or lacks its groups."""
    method = getattr(config, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{where} has topk_method {method!r}; it must be greedy or group_limited_greedy"
        )
    if method != "greedy":
        check_groups(config, num_experts, where)


def check_clamped(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for a clamped activation of other numbers than the kernels have."""
    for name, wanted in (("swiglu_limit", CLAMP_LIMIT), ("swiglu_alpha", CLAMP_ALPHA)):
        given = getattr(config, name, wanted)
        if given != wanted:
            raise CheckpointError(
                f"{where} has {name} {given!r}; experts of family gpt_oss run with {wanted}: give "
                "a model that was published with it"
            )


def check_gemma4(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for parts that other models of the family have, and speq does not run."""
    for name, what in (
        ("num_kv_shared_layers", "layers that share the keys and values of others"),
        ("hidden_size_per_layer_input", "embeddings of tokens for each layer"),
    ):
        given = getattr(config, name)
        if given:
            raise UnsupportedError(
                f"{where} has {name} {given!r}, {what}, which speq does not run; give a model "
                "without them, such as Gemma-4-26B-A4B"
            )
    if config.use_bidirectional_attention == "all":
        raise CheckpointError(
            f"{where} has use_bidirectional_attention 'all', with which tokens see later ones; "
            "give a model that generates text"
        )


def check_pairs(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups that are too small: two experts rank a group, and top-k chooses
    among those of the selected groups.
    """
    check_groups(config, num_experts, where)
    size, top_k = num_experts // config.n_group, config.num_experts_per_tok
    if size < 2 or config.topk_group * size < top_k:
        raise CheckpointError(
            f"{where} has n_group {config.n_group} and topk_group {config.topk_group}, which "
            f"leave {config.topk_group} groups of {size} experts to choose from; a group must "
            f"have at least 2, and those chosen from at least num_experts_per_tok, {top_k}"
        )


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families.

    model_type    in config.json, and the name of transformers' module
    experts_class class of a block's experts, replaced by OffloadedExperts
    names         of experts and routers on disk; the first ones are attributes of the model too
    router_inputs   attributes of the block that its router is given beside hidden states; None for
                    those that a configuration leaves out
    router_of_sequence   whether they take [1, T, H] in place of rows
    gate          how its routers choose
    logits_of     finds logits in what its routers return
    num_experts, expert_width, top_k, hidden_act   attributes of the config; no hidden_act: it has
                                                   none, and experts run with silu
    window        whether the model honours config.sliding_window in its mask
    typed_masks   whether the model wants one mask for each of config.layer_types
    attention     sizes of what its attention caches, from the config
    attention_by  entry of transformers' table that computes it outside the fused decoder
    biased        whether its experts have biases
    normed        whether the experts' output is normed before it is added
    scaled_embedding   attribute of the config that says whether the model multiplies its embeddings
                  by the root of the hidden size; None: it has none
    scaled_by     attribute of the config that the experts' sum is multiplied by; None: nothing
    stacked       how all experts of a layer lie in one tensor on disk
    activation    of its experts; None: as the config's hidden_act says
    check         raises SpeqError for a config that would otherwise fail in a pass; given the
                  config, the number of experts and where the config was read
    on_the_host   what its classes compute on the host during a pass, which no graph can hold
    since         first version of transformers with all that speq needs of it
    predictor     its MTP layer; None: speq reads none of this family
    states        which layers keep states in place of KV, from the config
    last_norm, rotary   names of the norm after its layers and of its rotary embedding
    text_part     place of the text model in multimodal checkpoints, or its names on disk; None:
                  they hold nothing else, by the names that transformers has
    built_as      the family whose classes run its text model, where transformers has no causal
                  model of its own for it; None: its own classes
    """

    model_type: str
    experts_class: str
    names: ExpertNames = USUAL_NAMES
    router_inputs: tuple[str, ...] = ()
    router_of_sequence: bool = False
    gate: GateOf = softmax_gate
    logits_of: LogitsOf = first_of
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    top_k: str = "num_experts_per_tok"
    hidden_act: str | None = "hidden_act"
    window: bool = False
    typed_masks: bool = False
    attention: Callable[[Any], AttentionShape] = cached_heads
    attention_by: str = "sdpa"
    biased: bool = False
    normed: bool = False
    scaled_embedding: str | None = None
    scaled_by: str | None = None
    stacked: Stacked = Stacked.ROWS
    activation: str | None = None
    check: Callable[[Any, int, object], None] = check_nothing
    on_the_host: str | None = None
    since: str = "5.17"
    predictor: MtpLayerKind | None = None
    states: Callable[[Any], StateShape] = no_states
    last_norm: str = "norm"
    rotary: str = "rotary_emb"
    text_part: TextModelPart | None = None
    built_as: BuiltAs | None = None

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of model_type in a config.json of this family."""
        text = self.model_type if self.text_part is None else self.text_part.model_type
        return tuple(dict.fromkeys((self.model_type, text)))

    @property
    def module(self) -> str:
        """The module of transformers that has its classes."""
        name = self.model_type if self.built_as is None else self.built_as.model_type
        return f"transformers.models.{name}.modeling_{name}"

    def output_scale(self, config: Any) -> float:
        """What the sum of a layer's experts is multiplied by before it is added."""
        return 1.0 if self.scaled_by is None else float(getattr(config, self.scaled_by))

    def scale_in_embedding(self, model: Any) -> None:
        """Leave to a model's embedding what its forward would do to the embeddings: a later stage
        of a pipeline is given rows in their place.
        """
        body = model.model
        name = self.scaled_embedding
        if name is None or not getattr(body.config, name):
            return
        body.config = copy(body.config)
        setattr(body.config, name, False)
        if isinstance(body.embed_tokens, nn.Embedding):
            body.embed_tokens.embed_scale = body.config.hidden_size**0.5

    def check_installed(self, where: object) -> None:
        """Raise SpeqError where the installed transformers lacks the family."""
        try:
            found = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise DependencyError(
                f"{where} is of family {self.model_type!r}, which transformers "
                f"{transformers_version} lacks; install transformers {self.since} or later"
            )

    def config(self, content: dict[str, Any], where: Path) -> dict[str, Any]:
        """The text model's part of the config.json in the folder `where`."""
        return content if self.text_part is None else self.text_part.config(content, where)

    def built_config(self, config: Any) -> Any:
        """The configuration that a causal model is built from, of the text model's own."""
        return config if self.built_as is None else self.built_as.config(config)

    def holds(self, name: str, num_layers: int | None) -> bool:
        """True for a tensor outside the experts of a model with `num_layers` layers. Layers after
        the last, and those under prefixes of their own, are MTP layers.
        """
        part = self.text_part
        if name.startswith(APART) or (part is not None and part.is_beside(name)):
            return False
        layer = LAYER.search(name)
        beyond = layer is not None and num_layers is not None and int(layer[1]) >= num_layers
        return not beyond and not self.names.is_expert(name)

    @contextlib.contextmanager
    def with_experts(self) -> Iterator[None]:
        """Build transformers' own models inside the block, whatever other threads build."""
        with _PATCHING:
            yield

    def without_experts(self) -> contextlib.AbstractContextManager[None]:
        """Build models with OffloadedExperts inside the block."""
        return self.replacing_experts(
            lambda own: BiasedExperts if self.biased else OffloadedExperts
        )

    @contextlib.contextmanager
    def replacing_experts(
        self, replacement: Callable[[type[nn.Module]], type[nn.Module]]
    ) -> Iterator[None]:
        """Build models with another class of experts inside the block.

        replacement  returns it, given transformers' own
        """
        module = importlib.import_module(self.module)
        with _PATCHING:
            original = getattr(module, self.experts_class)
            setattr(module, self.experts_class, replacement(original))
            try:
                yield
            finally:
                setattr(module, self.experts_class, original)

    def moe_blocks(self, model: nn.Module) -> dict[int, MoEBlock]:
        """Blocks that have routed experts, by model layer."""
        blocks = {}
        for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
            name = self.names.blocks[0]
            block = getattr(layer, name, None) if name else layer
            experts = getattr(block, self.names.experts, None)
            if isinstance(experts, OffloadedExperts):
                inputs = tuple(getattr(block, name, None) for name in self.router_inputs)
                router = getattr(block, self.names.routers[0])
                gate = self.gate(router, inputs)
                blocks[index] = MoEBlock(
                    *(experts, router, gate, inputs, self.logits_of, self.router_of_sequence)
                )
        return blocks

    def routers(self, model: nn.Module) -> list[nn.Module]:
        return [block.router for block in self.moe_blocks(model).values()]


# Names as published; transformers has the usual names for them.
MIXTRAL_NAMES = ExpertNames(
    blocks=("mlp", "block_sparse_moe"), projections=(PROJECTIONS, ("w1", "w3", "w2"))
)
PHIMOE_NAMES = ExpertNames(
    MIXTRAL_NAMES.blocks, routers=("router", "gate"), projections=MIXTRAL_NAMES.projections
)
HUNYUAN_NAMES = ExpertNames(routers=("gate", "gate.wg"))
AFMOE_NAMES = ExpertNames(routers=("router", "router.gate"))
GPT_OSS_NAMES = ExpertNames(routers=("router",))
# Names as published and as transformers saves them.
LFM2_NAMES = ExpertNames(
    blocks=("feed_forward",),
    projections=(MIXTRAL_NAMES.projections[1], PROJECTIONS),
    mlp="feed_forward",
)
GEMMA4_NAMES = ExpertNames(blocks=("",), routers=("router", "router.proj"))
HY_V3_RENAMED = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
)
CORRECTION = "e_score_correction_bias"
EXAONE_RENAMED = ((f".mlp.{CORRECTION}", f".mlp.gate.{CORRECTION}"),)
LAGUNA_RENAMED = (
    (f".mlp.experts.{CORRECTION}", f".mlp.gate.{CORRECTION}"),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
)
# Parts for images and audio.
GEMMA4_BESIDE = tuple(
    f"model.{name}." for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2_moe", "Qwen2MoeExperts", typed_masks=True),
        Family("qwen3_moe", "Qwen3MoeExperts", window=True),
        Family(
            "qwen3_vl_moe",
            "Qwen3MoeExperts",
            stacked=Stacked.COLUMNS,
            text_part=TextModelPart(
                "qwen3_vl_moe_text", "model.language_model.", ("model.visual.",)
            ),
            # Its router divides by the sum whatever norm_topk_prob says.
            built_as=BuiltAs("qwen3_moe", {"norm_topk_prob": True}),
        ),
        Family(
            "qwen3_next",
            "Qwen3NextExperts",
            typed_masks=True,
            attention=gated_heads,
            states=delta_states,
            on_the_host="states of family qwen3_next are cut back by the host",
            predictor=qwen3_next_layer("Qwen3Next", "Qwen3NextRotaryEmbedding"),
        ),
        Family(
            "qwen3_5_moe",
            "Qwen3_5MoeExperts",
            gate=normalized_gate,
            typed_masks=True,
            attention=gated_heads,
            states=delta_states,
            on_the_host="states of family qwen3_5_moe are cut back by the host",
            predictor=qwen3_next_layer("Qwen3_5Moe", "Qwen3_5MoeTextRotaryEmbedding"),
            text_part=TextModelPart(
                "qwen3_5_moe_text", "model.language_model.", ("model.visual.",)
            ),
        ),
        Family("olmoe", "OlmoeExperts", expert_width="intermediate_size"),
        Family(
            "mixtral",
            "MixtralExperts",
            names=MIXTRAL_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
        ),
        Family(
            "phimoe",
            "PhimoeExperts",
            names=PHIMOE_NAMES,
            gate=sparse_mixer,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
            on_the_host="rotary embeddings of family phimoe make their frequencies on the host",
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2Experts",
            gate=deepseek_v2_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_deepseek_v2,
        ),
        Family(
            "glm4_moe",
            "Glm4MoeExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
            predictor=deepseek_layer("Glm4Moe"),
        ),
        Family(
            "glm4v_moe",
            "Glm4MoeExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
            text_part=TextModelPart("glm4v_moe_text", "model.language_model.", ("model.visual.",)),
            built_as=BuiltAs("glm4_moe", {"use_qk_norm": False}),
        ),
        Family(
            "glm4_moe_lite",
            "Glm4MoeLiteExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            predictor=deepseek_layer("Glm4MoeLite", (("mlp_layer_types", "sparse"),)),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            predictor=deepseek_layer("DeepseekV3"),
        ),
        Family(
            "dots1",
            "Dots1Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            typed_masks=True,
            check=check_pairs,
        ),
        Family(
            "solar_open",
            "SolarOpenExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
        ),
        Family(
            "minimax_m2",
            "MiniMaxM2Experts",
            names=MIXTRAL_NAMES,
            router_inputs=("e_score_correction_bias",),
            gate=minimax_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
        ),
        Family(
            "ernie4_5_moe",
            "Ernie4_5_MoeExperts",
            gate=ernie_gate,
            num_experts="moe_num_experts",
            predictor=ERNIE,
        ),
        Family(
            "hunyuan_v1_moe",
            "HunYuanMoEV1Experts",
            gate=normalized_gate,
            names=HUNYUAN_NAMES,
            expert_width="intermediate_size",
        ),
        Family("mellum", "MellumExperts", typed_masks=True),
        Family(
            "hy_v3",
            "HYV3Experts",
            router_inputs=("e_score_correction_bias",),
            gate=corrected_gate("router_scaling_factor"),
            text_part=TextModelPart("hy_v3", renamed=HY_V3_RENAMED),
        ),
        Family(
            "afmoe",
            "AfmoeExperts",
            names=AFMOE_NAMES,
            router_inputs=("expert_bias",),
            router_of_sequence=True,
            gate=corrected_gate("route_scale"),
            typed_masks=True,
            normed=True,
            scaled_embedding="mup_enabled",
        ),
        Family(
            "exaone_moe",
            "ExaoneMoeExperts",
            gate=deepseek_v3_gate,
            typed_masks=True,
            check=check_pairs,
            text_part=TextModelPart("exaone_moe", renamed=EXAONE_RENAMED),
        ),
        Family(
            "laguna",
            "LagunaExperts",
            gate=laguna_gate,
            typed_masks=True,
            attention=heads_of_layers,
            scaled_by="moe_routed_scaling_factor",
            text_part=TextModelPart("laguna", renamed=LAGUNA_RENAMED),
        ),
        Family(
            "gpt_oss",
            "GptOssExperts",
            names=GPT_OSS_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            typed_masks=True,
            attention=heads_with_sinks,
            attention_by=BESIDE_SINKS,
            biased=True,
            stacked=Stacked.INTERLEAVED,
            activation=CLAMPED,
            check=check_clamped,
        ),
        Family(
            "lfm2_moe",
            "Lfm2MoeExperts",
            names=LFM2_NAMES,
            router_inputs=("expert_bias",),
            gate=lfm2_gate,
            hidden_act=None,
            typed_masks=True,
            check=check_short_conv,
            on_the_host="inputs of convolutions of family lfm2_moe are cut back by the host",
            states=conv_states,
            last_norm="embedding_norm",
            rotary="pos_emb",
        ),
        Family(
            "gemma4",
            "Gemma4TextExperts",
            names=GEMMA4_NAMES,
            gate=gemma4_gate,
            logits_of=log_of_first,
            top_k="top_k_experts",
            hidden_act="hidden_activation",
            typed_masks=True,
            attention=heads_by_layer,
            normed=True,
            check=check_gemma4,
            text_part=TextModelPart("gemma4_text", "model.language_model.", GEMMA4_BESIDE),
        ),
    )
}


def family_of(config: dict[str, Any], where: object) -> Family:
    """Find the family of a config.json. Raises SpeqError that lists the supported ones."""
    model_type = config.get("model_type")
    family = next((each for each in FAMILIES.values() if model_type in each.model_types), None)
    if family is None:
        raise UnsupportedError(
            f"{where} is of family {model_type!r}, which is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family.check_installed(where)
    return family
