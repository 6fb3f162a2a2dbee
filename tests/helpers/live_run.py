"""What the live page says over HTTP, and a picture to send to it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord
from speq.server.server import ApiServer
from tests.helpers.api_server import Client


def panel_of_tokens(record: RunRecord) -> list[Panel]:
    """A picture whose only number is that of the tokens so far."""
    table = Table(("tokens",), [[len(record.tokens)]])
    return [Panel("tokens", "Tokens", "Read the number.", [], {}, table)]


class PageClient(Client):
    """Requests to a server's live page, as it makes them itself."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__(server.page, {"Authorization": f"Bearer {server.token}"})
        self.token = server.token

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """Events from now on, as they come: (kind, data)."""
        connection = self.connect()
        connection.request("GET", f"/events?token={self.token}")
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        try:
            yield parsed(iter(response.readline, b""))
        finally:
            response.close()
            connection.close()


def parsed(lines: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """Server-sent events, as https://html.spec.whatwg.org has them: lines up to an empty one."""
    kind, data = "", ""
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data += value
        elif line == b"\n" and kind:
            yield kind, json.loads(data)
            kind, data = "", ""


def to_the_end(events: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Events up to the first that ends a request."""
    found = []
    for kind, data in events:
        found.append((kind, data))
        if kind in ("finished", "failed"):
            break
    return found
