"""A model family: what transformers' own classes do not say of it."""

import contextlib
import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from speq.errors import DependencyError, UnsupportedError
from speq.experts.expert_names import USUAL_NAMES, ExpertNames, Stacked
from speq.files.text_part import TextModelPart
from speq.kernels.ops import UNGATED, Activation
from speq.layers.gates import GateOf, RouterGate, softmax_gate
from speq.layers.offloaded_experts import BiasedExperts, LogitsOf, OffloadedExperts, first_of
from speq.models.attention import AttentionShape, cached_heads
from speq.models.bounds import LAYER
from speq.models.mtp_layer import APART, MtpLayerKind
from speq.models.states import NO_STATES, StateShape
from speq.models.text_head import with_head
from speq.version import is_before

# Makes what stands in for a module's forward, of the module and the model's rotary embedding; None:
# nothing does.
MakeStandIn = Callable[[Any, Any], Callable[..., Any] | None]
# transformers' modules are shared by all threads: two patches at a time would leave ours in place.
_PATCHING = threading.Lock()


# Where older versions of transformers clamp gpt_oss' experts, whatever a config says.
CLAMP_LIMIT = 7.0


def no_limit(config: Any, layer: int) -> float:
    return math.inf


def swiglu_limit(config: Any, layer: int) -> float:
    """The config's own limit of all layers."""
    return float(getattr(config, "swiglu_limit", CLAMP_LIMIT))


