"""What the live page shows of the requests of a server."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from speq.dashboard.live.event_bus import EventBus
from speq.dashboard.panel import Panel
from speq.dashboard.recording import Recording
from speq.dashboard.run_panels.run_page import panels_of
from speq.dashboard.run_record import RunRecord
from speq.engine.engine_thread import STOPPED, Observer
from speq.engine.request import Token
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError
from speq.generator import Generator
from speq.stats import Origin

# Of a prompt that is shown.
SHOWN_CHARACTERS = 20_000
# Pictures are made no more often than this, and take no more than this share of the time.
PICTURES_EVERY_S = 1.0
PICTURES_SHARE = 0.1


class LiveView(Observer):
    """Watches one request at a time, and tells `bus` of it: when it has ended, the next that begins
    is shown. Pictures are of all requests that run.

    They are made between two steps by the engine's thread, and only while somebody looks: no step's
    time has them in it, as a thread beside it would.
    """

    def __init__(
        self,
        generator: Generator,
        recording: Recording,
        panels_of: Callable[[RunRecord], list[Panel]] = panels_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bus = EventBus()
        self._generator, self._recording = generator, recording
        self._panels_of, self._clock = panels_of, clock
        self._shown: TokenStream | None = None
        self._pictures_due_s = 0.0

    def on_start(self, stream: TokenStream) -> None:
        if self._shown is not None:
            return
        self._shown = stream
        ids, sampling = stream.request.prompt_token_ids, asdict(stream.request.sampling)
        self._recording.begin(len(ids), sampling)
        prompt = self._generator.tokenizer.decode(ids[-SHOWN_CHARACTERS:])
        self.bus.begin({"prompt": prompt[-SHOWN_CHARACTERS:], "sampling": sampling})
        self._pictures_due_s = self._clock()

    def on_prefill(self, stream: TokenStream, done: int, total: int) -> None:
        if stream is self._shown:
            told = {"what": "running the prompt", "done": done, "total": total}
            self.bus.replace("prompt", told)

    def on_tokens(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None:
        if stream is not self._shown:
            return
        for token, origin in zip(tokens, origins, strict=True):
            self.bus.add_token(asdict(self._recording.place_token(token, origin)))
        if self.bus.has_subscribers and self._clock() >= self._pictures_due_s:
            self._draw(self._recording.record())

    def on_end(self, stream: TokenStream, end: End | SpeqError) -> None:
        if stream is not self._shown:
            return
        self._shown = None
        if isinstance(end, SpeqError):
            self.bus.end("failed", {"error": str(end)})
            return
        data: dict[str, Any] = {"finish_reason": end.finish_reason, "stats": None}
        record = self._recording.record()
        if end.finish_reason != STOPPED and record is not None:
            self._draw(record)
            data["stats"] = record.stats
        self.bus.end("finished", data)

    def record(self) -> RunRecord | None:
        """The last run as far as it has come; None before the first one. From any thread."""
        return self._recording.record()

    def close(self) -> None:
        """Send subscribers home."""
        self.bus.close()

    def _draw(self, record: RunRecord | None) -> None:
        """Make the pictures of a record, and tell of them."""
        if record is None:
            return
        begun_s = self._clock()
        panels = [panel.to_dict() for panel in self._panels_of(record)]
        self.bus.replace("panels", {"panels": panels, "stats": record.stats})
        now_s = self._clock()
        rest_s = (now_s - begun_s) * (1 / PICTURES_SHARE - 1)
        self._pictures_due_s = now_s + max(PICTURES_EVERY_S, rest_s)


@contextmanager
def watch(generator: Generator) -> Iterator[LiveView]:
    """A view of what a generator does within the block."""
    with Recording(generator) as recording, closing(LiveView(generator, recording)) as view:
        yield view
