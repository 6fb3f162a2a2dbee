"""`speq serve` as users start and end it."""

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from speq.dashboard.live.server import bound
from tests.helpers.command import PATIENCE_S, Command, arguments_of


@contextmanager
def serving(model: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the first line that it prints."""
    command = arguments_of("serve", model, "--memory-budget", "24MiB", "--port", 0, *arguments)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def ask(url: str, method: str, path: str, content: Any = None) -> tuple[int, Any]:
    address = urlsplit(url)
    assert address.hostname is not None
    with closing(
        http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
    ) as connection:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        read = response.read()
        return response.status, json.loads(read) if read[:1] == b"{" else read.decode()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)]
)
def test_a_server_from_start_to_end(bundled: Path, number: signal.Signals) -> None:
    with serving(bundled, "--dashboard", "--quiet") as (process, url):
        assert process.stdout is not None and process.stderr is not None
        page = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
        asked = {"model": "tiny-moe", "prompt": "Once upon a time", "max_tokens": 8}
        status, answer = ask(url, "POST", "/v1/completions", asked)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        # The page is of the same run, and has no form.
        token = urlsplit(page).query
        status, record = ask(page, "GET", f"/run.json?{token}")
        assert (status, len(record["tokens"])) == (200, 8)
        assert '<form id="ask" hidden>' in ask(page, "GET", f"/?{token}")[1]
        status, told = ask(page, "POST", f"/generate?{token}", {"prompt": "a"})
        assert (status, "ask the server" in told["error"]["message"]) == (409, True)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == ""


def test_the_command_refuses_before_it_loads(command: Command, tmp_path: Path) -> None:
    arguments = ("serve", "no/such/model", "--memory-budget", "1GiB")
    with closing(bound()) as taken:
        port = taken.getsockname()[1]
        ended = command(*arguments, "--port", port)
    assert ended.code == 1
    assert f"port {port} of 127.0.0.1 cannot be listened on" in ended.err
    for more, sentence in (
        (("--host", "0.0.0.0"), "there is no key"),
        (("--host", "example.org"), "it must be an address"),
        (("--api-key-file", tmp_path / "none"), "none"),
        (("--port", 70_000), "port is 70000"),
    ):
        ended = command(*arguments, *more)
        assert (ended.code, sentence in ended.err) == (1, True), ended.err
