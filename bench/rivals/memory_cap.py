"""A cap on all memory of one process, its page cache included, by a control group of Linux.

Version 1 (memory.limit_in_bytes) and version 2 (memory.max) are known:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory. A group is made where the system lets us,
from our own group upwards; where it lets us nowhere, that is an error, and no run goes uncapped.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from speq.errors import OptionError

V1_ROOT, V2_ROOT = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
REFUSED = (
    "memory of processes cannot be capped here: no control group with memory could be made "
    "({reason}); run as root or under `systemd-run --user --scope -p Delegate=yes`, or give "
    "cap=none, and figures are of uncapped processes"
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Files:
    """What a version of control groups calls its files."""

    version: str
    limit: str
    peak: str
    kills: str
    swap: str | None
    swap_holds_memory: bool


V1 = Files(
    "cgroup v1",
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "memory.memsw.limit_in_bytes",
    swap_holds_memory=True,
)
V2 = Files("cgroup v2", "memory.max", "memory.peak", "memory.events", "memory.swap.max", False)


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """A group with a limit; processes that join it share that limit."""

    folder: Path
    files: Files
    limit_bytes: int

    def join(self, pid: int) -> None:
        """Count what this process takes from now on. It cannot leave."""
        (self.folder / "cgroup.procs").write_text(f"{pid}\n")

    @property
    def peak_bytes(self) -> int | None:
        """The most that was taken at a time, cached file pages included; None: not told."""
        try:
            return int((self.folder / self.files.peak).read_text())
        except OSError:  # version 2 before Linux 5.19
            return None

    @property
    def killed(self) -> bool:
        """Whether the system ended a process because the limit left no room."""
        for line in (self.folder / self.files.kills).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count) > 0
        return False


@contextlib.contextmanager
def memory_cap(
    limit_bytes: int,
    roots: tuple[Path, Path] = (V1_ROOT, V2_ROOT),
    membership: Path = MEMBERSHIP,
) -> Iterator[MemoryCap]:
    """A group with this limit; it is removed behind the block, when its processes have ended.

    Raises SpeqError where the system allows no such group.
    """
    cap = make_group(limit_bytes, roots, membership)
    try:
        yield cap
    finally:
        with contextlib.suppress(OSError):  # a process that is still ending holds it
            cap.folder.rmdir()


def how_capped() -> str:
    """Which version of control groups caps memory here. Raises SpeqError where none does."""
    with memory_cap(1 << 30) as cap:
        return cap.files.version


def make_group(limit_bytes: int, roots: tuple[Path, Path], membership: Path) -> MemoryCap:
    v1, v2 = roots
    name = f"speq-{os.getpid()}-{next(_numbers)}"
    reason = "no control groups are mounted"
    for parent, files in candidates(v1, v2, membership):
        try:
            if files is V2:
                control = parent / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory\n")
            folder = parent / name
            folder.mkdir()
        except OSError as error:
            reason = str(error)
            continue
        try:
            (folder / files.limit).write_text(f"{limit_bytes}\n")
        except OSError as error:
            folder.rmdir()
            reason = str(error)
            continue
        if files.swap is not None:
            # A system without swap has no such file.
            with contextlib.suppress(OSError):
                limit = limit_bytes if files.swap_holds_memory else 0
                (folder / files.swap).write_text(f"{limit}\n")
        return MemoryCap(folder, files, limit_bytes)
    raise OptionError(REFUSED.format(reason=reason))


def candidates(v1: Path, v2: Path, membership: Path) -> Iterator[tuple[Path, Files]]:
    """Groups that a new one may be made in: version 1 first, our own group first."""
    own: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own[controllers] = Path(path.lstrip("/"))
    if v1.is_dir():
        # A parent's limit holds for its children, so any place will do.
        yield from ((v1 / place, V1) for place in upwards(own.get("memory", Path())))
    if (v2 / "cgroup.controllers").is_file():
        yield from ((v2 / place, V2) for place in upwards(own.get("", Path())))


def upwards(place: Path) -> list[Path]:
    return [place, *place.parents]