def swiglu_limits(config: Any, layer: int) -> float:
    """The config's own limit of each layer; none or 0: nothing is clamped."""
    limits = config.swiglu_limits
    return float((limits[layer] if limits else None) or math.inf)


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
    by_token       whether token ids choose the experts, and logits only weigh them
    """

    experts: OffloadedExperts
    router: nn.Module
    gate: RouterGate
    router_inputs: tuple[Tensor | None, ...] = ()
    logits_of: LogitsOf = first_of
    of_sequence: bool = False
    by_token: bool = False

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
    token_table   attribute of routers that have the experts of each token id; None: there are none
    num_experts, expert_width, top_k, hidden_act   attributes of the config; no hidden_act: it has
                                                   none, and experts run with silu
    latent_size   attribute of the config with the size of the experts' rows; None, there or here:
                  the hidden size
    window        whether the model honours config.sliding_window in its mask
    typed_masks   whether the model wants one mask for each of config.layer_types
    attention     sizes of what its attention caches, from the config
    attention_by  entry of transformers' table that computes it outside the fused decoder
    stand_ins     what stands in for the forward of further modules of a layer, by their names
    on_disk       class that has a table of which rows are read from disk, and what is built in its
                  place; None: there is none
    streams       attribute of the config that says how many rows a token has between layers; None:
                  one
    biased        whether its experts have biases
    normed        whether the experts' output is normed before it is added
    scaled_embedding   attribute of the config that says whether the model multiplies its embeddings
                  by the root of the hidden size; None: it has none
    scaled_by     attribute of the config that the experts' sum is multiplied by; None: nothing
    stacked       how all experts of a layer lie in one tensor on disk
    activation    of its experts; None: as the config's hidden_act says
    limit         where gate and up of a layer's experts are clamped, from the config and the layer;
                  see `Activation`
    check         raises SpeqError for a config that would otherwise fail in a pass; given the
                  config, the number of experts and where the config was read
    halves        whether transformers' classes compute in float16
    on_the_host   what its classes compute on the host during a pass, which no graph can hold
    since         first version of transformers with all that speq needs of it
    predictor     its MTP layer; None: speq reads none of this family
    states        which layers keep states in place of KV, from the config
    last_norm, rotary   names of the norm after its layers and of its rotary embedding, if it has
                  one
    text_part     place of the text model in multimodal checkpoints, or its names on disk; None:
                  they hold nothing else, by the names that transformers has
    built_as      the family whose classes run its text model, where transformers has no causal
                  model of its own for it; None: its own classes
    classes       the family of transformers whose classes it has, if not its own
    causal        class of its causal model, where transformers' AutoModelForCausalLM lacks it; of
                  its text model, where transformers has no causal one
    """

    model_type: str
    experts_class: str
    names: ExpertNames = USUAL_NAMES
    router_inputs: tuple[str, ...] = ()
    router_of_sequence: bool = False
    gate: GateOf = softmax_gate
    logits_of: LogitsOf = first_of
    token_table: str | None = None
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    top_k: str = "num_experts_per_tok"
    hidden_act: str | None = "hidden_act"
    latent_size: str | None = None
    window: bool = False
    typed_masks: bool = False
    attention: Callable[[Any], AttentionShape] = cached_heads
    attention_by: str = "sdpa"
    stand_ins: Mapping[str, MakeStandIn] = field(default_factory=dict)
    on_disk: tuple[str, Callable[[type[nn.Module]], type[nn.Module]]] | None = None
    streams: str | None = None
    biased: bool = False
    normed: bool = False
    scaled_embedding: str | None = None
    scaled_by: str | None = None
    stacked: Stacked = Stacked.ROWS
    activation: str | None = None
    limit: Callable[[Any, int], float] = no_limit
    check: Callable[[Any, int, object], None] = check_nothing
    halves: bool = True
    on_the_host: str | None = None
    since: str = "5.17"
    predictor: MtpLayerKind | None = None
    states: Callable[[Any], StateShape] = no_states
    last_norm: str = "norm"
    rotary: str = "rotary_emb"
    text_part: TextModelPart | None = None
    built_as: BuiltAs | None = None
    classes: str | None = None
    causal: str | None = None

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of model_type in a config.json of this family."""
        text = self.model_type if self.text_part is None else self.text_part.model_type
        return tuple(dict.fromkeys((self.model_type, text)))

    @property
    def module(self) -> str:
        """The module of transformers that has its classes."""
        name = self.classes or self.model_type
        if self.built_as is not None:
            name = self.built_as.model_type
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def gated(self) -> bool:
        """True if its experts have a gate."""
        return self.activation not in UNGATED

    def activations(self, config: Any, layers: Iterable[int]) -> tuple[Activation, ...]:
        """Activations of the experts of some layers."""
        act = "silu" if self.hidden_act is None else getattr(config, self.hidden_act)
        name = self.activation or act
        return tuple(Activation(name, self.limit(config, layer)) for layer in layers)

    def put_stand_ins(self, model: Any) -> None:
        """Make the modules of `stand_ins` run over caches with rollback."""
        rotary = self.rotary_of(model.model)
        for name, module in model.named_modules():
            make = self.stand_ins.get(name.rpartition(".")[2])
            made = None if make is None else make(module, rotary)
            if made is not None:
                module.forward = made

    def rotary_of(self, body: Any) -> Any:
        """The rotary embedding of a model without its head; None: it has none."""
        return getattr(body, self.rotary, None)

    def expert_columns(self, config: Any) -> int:
        """Size of the rows that experts are given."""
        latent = None if self.latent_size is None else getattr(config, self.latent_size)
        return int(latent or config.hidden_size)

    def streams_of(self, config: Any) -> int:
        """Rows that a token has between layers."""
        return 1 if self.streams is None else int(getattr(config, self.streams))

    def output_scale(self, config: Any) -> float:
        """What the sum of a layer's experts is multiplied by before it is added."""
        return 1.0 if self.scaled_by is None else float(getattr(config, self.scaled_by))

    def scale_in_embedding(self, model: Any) -> None:
        """Leave to a model's embedding what its forward would do to the embeddings: a later stage
        of a pipeline is given rows in their place.
        """
        body = model.model
        if hasattr(body, "embedding_multiplier"):
            self._scale_embedding(body, body.embedding_multiplier)
            body.embedding_multiplier = 1.0
        name = self.scaled_embedding
        if name is None or not getattr(body.config, name):
            return
        body.config = copy(body.config)
        setattr(body.config, name, False)
        self._scale_embedding(body, body.config.hidden_size**0.5)

    @staticmethod
    def _scale_embedding(body: Any, scale: float) -> None:
        embedding = body.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.embed_scale = scale  # type: ignore[assignment]

    def check_installed(self, where: object) -> None:
        """Raise SpeqError where the installed transformers lacks the family, or has it in an older
        form.
        """
        found = importlib.util.find_spec(f"transformers.models.{self.model_type}") is not None
        if not found or is_before(transformers_version, self.since):
            lacks = "has in an older form" if found else "lacks"
            raise DependencyError(
                f"{where} is of family {self.model_type!r}, which transformers "
                f"{transformers_version} {lacks}; install transformers {self.since} or later"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise SpeqError for a compute dtype that the family does not run in."""
        if dtype == torch.float16 and not self.halves:
            raise UnsupportedError(
                f"family {self.model_type} keeps some matrices in float32 under float16, and "
                "transformers cannot multiply by them; compute in bfloat16 or float32 (--dtype)"
            )

    def config(self, content: dict[str, Any], where: Path) -> dict[str, Any]:
        """The text model's part of the config.json in the folder `where`."""
        return content if self.text_part is None else self.text_part.config(content, where)

    def built_config(self, config: Any) -> Any:
        """The configuration that AutoModelForCausalLM builds from, of the text model's own."""
        if self.causal is not None:
            made = with_head(getattr(importlib.import_module(self.module), self.causal))
            AutoModelForCausalLM.register(made.config_class, made, exist_ok=True)
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
        return not beyond and not self.names.is_expert(name) and not self.is_on_disk(name)

    def is_on_disk(self, name: str) -> bool:
        """True for a tensor of a table of which rows are read from disk."""
        return self.on_disk is not None and ".ngram_embedding." in name

    @contextlib.contextmanager
    def with_experts(self) -> Iterator[None]:
        """Build transformers' own models inside the block, whatever other threads build."""
        with _PATCHING:
            yield

    def without_experts(self) -> contextlib.AbstractContextManager[None]:
        """Build models with OffloadedExperts, and with their table on disk, inside the block."""
        return self.replacing_experts(
            lambda own: BiasedExperts if self.biased else OffloadedExperts, self.on_disk
        )

    @contextlib.contextmanager
    def replacing_experts(
        self,
        replacement: Callable[[type[nn.Module]], type[nn.Module]],
        other: tuple[str, Callable[[type[nn.Module]], type[nn.Module]]] | None = None,
    ) -> Iterator[None]:
        """Build models with another class of experts inside the block.

        replacement  returns it, given transformers' own
        other        name of another class, and what returns what is built in its place
        """
        module = importlib.import_module(self.module)
        replaced = [(self.experts_class, replacement), *([] if other is None else [other])]
        with _PATCHING:
            own = {name: getattr(module, name) for name, _ in replaced}
            for name, made in replaced:
                setattr(module, name, made(own[name]))
            try:
                yield
            finally:
                for name, each in own.items():
                    setattr(module, name, each)

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
                by_token = self.token_table is not None and hasattr(router, self.token_table)
                blocks[index] = MoEBlock(
                    *(experts, router, gate, inputs, self.logits_of, self.router_of_sequence),
                    by_token=by_token,
                )
        return blocks

    def routers(self, model: nn.Module) -> list[nn.Module]:
        return [block.router for block in self.moe_blocks(model).values()]
