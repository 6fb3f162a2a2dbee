"""Answers outlive what ends the process: none is lost, made twice or out of order."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from speq.errors import SpeqError
from speq.offline.answer_folder import ANSWERS, JOURNAL, AnswerFolder, open_answers
from speq.offline.batch_run import BatchSummary, answer_all
from speq.offline.request_file import RequestFile
from speq.offline.settings import BatchFileSettings
from tests.helpers.killed import killed_at
from tests.helpers.scripted_answerer import ScriptedAnswerer

REQUESTS = [b"one", b"bad two", b"three", b'{"custom_id": "four"}', b"bad five", b"six", b"seven"]
HEADER: dict[str, Any] = {"format": 1, "requests": "a digest", "options": {"seed": 1, "top_k": 0}}


def settings_in(folder: Path) -> BatchFileSettings:
    path = folder / "requests.jsonl"
    path.write_bytes(b"\n".join(REQUESTS[:3]) + b"\n\n  \n" + b"\r\n".join(REQUESTS[3:]))
    return BatchFileSettings(path, folder / "answers.jsonl")


def run(settings: BatchFileSettings, answerer: ScriptedAnswerer) -> BatchSummary:
    requests = RequestFile.of(settings.requests)
    with open_answers(settings.unfinished, HEADER) as folder:
        summary = answer_all(requests, folder, answerer, clock=iter(range(9)).__next__)
        folder.write(requests, settings.answers, settings.failed)
    return summary


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Blank lines hold no request, and count as lines.
LINES = [1, 2, 3, 6, 7, 8, 9]


def check_files(settings: BatchFileSettings) -> None:
    wanted = [
        {"line": line, "error": "it is bad"}
        if content.startswith(b"bad")
        else {"line": line, "text": content.decode()}
        for line, content in zip(LINES, REQUESTS, strict=True)
    ]
    assert lines_of(settings.answers) == wanted
    assert lines_of(settings.failed) == [
        {"line": 2, "error": "it is bad", "request": "bad two"},
        {"line": 7, "error": "it is bad", "request": "bad five"},
    ]
    assert sorted(path.name for path in settings.answers.parent.iterdir()) == [
        "answers.failed.jsonl",
        "answers.jsonl",
        "requests.jsonl",
    ]


def test_answers_are_in_the_order_of_requests(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    summary = run(settings, ScriptedAnswerer())
    check_files(settings)
    assert summary == BatchSummary(7, 2, 0, prompt_tokens=10, new_tokens=25, seconds=1)
    assert summary.tokens_per_s == 25


def test_killed_at_any_moment_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """The moments are those at which something comes to the disk."""
    moments = [
        (os, "fsync"),
        (os, "replace"),
        (shutil, "rmtree"),
        (os, "rmdir"),
        (AnswerFolder, "_note"),
    ]
    at, lived = 0, False
    while not lived:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        settings = settings_in(folder)
        lived = killed_at(at, moments, lambda s=settings: run(s, ScriptedAnswerer()))  # type: ignore[misc]
        if not lived:
            if settings.answers.exists() and not (settings.unfinished / JOURNAL).exists():
                shutil.rmtree(settings.unfinished)  # all was done
            else:
                with open_answers(settings.unfinished, HEADER) as left:
                    known = set(left.kept)
                again = ScriptedAnswerer()
                run(settings, again)
                assert sorted(again.asked) == sorted(set(range(7)) - known)
        check_files(settings)
    assert at > 12


def test_a_damaged_answer_is_made_again_with_those_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path)
    requests = RequestFile.of(settings.requests)
    with open_answers(settings.unfinished, HEADER) as folder:
        answers = ScriptedAnswerer().answers(requests.read(range(6)))
        for group in answers:  # numbers 2, 1, 0 and 5, 4, 3
            folder.add(group)
    path = settings.unfinished / ANSWERS
    content = bytearray(path.read_bytes())
    fourth = [at for at, byte in enumerate(content) if byte == ord("\n")][2] + 5
    content[fourth] ^= 1
    path.write_bytes(content)
    again = ScriptedAnswerer()
    run(settings, again)
    assert again.asked == [3, 4, 5, 6]
    assert "is damaged behind answer 3" in caplog.text
    check_files(settings)


def test_lines_that_were_cut_off_are_made_again(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    requests = RequestFile.of(settings.requests)
    with open_answers(settings.unfinished, HEADER) as folder:
        for group in ScriptedAnswerer(2).answers(requests.read(range(4))):
            folder.add(group)
    journal = settings.unfinished / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])  # of the entry of number 2
    again = ScriptedAnswerer()
    run(settings, again)
    assert again.asked == [2, 4, 5, 6]
    check_files(settings)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"requests": "another"}, "were made with other requests; give the same"),
        ({"options": {"seed": 2, "top_k": 0}}, "were made with other seed; give the same"),
        ({"options": {"seed": 1}}, "were made with other top_k; give the same"),
        ({"format": 2}, "were made with other format; give the same"),
    ],
)
def test_other_requests_or_options_are_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with open_answers(tmp_path / "left", HEADER):
        pass
    with pytest.raises(SpeqError, match=sentence), open_answers(tmp_path / "left", HEADER | change):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    refused = pytest.raises(SpeqError, match="another process writes answers to")
    with open_answers(tmp_path / "left", HEADER), refused, open_answers(tmp_path / "left", HEADER):
        pass


@pytest.mark.parametrize("at", range(1, 7))
def test_a_full_disk_is_a_sentence_and_nothing_is_lost(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    own, passed = os.fsync, iter(range(1, 100))

    def full(descriptor: int) -> None:
        if next(passed) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(descriptor)

    first = ScriptedAnswerer()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SpeqError, match=r"cannot be written: No space left.*continues from"):
            run(settings, first)
    again = ScriptedAnswerer()
    run(settings, again)
    assert {*first.asked, *again.asked} == set(range(7))
    check_files(settings)


def test_a_second_file_of_an_earlier_job_goes(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.requests.write_bytes(b"one")
    settings.failed.write_text("of an earlier job")
    run(settings, ScriptedAnswerer())
    assert lines_of(settings.answers) == [{"line": 1, "text": "one"}]
    assert not settings.failed.exists()


def test_files_that_hold_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for content, sentence in ((b"", "holds no request"), (b"\n \n", "holds no request")):
        path.write_bytes(content)
        with pytest.raises(SpeqError, match=sentence):
            RequestFile.of(path)
    with pytest.raises(SpeqError, match="cannot be read: No such file"):
        RequestFile.of(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpeqError, match="is a named pipe"):
        RequestFile.of(tmp_path / "pipe")


def test_a_file_is_told_from_others_by_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    digests = set()
    for content in (b"a\nb\n", b"a\nb", b"a\nc\n", b"a\n\nb\n"):
        path.write_bytes(content)
        digests.add(RequestFile.of(path).digest)
    assert len(digests) == 4
