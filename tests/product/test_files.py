"""Files as they are read and replaced: regular ones only, whole or not at all, none left behind."""

import errno
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from speq import SpeqError
from speq.files import atomic_file
from speq.files.atomic_file import check_target, remove_abandoned, replacing, write_whole, writing
from speq.files.json_file import MAX_DEPTH, parse_json, read_json
from speq.files.regular_file import check_folder, check_regular, read_bytes, read_text
from speq.files.safetensors_file import SafetensorsFile
from speq.measure.report import read_prompts
from speq.measure.route_trace import RouteTrace
from speq.planning import profiles
from speq.quantizing.calibration import read_texts


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": socket_at,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_only_regular_files_are_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to would be opened for ever."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("odd.json")
    OTHER_KINDS[kind](path)
    reads: list[Callable[[Path], object]] = [
        check_regular,
        SafetensorsFile,
        read_json,
        read_texts,
        profiles.read,
        RouteTrace.read,
        lambda path: read_prompts(path, 1),
        lambda path: read_bytes(path, "give a file"),
        lambda path: check_folder(path.parent, {"*.json": 1 << 20}),
    ]
    for read in reads:
        with pytest.raises(SpeqError, match=r"odd\.json.* is a|odd\.json'? is not a file"):
            read(path)


def test_links_to_regular_files_are_fine(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to("file.json")
    assert read_json(tmp_path / "link.json") == {"a": 1}
    check_folder(tmp_path, {"*.json": 8})
    assert read_text(tmp_path / "link.json", "") == '{"a": 1}'


def test_files_that_are_too_large_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"x" * 3000 + b"\xff")
    with pytest.raises(SpeqError, match=r"has 2\.93 KiB and is read up to 1 KiB; cut it$"):
        read_bytes(path, "cut it", 1024)
    with pytest.raises(SpeqError, match=r"it is not UTF-8 \(.* position 3000.*\); save it so$"):
        read_text(path, "save it so")
    with pytest.raises(SpeqError, match=r"file\.json has 2\.93 KiB and files of its kind at most "):
        check_folder(tmp_path, {"*.txt": 1, "*.json": 1024})
    check_folder(tmp_path, {"*.txt": 1})
    with pytest.raises(SpeqError, match="cannot be read: embedded null byte; give another"):
        read_bytes(Path("a\0b"), "give another")


def test_json_no_deeper_than_any_file_of_a_model(tmp_path: Path) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        sound = opening * MAX_DEPTH + "1" + closing * MAX_DEPTH
        assert str(parse_json(sound)).count(opening[0]) == MAX_DEPTH
        for depth in (MAX_DEPTH + 1, 100_000):
            with pytest.raises(ValueError, match="nested deeper than 64 levels"):
                parse_json(opening * depth + "1" + closing * depth)
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(SpeqError, match=r"deep\.json is not valid JSON: .* levels; download it ag"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(SpeqError, match="a JSON list; it must hold an object: make it again"):
        read_json(path, "make it again")
    lines = tmp_path / "deep.jsonl"
    lines.write_text("[" * 100_000)
    with pytest.raises(SpeqError, match=r"deep\.jsonl:1 is not JSON: it is nested deeper"):
        read_texts(lines)
    with pytest.raises(SpeqError, match=r"deep\.jsonl:1 is no JSON object with a prompt; write"):
        read_prompts(lines, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "another format"),
        ({"model": None}, "the model None"),
        ({"top_k": "2"}, "top_k is '2'; it must be a whole number"),
        ({"num_layers": 10**30}, "num_layers is 1000.*; it must be from 1 to"),
        ({"num_experts": True}, "num_experts is True"),
        ({"steps": 7}, "not iterable"),
        ({"steps": [[]]}, "must be a mapping"),
        ({"steps": [{"drafted": 1, "used": 1, "guessed": 1, "path": 1}]}, "TypeError"),
        ({"extra": 1}, "unexpected keyword"),
    ],
)
def test_traces_of_wrong_types(change: dict[str, object], message: str, tmp_path: Path) -> None:
    trace = RouteTrace("model", 0, 2, 4, 2, [])
    trace.write(tmp_path / "trace.json")
    assert RouteTrace.read(tmp_path / "trace.json") == trace
    content = json.loads((tmp_path / "trace.json").read_text()) | change
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(SpeqError, match=rf"is no trace of .*{message}.*; record it again with"):
        RouteTrace.read(tmp_path / "trace.json")


