"""Plays a schedule of events on a world, and checks what comes of each."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from speq import Generator, SpeqError
from speq.engine.batch import Batch, StepOutput
from speq.engine.request import Request
from speq.errors import EngineLost, present
from speq.memory_watch import MemoryWatch
from speq.planning.memory import BudgetTooSmall
from speq.units import parse_bytes
from tests.helpers.open_files import open_files
from tests.simulation.disk import FAULTS, SimulatedDisk
from tests.simulation.kept_copy import SimulatedHome
from tests.simulation.network import DISTURBANCES, FORGERIES, Fault, SimulatedNetwork
from tests.simulation.readers import SimulatedReaders
from tests.simulation.repacked import check_repacked
from tests.simulation.staged import staged
from tests.simulation.world import MODES, World, sampling

# Kinds of events, by how often they come.
KINDS = {
    "step": 24,
    "add": 7,
    "cancel": 1,
    "resize": 2,
    "pressure": 2,
    "fault": 2,
    "interrupt": 1,
    "forget": 1,
    "reload": 1,
}


@dataclass(frozen=True)
class Event:
    """What happens; its number decides how, whatever happened before."""

    kind: str
    number: int


class Reload(Exception):
    """The run ends, and another one begins.

    meanwhile  what happens in between
    """

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.meanwhile = meanwhile


@dataclass
class Simulation:
    """One system, from its first run to its last.

    world   the one whose tokens are right at present
    root    of files that it writes
    asked   requests that run or wait, by (prompt, mode)
    counts  of what happened, for who looks whether anything does
    """

    world: World
    root: Path
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    network: SimulatedNetwork = field(init=False)
    home: SimulatedHome | None = None
    asked: dict[Request, tuple[int, int | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.proc.mkdir(parents=True, exist_ok=True)
        self.network = SimulatedNetwork(len(self.world.stages), SimulatedReaders.chance.pass_by)
        if self.world.copy_bytes:
            self.home = SimulatedHome(self.world, self.root / "home")

    @property
    def proc(self) -> Path:
        """A constructed /proc, in which nothing is said but what is free."""
        return self.root / "proc"

    @property
    def struck(self) -> int:
        """Faults so far that a request may end by."""
        interrupts = SimulatedReaders.chance.interrupts if self.world.stages else 0
        return self.disk.struck + self.network.struck + interrupts

    def play(self, events: Sequence[Event]) -> None:
        """Raises whatever is found."""
        SimulatedReaders.chance.interrupts = 0
        left = list(reversed(events))
        before = open_files(self.world.root)
        with (
            self.disk.mounted(),
            mock.patch("speq.engine_layout.ReaderThreads", SimulatedReaders),
            nullcontext() if self.home is None else self.home.mounted(),
        ):
            while left:
                self.run(left)
            if self.home is not None:
                self.home.check_finished(self.world.budget)
        after = open_files(self.world.root)
        assert after == before, f"files are left open: {after}, and before: {before}"

    def run(self, left: list[Event]) -> None:
        """One run of the model: until its events end, or another one begins."""
        self.free(1 << 40)
        SimulatedReaders.chance.interrupt_in = None
        self.disk.calm()
        if self.home is not None:
            self.home.let_copy(random.Random(left[-1].number))
        with self.opened() as generator:
            # Most runs begin with too few slots for all experts.
            runtime, slots = generator.runtime, 2 + left[-1].number % 30
            generator.resize(runtime.least_budget + slots * runtime.residency_plan.slot_bytes)
            self.watched(generator)
            struck = self.struck
            ended = Reload()
            try:
                while left:
                    with suppress(KeyboardInterrupt), generator.batch() as batch:
                        self.batch(generator, batch, left)
                    self.asked.clear()
                    check_quiet(generator)
            except Reload as reload:
                ended = reload
            except EngineLost:  # outside a step, for instance where memory is laid out anew
                assert self.struck, "stages are lost over a sound network"
            self.asked.clear()
            self.disk.calm()
            self.network.calm()
            SimulatedReaders.chance.interrupt_in = None
            self.contents(generator)
            if self.struck == struck:  # all is well: it writes what it should
                first = list(self.world.prompts[0])
                ids = generator.generate(first, **sampling(None, 8)).token_ids
                assert ids == self.world.wanted[0, None][:8]
        ended.meanwhile()

    @contextmanager
    def opened(self) -> Iterator[Generator]:
        """The model, as a run opens it."""
        world = self.world
        if world.stages:
            self.network.begin()
            with staged(world, self.network, lambda: self.struck) as generator:
                yield generator
        else:
            folder = world.folder if self.home is None else self.home.model
            generator = Generator.from_pretrained(folder, world.budget, **world.options)
            with closing(generator):
                yield generator

    def watched(self, generator: Generator) -> None:
        """Have the run follow the memory that is free."""
        runtime = generator.runtime
        runtime._budget.watch = MemoryWatch(runtime.plan.budget, self.proc, lambda: self.now_s)

    def batch(self, generator: Generator, batch: Batch, left: list[Event]) -> None:
        while left:
            event = left.pop()
            rng = random.Random(event.number)
            SimulatedReaders.chance.rng = random.Random(event.number + 1)
            self.disk.rng = random.Random(event.number + 2)
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
            happen: Callable[[Generator, Batch, random.Random], None] = getattr(self, event.kind)
            happen(generator, batch, rng)
            check_quiet(generator)

    # --- events ---

    def add(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        at, mode = rng.randrange(len(self.world.prompts)), rng.choice(MODES)
        options = sampling(mode, rng.randint(1, self.world.tokens))
        request = generator.prepare(list(self.world.prompts[at]), None, options)
        try:
            batch.add(request)
        except BudgetTooSmall:
            assert generator.runtime.plan.budget < parse_bytes(self.world.budget)
            self.counts["refused"] = self.counts.get("refused", 0) + 1
        else:
            self.asked[request] = (at, mode)

    def step(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        length = rng.choice(self.world.draft_lengths)
        if not generator.runtime.residency_plan.drafts:
            length = None
        for _ in range(rng.randint(1, 8)):
            self.now_s += 1
            for output in batch.step(length):
                self.told(output)

    def told(self, output: StepOutput) -> None:
        request = output.request
        at, mode = self.asked[request]
        made, wanted = request.output_token_ids, self.world.wanted[at, mode]
        assert made == wanted[: len(made)], f"prompt {at}, mode {mode}: {made}, not {wanted}"
        if output.error is not None:
            assert isinstance(output.error, SpeqError), repr(output.error)
            excused = self.struck or isinstance(output.error, BudgetTooSmall)
            assert excused, f"an error of a sound disk: {output.error}"
            self.counts["error"] = self.counts.get("error", 0) + 1
            del self.asked[request]
        elif request.finish_reason is not None:
            assert len(made) == request.sampling.max_new_tokens
            self.counts["text"] = self.counts.get("text", 0) + 1
            del self.asked[request]

    def cancel(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        if self.asked:
            request = rng.choice([*self.asked])
            batch.drop(request)
            del self.asked[request]

    def resize(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        runtime = generator.runtime
        most = runtime.residency_plan.slot_bytes * rng.randint(0, 40)
        generator.resize(runtime.least_budget + most)

    def pressure(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        self.free(rng.choice([0, 1 << 19, 1 << 20, 1 << 22, 1 << 40]))
        self.now_s += rng.choice([0.5, 3, 40])

    def free(self, nbytes: int) -> None:
        (self.proc / "meminfo").write_text(f"MemAvailable: {nbytes >> 10} kB\n")

    def fault(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        kinds = FAULTS if self.world.verified else FAULTS[:-1]
        self.disk.plan(rng.choice(kinds), rng.randint(0, 6), rng.choice([1, 1, 2, 5]))

    def interrupt(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        SimulatedReaders.chance.interrupt_in = rng.randint(0, 40)

    def forget(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        if not self.asked:
            generator.runtime.forget()

    def reload(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        raise Reload

    def disturb(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        kinds = (*DISTURBANCES, *FORGERIES) if self.world.keyed else DISTURBANCES
        rank = rng.randrange(self.network.count)
        self.network.plan(Fault(rng.choice(kinds), rank, rng.randint(0, 9), rng.randrange(1 << 30)))

    def repack(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        root = self.world.root
        check_repacked(root / "model", root / "repacked", self.root / "repacked", self.disk)

    def rot(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        raise Reload(partial(present(self.home, "a copy is kept").spoil, rng))

    def weights(self, generator: Generator, batch: Batch, rng: random.Random) -> None:
        raise Reload(self.replace_weights)

    def replace_weights(self) -> None:
        self.world = present(self.world.other, "there are other weights")
        present(self.home, "a copy is kept").replace_weights(self.world)

    def contents(self, generator: Generator) -> None:
        """Each expert's slot holds the expert."""
        runtime = generator.runtime
        loader, store = runtime.engine.offload.loader, runtime.opened.store
        if loader.unsettled or runtime.engine.closed:
            return
        loader.collect_finished()
        slots = runtime.engine.offload.slots
        for key, slot in loader.cache._slots.items():
            wanted = slots[slot].clone()
            room = aligned_like(slots)
            store.read(key.layer, key.expert, room)
            count = store.record_bytes(key.layer, key.expert)
            assert room[:count].equal(wanted[:count]), f"slot {slot} does not hold {key}"


def check_quiet(generator: Generator) -> None:
    """What holds between steps."""
    runtime = generator.runtime
    loader = runtime.engine.offload.loader
    cache, under_way = loader.cache, loader._under_way.values()
    if not loader.unsettled:
        taken = [*cache._slots.values(), *cache._free, *(each.slot for each in under_way)]
        assert sorted(taken) == list(range(cache.num_slots)), "slots are lost, or held twice"
        assert not +cache._pins, "experts stay pinned"
    assert cache.num_slots == runtime.plan.slots
    assert sum(runtime.plan.items.values()) <= runtime.plan.budget
    for kv in runtime.engine.caches:
        assert 0 <= kv.length <= kv.capacity


def aligned_like(slots: Any) -> Any:
    from speq.files.alignment import allocate_aligned

    return allocate_aligned(1, slots.shape[1])[0]
