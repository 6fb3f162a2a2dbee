"""A transformers model with two expert banks, run over tokens, trees of tokens and prompts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import logging as hf_logging

from speq.devices.device import Accelerator, Processor
from speq.devices.staged import Uploads
from speq.errors import Broken, SpeqError, present
from speq.files.checkpoint import OTHER_VERSION, Checkpoint
from speq.kernels.checks import EXACT_DTYPES
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.layers.arguments import cache_name
from speq.layers.dense_linear import DenseLinear, dense_linears
from speq.layers.dense_matrix import ExactMatrix
from speq.layers.offloaded_experts import ActiveBackend, ExpertBackend
from speq.models.dense import Records, held_bytes, held_matrices, hold_dense, plain_modules
from speq.models.dequantised import from_checkpoint
from speq.models.families import Family
from speq.models.fused_decoder import AttentionWindows, FusedDecoder, install_fused_decoder
from speq.models.hidden_state_capture import HiddenStateCapture
from speq.models.kv_cache import KVCache, attention_mask, causal_mask
from speq.models.layer_range import (
    LayerRange,
    RemoteStages,
    StageInput,
    built,
    next_stage_layer,
    own_layers,
)
from speq.models.packed_batch import (
    BatchSpan,
    SequenceTokens,
    cache_of,
    mask_of,
    spans_of,
)
from speq.models.resident import MappedWeights, make_resident
from speq.units import Progress, no_progress

# Parts of a pass: the routed experts, and what no module below the model is charged with.
EXPERTS = "routed experts"
WHOLE = "between modules"
# Layers of a model that has one mask for all.
ANY_KIND = "any"
# Told tokens, and what drafters go by of them [T, F], as `MoEModel.capture_hidden_states` has it.
OnHidden = Callable[[list[int], Tensor], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a pass found of the nodes asked for.

    logits    [N, V]
    features  [N, F], what drafters go by: last hidden states, or those of
              `MoEModel.capture_hidden_states`
    """

    logits: Tensor
    features: Tensor


