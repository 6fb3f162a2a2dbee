"""What control groups leave to this process: containers, systemd and batch systems set limits.

A limit counts for a group and for all groups inside it, so the narrowest of the process's own group
and of those around it is the one that holds. Both versions are read, and both may be mounted.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

PROC = Path("/proc")
# The version that has one hierarchy for all controllers, as the kernel names its file system.
UNIFIED = "cgroup2"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a hierarchy of groups can be looked into.

    kind     cgroup or cgroup2
    root     the group that is seen at `folder`
    options  of the file system: names of version 1's controllers are among them
    """

    kind: str
    root: PurePosixPath
    folder: Path
    options: tuple[str, ...]


def processors(proc: Path = PROC) -> int:
    """Processors that this process may use at a time: a quota of one and a half are two."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    quotas = [quota for quota in _limits("cpu", _cpu_quota, _cpu_quota_v1, proc) if quota > 0]
    return max(1, math.ceil(min([float(allowed), *quotas])))


def granted_bytes(proc: Path = PROC) -> int | None:
    """Memory that the process's groups let it have; None where none of them has a limit.

    Page cache that the kernel gives back when it is asked for memory is not taken.
    """
    return min(_limits("memory", _memory, _memory_v1, proc), default=None)


def _limits(
    controller: str,
    unified: Callable[[Path], T | None],
    version_1: Callable[[Path], T | None],
    proc: Path,
) -> list[T]:
    """What the process's group and the groups around it say, as far as they say anything."""
    said = (
        (unified if kind == UNIFIED else version_1)(folder)
        for kind, folder in _folders(controller, proc)
    )
    return [limit for limit in said if limit is not None]


def _folders(controller: str, proc: Path) -> Iterator[tuple[str, Path]]:
    """Folders of the process's group and of those around it, each with the kind of its hierarchy.

    A group that is mounted nowhere is that of a container which sees its own group as the topmost.
    """
    mounts = list(_mounts(proc))
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        kind = UNIFIED if number == "0" and not controllers else "cgroup"
        if kind == "cgroup" and controller not in controllers.split(","):
            continue
        held = [
            mount
            for mount in mounts
            if mount.kind == kind and (kind == UNIFIED or controller in mount.options)
        ]
        inside = [(mount, inner) for mount in held if (inner := _inside(mount, path)) is not None]
        for mount, inner in inside or [(mount, PurePosixPath()) for mount in held]:
            for group in (inner, *inner.parents):
                yield kind, mount.folder / group


def _inside(mount: Mount, path: str) -> PurePosixPath | None:
    """A group's path below the one that is mounted; None where it lies elsewhere."""
    group = PurePosixPath(path)
    if not group.is_relative_to(mount.root):
        return None
    inner = group.relative_to(mount.root)
    return None if ".." in inner.parts else inner


def _mounts(proc: Path) -> Iterator[Mount]:
    for line in _lines(proc / "self" / "mountinfo"):
        place, _, system = line.partition(" - ")
        at, of = place.split(), system.split()
        if len(at) > 4 and len(of) > 2 and of[0] in ("cgroup", UNIFIED):
            options = tuple(of[2].split(","))
            yield Mount(of[0], PurePosixPath(_plain(at[3])), Path(_plain(at[4])), options)


def _plain(name: str) -> str:
    """A path of mountinfo, which writes blanks and backslashes as \\040."""
    first, *rest = name.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _memory(group: Path) -> int | None:
    # Above `high` nothing is killed, but all that the group does waits for memory.
    limits = [_whole(group / name) for name in ("memory.max", "memory.high")]
    said = [limit for limit in limits if limit is not None]
    if not said:
        return None
    back = ("inactive_file", "active_file", "slab_reclaimable")
    return _left(min(said), group / "memory.current", group / "memory.stat", back)


def _memory_v1(group: Path) -> int | None:
    limit = _whole(group / "memory.limit_in_bytes")
    if limit is None:
        return None
    back = ("total_inactive_file", "total_active_file")
    return _left(limit, group / "memory.usage_in_bytes", group / "memory.stat", back)


def _left(limit: int, usage: Path, stat: Path, back: tuple[str, ...]) -> int:
    """What is left of a limit. back: the counts of what the kernel gives back."""
    counts = dict(line.split(maxsplit=1) for line in _lines(stat) if " " in line)
    given_back = sum(int(counts[name]) for name in back if counts.get(name, "").isdecimal())
    return min(limit, max(limit - max((_whole(usage) or 0) - given_back, 0), 0))


def _cpu_quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _share(quota, period)


def _cpu_quota_v1(group: Path) -> float | None:
    return _share(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    """Processors; None for max, -1 and whatever else is no limit."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _whole(file: Path) -> int | None:
    """A number of bytes; None where there is no file, or "max" in it."""
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    return "".join(_lines(file)[:1]).strip()


def _lines(file: Path) -> list[str]:
    """Lines of a file of the kernel's; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
