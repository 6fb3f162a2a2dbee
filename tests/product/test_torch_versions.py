"""The bindings compile against the oldest torch that we support, whatever torch is installed."""

import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.helpers.needed import absent
from tests.helpers.paths import ROOT
from tools import torch_headers
from tools.torch_headers import BINDINGS, RemoteFile, Unreachable, compile_errors, fetch

WHEEL = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def headers(request: pytest.FixtureRequest) -> Path:
    try:
        return fetch(torch_headers.oldest_torch())
    except Unreachable as error:
        absent(request.config, "torch-headers", str(error))


@pytest.mark.wide
@pytest.mark.parametrize("name", BINDINGS)
def test_bindings_compile_against_the_oldest_torch(headers: Path, name: str) -> None:
    assert compile_errors(ROOT / name, headers) == ""


@pytest.mark.wide
def test_what_newer_torch_has_does_not(headers: Path, tmp_path: Path) -> None:
    """The macro came with torch 2.13."""
    source = tmp_path / "cuda" / "newer.cpp"
    source.parent.mkdir()
    source.write_text(
        '#include "cuda/tensors.h"\nvoid newer() { STABLE_TORCH_ERROR_CODE_CHECK(0); }\n'
    )
    assert "STABLE_TORCH_ERROR_CODE_CHECK" in compile_errors(source, headers)


def test_all_bindings_are_compiled() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*/*bindings.cpp")}
    assert found == set(BINDINGS)


class Ranges(BaseHTTPRequestHandler):
    """Serves parts of a wheel."""

    def do_HEAD(self) -> None:
        self.answer(200, WHEEL, send=False)

    def do_GET(self) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        self.answer(206, WHEEL[int(first) : int(last) + 1])

    def answer(self, status: int, data: bytes, send: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if send:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Whole(Ranges):
    """Knows nothing of ranges."""

    def do_GET(self) -> None:
        self.answer(200, WHEEL)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), request.param)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/wheel"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("url", [Ranges], indirect=True)
def test_a_remote_file_is_read_in_parts(url: str) -> None:
    file = io.BufferedReader(RemoteFile(url), 1000)
    assert file.seek(-10, io.SEEK_END) == len(WHEEL) - 10
    assert file.read() == WHEEL[-10:]
    file.seek(300)
    assert file.read(5000) == WHEEL[300:5300]


@pytest.mark.parametrize("url", [Whole], indirect=True)
def test_a_server_without_ranges_is_said(url: str) -> None:
    with pytest.raises(Unreachable, match="does not serve parts of files"):
        RemoteFile(url).read(10)


def test_without_a_network_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_headers, "wheel_url", lambda version: "http://127.0.0.1:1/wheel")
    with pytest.raises(Unreachable, match=r"headers of torch 2\.10 cannot be fetched: .*refused"):
        fetch("2.10", tmp_path)
    assert not (tmp_path / "2.10").exists()