class MoEModel:
    """Everything of a model but its experts, which come from the bank given to each pass."""

    def __init__(
        self,
        hf_model: Any,
        family: Family,
        device: Processor | Accelerator,
        records: Mapping[str, ExactMatrix],
    ) -> None:
        """records: matrices that are held as records, by the names of their modules."""
        self._hf_model = hf_model
        self._config = hf_model.config
        self._family = family
        self._switch = ActiveBackend()
        self.device = device.torch
        self._uploads = None if isinstance(device, Processor) else Uploads(device)
        self.dtype: torch.dtype = hf_model.dtype
        blocks = list(family.moe_blocks(hf_model).values())
        foreseen = [*(block.logits for block in blocks[1:]), None]
        for layer, (block, next_logits) in enumerate(zip(blocks, foreseen, strict=True)):
            listening = layer, self._switch, block.router, next_logits
            block.experts.attach(*listening, block.logits_of)
        self.num_moe_layers = len(blocks)
        self.gates = [block.gate for block in blocks]
        # Of the experts of each layer; empty where they have none.
        self.biases = [
            each for each in (block.experts.biases for block in blocks) if each is not None
        ]
        hold_dense(hf_model, self._switch, records, [block.router for block in blocks])
        self._windows = windows_of(family, self._config)
        self._cache_name = cache_name(type(hf_model.model).forward)
        self._capture: HiddenStateCapture | None = None
        layers = own_layers(hf_model.model)
        self._states = family.states(self._config)
        self._states.hold(layers)
        # Behind its own layers, where other machines hold the rest.
        self._next_stage = next_stage_layer(hf_model.model)
        keeps_entries = not self._states.layers
        if isinstance(device, Processor) and self.dtype in EXACT_DTYPES and keeps_entries:
            kinds = [ANY_KIND] * len(layers)
            if family.typed_masks:
                types = zip(hf_model.model.layers, self._config.layer_types, strict=False)
                kinds = [kind for layer, kind in types if layer in layers]
            install_fused_decoder(
                hf_model, family, kinds, ahead=host_rope(family, hf_model.model) is None
            )
        self._fused = isinstance(hf_model.model.forward, FusedDecoder)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers held."""
        tensors = [*self._hf_model.parameters(), *self._hf_model.buffers()]
        return sum(tensor.nbytes for tensor in tensors) + held_bytes(self._hf_model)

    @property
    def dense(self) -> dict[str, DenseLinear]:
        """Its dense layers, by the names of their modules, which are those on disk."""
        return dense_linears(self._hf_model)

    @property
    def dense_sizes(self) -> list[int]:
        """Bytes of each matrix of `ModelShape.dense`, as it is held."""
        return [matrix.nbytes for matrix in held_matrices(self._hf_model)]

    @property
    def unrecordable(self) -> str | None:
        """Why no graph of a pass may be recorded; None where one may."""
        if self._family.on_the_host is not None:
            return self._family.on_the_host
        kind = host_rope(self._family, self._hf_model.model)
        if kind is not None:
            return f"rotary embeddings of type {kind} look at positions on the host"
        return None

    def join(self, others: RemoteStages) -> None:
        """Have passes go through other stages behind this model's own layers. Of a first stage."""
        next_stage = present(self._next_stage, "stages were joined to one that is not the first")
        next_stage.others = others

    @property
    def remote_stages(self) -> RemoteStages | None:
        """Where passes go on; None: this machine has all layers, or is not the first."""
        return None if self._next_stage is None else self._next_stage.others

    @property
    def backend(self) -> ExpertBackend | None:
        """The experts of the pass under way."""
        return self._switch.backend

    @property
    def body(self) -> nn.Module:
        """All of the model but its head."""
        return self._hf_model.model

    def last_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm behind the layers: [T, H] to [T, H]."""
        normed: Tensor = getattr(self.body, self._family.last_norm)(hidden_states)
        return normed

    def capture_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Have drafters go by what goes into these layers, side by side, in place of last hidden
        states. Once of a model; none: they go by last hidden states, and nothing is kept.
        """
        if not layers:
            return
        body = self._hf_model.model
        self._capture = HiddenStateCapture(body, layers)
        if isinstance(body.forward, FusedDecoder):
            body.forward.capture = self._capture

    def features(self, hidden_states: Tensor) -> Tensor:
        """What drafters go by [T, F] of the pass that ran last, given its last hidden states."""
        return hidden_states if self._capture is None else self._capture.take()

    @contextmanager
    def using(self, backend: ExpertBackend) -> Iterator[None]:
        """Modules called inside the block run `backend`'s experts."""
        self._switch.use(backend)
        try:
            yield
        finally:
            self._switch.use(None)

    def parts(self) -> dict[str, list[nn.Module]]:
        """Modules by what they do, for measurements; each holds those of other parts inside it."""
        body = self._hf_model.model
        found: dict[str, list[nn.Module]] = {WHOLE: [body], "head": []}
        found["head"].append(self._hf_model.get_output_embeddings())
        blocks = self._family.moe_blocks(self._hf_model)
        for index, layer in enumerate(body.layers):
            mixer = self._states.mixer(layer) or layer.self_attn
            found.setdefault("attention", []).append(mixer)
            kind = "shared experts" if index in blocks else "dense layers"
            found.setdefault(kind, []).append(getattr(layer, self._family.names.mlp))
        found[EXPERTS] = [block.experts for block in blocks.values()]
        found["router"] = [block.router for block in blocks.values()]
        for parent in (body, *body.layers):
            norms = [m for m in parent.children() if "Norm" in type(m).__name__]
            found.setdefault("norms", []).extend(norms)
        return found

    @torch.inference_mode()
    def forward(
        self, backend: ExpertBackend, batch: Sequence[SequenceTokens], prefill: bool = False
    ) -> Tensor:
        """Run tokens of some sequences in one pass; return their last hidden states [1, T, H], the
        rows of each sequence behind those of the one before.

        prefill  whether they are of a prompt: all of them stay, and states need not go back; other
                 stages want to know as well

        Their KV is written behind the length of each cache, which stays as it is. In a pass of few
        rows that the fused decoder runs, a row comes out, bit for bit, as it would without the
        other sequences. Elsewhere it does up to the rounding of products and of attention: torch's
        depend on the number of rows.
        """
        spans = spans_of(batch)
        if self.remote_stages is not None:
            self.remote_stages.begin(spans, prefill)
        packed = torch.tensor([[token_id for each in batch for token_id in each.token_ids]])
        if self._fused and packed.shape[1] <= MAX_LINEAR_ROWS:
            windows = AttentionWindows(spans, self._windows)
            with self.using(backend):
                return self._hf_model.model(
                    input_ids=packed, attention_mask=windows
                ).last_hidden_state
        seen = [self._seen(span) for span in spans]
        for span in spans:
            span.cache.begin_pass(span.tree, prefill)
        token_ids = self._send(packed)
        if len(spans) == 1:
            ((positions, mask),) = seen
            return self._run(backend, spans[0].cache, token_ids, positions, self._masks(mask))
        positions = torch.cat([positions for positions, _ in seen], 1)
        masks = self._masks(lambda window: mask_of([mask(window) for _, mask in seen]))
        with rotated_by_sequence(self._family, self._hf_model.model, spans):
            return self._run(backend, cache_of(spans), token_ids, positions, masks)

    def forward_rows(
        self,
        backend: ExpertBackend,
        batch: Sequence[SequenceTokens],
        hidden_states: Tensor,
        prefill: bool = False,
    ) -> Tensor:
        """Run the layers of a stage behind the first over rows [T, H], which lie as `forward` has
        them: [T, H]. The token ids of the batch do not matter.
        """
        embedding = self._hf_model.model.embed_tokens
        if not isinstance(embedding, StageInput):
            raise Broken("rows came to a model that makes its own")
        embedding.hidden_states = hidden_states
        try:
            return self.forward(backend, batch, prefill)[0]
        finally:
            embedding.hidden_states = None

    def _seen(self, span: BatchSpan) -> tuple[Tensor, Callable[[int | None], Tensor]]:
        """Positions [1, T] of a text's rows, and what they see of its entries, by how far they look
        back.
        """
        cache, tree, count = span.cache, span.tree, span.last - span.first
        end = cache.length + count
        lengths = self._send(torch.tensor([cache.length]))
        if tree is None:
            positions = lengths[:, None] + torch.arange(count, device=self.device)
            return positions, partial(causal_mask, positions, end)
        roots, depths = lengths - tree.first, self._send(torch.tensor(tree.depths()))
        positions = roots[:, None] + depths[tree.first :]
        return positions, partial(attention_mask, roots, depths, self._send(tree.visible()), end)

    @torch.inference_mode()
    def forward_at(
        self,
        backend: ExpertBackend,
        cache: KVCache,
        token_ids: Tensor,
        positions: Tensor,
        seen: int,
    ) -> Tensor:
        """Run one row's chain of tokens [1, T]; return their last hidden states [1, T, H].

        token_ids  on the device, as the positions [1, T] int64 are; entries are written there
        seen       entries that attention runs over, more than any position

        No shape depends on a position and nothing is read by the host, so that a graph of the pass
        is right for all positions below `seen`.
        """
        placed = cache.placed(positions[0], seen)
        mask = partial(causal_mask, positions, seen)
        return self._run(backend, placed, token_ids, positions, self._masks(mask))

    def _send(self, values: Tensor) -> Tensor:
        """A tensor of the host where the model computes."""
        return values if self._uploads is None else self._uploads.send(values)

    def _run(
        self, backend: ExpertBackend, cache: Cache, token_ids: Tensor, positions: Tensor, masks: Any
    ) -> Tensor:
        """masks: as the model takes them"""
        with self.using(backend):
            output = self._hf_model.model(
                input_ids=token_ids,
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: cache},
            )
        return output.last_hidden_state

    def head_words(self) -> tuple[Tensor, Tensor | None]:
        """The head's matrix [V, H], perhaps as a view of what is held, and its bias [V] or None."""
        head = self._hf_model.get_output_embeddings()
        return head.exact.words(), head.bias

    @torch.inference_mode()
    def embed(self, token_ids: list[int]) -> Tensor:
        """What the first layer is given of T tokens: [T, H]."""
        return self._hf_model.get_input_embeddings()(self.tokens(token_ids))

    def tokens(self, token_ids: list[int]) -> Tensor:
        """T tokens where the model computes, [T] int64."""
        return self._send(torch.tensor(token_ids))

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor, backend: ExpertBackend | None = None) -> Tensor:
        """The head: [..., H] to [..., V].

        bank  of the pass that made the hidden states: drafts may have a head of their own
        """
        head = self._hf_model.get_output_embeddings()
        if backend is None:
            return self._capped(head(hidden_states))
        with self.using(backend):
            return self._capped(head(hidden_states))

    def _capped(self, logits: Tensor) -> Tensor:
        """Logits through the softcap that some models have, as their own forward does it."""
        cap = logits_cap(self._config)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def score(self, backend: ExpertBackend, batch: Sequence[SequenceTokens]) -> list[Scored]:
        """Run tokens of some sequences in one pass; logits of all of them, for each sequence."""
        hidden = self.forward(backend, batch)[0]
        counts = [len(each.token_ids) for each in batch]
        found = self.logits(hidden, backend), self.features(hidden)
        by_sequence = zip(*(rows.split(counts) for rows in found), strict=True)
        return [Scored(*each) for each in by_sequence]

    def prefill(
        self, backend: ExpertBackend, tokens: SequenceTokens, observe: OnHidden | None = None
    ) -> Tensor:
        """Run a chunk of a prompt and keep its KV; the last hidden state [1, H].

        observe  told the tokens, and what drafters go by of them
        """
        hidden = self.forward(backend, [tokens], prefill=True)[0]
        tokens.cache.advance(len(tokens.token_ids))
        tokens.cache.settle()
        if observe is not None:
            observe(tokens.token_ids, self.features(hidden))
        return hidden[-1:]

    def score_last(self, last: Tensor) -> Scored:
        """Score a prompt's last token by its hidden state [1, H]."""
        return Scored(self.logits(last), last)

    def _masks(self, mask: Callable[[int | None], Tensor]) -> Any:
        """mask: what tokens see of the entries, given how far they look back."""
        masks = {kind: mask(window) for kind, window in self._windows.items()}
        return masks if self._family.typed_masks else masks[ANY_KIND]


