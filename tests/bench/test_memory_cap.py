"""Caps on a process's memory: groups of both versions, and what no group can be made of."""

from pathlib import Path

import pytest

from speq.bench.rivals.memory_cap import MemoryCap, memory_cap
from speq.errors import SpeqError

LIMIT = 300 << 20


def version_1(tmp_path: Path) -> tuple[tuple[Path, Path], Path]:
    root = tmp_path / "v1"
    (root / "user" / "shell").mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("5:cpu:/elsewhere\n4:memory:/user/shell\n0::/\n")
    return (root, tmp_path / "none"), membership


def version_2(tmp_path: Path) -> tuple[tuple[Path, Path], Path]:
    root = tmp_path / "v2"
    (root / "user.slice").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    (root / "cgroup.subtree_control").write_text("cpu memory\n")
    (root / "user.slice" / "cgroup.subtree_control").write_text("")
    membership = tmp_path / "membership"
    membership.write_text("0::/user.slice\n")
    return (tmp_path / "none", root), membership


def emptied(cap: MemoryCap) -> None:
    """A real group's files go with it; these do not."""
    for path in cap.folder.iterdir():
        path.unlink()


def test_version_1_counts_swap_in_the_limit(tmp_path: Path) -> None:
    roots, membership = version_1(tmp_path)
    with memory_cap(LIMIT, roots, membership) as cap:
        assert cap.folder.parent == roots[0] / "user" / "shell"
        assert (cap.folder / "memory.limit_in_bytes").read_text() == f"{LIMIT}\n"
        assert (cap.folder / "memory.memsw.limit_in_bytes").read_text() == f"{LIMIT}\n"
        cap.join(77)
        assert (cap.folder / "cgroup.procs").read_text() == "77\n"
        (cap.folder / "memory.max_usage_in_bytes").write_text("12345\n")
        assert cap.peak_bytes == 12345
        (cap.folder / "memory.oom_control").write_text("under_oom 0\noom_kill 0\n")
        assert not cap.killed
        (cap.folder / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
        assert cap.killed
        emptied(cap)
    assert not cap.folder.exists()


def test_version_2_hands_memory_down_and_allows_no_swap(tmp_path: Path) -> None:
    roots, membership = version_2(tmp_path)
    with memory_cap(LIMIT, roots, membership) as cap:
        assert cap.folder.parent == roots[1] / "user.slice"
        assert (cap.folder.parent / "cgroup.subtree_control").read_text() == "+memory\n"
        assert (cap.folder / "memory.max").read_text() == f"{LIMIT}\n"
        assert (cap.folder / "memory.swap.max").read_text() == "0\n"
        assert cap.peak_bytes is None  # older systems have no such file
        (cap.folder / "memory.events").write_text("low 0\noom_kill 1\n")
        assert cap.killed
        emptied(cap)


def test_a_group_above_ours_does_where_ours_takes_none(tmp_path: Path) -> None:
    roots, membership = version_2(tmp_path)
    (roots[1] / "user.slice" / "cgroup.subtree_control").unlink()  # cannot be read
    with memory_cap(LIMIT, roots, membership) as cap:
        assert cap.folder.parent == roots[1]
        emptied(cap)


def test_no_groups_are_an_error_and_no_silence(tmp_path: Path) -> None:
    nowhere = (tmp_path / "a", tmp_path / "b")
    with (
        pytest.raises(SpeqError, match=r"cannot be capped here: .* or give cap=none"),
        memory_cap(LIMIT, nowhere, tmp_path / "c"),
    ):
        pass
