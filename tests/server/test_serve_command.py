"""`speq serve` as users start and end it."""

import http.client
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from speq.server.server import ApiServer, listen
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


def test_the_command(
    command: Command, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within this process, from options to an interrupt, while a request and a page are asked."""
    told: list[Any] = []
    serve = ApiServer.run

    def run(server: ApiServer) -> None:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        told.append(ask(server.url, "GET", "/v1/models"))
        asked = {"model": "mine", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        told.append(ask(server.url, "POST", "/v1/completions", asked))
        server.stop()
        thread.join(PATIENCE_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(ApiServer, "run", run)
    options = ("--served-model-name", "mine", "--context-length", 64, "--reader-threads", 2)
    before = signal.getsignal(signal.SIGTERM)
    ended = command(
        *("serve", tiny("qwen3_moe"), "--memory-budget", "1MiB", "--port", 0, "--quiet"), *options
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("http://127.0.0.1:") and ended.out.endswith("/v1\n")
    (status, models), (finished, answer) = told
    assert status == finished == 200
    assert [(each["id"], each["max_model_len"]) for each in models["data"]] == [("mine", 64)]
    assert answer["usage"]["completion_tokens"] == 4
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_from_start_to_end(bundled: Path, number: signal.Signals) -> None:
    with serving(bundled, "--dashboard", "--quiet") as (process, url):
        assert process.stdout is not None and process.stderr is not None
        page = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
        asked = {"model": "tiny-moe", "prompt": "Once upon a time", "max_tokens": 8}
        status, answer = ask(url, "POST", "/v1/completions", asked)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        # The page is of the same run, and asks by the same routes.
        token = urlsplit(page).query
        status, record = ask(page, "GET", f"/run.json?{token}")
        assert (status, len(record["tokens"])) == (200, 8)
        assert ask(page, "GET", f"/?{token}")[0] == 200
        status, answer = ask(page, "POST", f"/v1/completions?{token}", asked)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == ""


def test_the_command_refuses_before_it_loads(command: Command, tmp_path: Path) -> None:
    arguments = ("serve", "no/such/model", "--memory-budget", "1GiB")
    with closing(listen("127.0.0.1", 0)) as taken:
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
