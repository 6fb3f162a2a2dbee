"""`speq serve --ray` with two replicas on this machine, asked by OpenAI's own client."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.helpers.command import arguments_of
from tests.helpers.ray_needed import need_ray, processes_of
from tests.helpers.tiny_models import greedy_tokens, load_plain

pytestmark = pytest.mark.full
PATIENCE_S = 240
TOKENS = 24


@pytest.fixture(scope="module")
def url(bundled: Path, pytestconfig: pytest.Config) -> Iterator[str]:
    """The base URL, as the command prints it."""
    need_ray(pytestconfig)
    command = arguments_of(
        "serve", bundled, "--memory-budget", "64MiB", "--dtype", "float32", "--port", 0,
        "--context-length", 256, "--reader-threads", 2, "--max-waiting", 64, "--ray",
        "--replicas", 2, "--replica-cpus", 1, "--shutdown-seconds", 2,
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=10, timeout=PATIENCE_S)


def ask(client: openai.OpenAI, prompt: list[int], session: str | None = None) -> str:
    made = client.completions.create(
        model="tiny-moe",
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers={} if session is None else {"x-session-id": session},
    )
    return made.choices[0].text


def test_requests_of_a_session_go_to_one_replica(client: openai.OpenAI, url: str) -> None:
    def finished(session: str) -> float:
        """Requests that the replica of a session has answered."""
        page = client.with_options().get(  # type: ignore[type-var]
            f"{url.removesuffix('/v1')}/metrics",
            cast_to=str,
            options={"headers": {"x-session-id": session}},
        )
        counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", str(page), re.MULTILINE)
        return sum(map(float, counts))

    sessions = [f"chat-{number}" for number in range(8)]
    before = {session: finished(session) for session in sessions}
    for _ in range(4):
        ask(client, [7, 8, 9], sessions[0])
    told = {session: finished(session) - before[session] for session in sessions}
    assert told[sessions[0]] == 4
    # Others of these sessions have the other replica, which was not asked.
    assert set(told.values()) == {0, 4}


def test_a_killed_replica_loses_no_request_that_is_retried(
    client: openai.OpenAI, bundled: Path
) -> None:
    from speq.text.tokenizer import load_tokenizer

    plain, tokenizer = load_plain(bundled), load_tokenizer(bundled)
    prompts = [[at + 3] * (at % 5 + 2) for at in range(24)]
    before = processes_of("ServerReplica")
    assert len(before) == 2
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(ask, client, prompt) for prompt in prompts]
        texts[3].result()
        os.kill(before[0], signal.SIGKILL)
        made = [text.result() for text in texts]
    assert made == [tokenizer.decode(greedy_tokens(plain, each, TOKENS)) for each in prompts]
    assert before[0] not in processes_of("ServerReplica")


def test_what_is_refused_is_refused_by_a_replica(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="tiny-moe", prompt="a", best_of=2)
    with pytest.raises(openai.NotFoundError, match="this server has tiny-moe"):
        client.completions.create(model="another", prompt="a")
