"""Commands that answer many requests over two stages, of which the second is another process."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speq.engine import engine_thread
from speq.offline.answer_folder import AnswerFolder
from speq.server.server import ApiServer
from tests.helpers.api_server import Rig, api_server
from tests.helpers.command import PATIENCE_S, Command, Ended
from tests.helpers.stages import first_of, free_port, stage_process
from tests.helpers.tiny_models import greedy_tokens, load_plain

TOKENS = 12
PROMPTS = [[at + 3] * (at % 3 + 2) for at in range(5)]


@pytest.fixture(scope="module")
def texts(bundled: Path) -> list[str]:
    """What plain transformers goes on with."""
    from speq.text.tokenizer import load_tokenizer

    plain, tokenizer = load_plain(bundled), load_tokenizer(bundled)
    return [tokenizer.decode(greedy_tokens(plain, each, TOKENS)) for each in PROMPTS]


@pytest.mark.wide
def test_a_server_over_two_stages(
    command: Command, bundled: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests side by side have plain transformers' tokens; the stage ends with the server."""
    serve, told = ApiServer.run, []

    def run(server: ApiServer) -> None:
        rig = Rig(server, None, None, threading.Thread(target=serve, args=(server,)))  # type: ignore[arg-type]
        rig.thread.start()

        def ask(prompt: list[int]) -> None:
            reply = rig.complete(
                model="mine", prompt=prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True
            )
            told.append((prompt, reply.json["choices"][0]["text"]))

        asking = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(PATIENCE_S)
        rig.stop()
        raise KeyboardInterrupt

    monkeypatch.setattr(ApiServer, "run", run)
    met = f"127.0.0.1:{free_port()}"
    with stage_process(bundled, met, "16MiB") as process:
        ended = command(
            "serve", bundled, "--memory-budget", "24MiB", "--dtype", "float32", "--port", 0,
            "--context-length", 64, "--max-batch", 2, "--served-model-name", "mine", "--quiet",
            "--stages", 2, "--rendezvous", met,
        )  # fmt: skip
        assert (ended.code, ended.err) == (0, "")
        out = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, out
    assert sorted(told) == sorted(zip(PROMPTS, texts, strict=True))


@pytest.mark.wide
def test_a_lost_stage_is_the_end_of_the_engine(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "CHECK_S", PATIENCE_S)  # who asks learns of it first
    model, met = tiny("olmoe"), f"127.0.0.1:{free_port()}"
    with (
        stage_process(model, met, "8MiB", "--codec", "raw") as process,
        first_of(model, met, codec="raw", context_length=64) as generator,
        api_server(generator, generator) as rig,
    ):
        assert rig.complete(max_tokens=3, ignore_eos=True).status == 200
        assert rig.get("/health").status == 200
        process.kill()
        process.wait(PATIENCE_S)
        for status in (500, 503):
            reply = rig.complete(max_tokens=3)
            assert reply.status == status
            assert "stage 2 of 2 has ended" in reply.error["message"]
        health = rig.get("/health")
        assert health.status == 503
        assert "stage 2 of 2 has ended" in health.error["message"]


def batch(command: Command, model: Path, requests: Path, met: str) -> Ended:
    return command(
        "batch", model, requests, requests.with_name("answers.jsonl"), "--memory-budget", "24MiB",
        "--dtype", "float32", "--max-batch", 2, "--ignore-eos", "--max-new-tokens", TOKENS,
        "--context-length", 64, "--stages", 2, "--rendezvous", met, "--stage-wait-s", PATIENCE_S,
    )  # fmt: skip


@pytest.mark.wide
def test_a_batch_goes_on_with_new_stages(
    command: Command,
    bundled: Path,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that is lost ends the command, and no request fails for it."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    own, kept = AnswerFolder.add, []
    met = f"127.0.0.1:{free_port()}"
    with stage_process(bundled, met, "16MiB") as process, monkeypatch.context() as patch:

        def add(folder: AnswerFolder, answers: list[Any]) -> None:
            own(folder, answers)
            kept.extend(answers)
            process.kill()
            process.wait(PATIENCE_S)

        patch.setattr(AnswerFolder, "add", add)
        ended = batch(command, bundled, requests, met)
    assert ended.code == 1
    assert "error: stage 2 of 2 has ended, or cannot be reached" in ended.err
    assert 0 < len(kept) < len(PROMPTS)
    met = f"127.0.0.1:{free_port()}"
    with stage_process(bundled, met, "16MiB") as process:
        ended = batch(command, bundled, requests, met)
        assert ended.code == 0, ended.err
        assert process.wait(PATIENCE_S) == 0
    lines = requests.with_name("answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


STAGES = ("--stages", 2)
MET = ("--rendezvous", "127.0.0.1:29400")


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("serve", STAGES, "stages is given and rendezvous is not; give where the stages meet, or"),
        ("batch", MET, "rendezvous is given and stages is not"),
        ("serve", (*STAGES, *MET, "--ray"), "rendezvous and ray are both given"),
        ("batch", (*STAGES, "--ray", "--replicas", 2), "replicas and stages are both given"),
        ("serve", (*STAGES, "--ray", "--max-replicas", 2), "max_replicas and stages are both"),
        ("generate", ("--ray",), "ray is given and stages is not"),
        (
            "chat",
            (*STAGES, "--ray", "--ray-address", "ray://a:1"),
            "ray_address is ray://a:1 and the",
        ),
        ("generate", ("--stages", "x", *MET), "stages is 'x'"),
    ],
)
def test_options_that_do_not_go_together(
    command: Command, tmp_path: Path, name: str, given: tuple[object, ...], sentence: str
) -> None:
    files = ("requests", tmp_path / "answers") if name == "batch" else ()
    ended = command(name, "no/such/model", *files, "--memory-budget", "24MiB", *given)
    assert ended.code == 1
    assert f"error: {sentence}" in ended.err
