"""`speq batch` on the bundled model, beside plain transformers on the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from speq.config import RunConfig
from speq.engine.batch import Batch, StepOutput
from speq.errors import SpeqError
from speq.offline.answer_folder import AnswerFolder
from speq.offline.batch_run import MAY_DIFFER
from tests.helpers.command import Command, Ended
from tests.helpers.tiny_models import greedy_tokens, load_plain

CHAT = [{"role": "user", "content": "Name a tree."}]
PROMPTS = ["Once upon a time", "def fib(n):", "The sea is", "A list of birds:", "In the year"]
LENGTHS = [7, 3, 11, 5, 9]


@pytest.fixture(scope="module")
def oracle(bundled: Path) -> Any:
    """The text that plain transformers goes on with."""
    tokenizer, plain = AutoTokenizer.from_pretrained(bundled), load_plain(bundled)

    def text(prompt: Any, count: int) -> str:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        return str(tokenizer.decode(greedy_tokens(plain, ids, count)))

    return text


def write(path: Path, requests: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def asked() -> list[dict[str, Any]]:
    pairs = zip(PROMPTS, LENGTHS, strict=True)
    return [
        {"prompt": prompt, "max_new_tokens": count, "custom_id": prompt[:3]}
        for prompt, count in pairs
    ]


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(command: Command, model: Path, requests: Path, *more: object) -> Ended:
    """Into `answers.jsonl` beside the requests."""
    return command(
        "batch", model, requests, requests.with_name("answers.jsonl"), "--memory-budget", "80MiB",
        "--dtype", "float32", "--max-batch", 3, "--reader-threads", 2, "--ignore-eos", *more,
    )  # fmt: skip


def test_answers_are_those_of_each_request_alone(
    command: Command, bundled: Path, oracle: Any, tmp_path: Path
) -> None:
    chat = {"model": "tiny-moe", "messages": CHAT, "temperature": 0, "max_tokens": 6}
    named = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    requests = [
        *asked(),
        {"messages": CHAT, "max_new_tokens": 8},
        {"prompt": "no", "max_new_token": 3},
        {**named, "body": chat | {"ignore_eos": True}},
        {**named, "body": chat | {"n": 2}},
        {**named, "url": "/v1/embeddings", "body": {}},
        [1, 2],
    ]
    path = write(tmp_path / "requests.jsonl", requests)
    ended = run(command, bundled, path, "--json", tmp_path / "summary.json")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("error: 4 of 11 requests failed; ")
    answers = lines_of(tmp_path / "answers.jsonl")
    for answer, prompt, count in zip(answers[:5], PROMPTS, LENGTHS, strict=True):
        assert answer["text"] == oracle(prompt, count)
        assert (answer["custom_id"], answer["finish_reason"]) == (prompt[:3], "length")
        usage = answer["usage"]
        assert usage["new_tokens"] == answer["stats"]["new_tokens"] == count
        assert usage["total_tokens"] == usage["prompt_tokens"] + count
    assert answers[5]["text"] == oracle(CHAT, 8)
    assert "unknown option max_new_token" in answers[6]["error"]
    done, refused, elsewhere = (answer["response"] for answer in answers[7:10])
    assert (done["status_code"], refused["status_code"]) == (200, 400)
    assert done["body"]["choices"][0]["message"]["content"] == oracle(CHAT, 6)
    assert done["body"]["usage"]["completion_tokens"] == 6
    assert refused["body"]["error"]["param"] == "n"
    assert "url is '/v1/embeddings'" in elsewhere["body"]["error"]["message"]
    assert answers[10]["error"] == "line 11 holds a JSON list; give an object"
    failed = lines_of(tmp_path / "answers.failed.jsonl")
    assert [each["line"] for each in failed] == [7, 9, 10, 11]
    assert [each["request"] for each in failed] == [requests[at] for at in (6, 8, 9, 10)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["requests"], summary["failed"], summary["kept"]) == (11, 4, 0)
    assert summary["new_tokens"] == sum(LENGTHS) + 8 + 6
    assert summary["tokens_per_s"] > 0


def test_an_interrupted_job_goes_on(
    command: Command, bundled: Path, oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is answered is not asked of the model again."""
    path = write(tmp_path / "requests.jsonl", asked())
    own, kept = AnswerFolder.add, []

    def interrupted(folder: AnswerFolder, answers: list[Any]) -> None:
        own(folder, answers)
        kept.extend(answer.number for answer in answers)
        if len(kept) >= 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFolder, "add", interrupted)
        assert run(command, bundled, path).code == 130
    refused = run(command, bundled, path, "--temperature", 0.5, "--seed", 1)
    assert refused.code == 1
    assert "were made with other seed, temperature; give the same" in refused.err
    assert not (tmp_path / "answers.jsonl").exists()
    joined: list[str] = []
    added = Batch.add

    def counted(batch: Batch, request: Any) -> Any:
        joined.append(request.prompt_token_ids)
        return added(batch, request)

    monkeypatch.setattr(Batch, "add", counted)
    ended = run(command, bundled, path, "--memory-budget", "90MiB", "--max-batch", 2)
    assert ended.code == 0
    assert len(joined) == len(PROMPTS) - len(kept)
    answers = lines_of(tmp_path / "answers.jsonl")
    wanted = [oracle(*each) for each in zip(PROMPTS, LENGTHS, strict=True)]
    assert [answer["text"] for answer in answers] == wanted
    assert f"5 requests ({len(kept)} of an earlier run), 0 failed; " in ended.out
    again = run(command, bundled, path)
    assert again.code == 1 and "answers.jsonl exists already" in again.err


