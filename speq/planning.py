"""What fits a budget and what it would give, from a model's config.json alone.

Memory is planned by the same code as a run's (`speq.demand`, `speq.memory`); times are the
governor's (`speq.governor.planner`).
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from speq import memory
from speq.config import DEFAULT_READER_THREADS, checked_int
from speq.demand import ExpertSizes, demand_by_sizes, loading_bytes_of
from speq.errors import SpeqError
from speq.governor.adaptive import LONGEST
from speq.governor.locality import Locality
from speq.governor.planner import Candidate, Choice, Holding, Outlook, PassBytes, Speeds, choose
from speq.governor.presets import Rates
from speq.governor.profile import Profile
from speq.governor.roofline import Link
from speq.int4 import Int4Layout
from speq.memory import Demand, MemoryPlan, Representation
from speq.models.families import family_of
from speq.models.shape import DTYPES, ModelShape, config_in, shape_of
from speq.opened import Opened
from speq.representation import side_by_side
from speq.store.alignment import ALIGNMENT
from speq.store.checkpoint import is_quantised
from speq.store.codec import ExpertCodec, ExpertShape, RawCodec
from speq.store.draft_source import open_draft
from speq.store.json_file import read_json
from speq.store.range_file import ENDS_BYTES

# What a plan is for where nothing is said: enough for a chat.
DEFAULT_CONTEXT = 4096
# That a token drafted by INT4 experts stands, where it was never measured: "over 90 %" in MoE-SpeQ
# 4.5; 0.92 to 0.98 on the bundled model.
DEFAULT_ACCEPTANCE = 0.9


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for.

    dtype          computed in; words: of the experts as published
    codec          of the experts at hand, sized by the largest, or what was published
    draft          layout of an INT4 expert; None: there can be none
    reading_bytes  what each thread that reads the experts at hand takes
    loading_bytes  what loading takes beside the weights it leaves
    """

    name: str
    shape: ModelShape
    dtype: torch.dtype
    words: torch.dtype
    codec: ExpertCodec
    draft: Int4Layout | None
    reading_bytes: int
    loading_bytes: int

    @classmethod
    def of_config(cls, name: str, path: Path, dtype: str) -> "Subject":
        """Of a folder with a config.json: experts as published, and a draft made by rounding."""
        content = read_json(path / "config.json")
        if is_quantised(content):
            raise SpeqError(
                f"{path} is quantised; give the original 16- or 32-bit model, whose output is the "
                "one to reproduce"
            )
        config = config_in(path)
        shape = shape_of(family_of(content, path), config, path / "config.json")
        words = config.dtype if config.dtype in DTYPES.values() else torch.bfloat16
        experts = shape.experts
        draft = None
        with contextlib.suppress(SpeqError):  # of dimensions that cannot be packed
            draft = Int4Layout(experts.hidden_size, experts.expert_width)
            _ = draft.nbytes
        computed = DTYPES.get(dtype, words)
        stored_bytes = shape.resident_weights * words.itemsize
        return cls(
            name=name,
            shape=shape,
            dtype=computed,
            words=words,
            codec=RawCodec(ExpertShape(experts.hidden_size, experts.expert_width, words)),
            draft=draft,
            reading_bytes=ENDS_BYTES + ALIGNMENT,
            loading_bytes=0 if computed == words else stored_bytes,
        )

    @classmethod
    def of_model(cls, name: str, opened: Opened, dtype: str) -> "Subject":
        """Of a whole model: its experts as they are packed, and the draft it would run with."""
        store = opened.store
        words = store.codec.shape.dtype
        computed = DTYPES.get(dtype, words)
        draft = None
        with contextlib.suppress(SpeqError):  # refused by a run, with its reason
            source = open_draft("auto", opened.checkpoint, store, opened.shape.experts)
            with contextlib.closing(source):
                draft = source.layout
                _ = draft.nbytes
        return cls(
            name=name,
            shape=opened.shape,
            dtype=computed,
            words=words,
            codec=store.codec,
            draft=draft,
            reading_bytes=store.reading_bytes,
            loading_bytes=loading_bytes_of(opened.checkpoint, computed),
        )

    @property
    def num_layers(self) -> int:
        return len(self.shape.experts.layers)

    @property
    def count(self) -> int:
        return self.num_layers * self.shape.experts.num_experts

    @property
    def representations(self) -> list[Representation]:
        ways = side_by_side(self.codec, 0)
        if self.draft is not None:
            ways += side_by_side(self.codec, self.count * self.draft.nbytes)
        return ways

    @property
    def pass_bytes(self) -> PassBytes:
        shape = self.shape
        draft_bytes = 0 if self.draft is None else self.draft.nbytes
        return PassBytes(
            layers=shape.num_layers,
            fixed_bytes=shape.resident_bytes(self.dtype)
            - shape.embedding_weights * self.dtype.itemsize,
            draft_token_bytes=self.num_layers * shape.top_k * draft_bytes,
        )

    def demand(self, way: Representation, on_cpu: bool, readers: int) -> Demand:
        """What a run with experts held so would ask of memory.

        Experts in another codec than those at hand are thought to be packed in it.
        """
        at_hand = way.codec == self.codec.name
        reading_bytes = self.reading_bytes if at_hand else 0
        if way.codec == "raw" and not at_hand:
            reading_bytes = ENDS_BYTES + ALIGNMENT
        return demand_by_sizes(
            self.shape,
            ExpertSizes(self.count, way.slot_bytes, reading_bytes, way.draft_bytes > 0),
            way.draft_bytes // self.count,
            LONGEST,
            self.dtype,
            self.loading_bytes if on_cpu else 0,
            readers if on_cpu else 0,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """What is planned for. context: tokens of KV cache; readers: threads, on the CPU."""

    budget_bytes: int
    context: int
    on_cpu: bool
    readers: int = DEFAULT_READER_THREADS

    @classmethod
    def of(
        cls, budget_bytes: int, context: int | None, on_cpu: bool, shape: ModelShape
    ) -> "Budget":
        """context None: `DEFAULT_CONTEXT`, or the model's limit where that is less."""
        limit = shape.max_context
        if context is None:
            context = min(DEFAULT_CONTEXT, limit)
        return cls(budget_bytes, checked_int("context_length", context, 1, limit), on_cpu)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What expected times rest on.

    machine  bandwidths, or what was measured of this model
    link     in place of the machine's; None: the machine's
    """

    machine: Rates | Profile
    locality: Locality
    acceptance: float
    link_bytes_per_s: float | None = None

    @property
    def link(self) -> Link:
        machine = self.machine
        link = machine.slow_tier if isinstance(machine, Profile) else Link(machine.link_bytes_per_s)
        given = self.link_bytes_per_s
        return link if given is None else Link(given, link.overhead_s, link.first_fetch_s)

    @property
    def source(self) -> str:
        machine = self.machine
        if isinstance(machine, Rates):
            return machine.source
        given = "" if self.link_bytes_per_s is None else ", link as given"
        return f"profile measured on {machine.key.device}{given}"

    def outlook(self, num_layers: int, sizes: PassBytes, holdings: Iterable[Holding]) -> Outlook:
        machine, locality = self.machine, self.locality
        if isinstance(machine, Profile):
            speeds = Speeds.of_profile(
                machine, lambda rows: num_layers * locality.distinct(rows), holdings
            )
        else:
            speeds = Speeds.of_rates(machine, sizes, holdings)
        return Outlook(num_layers, locality, speeds, self.link, self.acceptance)


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Ways to hold a model under a budget, each with its memory, the best of them, and where
    speculation breaks even (`Outlook.break_even_acceptance`, `break_even_link`).

    worst     the choice if tokens chose experts independently (MoESD's N(t))
    left_out  why, by name, of ways that do not fit
    """

    subject: Subject
    budget: Budget
    assumptions: Assumptions
    candidates: list[Candidate]
    memory: list[MemoryPlan]
    choice: Choice
    worst: Choice
    break_even_acceptance: float | None
    break_even_link_bytes_per_s: float | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Index of the candidate of the least expected time per token."""
        return min(range(len(self.candidates)), key=lambda at: self.candidates[at].tpot_s)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        entries = [candidate_entry(candidate) for candidate in self.candidates]
        best = self.memory[self.best]
        return {
            "model": self.subject.name,
            "budget_bytes": self.budget.budget_bytes,
            "context_length": self.budget.context,
            "expert_bytes": self.subject.count * self.subject.codec.shape.nbytes,
            "items": dict(best.items),
            "unused_bytes": best.report()["unused"],
            "candidates": entries,
            "best": entries[self.best],
            "reason": self.choice.reason,
            "independent_routes": self.worst.reason,
            "left_out": self.left_out,
            "break_even_acceptance": self.break_even_acceptance,
            "break_even_link_bytes_per_s": self.break_even_link_bytes_per_s,
            "assumptions": {
                "machine": self.assumptions.source,
                "link_bytes_per_s": self.assumptions.link.bandwidth_bytes_per_s,
                "locality": self.assumptions.locality.source,
                "acceptance": self.assumptions.acceptance,
            },
        }


def candidate_entry(candidate: Candidate) -> dict[str, Any]:
    """One of `candidates` in the object of `--json`; the two TPOTs beside the expected one are
    those with all transfers exposed (Eq. 3 of MoE-SpeQ) and with all hidden that can be.
    """
    cycle = candidate.cycle
    return {
        "codec": candidate.holding.codec,
        "draft": candidate.holding.draft,
        "slots": candidate.holding.slots,
        "draft_length": cycle.draft_length,
        "tpot_ms": candidate.tpot_s * 1e3,
        "exposed_tpot_ms": cycle.serial_s / cycle.tokens * 1e3,
        "hidden_tpot_ms": cycle.overlapped_s / cycle.tokens * 1e3,
        "moved_bytes_per_token": candidate.moved_bytes_per_token,
        "limit": cycle.limit,
    }


def plan(subject: Subject, budget: Budget, assumptions: Assumptions) -> BudgetPlan:
    """Plan every way to hold the experts.

    Raises SpeqError, item by item, where not even the smallest fits without a draft.
    """
    holdings: list[Holding] = []
    plans: list[MemoryPlan] = []
    left_out: dict[str, str] = {}
    refused: dict[int, SpeqError] = {}
    if subject.draft is None:
        left_out["with a draft"] = "experts of these dimensions have no INT4 copy"
    for way in subject.representations:
        demand = subject.demand(way, budget.on_cpu, budget.readers)
        holding = _holding(way.codec, way.draft_bytes // subject.count, 0, way.slot_bytes)
        try:
            made = memory.plan(demand, budget.budget_bytes, budget.context)
        except SpeqError as error:
            refused[way.slot_bytes + way.draft_bytes] = error
            left_out[holding.name] = str(error)
        else:
            plans.append(made)
            holdings.append(replace(holding, slots=made.slots))
    if not holdings:
        raise refused[min(refused)]
    outlook = assumptions.outlook(subject.num_layers, subject.pass_bytes, holdings)
    independent = replace(assumptions.locality, curve=None)
    return BudgetPlan(
        subject,
        budget,
        assumptions,
        outlook.candidates(holdings),
        plans,
        choose(outlook, holdings),
        choose(replace(outlook, locality=independent), holdings),
        outlook.break_even_acceptance(holdings),
        outlook.break_even_link(holdings),
        left_out,
    )


def choose_representation(
    subject: Subject,
    rows: Iterable[dict[str, int | str | bool]],
    assumptions: Assumptions,
) -> Choice:
    """The codec, with or without a draft, and the draft length to begin with, of a run under way.

    rows  what its budget buys of each representation, as `memory.slots_of` says
    """
    draft_bytes = 0 if subject.draft is None else subject.draft.nbytes
    holdings = [
        _holding(
            str(row["codec"]),
            draft_bytes if row["draft"] else 0,
            int(row["slots"]),
            int(row["slot_bytes"]),
        )
        for row in rows
        if row["slots"]
    ]
    return choose(assumptions.outlook(subject.num_layers, subject.pass_bytes, holdings), holdings)


def _holding(codec: str, draft_bytes: int, slots: int, slot_bytes: int) -> Holding:
    """draft_bytes: of an INT4 expert; 0: no draft."""
    over_codes = draft_bytes if codec == "residual" else 0
    return Holding(codec, draft_bytes > 0, slots, slot_bytes, slot_bytes + over_codes)
