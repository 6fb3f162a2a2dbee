"""A user's home where a packed copy of a model's experts grows, as far as a schedule lets it."""

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from speq import Generator
from speq.experts import packed_copy, record_writer
from speq.experts.copied_store import CopySource
from speq.experts.packed_copy import CopyStopped, PackedCopy
from speq.files.checkpoint import Checkpoint
from speq.files.contents import stamp
from tests.helpers.copies import first_runs_hold
from tests.simulation.other_weights import WEIGHTS
from tests.simulation.world import World

# Of the copy's size: what its disk holds of it, and of whatever else.
ROOM = 1.5
# Of experts that are written at a time.
BATCH_BYTES = 64 << 10
ALL = 1 << 30


@dataclass
class SimulatedHome:
    """The home, and the model's folder.

    experts_left  that are copied until the copying is stopped; it is done where a run begins
    """

    world: World
    root: Path
    experts_left: int = 0
    model: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.root / "model"
        shutil.rmtree(self.root, ignore_errors=True)
        self.cache.mkdir(parents=True)
        shutil.copytree(self.world.folder, self.model)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def let_copy(self, rng: random.Random) -> None:
        """Choose how many experts the next run copies."""
        self.experts_left = rng.choice([1, 30, ALL, ALL, ALL])

    def replace_weights(self, world: World) -> None:
        """Give the model the weights of another world, in a new file of the same size."""
        new = self.root / "new"
        shutil.copyfile(world.folder / WEIGHTS, new)
        new.replace(self.model / WEIGHTS)

    def spoil(self, rng: random.Random) -> None:
        """Flip bits of a file of the copy, where it lies."""
        files = sorted(each for each in self.cache.rglob("*") if each.is_file())
        files = [each for each in files if each.stat().st_size]
        if not files:
            return
        largest = max(files, key=lambda each: each.stat().st_size)
        with rng.choice([largest, rng.choice(files)]).open("r+b") as file:
            content = file.read()
            for _ in range(rng.choice([1, 100, 3000])):
                at = rng.randrange(len(content))
                file.seek(at)
                file.write(bytes([content[at] ^ (1 << rng.randrange(8))]))

    @contextmanager
    def mounted(self) -> Iterator[None]:
        home = self

        def report(copy: PackedCopy, done: int, total: int) -> None:
            copy.done = done
            home.experts_left -= 1
            if home.experts_left <= 0 and done < total:
                raise CopyStopped

        def begin(copy: PackedCopy) -> None:
            begun(copy)
            copy.wait()

        def usage(folder: Any) -> Any:
            taken = sum(each.stat().st_size for each in home.cache.rglob("*") if each.is_file())
            total = int(home.world.copy_bytes * ROOM)
            return SimpleNamespace(total=total, free=max(total - taken, 0))

        begun = PackedCopy.begin
        with ExitStack() as stack:
            for patch in (
                mock.patch.object(packed_copy, "LEAST_BYTES", 1),
                mock.patch.object(packed_copy, "SPARE_SHARE", 0),
                mock.patch.object(record_writer, "BATCH_BYTES", BATCH_BYTES),
                mock.patch.object(packed_copy, "cache_folder", lambda name: home.cache / name),
                mock.patch.object(shutil, "disk_usage", usage),
                mock.patch.object(PackedCopy, "_report_progress", report),
                mock.patch.object(PackedCopy, "begin", begin),
                first_runs_hold(records=True),
            ):
                stack.enter_context(patch)
            yield

    def check_finished(self, budget: str) -> None:
        """What was begun and stopped comes to its end, on a disk that has room for the rest."""
        self.experts_left = ALL
        for _ in range(2):  # the second run compares what the first one's files may have changed
            Generator.from_pretrained(self.model, budget, **self.world.options).close()
        checkpoint = Checkpoint(self.model)
        (folder,) = (each.parent for each in self.cache.rglob("source.json"))
        held = CopySource.of(folder).holds(stamp(checkpoint))
        checkpoint.close()
        assert held, "the copy is never finished"
