"""A transformers model with two expert backends, run over tokens, trees of tokens and prompts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import logging as hf_logging

from speq.devices.device import Accelerator, Processor
from speq.devices.staged import Uploads
from speq.errors import Broken, CheckpointError, present
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import OTHER_VERSION
from speq.kernels import library
from speq.kernels.checks import EXACT_DTYPES
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.layers.arguments import cache_name
from speq.layers.dense_linear import DenseLinear, dense_linears
from speq.layers.dense_matrix import ExactMatrix
from speq.layers.indexer import install_indexers
from speq.layers.offloaded_experts import ActiveBackend, ExpertBackend
from speq.models.attention import IN_BLOCKS
from speq.models.decoder_recordings import DecoderRecordings
from speq.models.dense import Records, hold_dense, matrices_in, matrix_bytes, packable_modules
from speq.models.dequantised import load_dequantized
from speq.models.family import Family
from speq.models.fused_decoder import (
    ANY_KIND,
    AttentionWindows,
    FusedDecoder,
    fuse_parts,
    install_fused_decoder,
)
from speq.models.hidden_state_capture import HiddenStateCapture
from speq.models.kv_cache import KVCache, attention_mask, causal_mask
from speq.models.layer_parts import parts_of
from speq.models.layer_range import (
    LayerRange,
    RemoteStages,
    StageInput,
    build_part,
    next_stage_layer,
    own_layers,
)
from speq.models.ngram_layer import close_tables, open_tables
from speq.models.packed_batch import (
    BatchSpan,
    SequenceTokens,
    cache_of,
    mask_of,
    spans_of,
)
from speq.models.resident import MappedWeights, make_resident
from speq.models.table_on_disk import close_table, leave_table
from speq.units import Progress, no_progress

# Parts of a pass: the routed experts, and what belongs to no module below the model.
EXPERTS = "routed experts"
WHOLE = "between modules"
# Called with tokens and their features for drafters [T, F], see `MoEModel.capture_hidden_states`.
OnHidden = Callable[[list[int], Tensor], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """Results of a pass for the requested nodes.

    logits    [N, V]
    features  [N, F], input of drafters: last hidden states, or those of
              `MoEModel.capture_hidden_states`
    """

    logits: Tensor
    features: Tensor


class MoEModel:
    """A model without its experts, which come from the backend given to each pass."""

    def __init__(
        self,
        hf_model: Any,
        family: Family,
        device: Processor | Accelerator,
        records: Mapping[str, ExactMatrix],
        recorded: bool = True,
        in_order: bool = False,
    ) -> None:
        """
        records   packed matrices, by the names of their modules
        recorded  record passes of few tokens on the CPU as lists of ops
        in_order  the CPU kernels add up in the order of `library.ordered_sums`
        """
        self._sums: Callable[[], AbstractContextManager[None]] = (
            library.ordered_sums if in_order else nullcontext
        )
        self._hf_model = hf_model
        self._config = hf_model.config
        self._family = family
        self._switch = ActiveBackend()
        self.device = device.torch
        self._uploads = None if isinstance(device, Processor) else Uploads(device)
        self.dtype: torch.dtype = hf_model.dtype
        blocks = list(family.moe_blocks(hf_model).values())
        forecast = (None if block.by_token else block.logits for block in blocks[1:])
        next_logits_of = [*forecast, None]
        for layer, (block, next_logits) in enumerate(zip(blocks, next_logits_of, strict=True)):
            listening = layer, self._switch, block.router, next_logits
            block.experts.attach(*listening, block.logits_of)
        self.num_moe_layers = len(blocks)
        self.gates = [block.gate for block in blocks]
        # Biases of each layer's experts; empty if they have none.
        self.biases = [
            each for each in (block.experts.biases for block in blocks) if each is not None
        ]
        family.scale_in_embedding(hf_model)
        hold_dense(hf_model, self._switch, records, [block.router for block in blocks])
        self._windows = windows_of(family, self._config)
        self._cache_name = cache_name(type(hf_model.model).forward)
        self._capture: HiddenStateCapture | None = None
        layers = own_layers(hf_model.model)
        self._states = family.states(self._config)
        self._states.hold(layers)
        family.put_stand_ins(hf_model)
        if isinstance(device, Processor) and not family.stand_ins:
            install_indexers(layers, self._config._attn_implementation == IN_BLOCKS)
        # Follows its own layers if other machines hold the rest.
        self._next_stage = next_stage_layer(hf_model.model)
        if isinstance(device, Processor) and self.dtype in EXACT_DTYPES:
            fuse_parts(hf_model, family)
            kinds = [ANY_KIND] * len(layers)
            if family.typed_masks:
                types = zip(hf_model.model.layers, self._config.layer_types, strict=False)
                kinds = [kind for layer, kind in types if layer in layers]
            ahead = host_rope(family, hf_model.model) is None
            install_fused_decoder(hf_model, family, self._states, kinds, ahead)
        decoder = hf_model.model.forward
        self._fused = isinstance(decoder, FusedDecoder)
        # Of passes of few tokens, on the CPU; None: there are none.
        self.recordings: DecoderRecordings | None = None
        listed = recorded and library.has_cpu_library()
        if listed and isinstance(decoder, FusedDecoder) and decoder.recordable:
            self.recordings = DecoderRecordings(decoder, self._switch)

    def close(self) -> None:
        """Give back the files of tables that stay on disk, and end what reads them."""
        close_tables(self._hf_model)
        close_table(self._hf_model)

    @property
    def nbytes(self) -> int:
        tensors = [*self._hf_model.parameters(), *self._hf_model.buffers()]
        return sum(tensor.nbytes for tensor in tensors) + matrix_bytes(self._hf_model)

    @property
    def dense(self) -> dict[str, DenseLinear]:
        """Dense layers by module name, which is also their name on disk."""
        return dense_linears(self._hf_model)

    @property
    def dense_sizes(self) -> list[int]:
        """Bytes of each matrix of `ModelShape.dense` in its present form."""
        return [matrix.nbytes for matrix in matrices_in(self._hf_model)]

    @property
    def unrecordable(self) -> str | None:
        """Reason why no graph of a pass may be recorded; None if one may."""
        if self._family.on_the_host is not None:
            return self._family.on_the_host
        kind = host_rope(self._family, self._hf_model.model)
        if kind is not None:
            return f"rotary embeddings of type {kind} look at positions on the host"
        return None

    def join(self, others: RemoteStages) -> None:
        """Send the first stage's passes through the other stages after its own layers."""
        next_stage = present(self._next_stage, "stages were joined to a later stage")
        next_stage.others = others

    @property
    def remote_stages(self) -> RemoteStages | None:
        """The later stages; None: this machine has all layers, or is not the first."""
        return None if self._next_stage is None else self._next_stage.others

    @property
    def backend(self) -> ExpertBackend | None:
        """Expert backend of the current pass."""
        return self._switch.backend

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        return self._hf_model.model

    def last_norm(self, hidden_states: Tensor) -> Tensor:
        """Norm after the layers: [T, H] to [T, H]."""
        normed: Tensor = getattr(self.body, self._family.last_norm)(hidden_states)
        return normed

    def capture_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Give drafters the inputs of these layers, side by side, as features. Call once; without
        layers, the features are the last hidden states.
        """
        if not layers:
            return
        body = self._hf_model.model
        streams = self._family.streams_of(self._config)
        self._capture = HiddenStateCapture(body, layers, streams)
        if isinstance(body.forward, FusedDecoder):
            body.forward.capture = self._capture

    def features(self, hidden_states: Tensor) -> Tensor:
        """Features [T, F] of the last pass for drafters, given its last hidden states."""
        return hidden_states if self._capture is None else self._capture.take()

    @contextmanager
    def using(self, backend: ExpertBackend) -> Iterator[None]:
        """Run the experts of `backend` inside the block."""
        self._switch.use(backend)
        try:
            with self._sums():
                yield
        finally:
            self._switch.use(None)

    def parts(self) -> dict[str, list[nn.Module]]:
        """Modules by purpose, for measurements; a module may contain those of other parts."""
        body = self._hf_model.model
        found: dict[str, list[nn.Module]] = {WHOLE: [body], "head": []}
        found["head"].append(self._hf_model.get_output_embeddings())
        blocks = self._family.moe_blocks(self._hf_model)
        for index, layer in enumerate(body.layers):
            parts = parts_of(layer, self._family, self._states)
            kind = "shared experts" if index in blocks else "dense layers"
            for name, part in (("attention", parts.mixer), (kind, parts.feed_forward)):
                if part is not None:
                    found.setdefault(name, []).append(part)
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
        """Run tokens of a batch in one pass. Return their last hidden states [1, T, H], sequence
        after sequence.

        prefill  the tokens are of a prompt and are never rolled back; other stages are informed as
                 well

        Their KV is written after the length of each cache, which does not change. In a pass of few
        rows, which the fused decoder runs, each row is bit-identical to a pass without the other
        sequences. In other passes it is equal up to rounding: torch's products and attention depend
        on the number of rows.
        """
        spans = spans_of(batch)
        if self.remote_stages is not None:
            self.remote_stages.begin(spans, prefill)
        packed = torch.tensor([[token_id for each in batch for token_id in each.token_ids]])
        for span in spans:
            span.cache.begin_pass(span.tree, prefill)
        if self._fused and packed.shape[1] <= MAX_LINEAR_ROWS:
            with self.using(backend):
                if self.recordings is not None and not prefill:
                    hidden = self.recordings.run(backend, spans, packed, self._windows)
                    if hidden is not None:
                        return hidden[None]
                windows = AttentionWindows(spans, self._windows)
                return self._hf_model.model(
                    input_ids=packed, attention_mask=windows
                ).last_hidden_state
        seen = [self._seen(span) for span in spans]
        token_ids = self._send(packed)
        if len(spans) == 1:
            ((positions, mask),) = seen
            return self._run(backend, spans[0].cache, token_ids, positions, self._masks(mask))
        positions = torch.cat([positions for positions, _ in seen], 1)
        masks = self._masks(lambda window: mask_of([mask(window) for _, mask in seen]))
        with rotary_by_sequence(self._family, self._hf_model.model, spans):
            return self._run(backend, cache_of(spans), token_ids, positions, masks)

    def forward_rows(
        self,
        backend: ExpertBackend,
        batch: Sequence[SequenceTokens],
        hidden_states: Tensor,
        prefill: bool = False,
    ) -> Tensor:
        """Run the layers of a later stage over rows [T, H], in the order of `forward`. Return [T,
        H]. The token ids of the batch do not matter.
        """
        embedding = self._hf_model.get_input_embeddings()
        if not isinstance(embedding, StageInput):
            raise Broken("rows were sent to a model that has the embedding itself")
        embedding.hidden_states = hidden_states
        try:
            return self.forward(backend, batch, prefill)[0]
        finally:
            embedding.hidden_states = None

    def _seen(self, span: BatchSpan) -> tuple[Tensor, Callable[[int | None], Tensor]]:
        """Return the positions [1, T] of a sequence's rows, and a function from window to attention
        mask.
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
        """Run a chain of tokens [1, T] of one sequence. Return their last hidden states [1, T, H].

        token_ids  on the device, as are the positions [1, T] int64; KV is written at these
                   positions
        seen       cached tokens that attention reads, more than any position

        No shape depends on a position and the host reads nothing, so a graph of the pass is valid
        for all positions below `seen`.
        """
        placed = cache.placed(positions[0], seen)
        mask = partial(causal_mask, positions, seen)
        return self._run(backend, placed, token_ids, positions, self._masks(mask))

    def forget_recordings(self) -> None:
        """Free the recorded passes, whose KV caches and experts are given back."""
        if self.recordings is not None:
            self.recordings.forget()

    def _send(self, values: Tensor) -> Tensor:
        """Copy a tensor from the host to where the model computes."""
        return values if self._uploads is None else self._uploads.send(values)

    def _run(
        self, backend: ExpertBackend, cache: Cache, token_ids: Tensor, positions: Tensor, masks: Any
    ) -> Tensor:
        """Run the body of the model. masks: as the model takes them"""
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
        """Return the head's matrix [V, H], possibly a view, and its bias [V] or None."""
        head = self._hf_model.get_output_embeddings()
        return head.exact.words(), head.bias

    @torch.inference_mode()
    def embed(self, token_ids: list[int]) -> Tensor:
        """Input of the first layer for T tokens: [T, H]."""
        return self._hf_model.get_input_embeddings()(self.tokens(token_ids))

    def tokens(self, token_ids: list[int]) -> Tensor:
        """Copy T tokens to where the model computes: [T] int64."""
        return self._send(torch.tensor(token_ids))

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor, backend: ExpertBackend | None = None) -> Tensor:
        """Apply the head: [..., H] to [..., V].

        backend  of the pass that made the hidden states: drafts may have a head of their own
        """
        head = self._hf_model.get_output_embeddings()
        with self._sums() if backend is None else self.using(backend):
            return self._scaled(head(hidden_states))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Divide logits, or bound them, as some models do in their own forward."""
        cap = logits_cap(self._config)
        if cap is not None:
            return logits.div_(cap).tanh_().mul_(cap)
        divisor: float | None = getattr(self._config, "logits_scaling", None)
        return logits if divisor is None else logits.div_(divisor)

    def prefill(
        self, backend: ExpertBackend, tokens: SequenceTokens, observe: OnHidden | None = None
    ) -> Tensor:
        """Run a chunk of a prompt and keep its KV. Return its last hidden states [T, H].

        observe  called with the tokens and their features for drafters
        """
        hidden = self.forward(backend, [tokens], prefill=True)[0]
        tokens.cache.advance(len(tokens.token_ids))
        tokens.cache.settle()
        if observe is not None:
            observe(tokens.token_ids, self.features(hidden))
        return hidden

    def score_last(self, last: Tensor) -> Scored:
        """Score a prompt's last token by its hidden state [1, H]."""
        return Scored(self.logits(last), last)

    def _masks(self, mask: Callable[[int | None], Tensor]) -> Any:
        """Build the masks that the model takes from a function from window to mask."""
        masks = {kind: mask(window) for kind, window in self._windows.items()}
        return masks if self._family.typed_masks else masks[ANY_KIND]


