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
from speq.governor.draft_length import LONGEST, LONGEST_SECONDARY
from speq.heads.head_context import ROWS as HEAD_ROWS
from speq.kernels.dense_ops import product_scratch_bytes
from speq.kernels.library import KERNELS
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.decoder_recordings import MAX_IN_ALL
from speq.models.recorded import MAX_GRAPHS
from speq.models.shape import ModelShape
from speq.models.states import SNAPSHOTS
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.memory import Demand
from speq.planning.model_spec import ModelSpec

# A plan is for so many tokens where nothing is said: enough for a chat.
DEFAULT_CONTEXT = 4096
# A draft's head of eight bits: both planes' logits and their sum, in float32.
HEAD_LOGIT_BYTES = 12


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
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
    batch_size     sequences that run as one batch, at most, each with a KV cache of its own
    longest_side   as `longest_draft`, of a drafter that takes no memory, beside the run's own or
                   alone
    snapshots      copies of a sequence's states that are kept for later prompts
    """

    budget_bytes: int
    context: int
    on_cpu: bool
    readers: int = DEFAULT_READER_THREADS
    longest_draft: int = LONGEST
    beside: DeviceOverhead | None = None
    graphs: bool = False
    batch_size: int = 1
    longest_side: int = 0
    snapshots: int = 0

    @classmethod
    def of(
        cls, budget_bytes: int, context: int | None, on_cpu: bool, shape: ModelShape
    ) -> "Budget":
        """The budget of a run with default options.

        context  None: `DEFAULT_CONTEXT`, or the model's limit where that is less
        """
        limit = shape.max_context
        if context is None:
            context = min(DEFAULT_CONTEXT, limit)
        context = checked_int("context_length", context, 1, limit)
        return cls(
            *(budget_bytes, context, on_cpu), longest_side=LONGEST_SECONDARY, snapshots=SNAPSHOTS
        )


def demand_of(model_spec: ModelSpec, plan: ResidencyPlan, budget: Budget) -> Demand:
    """A run of the model with its experts held so."""
    shape, dtype = model_spec.shape, model_spec.dtype
    codec = codec_of(plan.codec, model_spec.codec.shape)
    # On a GPU loading and reading pass through host memory, which is not what is budgeted.
    readers = budget.readers if budget.on_cpu else 0
    loading_bytes = 0
    if budget.on_cpu:
        loading_bytes = model_spec.dense.loading_bytes(budget.readers, model_spec.converted_bytes)
    batch_size = budget.batch_size
    each = 1 + budget.longest_draft if plan.drafts else 1
    alone = max(each, 1 + budget.longest_side)
    # In a batch each sequence drafts less far: all rows of a pass are few.
    scored = max(alone, batch_size * min(each, MAX_LINEAR_ROWS // batch_size))
    order_bytes = 0
    if plan.draft_bytes and plan.encoded and codec.needs_draft:
        # Records follow the order of the draft's codes, which the copy then keeps.
        order_bytes = model_spec.count * 4 * model_spec.shape.experts.expert_width
    recorded = budget.graphs and not budget.on_cpu
    head = model_spec.head if plan.drafter == "head" else None
    kv_elements = shape.kv_elements_per_token + (head.kv_elements_per_token if head else 0)

    def workspace(rows: int, context: int) -> int:
        taken = pass_bytes(rows, context)
        if batch_size > 1:
            taken = max(taken, pass_bytes(scored, batch_size * context))
        if head is not None:
            taken += head.features_bytes(max(rows, scored), dtype)
            # The head's passes come after the model's.
            of_head = head.workspace_bytes(HEAD_ROWS, shape.vocab_size, context, dtype)
            taken = max(taken, of_head)
        # Recorded passes keep what indexers choose: a byte for each row and cached token.
        chooses = budget.on_cpu and any(len(each) > 2 for each in shape.kv_layers)
        return taken + (MAX_IN_ALL * scored * context if chooses else 0)

    def pass_bytes(rows: int, context: int) -> int:
        rows = max(rows, scored)
        few = min(MAX_LINEAR_ROWS, KERNELS["cpu" if budget.on_cpu else "cuda"].max_rows)
        decoded = decoded_bytes(model_spec, rows, scored, few)
        if budget.on_cpu:
            return shape.workspace_bytes(rows, scored, context, dtype) + decoded
        kernels = shape.gpu_kernel_bytes(rows, dtype, codec.shape.dtype, codec.plain_bytes)
        return shape.activation_bytes(rows, scored, context, dtype) + kernels + decoded

    def graphs(context: int) -> int:
        taken = graph_bytes(shape, alone, plan.drafter == "int4", context, dtype)
        kept = MAX_GRAPHS * head.features_bytes(alone, dtype) if head else 0
        return taken + kept

    return Demand(
        non_expert_bytes=model_spec.non_expert_bytes,
        loading_bytes=loading_bytes,
        draft_bytes=plan.draft_bytes + order_bytes,
        kv_bytes_per_token=batch_size * kv_elements * dtype.itemsize,
        batch_size=batch_size,
        reading_bytes=(
            ALIGNMENT
            + readers * reading_bytes_of(model_spec, plan)
            + model_spec.copying_bytes * budget.on_cpu
            # The weights of an expert that fits no slot, which are read to compute it.
            + model_spec.codec.slot_bytes * (plan.encoded and budget.on_cpu)
        ),
        slot_bytes=plan.slot_bytes,
        num_experts=model_spec.count,
        workspace=workspace,
        graphs=graphs if recorded else None,
        overhead=overhead_of(model_spec, plan, budget),
        head_bytes=head.nbytes(dtype) if head else 0,
        state_bytes=batch_size * shape.states.nbytes(dtype, budget.snapshots),
    )


def decoded_bytes(model_spec: ModelSpec, rows: int, scored: int, few: int) -> int:
    """What products of many rows by a compact dense matrix take: its words, one matrix at a time.

    rows  of the pass; scored: of them, those that the head, of the embedding's shape, is asked for
    few   rows that need none of it
    """
    if model_spec.dense.name == "raw":
        return 0
    shape, dtype = model_spec.shape, model_spec.dtype
    head = shape.embedding
    asked = {each: scored if each == head else rows for each in shape.dense}
    return max(
        product_scratch_bytes(*each, dtype) if count > few else 0 for each, count in asked.items()
    )


def overhead_of(
    model_spec: ModelSpec, plan: ResidencyPlan, budget: Budget
) -> Callable[[int], int] | None:
    """Tokens of context -> what the device takes beyond all tensors."""
    beside = budget.beside
    if beside is None:
        return None
    return lambda context: beside.overhead(
        kept_bytes(model_spec, plan, context, budget.batch_size, budget.snapshots), budget.graphs
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


def reading_bytes_of(model_spec: ModelSpec, plan: ResidencyPlan) -> int:
    """Memory of each thread that reads; records go straight into their slots."""
    codec = codec_of(plan.codec, model_spec.codec.shape)
    if plan.encoded:
        return model_spec.reading_bytes + encoding_bytes(model_spec.codec, codec)
    if plan.codec == model_spec.codec.name:
        return model_spec.reading_bytes
    return ENDS_BYTES + ALIGNMENT if codec.usual_bits is None else 0


def kept_bytes(
    model_spec: ModelSpec,
    plan: ResidencyPlan,
    context: int,
    batch_size: int = 1,
    snapshots: int = 0,
) -> Iterator[int]:
    """Each tensor that a run keeps on a device, slots apart, in the order in which they are made:
    weights, the INT4 copy part by part, the head, and the KV caches of the batch.
    """
    shape, size = model_spec.shape, model_spec.dtype.itemsize
    yield from model_spec.dense.sizes
    yield from shape.other_bytes(model_spec.dtype)
    if plan.holds_int4 and not plan.draft_on_host and model_spec.draft is not None:
        for part, dtype in model_spec.draft.shapes.values():
            yield (
                model_spec.drafted_experts(plan.draft_experts) * math.prod(part) * dtype.itemsize
            )
    if plan.drafter == "int4":
        for layout in model_spec.dense_draft.layouts.values():
            yield from (math.prod(part) * kind.itemsize for part, kind in layout.shapes.values())
    kv_shapes = shape.kv_layers * batch_size
    yield from batch_size * shape.states.sizes_of(model_spec.dtype, snapshots)
    if plan.drafter == "head" and model_spec.head is not None:
        yield from model_spec.head.sizes(model_spec.dtype)
        kv_shapes += [model_spec.head.kv_shapes] * batch_size
    for of_layer in kv_shapes:
        yield from (heads * width * context * size for heads, width in of_layer)
