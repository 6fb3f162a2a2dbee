"""Decides how the matrices outside the experts are held, before anything is loaded."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speq.errors import OptionError
from speq.files.alignment import allocate_aligned
from speq.files.checkpoint import Checkpoint
from speq.files.range_file import ENDS_BYTES
from speq.kernels import dense_ops, library, ops
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.fitting import fit_all, holds_all
from speq.planning.model_spec import ModelSpec
from speq.units import Clock

logger = logging.getLogger("speq")

# Records are taken where their products take no longer than so many times those by words.
SLOWEST = 1.03
# Words that are timed, more than caches hold, in copies of one matrix; and how many copies.
TIMED_BYTES = 192 << 20
MOST_COPIES = 64
# The matrix that is timed takes no more than this, if there is one: it is encoded by one thread.
MATRIX_BYTES = 16 << 20
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DenseTrial:
    """Seconds of one row's product by a matrix: by its words, and by its record.

    record_share  bytes of the record over those of the words
    """

    raw_s: float
    lossless_s: float
    record_share: float

    @property
    def pays(self) -> bool:
        return self.lossless_s <= SLOWEST * self.raw_s

    @property
    def byte_cost(self) -> float:
        """The time of a record's byte over that of a byte of words."""
        return self.lossless_s / (self.raw_s * self.record_share)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        expert: Callable[[str], bool],
        limit_bytes: int,
        clock: Clock = time.perf_counter,
    ) -> "DenseTrial":
        """Time a matrix of a checkpoint in as many copies as a pass would read of others.

        expert       tells names of experts' tensors
        limit_bytes  that the copies may take of memory, words and records together
        """
        words = some_matrix(checkpoint, expert)
        record = dense_ops.encode_dense(words)
        limit_bytes = min(limit_bytes, 2 * TIMED_BYTES)
        count = max(1, min(limit_bytes // (words.nbytes + record.nbytes), MOST_COPIES))
        matrices = [words.clone() for _ in range(count)]
        records = [dense_ops.RecordMatrix(record.clone(), *words.shape) for _ in range(count)]
        row = torch.ones(1, words.shape[1], dtype=words.dtype)
        raw_s = lossless_s = float("inf")
        for _ in range(ROUNDS):
            start_s = clock()
            for matrix in matrices:
                ops.linear(row, matrix)
            between_s = clock()
            for each in records:
                each.product(row, None)
            raw_s = min(raw_s, between_s - start_s)
            lossless_s = min(lossless_s, clock() - between_s)
        return cls(raw_s / count, lossless_s / count, record.nbytes / words.nbytes)


def some_matrix(checkpoint: Checkpoint, expert: Callable[[str], bool]) -> Tensor:
    """The largest matrix outside the experts that is quickly encoded, [N, K] bfloat16."""
    held = [
        (file, info)
        for name, (file, info) in checkpoint.tensors.items()
        if len(info.shape) == 2 and info.dtype.is_floating_point and not expert(name)
    ]
    quick = [entry for entry in held if entry[1].nbytes <= MATRIX_BYTES]
    file, info = max(quick, key=lambda entry: entry[1].nbytes) if quick else held[0]
    words = torch.empty(info.shape, dtype=info.dtype)
    ends = allocate_aligned(1, ENDS_BYTES)[0]
    file.read_scattered(info.offset, words.view(-1).view(torch.uint8), ends)
    return words.bfloat16()


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """What is known of memory before the form is chosen.

    candidates   the ways to hold a model's experts, in the order of preference
    wants_draft  whether options ask for a draft
    """

    budget: Budget
    candidates: Callable[[ModelSpec], Sequence[ResidencyPlan]]
    wants_draft: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.budget.on_cpu else "cuda"

    def with_dense(self, model_spec: ModelSpec, form: str, usual: bool = False) -> ModelSpec:
        """Apply `ModelSpec.with_dense` with the kernels of the run's device."""
        return model_spec.with_dense(form, usual, library.KERNELS[self.device])

    def fits(self, model_spec: ModelSpec) -> bool:
        """True if a model fits in any way."""
        fitting, _ = fit_all(model_spec, self.candidates(model_spec), self.budget)
        return bool(fitting)

    def holds_draft(self, model_spec: ModelSpec) -> bool:
        """True if there is room for a draft, in any way."""
        drafting = [way for way in self.candidates(model_spec) if way.drafts]
        fitting, _ = fit_all(model_spec, drafting, self.budget)
        return bool(fitting)

    def holds_all(self, model_spec: ModelSpec) -> bool:
        """True if some way to hold the experts has slots for all of them, and no smaller ones."""
        candidates = self.candidates(model_spec)
        as_given = [way for way in candidates if way.codec == model_spec.codec.name]
        return holds_all(model_spec, as_given or candidates, self.budget)


def choose_dense_form(
    model_spec: ModelSpec,
    form: str,
    room: MemoryContext,
    trial: Callable[[], DenseTrial] | None,
    expected_s: Callable[[ModelSpec], float],
) -> ModelSpec:
    """The model with its dense matrices in the form of the option, or in that which is best here.

    trial       None: nothing is measured; then words are kept where memory is not short
    expected_s  gives the seconds per token that are expected of a model: what slower products cost
                is weighed against what the memory that they save gains

    Raises SpeqError for a form that there is none of.
    """
    codes = model_spec.dtype == torch.bfloat16
    if form == "raw" or (form == "auto" and not codes):
        return model_spec
    if form == "auto":
        chosen, reason = auto_form(model_spec, room, trial, expected_s)
        logger.debug("dense layers %s: %s", chosen.dense.name, reason)
        return chosen
    if not codes:
        raise OptionError(
            f"dense {form} codes bfloat16 and the run computes in "
            f"{str(model_spec.dtype).removeprefix('torch.')}; use dense raw"
        )
    drafts = any(way.drafter == "int4" for way in room.candidates(model_spec))
    if form == "residual" and not (drafts and model_spec.dense_draft.bases):
        raise OptionError(
            "dense residual is read over a draft's INT4 codes of dense layers, and this run has "
            "no such draft; use dense lossless"
        )
    return room.with_dense(model_spec, form)


def auto_form(
    model_spec: ModelSpec,
    room: MemoryContext,
    trial: Callable[[], DenseTrial] | None,
    expected_s: Callable[[ModelSpec], float],
) -> tuple[ModelSpec, str]:
    """The model in the form lossless or raw, and why: lossless where a fast kernel runs it, and it
    was measured to be no slower, or to gain more by the memory that it saves.
    """
    backend = library.backend_of("linear_lossless", room.device)
    if backend.name == "reference":
        return model_spec, f"records of them have no fast kernel here ({backend.reason})"
    coded, short = room.with_dense(model_spec, "lossless"), not room.holds_all(model_spec)
    if short and not room.fits(coded):
        return (
            model_spec,
            "to encode them while they are loaded takes more memory than the budget has",
        )
    if trial is None:
        if short:
            return coded, "experts get the memory that is saved"
        return model_spec, "there is memory for all experts beside words"
    made = trial()
    coded = replace(coded, dense_byte_cost=made.byte_cost)
    reason = (
        f"a product takes {made.lossless_s * 1e6:.0f} us by a record and {made.raw_s * 1e6:.0f} "
        "us by words"
    )
    if made.pays:
        return coded, reason
    if not short:
        return model_spec, reason
    if not room.fits(model_spec):
        return coded, f"words do not fit; {reason}"
    if room.wants_draft and room.holds_draft(coded) and not room.holds_draft(model_spec):
        return coded, f"a draft is asked for and has no room beside words; {reason}"
    coded_s, words_s = expected_s(coded), expected_s(model_spec)
    return (
        coded if coded_s < words_s else model_spec,
        f"a token is expected to take {coded_s * 1e3:.1f} ms by records, for which experts get the "
        f"memory that is saved, and {words_s * 1e3:.1f} by words; {reason}",
    )
