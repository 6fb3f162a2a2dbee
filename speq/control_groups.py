"""Reads the limits that control groups set for this process, as in containers and systemd.

A limit applies to a group and all groups inside it, so the smallest limit of the process's group
and the groups around it holds. Both versions of control groups are read; both may be mounted.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

PROC = Path("/proc")
# File system of version 2, which has one hierarchy for all controllers.
UNIFIED = "cgroup2"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount point of a hierarchy of groups.

    kind     cgroup or cgroup2
    root     group that is mounted at `folder`
    options  of the file system; they include the names of version 1's controllers
    """

    kind: str
    root: PurePosixPath
    folder: Path
    options: tuple[str, ...]


def processors(proc: Path = PROC) -> int:
    """Processors that this process may use at a time; a quota of 1.5 counts as 2."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    quotas = [quota for quota in _limits("cpu", _cpu_quota, _cpu_quota_v1, proc) if quota > 0]
    return max(1, math.ceil(min([float(allowed), *quotas])))


def granted_bytes(proc: Path = PROC) -> int | None:
    """Memory that the process's groups leave to it; None if none of them has a limit.

    Page cache that the kernel can reclaim does not count as used.
    """
    return min(_limits("memory", _memory, _memory_v1, proc), default=None)


def memory_stalls(proc: Path = PROC) -> float:
    """Share of the last ten seconds, in percent, in which some process of these groups waited for
    memory, or of the machine where no group tells; 0 where the kernel does not say.
    """
    groups = [
        _stalled(folder / "memory.pressure")
        for kind, folder in _folders("memory", proc)
        if kind == UNIFIED
    ]
    known = [share for share in groups if share is not None]
    return max(known) if known else _stalled(proc / "pressure" / "memory") or 0.0


def _stalled(file: Path) -> float | None:
    """Read a file of the kernel's pressure stall information; None if it cannot be read."""
    for line in _lines(file):
        kind, *values = line.split()
        for name, _, value in (each.partition("=") for each in values):
            if (kind, name) == ("some", "avg10"):
                with suppress(ValueError):
                    return float(value)
    return None


def _limits(
    controller: str,
    unified: Callable[[Path], T | None],
    version_1: Callable[[Path], T | None],
    proc: Path,
) -> list[T]:
    """Read the limits of the process's group and the groups around it."""
    limits = (
        (unified if kind == UNIFIED else version_1)(folder)
        for kind, folder in _folders(controller, proc)
    )
    return [limit for limit in limits if limit is not None]


def _folders(controller: str, proc: Path) -> Iterator[tuple[str, Path]]:
    """Yield (kind of hierarchy, folder) of the process's group and the groups around it.

    A group that is mounted nowhere belongs to a container, which sees its own group as the root.
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
    """Return a group's path below the mounted one; None if it is not below it."""
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
    """Unescape a path of mountinfo, which writes blanks and backslashes as \\040."""
    first, *rest = name.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _memory(group: Path) -> int | None:
    # Above `high` nothing is killed, but the group's processes wait for memory.
    limits = [_whole(group / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    reclaimable = ("inactive_file", "active_file", "slab_reclaimable")
    return _remaining(min(known), group / "memory.current", group / "memory.stat", reclaimable)


def _memory_v1(group: Path) -> int | None:
    limit = _whole(group / "memory.limit_in_bytes")
    if limit is None:
        return None
    reclaimable = ("total_inactive_file", "total_active_file")
    return _remaining(limit, group / "memory.usage_in_bytes", group / "memory.stat", reclaimable)


def _remaining(limit: int, usage: Path, stat: Path, reclaimable: tuple[str, ...]) -> int:
    """Bytes left of a limit. reclaimable: counts in `stat` that the kernel can reclaim."""
    counts = dict(line.split(maxsplit=1) for line in _lines(stat) if " " in line)
    cached = sum(int(counts[name]) for name in reclaimable if counts.get(name, "").isdecimal())
    return min(limit, max(limit - max((_whole(usage) or 0) - cached, 0), 0))


def _cpu_quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    return _share(quota, period)


def _cpu_quota_v1(group: Path) -> float | None:
    return _share(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float | None:
    """Quota in processors; None if there is no limit, as for max and -1."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _whole(file: Path) -> int | None:
    """Read a number of bytes; None if there is no file or no number in it, as for "max"."""
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    return "".join(_lines(file)[:1]).strip()


def _lines(file: Path) -> list[str]:
    """Read the lines of one of the kernel's files; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