def test_a_disk_that_fails_ends_the_job_and_no_request(
    command: Command, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "requests.jsonl", asked())
    own, steps = Batch.step, iter(range(100))

    def failing(batch: Batch, draft_length: int | None = None) -> list[StepOutput]:
        if next(steps) == 6:
            error = SpeqError("reading failed; check the disk and run again")
            error.__cause__ = OSError("of the disk")
            return [StepOutput(request, [], error=error) for request in batch.clear()]
        return own(batch, draft_length)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", failing)
        ended = run(command, bundled, path)
    assert ended.code == 1
    assert "check the disk and run again" in ended.err.splitlines()[-1]
    assert run(command, bundled, path).code == 0
    assert not (tmp_path / "answers.failed.jsonl").exists()
    assert len(lines_of(tmp_path / "answers.jsonl")) == 5


def test_a_text_that_the_engine_cannot_finish_fails_alone(
    command: Command, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "requests.jsonl", asked())
    own, seen = Batch.step, []

    def failing(batch: Batch, draft_length: int | None = None) -> list[StepOutput]:
        emitted = own(batch, draft_length)
        if batch.running and not seen:
            request = batch.running[0]
            seen.append(request)
            batch.drop(request)
            others = [each for each in emitted if each.request is not request]
            return [*others, StepOutput(request, [], error=SpeqError("the logits are not numbers"))]
        return emitted

    monkeypatch.setattr(Batch, "step", failing)
    assert run(command, bundled, path).code == 1
    failed = lines_of(tmp_path / "answers.failed.jsonl")
    assert [each["error"] for each in failed] == ["the logits are not numbers"]
    answers = lines_of(tmp_path / "answers.jsonl")
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    assert ["error" in answer for answer in answers].count(True) == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--memory-budget", "1MiB"), "too small"),
        (("--max-batch", 0), "max_batch is 0"),
        (("--json", "answers.jsonl/x"), "cannot be written"),
    ],
)
def test_bad_options_are_refused_before_anything_is_answered(
    more: tuple[object, ...], sentence: str, command: Command, bundled: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "requests.jsonl", asked())
    (tmp_path / "answers.jsonl").write_text("")
    given = [tmp_path / each if each == "answers.jsonl/x" else each for each in more]
    ended = run(command, bundled, path, "--force", *given)
    assert ended.code == 1
    assert sentence in ended.err
    assert (tmp_path / "answers.jsonl").read_text() == ""


def test_answers_never_replace_their_requests(
    command: Command, bundled: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "answers.jsonl", asked())
    ended = run(command, bundled, path, "--force")
    assert ended.code == 1
    assert "requests and answers are both" in ended.err
    assert lines_of(path) == asked()


def test_what_may_differ_is_an_option() -> None:
    assert set(MAY_DIFFER) <= RunConfig.of("1GiB").as_json().keys()
