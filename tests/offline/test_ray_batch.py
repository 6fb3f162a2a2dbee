"""`speq batch --ray` with two replicas on this machine, beside plain transformers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from speq.offline.answer_folder import AnswerFolder
from tests.helpers.command import Command, Ended
from tests.helpers.ray_needed import need_ray, processes_of
from tests.helpers.tiny_models import greedy_tokens, load_plain

pytestmark = pytest.mark.full
COUNT, TOKENS = 12, 10


@pytest.fixture(autouse=True)
def ray_is_there(pytestconfig: pytest.Config) -> None:
    need_ray(pytestconfig)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Prompts of token ids, with one request among them that is refused."""
    path = tmp_path / "requests.jsonl"
    given: list[Any] = [{"prompt": [at + 3] * (at % 4 + 2)} for at in range(COUNT)]
    given[5] = {"prompt": ""}
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return path


def run(command: Command, model: Path, requests: Path) -> Ended:
    return command(
        "batch", model, requests, requests.with_name("answers.jsonl"), "--memory-budget", "64MiB",
        "--dtype", "float32", "--max-batch", 2, "--reader-threads", 2, "--ignore-eos",
        "--max-new-tokens", TOKENS, "--ray", "--replicas", 2, "--replica-cpus", 1,
    )  # fmt: skip


def check(model: Path, requests: Path, ended: Ended) -> None:
    """Every answer is there once, in order, and as it is alone."""
    assert ended.code == 1, ended.err
    assert ended.err.splitlines()[-1].startswith("error: 1 of 12 requests failed")
    lines = requests.with_name("answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["line"] for answer in answers] == [*range(1, COUNT + 1)]
    from speq.text.tokenizer import load_tokenizer

    plain, tokenizer = load_plain(model), load_tokenizer(model)
    for at, answer in enumerate(answers):
        if at == 5:
            assert "the prompt is empty" in answer["error"]
            continue
        wanted = greedy_tokens(plain, [at + 3] * (at % 4 + 2), TOKENS)
        assert answer["text"] == tokenizer.decode(wanted)
    assert not requests.with_name("answers.jsonl.unfinished").exists()


def test_a_killed_replica_loses_no_request(
    command: Command, bundled: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AnswerFolder.add
    killed: list[int] = []

    def add(folder: AnswerFolder, answers: list[Any]) -> None:
        own(folder, answers)
        if not killed:
            killed.append(processes_of("BatchReplica")[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(AnswerFolder, "add", add)
    check(bundled, requests, run(command, bundled, requests))
    assert len(killed) == 1


def test_a_killed_job_goes_on_where_it_was(
    command: Command, bundled: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AnswerFolder.add
    added: list[int] = []

    def interrupted(folder: AnswerFolder, answers: list[Any]) -> None:
        own(folder, answers)
        added.extend(answer.number for answer in answers)
        if len(added) in (3, 4):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFolder, "add", interrupted)
        assert run(command, bundled, requests).code == 130
    first = [*added]

    def counted(folder: AnswerFolder, answers: list[Any]) -> None:
        own(folder, answers)
        added.extend(answer.number for answer in answers)

    monkeypatch.setattr(AnswerFolder, "add", counted)
    check(bundled, requests, run(command, bundled, requests))
    assert sorted(added) == [*range(COUNT)]  # none twice
    assert 3 <= len(first) < COUNT


def test_a_replica_that_cannot_be_made_is_a_sentence(
    command: Command, bundled: Path, requests: Path
) -> None:
    ended = command(
        "batch", bundled, requests, requests.with_name("answers.jsonl"), "--memory-budget", "1MiB",
        "--ray",
    )  # fmt: skip
    assert ended.code == 1
    assert "error: " in ended.err and "too small" in ended.err.splitlines()[-1]
