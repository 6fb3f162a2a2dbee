"""One request to a server of OpenAI's API, and when its parts came."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from speq.errors import FileError, PeerError, SpeqError, present
from speq.units import Clock

WANTED = "give the base URL that `speq serve` printed, such as http://127.0.0.1:8000/v1"
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Target:
    """A server. key: None where it asks for none."""

    address: SplitResult
    key: str | None = None
    timeout_s: float = 60.0

    @classmethod
    def of(cls, url: str, key: str | None, timeout_s: float) -> "Target":
        """Raises SpeqError for what is no URL of a server."""
        wrong = PeerError(f"{url!r:.200} is no URL of a server; {WANTED}")
        try:
            address = urlsplit(url.rstrip("/"))
            port = address.port
        except ValueError as error:
            raise wrong from error
        if address.scheme not in ("http", "https") or not address.hostname or port == 0:
            raise wrong
        return cls(address, key, timeout_s)

    def connect(self) -> http.client.HTTPConnection:
        secure = self.address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = present(self.address.hostname, "an address was taken that has no host")
        return kind(host, self.address.port, timeout=self.timeout_s)

    def send(
        self, connection: http.client.HTTPConnection, route: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.request(method, f"{self.address.path}{route}", content, headers)
        return connection.getresponse()

    def first_model(self) -> str:
        """What the server calls its first model. Raises SpeqError where there is no server."""
        url = self.address.geturl()
        connection = self.connect()
        try:
            response = self.send(connection, "/models", None)
            read = response.read()
            if response.status != 200:
                raise FileError(f"{url} answers with {response.status}: {read.decode()[:200]}")
            return str(json.loads(read)["data"][0]["id"])
        except SpeqError:
            raise
        except (*FAILURES, IndexError) as error:
            raise PeerError(f"{url} has no models to tell of ({error}); {WANTED}") from error
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What came of a request; times by the bench's clock.

    status          of HTTP; 0 where nothing came
    first_s, end_s  when text began, and when the answer was whole; None where it was not
    queued_ms       time in the server's queue, where it says
    """

    status: int
    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    queued_ms: float | None = None

    @property
    def whole(self) -> bool:
        return self.end_s is not None and self.first_s is not None and self.tokens > 0


def ask(target: Target, model: str, prompt: str, max_new_tokens: int, clock: Clock) -> AnswerTimes:
    """Go on from a prompt, greedily and to the full length."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = clock()
    connection = target.connect()
    try:
        response = target.send(connection, "/completions", body)
        if response.status != 200:
            return AnswerTimes(response.status, sent_s)
        return read(response, sent_s, clock)
    except FAILURES:
        return AnswerTimes(0, sent_s)
    finally:
        connection.close()


def read(response: http.client.HTTPResponse, sent_s: float, clock: Clock) -> AnswerTimes:
    """Chunks up to the one that ends them. An answer that breaks off is none."""
    first_s: float | None = None
    usage: dict[str, Any] = {}
    for line in iter(response.readline, b""):
        if line.startswith(b"data: [DONE]"):
            queued_ms = usage.get("speq", {}).get("queued_ms")
            return AnswerTimes(
                200, sent_s, first_s, clock(), int(usage.get("completion_tokens", 0)), queued_ms
            )
        if not line.startswith(b"data: "):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            break
        if first_s is None and chunk["choices"]:
            first_s = clock()
        usage = chunk.get("usage") or usage
    return AnswerTimes(0, sent_s, first_s)
