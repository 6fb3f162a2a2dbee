"""Limits of control groups, in trees of files as the kernel shows them; sizes counted by hand."""

import os
from pathlib import Path

import pytest

from speq.control_groups import granted_bytes, processors
from speq.host_memory import available_bytes
from tests.helpers.kernel_files import Kernel, group

GIB = 1 << 30
# What version 1 says where there is no limit.
UNLIMITED = "9223372036854771712"


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_without_groups_the_machine_says_what_is_free(kernel: Kernel) -> None:
    assert granted_bytes(kernel.proc) is None
    assert available_bytes(kernel.proc) == 32 * GIB
    kernel.belongs("0::/gone")
    kernel.mount("sys", "cgroup2")
    assert granted_bytes(kernel.proc) is None
    (kernel.proc / "self/cgroup").unlink()
    (kernel.proc / "self/mountinfo").unlink()
    assert available_bytes(kernel.proc) == 32 * GIB


def test_where_nobody_says_what_is_free_all_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS has it: neither /proc nor the number of free pages."""
    monkeypatch.setattr(os, "sysconf_names", {})
    asked: list[str] = []
    monkeypatch.setattr(os, "sysconf", lambda name: asked.append(name) or 4096)
    assert available_bytes(tmp_path) == 4096 * 4096
    assert asked == ["SC_PHYS_PAGES", "SC_PAGE_SIZE"]


def test_page_cache_of_version_2_is_not_taken(kernel: Kernel) -> None:
    """8 GiB, of which 7 are charged: 6 of them files, half a GiB names of files."""
    at = kernel.mount("sys", "cgroup2")
    kernel.belongs("0::/box")
    stat = (
        f"anon {GIB // 2}\nfile {6 * GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}\n"
        f"slab_reclaimable {GIB // 2}\nslab {GIB}"
    )
    group(at / "box", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert available_bytes(kernel.proc) == 7 * GIB + GIB // 2


def test_page_cache_of_version_1_is_not_taken(kernel: Kernel) -> None:
    """The counts of the group with those inside it, which is what is charged to it."""
    at = kernel.mount("sys", "cgroup", "rw,memory")
    kernel.belongs("9:cpu,cpuacct:/elsewhere", "4:memory:/box")
    stat = (
        f"cache {GIB}\ninactive_file 1\nactive_file 2\ntotal_cache {3 * GIB}\n"
        f"total_inactive_file {2 * GIB}\ntotal_active_file {GIB // 2}\ntotal_rss {GIB}"
    )
    group(
        at / "box",
        memory__limit_in_bytes=6 * GIB,
        memory__usage_in_bytes=5 * GIB,
        memory__stat=stat,
    )
    group(at, memory__limit_in_bytes=UNLIMITED, memory__usage_in_bytes=20 * GIB)
    assert available_bytes(kernel.proc) == 3 * GIB + GIB // 2


@pytest.mark.parametrize("narrow", ["outer", "outer/middle", "outer/middle/own"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_group_around_the_process_wins(
    kernel: Kernel, version: int, narrow: str
) -> None:
    kind, limit, used, none = (
        ("cgroup", "memory__limit_in_bytes", "memory__usage_in_bytes", UNLIMITED)
        if version == 1
        else ("cgroup2", "memory__max", "memory__current", "max")
    )
    at = kernel.mount("sys", kind, "rw,memory")
    kernel.belongs("4:memory:/outer/middle/own" if version == 1 else "0::/outer/middle/own")
    for each in ("outer", "outer/middle", "outer/middle/own"):
        given = 3 * GIB if each == narrow else none
        group(at / each, **{limit: given, used: GIB})
    group(at / "outer/other", **{limit: 5, used: 4})
    assert available_bytes(kernel.proc) == 2 * GIB


def test_what_counts_is_what_is_left_and_not_the_limit(kernel: Kernel) -> None:
    at = kernel.mount("sys", "cgroup2")
    kernel.belongs("0::/outer/own")
    group(at / "outer", memory__max=8 * GIB, memory__current=7 * GIB)
    group(at / "outer/own", memory__max=4 * GIB, memory__current=GIB)
    assert available_bytes(kernel.proc) == GIB


def test_a_group_that_is_full_leaves_nothing(kernel: Kernel) -> None:
    at = kernel.mount("sys", "cgroup2")
    kernel.belongs("0::/own")
    group(at / "own", memory__max=4 * GIB, memory__current=4 * GIB + 4096)
    assert available_bytes(kernel.proc) == 0


def test_memory_that_is_throttled_is_none_to_be_had(kernel: Kernel) -> None:
    at = kernel.mount("sys", "cgroup2")
    kernel.belongs("0::/own")
    group(at / "own", memory__max="max", memory__high=3 * GIB, memory__current=GIB)
    assert available_bytes(kernel.proc) == 2 * GIB


def test_both_versions_are_asked(kernel: Kernel) -> None:
    """systemd's hybrid: memory in version 1, and a version 2 without controllers."""
    kernel.mount("unified", "cgroup2")
    at = kernel.mount("memory", "cgroup", "rw,memory")
    kernel.mount("cpu", "cgroup", "rw,cpu,cpuacct")
    kernel.belongs("4:memory:/user", "1:name=systemd:/a:b", "0::/user")
    group(at / "user", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    group(kernel.root / "unified/user", cgroup__procs=1)
    assert available_bytes(kernel.proc) == GIB


def test_a_container_sees_its_own_group_as_the_topmost(kernel: Kernel) -> None:
    """As Docker mounts it: the group's own folder, under the name that it has outside or none."""
    at = kernel.mount("sys", "cgroup", "rw,memory", root="/docker/1234")
    group(at, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    group(at / "inner", memory__limit_in_bytes=GIB, memory__usage_in_bytes=GIB // 2)
    for path, wanted in (("/docker/1234", GIB), ("/", GIB), ("/docker/1234/inner", GIB // 2)):
        kernel.belongs(f"4:memory:{path}")
        assert available_bytes(kernel.proc) == wanted
    kernel.belongs("4:memory:/../elsewhere")
    assert available_bytes(kernel.proc) == GIB


def test_a_path_with_a_blank(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path / "a b")
    at = kernel.mount("sys fs", "cgroup2")
    kernel.belongs("0::/user slice")
    group(at / "user slice", memory__max=GIB, memory__current=0)
    assert available_bytes(kernel.proc) == GIB


def test_files_that_say_nothing_are_no_limits(kernel: Kernel) -> None:
    """A limit without a usage is still a limit; a usage without a limit is none."""
    at = kernel.mount("sys", "cgroup2")
    kernel.belongs("0::/outer/own", "torn", "")
    group(at / "outer", memory__current=GIB, cpu__max="")
    group(at / "outer/own", memory__max=5 * GIB, memory__stat="inactive_file\nactive_file x")
    assert available_bytes(kernel.proc) == 5 * GIB
    assert processors(kernel.proc) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [("max", 64), ("50000", 1), ("100000", 1), ("150000", 2), ("800000", 8), ("9000000", 64)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_processors_of_a_quota(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, version: int, quota: str, wanted: int
) -> None:
    """On 64 processors, in periods of 100 ms. A part of a processor is one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    if version == 1:
        at = kernel.mount("sys", "cgroup", "rw,cpu,cpuacct")
        kernel.belongs("3:cpu,cpuacct:/outer/own")
        given = "-1" if quota == "max" else quota
        group(at / "outer", cpu__cfs_quota_us=given, cpu__cfs_period_us=100_000)
        group(at / "outer/own", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    else:
        at = kernel.mount("sys", "cgroup2")
        kernel.belongs("0::/outer/own")
        group(at / "outer", cpu__max=f"{quota} 100000")
        group(at / "outer/own", cpu__max="max 100000")
    assert processors(kernel.proc) == wanted


def test_processors_are_those_that_the_process_may_run_on(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert processors(kernel.proc) == 2