def logits_cap(config: Any) -> float | None:
    """Between which number and its negative logits are squeezed; None: they are not."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def windows_of(family: Family, config: Any) -> dict[str, int | None]:
    """How far each kind of layer looks back, its own token included; None: all the way."""
    window = getattr(config, "sliding_window", None) or None  # some store 0 for none
    if not family.typed_masks:
        return {ANY_KIND: window if family.window else None}
    kinds = sorted(set(config.layer_types))
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def host_rope(family: Family, body: Any) -> str | None:
    """The type of rotary embeddings that look at all positions of a pass; None for others."""
    given = getattr(getattr(body, family.rotary), "rope_type", None)
    for kind in sorted(map(str, given.values() if isinstance(given, dict) else [given])):
        if kind == "longrope" or "dynamic" in kind:
            return kind
    return None


@contextmanager
def rotated_by_sequence(family: Family, body: Any, spans: Sequence[BatchSpan]) -> Iterator[None]:
    """Within the block positions turn the rows of each text as those of that text alone do, where
    turns depend on all positions of a pass.
    """
    if host_rope(family, body) is None:
        yield
        return
    rotary = getattr(body, family.rotary)
    own = rotary.forward

    def forward(hidden: Tensor, position_ids: Tensor, **others: Any) -> tuple[Tensor, ...]:
        turns = [own(hidden, position_ids=position_ids[..., span.rows], **others) for span in spans]
        return tuple(torch.cat(of_sequences, 1) for of_sequences in zip(*turns, strict=True))

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the report that all expert tensors were left unread, and without progress bars."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def load(
    family: Family,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: Processor | Accelerator,
    records: Records | None = None,
    progress: Progress = no_progress,
    part: LayerRange | None = None,
) -> MoEModel:
    """Load all of a model but its experts, or of a part of it.

    records   makes records of its matrices, one after another; None: they stay words
    progress  told (what, done, total)

    Raises SpeqError where the checkpoint lacks a tensor or has one of another shape.
    """
    count = checkpoint.model_config.get("num_hidden_layers")

    def is_held(name: str) -> bool:
        return family.holds(name, count) and (part is None or part.holds(name))

    try:
        with quiet_transformers(), built(family, part):
            model, info = from_checkpoint(
                checkpoint,
                is_held,
                dtype=dtype,
                attn_implementation=family.attention_by,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers' loader has no error type of its own
        raise SpeqError(
            f"transformers cannot load {checkpoint.path}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; {OTHER_VERSION}"
        ) from error
    if info["mismatched_keys"]:
        name, given, wanted = sorted(info["mismatched_keys"], key=str)[0]
        raise SpeqError(
            f"{checkpoint.path}: tensor {name} has shape {list(given)}; config.json makes it "
            f"{list(wanted)}; {OTHER_VERSION}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise SpeqError(
            f"{checkpoint.path} lacks {len(missing)} tensors that config.json asks for, "
            f"{missing[0]} among them; download it again, or choose another checkpoint"
        )
    unexpected = [name for name in info["unexpected_keys"] if ".experts." not in name]
    unexpected = [name for name in unexpected if is_held(name)]
    if unexpected:
        logging.getLogger("speq").warning(
            "%s holds %d tensors the model has no use for, %s among them",
            checkpoint.path,
            len(unexpected),
            checkpoint.on_disk(sorted(unexpected)[0]),
        )
    check = checkpoint.tensor_check()
    if part is not None:
        others = [place for name, place in checkpoint.tensors.items() if not part.holds(name)]
        for file, stored in others:
            check.leave(file, stored.offset)
    mapped = MappedWeights(checkpoint, check)
    plain = plain_modules(model, family.routers(model))
    held = {} if records is None else records(plain, mapped)
    if isinstance(device, Processor):
        make_resident(model, mapped, progress)
    check.finish(partial(progress, "comparing weights with their checksums"))
    return MoEModel(model.eval().to(device.torch), family, device, held)
