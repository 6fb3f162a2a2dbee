"""The memory that a run asks for: by its model, the way its experts are held, and its budget."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from speq.config import DEFAULT_READER_THREADS
from speq.errors import checked_int
from speq.experts.codec import codec_of
from speq.experts.encoding_store import encoding_bytes
from speq.files.alignment import ALIGNMENT
from speq.files.range_file import ENDS_BYTES
from speq.governor.draft_length import LONGEST, LONGEST_SIDE
from speq.governor.holding import Holding
from speq.heads.head_text import ROWS as HEAD_ROWS
from speq.kernels.dense_ops import product_scratch_bytes
from speq.kernels.library import KERNELS
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.recorded import MAX_GRAPHS
from speq.models.shape import ModelShape
from speq.planning.memory import Demand
from speq.planning.subject import Subject

# A plan is for so many tokens where nothing is said: enough for a chat.
DEFAULT_CONTEXT = 4096
# A draft's head of eight bits: both planes' logits and their sum, in float32.
HEAD_LOGIT_BYTES = 12


@dataclass(frozen=True, slots=True)
class Beside:
    """What a run on a device with memory of its own takes besides tensors there.

    host_bytes  of the host's memory, for exact experts; None: as much as all of them take
    overhead    (bytes of tensors that are kept, whether passes are recorded) -> what the device
                takes beyond them, as `speq.devices.device.Accelerator.overhead_bytes`
    """

    host_bytes: int | None
    overhead: Callable[[Iterable[int], bool], int]


@dataclass(frozen=True, slots=True)
class Budget:
    """What is planned for.

    context        tokens of KV cache
    readers        threads that read
    longest_draft  tokens of a draft that is to be verified, at most
    beside         what is taken besides tensors on a device; None: nothing of that is asked
    graphs         whether passes are recorded, which the CPU never does
    texts          that run side by side, at most, each with a KV cache of its own
    longest_side   as `longest_draft`, of a drafter that takes no memory, beside the run's own or
                   alone
    """

    budget_bytes: int
    context: int
    on_cpu: bool
    readers: int = DEFAULT_READER_THREADS
    longest_draft: int = LONGEST
    beside: Beside | None = None
    graphs: bool = False
    texts: int = 1
    longest_side: int = 0

    @classmethod
    def of(
        cls, budget_bytes: int, context: int | None, on_cpu: bool, shape: ModelShape
    ) -> "Budget":
        """Of a run with options as they are.

        context  None: `DEFAULT_CONTEXT`, or the model's limit where that is less
        """
        limit = shape.max_context
        if context is None:
            context = min(DEFAULT_CONTEXT, limit)
        context = checked_int("context_length", context, 1, limit)
        return cls(budget_bytes, context, on_cpu, longest_side=LONGEST_SIDE)


def demand_of(subject: Subject, holding: Holding, budget: Budget) -> Demand:
    """A run of the model with its experts held so."""
    shape, dtype = subject.shape, subject.dtype
    codec = codec_of(holding.codec, subject.codec.shape)
    # On a GPU loading and reading pass through host memory, which is not what is budgeted.
    readers = budget.readers if budget.on_cpu else 0
    loading_bytes = 0
    if budget.on_cpu:
        loading_bytes = subject.dense.loading_bytes(budget.readers, subject.converted_bytes)
    texts = budget.texts
    each = 1 + budget.longest_draft if holding.drafts else 1
    alone = max(each, 1 + budget.longest_side)
    # Side by side, texts draft less far each: all rows of a pass are few.
    scored = max(alone, texts * min(each, MAX_LINEAR_ROWS // texts))
    order_bytes = 0
    if holding.draft_bytes and holding.encoded and codec.needs_draft:
        # Records follow the order of the draft's codes, which the copy then keeps.
        order_bytes = subject.count * 4 * subject.shape.experts.expert_width
    recorded = budget.graphs and not budget.on_cpu
    head = subject.head if holding.drafter == "head" else None
    kv_elements = shape.kv_elements_per_token + (head.kv_elements_per_token if head else 0)

    def workspace(rows: int, context: int) -> int:
        taken = pass_bytes(rows, context)
        if texts > 1:
            taken = max(taken, pass_bytes(scored, texts * context))
        if head is None:
            return taken
        taken += head.features_bytes(max(rows, scored), dtype)
        # The head's passes come after the model's.
        return max(taken, head.workspace_bytes(HEAD_ROWS, shape.vocab_size, context, dtype))

    def pass_bytes(rows: int, context: int) -> int:
        rows = max(rows, scored)
        few = min(MAX_LINEAR_ROWS, KERNELS["cpu" if budget.on_cpu else "cuda"].max_rows)
        decoded = decoded_bytes(subject, rows, scored, few)
        if budget.on_cpu:
            return shape.workspace_bytes(rows, scored, context, dtype) + decoded
        kernels = shape.gpu_kernel_bytes(rows, dtype, codec.shape.dtype, codec.plain_bytes)
        return shape.activation_bytes(rows, scored, context, dtype) + kernels + decoded

    def graphs(context: int) -> int:
        taken = graph_bytes(shape, alone, holding.drafter == "int4", context, dtype)
        kept = MAX_GRAPHS * head.features_bytes(alone, dtype) if head else 0
        return taken + kept

    return Demand(
        non_expert_bytes=subject.non_expert_bytes,
        loading_bytes=loading_bytes,
        draft_bytes=holding.draft_bytes + order_bytes,
        kv_bytes_per_token=texts * kv_elements * dtype.itemsize,
        texts=texts,
        reading_bytes=(
            ALIGNMENT + readers * reading_bytes_of(subject, holding) + subject.copying_bytes
        ),
        slot_bytes=holding.slot_bytes,
        num_experts=subject.count,
        workspace=workspace,
        graphs=graphs if recorded else None,
        overhead=overhead_of(subject, holding, budget),
        head_bytes=head.nbytes(dtype) if head else 0,
        state_bytes=texts * shape.states.nbytes(dtype),
    )


def decoded_bytes(subject: Subject, rows: int, scored: int, few: int) -> int:
    """What products of many rows by a compact dense matrix take: its words, one matrix at a time.

    rows  of the pass; scored: of them, those that the head, of the embedding's shape, is asked for
    few   rows that need none of it
    """
    if subject.dense.name == "raw":
        return 0
    shape, dtype = subject.shape, subject.dtype
    head = shape.embedding
    asked = {each: scored if each == head else rows for each in shape.dense}
    return max(
        product_scratch_bytes(*each, dtype) if count > few else 0 for each, count in asked.items()
    )


def overhead_of(subject: Subject, holding: Holding, budget: Budget) -> Callable[[int], int] | None:
    """Tokens of context -> what the device takes beyond all tensors."""
    beside = budget.beside
    if beside is None:
        return None
    return lambda context: beside.overhead(
        kept_bytes(subject, holding, context, budget.texts), budget.graphs
    )


def graph_bytes(
    shape: ModelShape, rows: int, drafted: bool, context: int, dtype: torch.dtype
) -> int:
    """What recorded passes keep.

    rows     tokens of the longest verification
    drafted  whether the draft's passes are recorded as well

    Graphs of one kind of pass share the memory of the widest, which no other tensor gets. Each
    keeps its results, and verifications what lies, in every layer, where the host takes part.
    """
    experts, size = shape.experts, dtype.itemsize
    result = (shape.vocab_size + experts.hidden_size) * size
    at_cut = 2 * experts.hidden_size * size + 4 * experts.num_experts + 16 * shape.top_k
    verification = shape.activation_bytes(rows, 0, context, dtype)
    verification += MAX_GRAPHS * rows * (result + len(experts.layers) * at_cut)
    if not drafted:
        return verification
    draft = shape.activation_bytes(1, 0, context, dtype) + MAX_GRAPHS * result
    draft += HEAD_LOGIT_BYTES * shape.vocab_size
    return verification + draft + shape.gpu_kernel_bytes(1, dtype, dtype, plain_bytes=0)


def reading_bytes_of(subject: Subject, holding: Holding) -> int:
    """Memory of each thread that reads; records go straight into their slots."""
    codec = codec_of(holding.codec, subject.codec.shape)
    if holding.encoded:
        return subject.reading_bytes + encoding_bytes(subject.codec, codec)
    if holding.codec == subject.codec.name:
        return subject.reading_bytes
    return ENDS_BYTES + ALIGNMENT if codec.usual_bits is None else 0


def kept_bytes(subject: Subject, holding: Holding, context: int, texts: int = 1) -> Iterator[int]:
    """Each tensor that a run keeps on a device, slots apart, in the order in which they are made:
    weights, the INT4 copy part by part, the head, and the KV caches of so many texts.
    """
    shape, size = subject.shape, subject.dtype.itemsize
    yield from subject.dense.sizes
    yield from shape.other_bytes(subject.dtype)
    if holding.holds_int4 and subject.draft is not None:
        for part, dtype in subject.draft.shapes.values():
            yield subject.drafted(holding.draft_experts) * math.prod(part) * dtype.itemsize
    if holding.drafter == "int4":
        for layout in subject.dense_draft.layouts.values():
            yield from (math.prod(part) * kind.itemsize for part, kind in layout.shapes.values())
    kv_shapes = shape.kv_layers * texts
    yield from texts * shape.states.sizes_of(subject.dtype)
    if holding.drafter == "head" and subject.head is not None:
        yield from subject.head.sizes(subject.dtype)
        kv_shapes += [subject.head.kv_shapes] * texts
    for of_layer in kv_shapes:
        yield from (heads * width * context * size for heads, width in of_layer)