def logits_cap(config: Any) -> float | None:
    """Softcap: bound on the magnitude of logits; None: there is none."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def windows_of(family: Family, config: Any) -> dict[str, int | None]:
    """Attention window of each kind of layer, its own token included; None: no limit."""
    window = getattr(config, "sliding_window", None) or None  # some store 0 for none
    if not family.typed_masks:
        return {ANY_KIND: window if family.window else None}
    kinds = sorted(set(config.layer_types))
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def host_rope(family: Family, body: Any) -> str | None:
    """Type of rotary embeddings that depend on all positions of a pass; None for others."""
    given = getattr(family.rotary_of(body), "rope_type", None)
    for kind in sorted(map(str, given.values() if isinstance(given, dict) else [given])):
        if kind == "longrope" or "dynamic" in kind:
            return kind
    return None


@contextmanager
def rotary_by_sequence(family: Family, body: Any, spans: Sequence[BatchSpan]) -> Iterator[None]:
    """Compute rotary embeddings by sequence inside the block, if they depend on all positions of a
    pass.
    """
    if host_rope(family, body) is None:
        yield
        return
    rotary = family.rotary_of(body)
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
    """Silence the report of unread expert tensors and the progress bars inside the block."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def attention_on(device: Processor | Accelerator, family: Family) -> str:
    """Name of what computes attention outside the fused decoder, in transformers' table."""
    return IN_BLOCKS if isinstance(device, Processor) else family.attention_by


