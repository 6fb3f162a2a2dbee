"""What a live page shows of texts that clients of a server ask for."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from speq.dashboard.live.broadcast import Broadcast
from speq.dashboard.live.session import STOPPED, Busy, Nothing, Pictures
from speq.dashboard.panel import Panel
from speq.dashboard.recording import Recording
from speq.dashboard.run_record import RunRecord
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError
from speq.generator import Generator, Token
from speq.stats import Origin

# Of a prompt that is shown.
SHOWN_CHARACTERS = 20_000


class Watched:
    """Sees texts come, in the engine's thread, and tells `broadcast` of one of them at a time: when
    it has ended, the next that begins is shown. Pictures are of all texts under way.

    For the page it is a `Shown`, which asks for nothing itself.
    """

    asks = False

    def __init__(
        self,
        generator: Generator,
        recording: Recording,
        panels_of: Callable[[RunRecord], list[Panel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broadcast = Broadcast()
        self._generator, self._recording = generator, recording
        self._pictures = Pictures(self.broadcast, panels_of, clock)
        self._shown: TokenStream | None = None

    # --- for the engine's thread ---

    def begun(self, stream: TokenStream) -> None:
        if self._shown is not None:
            return
        self._shown = stream
        request = stream.request
        ids, sampling = request.prompt_token_ids, asdict(request.sampling)
        self._recording.begin(len(ids), sampling)
        shown = self._generator.tokenizer.decode(ids[-SHOWN_CHARACTERS:])
        self.broadcast.begin({"prompt": shown[-SHOWN_CHARACTERS:], "sampling": sampling})
        self._pictures.begin()

    def reading(self, stream: TokenStream, done: int, total: int) -> None:
        if stream is self._shown:
            told = {"what": "running the prompt", "done": done, "total": total}
            self.broadcast.newest("prompt", told)

    def told(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None:
        if stream is not self._shown:
            return
        for token, origin in zip(tokens, origins, strict=True):
            self.broadcast.token(asdict(self._recording.placed(token, origin)))
        if self._pictures.due:
            self._pictures.draw(self.record())

    def ended(self, stream: TokenStream, end: End | SpeqError) -> None:
        if stream is not self._shown:
            return
        self._shown = None
        if isinstance(end, SpeqError):
            self.broadcast.end("failed", {"error": str(end)})
            return
        data: dict[str, Any] = {"finish_reason": end.finish_reason, "stats": None}
        if end.finish_reason != STOPPED:
            record = self.record()
            self._pictures.draw(record)
            data["stats"] = record.stats
        self.broadcast.end("finished", data)

    # --- for the page ---

    def start(self, prompt: Any, sampling: dict[str, Any]) -> int:
        raise Busy("this page shows what `speq serve` generates; ask the server for text")

    def stop(self) -> bool:
        raise Busy("this page shows what `speq serve` generates; its clients stop it")

    def record(self) -> RunRecord:
        """The last run as far as it has come. Raises Nothing before the first one."""
        record = self._recording.record()
        if record is None:
            raise Nothing("nothing was generated yet; ask the server for something first")
        return record

    def close(self) -> None:
        """Send listeners home."""
        self.broadcast.close()