# What is written.


def test_only_regular_files_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, make in OTHER_KINDS.items():
        path = Path(f"{kind.split()[-1]}.json")
        make(path)
        before = os.lstat(path)
        for force in (False, True):
            with pytest.raises(SpeqError, match=rf"is {kind} and must be a regular") as refused:
                check_target(path, force)
            assert str(refused.value).endswith("; choose another name")
        with pytest.raises(SpeqError, match=r"; choose another name$"):
            write_whole(path, b"new")
        assert os.lstat(path) == before
    Path("folder").mkdir()
    with pytest.raises(SpeqError, match="folder cannot be written; choose a file in a folder"):
        check_target(Path("folder"), force=True)
    Path("to-folder").symlink_to("folder")
    with pytest.raises(SpeqError, match="to-folder cannot be written; choose a file in a folder"):
        check_target(Path("to-folder"), force=True)
    assert not [*tmp_path.rglob("*.partial")]


def test_standard_output_is_no_file_to_replace() -> None:
    """A pipe at the end of a link that names no path."""
    reading, writing_end = os.pipe()
    try:
        for force in (False, True):
            with pytest.raises(
                SpeqError, match=r"is a named pipe and must .*; choose another name$"
            ):
                check_target(Path(f"/dev/fd/{writing_end}"), force)
        with pytest.raises(SpeqError, match=r"is a named pipe and must .*; choose another name$"):
            write_whole(Path(f"/dev/fd/{writing_end}"), b"new")
    finally:
        os.close(reading)
        os.close(writing_end)


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    with pytest.raises(SpeqError, match="exists already; choose another name or add --force"):
        check_target(link, force=False)
    check_target(link, force=True)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    target.unlink()
    check_target(link, force=False)
    write_whole(link, b"newer")
    assert link.is_symlink()
    assert target.read_text() == "newer"


def killed_while_writing(path: Path, how: signal.Signals) -> None:
    child = os.fork()
    if not child:
        with replacing(path) as file:
            file.write(b"half")
            file.flush()
            signal.signal(how, signal.SIG_DFL) if how != signal.SIGKILL else None
            os.kill(os.getpid(), how)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == how


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_the_killed_leave_goes_at_the_next_start(how: signal.Signals, tmp_path: Path) -> None:
    path, other = tmp_path / "file.json", tmp_path / "other.json"
    killed_while_writing(path, how)
    killed_while_writing(other, how)
    (left,) = tmp_path.glob("file.json.*.partial")
    assert left.read_bytes() == b"half"
    (tmp_path / "mine.partial").write_text("a user's own")
    write_whole(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert not left.exists()
    assert len([*tmp_path.glob("other.json.*.partial")]) == 1
    remove_abandoned(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.json", "mine.partial"]
    remove_abandoned(tmp_path / "nowhere")


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with replacing(path) as file:
        (partial,) = tmp_path.glob("*.partial")
        remove_abandoned(tmp_path)
        assert partial.exists()
        file.write(b"whole")
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_a_partial_file_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Path] = []
    lock = atomic_file.fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.glob("*.partial"))
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(atomic_file.fcntl, "flock", late)
    write_whole(tmp_path / "file.json", b"whole")
    assert len(taken) == 1
    assert (tmp_path / "file.json").read_bytes() == b"whole"


def test_where_there_are_no_locks_nothing_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(atomic_file.fcntl, "flock", none)
    (tmp_path / "file.json.1-1.partial").write_text("another's")
    write_whole(tmp_path / "file.json", b"whole")
    assert {each.name for each in tmp_path.iterdir()} == {"file.json", "file.json.1-1.partial"}


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeqError) as refused:
        write_whole(tmp_path / "file" / "x.json", b"")
    assert str(refused.value) == (
        f"{tmp_path / 'file' / 'x.json'} cannot be written: File exists; free some space, or "
        "choose another place"
    )
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sentence = r"^x cannot be written: No space left on device; wait$"
    with pytest.raises(SpeqError, match=sentence), writing(Path("x"), "wait"):
        raise full