def load(
    family: Family,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: Processor | Accelerator,
    records: Records | None = None,
    progress: Progress = no_progress,
    part: LayerRange | None = None,
    recorded: bool = True,
    in_order: bool = False,
    table_on_disk: bool = False,
) -> MoEModel:
    """Load a model, or a part of it, without its experts.

    records   packs its matrices; None: they stay plain weights
    table_on_disk  read the embedding's rows from its file as tokens ask for them
    recorded, in_order  as MoEModel has them
    progress  called with (what, done, total)

    Raises SpeqError if the checkpoint lacks a tensor or has one of another shape.
    """
    count = checkpoint.model_config.get("num_hidden_layers")

    def is_held(name: str) -> bool:
        return family.holds(name, count) and (part is None or part.holds(name))

    try:
        with quiet_transformers(), build_part(family, part):
            model, info = load_dequantized(
                checkpoint,
                is_held,
                dtype=dtype,
                attn_implementation=attention_on(device, family),
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers' loader has no error type of its own
        raise CheckpointError(
            f"transformers cannot load {checkpoint.path}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; {OTHER_VERSION}"
        ) from error
    if info["mismatched_keys"]:
        name, given, wanted = sorted(info["mismatched_keys"], key=str)[0]
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(given)}; config.json makes it "
            f"{list(wanted)}; {OTHER_VERSION}"
        )
    made = () if family.text_part is None else family.text_part.integers  # of the configuration
    missing = sorted(name for name in info["missing_keys"] if not name.endswith(made))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} tensors that config.json requires, "
            f"{missing[0]} among them; download it again, or choose another checkpoint"
        )
    unexpected = [name for name in info["unexpected_keys"] if ".experts." not in name]
    unexpected = [name for name in unexpected if is_held(name)]
    if unexpected:
        logging.getLogger("speq").warning(
            "%s holds %d tensors the model has no use for, such as %s",
            checkpoint.path,
            len(unexpected),
            checkpoint.on_disk(sorted(unexpected)[0]),
        )
    check = checkpoint.tensor_check()
    for name, (file, stored) in checkpoint.tensors.items():
        if family.is_on_disk(name) or (part is not None and not part.holds(name)):
            check.leave(file, stored.offset)
    mapped = MappedWeights(checkpoint, check)
    held: dict[str, ExactMatrix] = {**leave_table(model, mapped)} if table_on_disk else {}
    plain = packable_modules(model, family.routers(model))
    if records is not None:
        held.update(records((each for each in plain if each[0] not in held), mapped))
    if isinstance(device, Processor):
        make_resident(model, mapped, progress)
    check.finish(partial(progress, "comparing weights with their checksums"))
    check_token_tables(family, model, checkpoint)
    open_tables(model, checkpoint)
    return MoEModel(model.eval().to(device.torch), family, device, held, recorded, in_order)


def check_token_tables(family: Family, model: Any, checkpoint: Checkpoint) -> None:
    """Raise SpeqError for a table of token ids [V, K] with a row other than K different experts."""
    for layer, block in family.moe_blocks(model).items():
        if not block.by_token:
            continue
        router: Any = block.router
        table, experts = getattr(router, str(family.token_table)), router.num_experts
        ordered = table.sort(1).values
        wrong = (ordered[:, 0] < 0) | (ordered[:, -1] >= experts)
        wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(1)
        if wrong.any():
            token = int(wrong.nonzero()[0])
            raise CheckpointError(
                f"{checkpoint.path}: {family.token_table} of layer {layer} gives token {token} "
                f"experts {table[token].tolist()}; they must differ and be of 0 to {experts - 1}: "
                "download it again, or choose another checkpoint"
            )
