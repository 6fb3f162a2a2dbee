"""Systems beside each other: the same model and texts, the same memory, each in its own process.

Systems rotate within each round, so that a machine that slows down meanwhile favours none. Before
each process the files it may read are dropped from the page cache. A system that is missing, does
not fit or crashes is a row that says so.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from speq.bench.machine import page_cache
from speq.bench.neighbours import neighbours
from speq.bench.rivals.job import RivalJob, Task
from speq.bench.rivals.memory_cap import memory_cap
from speq.bench.rivals.process import ProcessResult, run_process
from speq.bench.rivals.systems import SystemEntry
from speq.bench.rotation import rotate
from speq.errors import SpeqError
from speq.units import Progress, track

# Tokens of the first text that systems of ours must agree on, computing in float32.
COMPARED_TOKENS = 24
# Further memory for comparing in float32: activations and the KV cache are twice as large.
WIDER = 1.25


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same for every system.

    kinds          of the prompts, one each
    reserve_bytes  beside a budget: for a process's code, interpreter and libraries
    capped         whether processes are held to budget and reserve by the system
    limit_s        a process that takes longer is ended
    """

    model: Path
    stores: dict[str, Path]
    scratch: Path
    prompts: list[list[int]]
    kinds: list[str]
    max_new_tokens: int
    warm_up_tokens: int
    text_s: float
    reserve_bytes: int
    capped: bool
    device: str
    dtype: str
    threads: int
    neighbours: int
    limit_s: float

    def job(self, entry: SystemEntry, budget_bytes: int, task: Task) -> RivalJob:
        store = entry.system.store
        return RivalJob(
            task,
            entry.system.name,
            str(self.model if store is None else self.stores[store]),
            budget_bytes,
            self.prompts,
            self.max_new_tokens,
            stores={codec: str(folder) for codec, folder in self.stores.items()},
            scratch=str(self.scratch),
            device=self.device,
            dtype=self.dtype,
            options=dict(entry.options),
            threads=self.threads,
            warm_up_tokens=self.warm_up_tokens,
            text_s=self.text_s,
        )


@dataclass(slots=True)
class ContestCell:
    """A system under a budget, and what it did in each round.

    rounds     one Heard a round
    agreement  share of tokens that it, too, finds likeliest, all before them given
    """

    entry: SystemEntry
    budget: str
    budget_bytes: int
    rounds: list[ProcessResult] = field(default_factory=list)
    agreement: float | None = None

    @property
    def failure(self) -> str:
        return next((each.failure for each in self.rounds if each.failure), "")


class Contest:
    """Runs processes on the same terms."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def run(self, job: RivalJob, budget_bytes: int) -> ProcessResult:
        """One process: cold files, under the cap where there is one."""
        terms = self.terms
        self.drop_files()
        with contextlib.ExitStack() as stack:
            cap = None
            if terms.capped:
                cap = stack.enter_context(memory_cap(budget_bytes + terms.reserve_bytes))
            stack.enter_context(neighbours(terms.neighbours))
            return run_process(job, cap, terms.limit_s)

    def drop_files(self) -> None:
        """Have the page cache hold none of what systems read."""
        for folder in (self.terms.model, *self.terms.stores.values(), self.terms.scratch):
            for path in folder.rglob("*"):
                if path.is_file():
                    page_cache.drop(path)

    def prepare(self, cells: list[ContestCell], progress: Progress | None) -> None:
        """Have each system's form of the model written; one without it is a row that says so."""
        failures: dict[str, str] = {}
        for cell in cells:
            label = cell.entry.label
            if label not in failures:
                failures[label] = ""
                try:
                    job = self.terms.job(cell.entry, cell.budget_bytes, "time")
                    cell.entry.system.prepare(job, progress)
                except SpeqError as error:
                    failures[label] = str(error)
            if failures[label]:
                cell.rounds.append(ProcessResult(failure=failures[label]))

    def compare(self, cells: list[ContestCell], progress: Progress | None) -> list[int]:
        """Have systems of ours agree on the first tokens, and tell these.

        Each runs under its largest budget, and a little more. Raises SpeqError where two differ.
        """
        largest: dict[str, ContestCell] = {}
        for cell in cells:
            before = largest.get(cell.entry.label)
            if cell.failure:
                continue
            if cell.entry.system.ours and (not before or before.budget_bytes < cell.budget_bytes):
                largest[cell.entry.label] = cell
        found: dict[str, list[int]] = {}
        for label, cell in track("comparing tokens", largest.items(), len(largest), progress):
            room = int(cell.budget_bytes * WIDER)
            job = self.terms.job(cell.entry, room, "tokens")
            job = replace(
                job,
                dtype="float32",
                # Compact dense weights code words of 16 bits, and the run computes in those.
                options=job.options | ({"dense": "raw"} if "dense" in job.options else {}),
                prompts=self.terms.prompts[:1],
                max_new_tokens=COMPARED_TOKENS,
                finish_copy=True,
                warm_up_tokens=0,
                text_s=float("inf"),
            )
            said = self.run(job, room)
            if said.failure:
                for each in cells:
                    if each.entry.label == label:
                        each.rounds.append(said)
                continue
            found[label] = said.texts[0].token_ids
        first = next(iter(found), None)
        for label, tokens in found.items():
            if first is not None and tokens != found[first]:
                raise SpeqError(
                    f"{label} and {first} compute different tokens in float32: "
                    f"{first_difference(tokens, found[first])}; this is a defect, and no time is "
                    "measured"
                )
        return found[first] if first is not None else []

    def measure(self, cells: list[ContestCell], rounds: int, progress: Progress | None) -> None:
        """Every cell once a round; one that failed is not tried again."""
        turns = [cell for turn in range(rounds) for cell in rotate(cells, turn)]
        for cell in track("measuring systems", turns, len(turns), progress):
            if not cell.failure:
                job = self.terms.job(cell.entry, cell.budget_bytes, "time")
                cell.rounds.append(self.run(job, cell.budget_bytes))

    def agree(self, cells: list[ContestCell], tokens: list[int], progress: Progress | None) -> None:
        """Of each foreign system: how many of the exact model's tokens it finds likeliest too."""
        foreign = list(foreign_cells(cells))
        for cell in track("agreement of other programs", foreign, len(foreign), progress):
            job = replace(
                self.terms.job(cell.entry, cell.budget_bytes, "choices"),
                prompts=self.terms.prompts[:1],
                continuations=[tokens],
                warm_up_tokens=0,
            )
            said = self.run(job, cell.budget_bytes)
            if said.failure:
                continue
            chosen = said.texts[0].token_ids
            share = sum(a == b for a, b in zip(chosen, tokens, strict=True)) / len(tokens)
            for each in cells:
                if each.entry.label == cell.entry.label:
                    each.agreement = share


def foreign_cells(cells: list[ContestCell]) -> Iterator[ContestCell]:
    """Of each system that is not ours, the cell with the largest budget that it runs in."""
    largest: dict[str, ContestCell] = {}
    for cell in cells:
        before = largest.get(cell.entry.label)
        if cell.entry.system.ours or cell.failure:
            continue
        if before is None or before.budget_bytes < cell.budget_bytes:
            largest[cell.entry.label] = cell
    yield from largest.values()


def first_difference(one: list[int], other: list[int]) -> str:
    """Where two runs of tokens part."""
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return f"{len(one)} tokens and {len(other)}"
    return f"token {at} is {one[at]} and {other[at]}"
