"""A generator whose runs a live page shows, whoever asked for them."""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Generator as Coroutine
from dataclasses import asdict
from typing import Any, Unpack

from speq.dashboard.live.broadcast import Broadcast
from speq.dashboard.live.session import STOPPED, Busy, Nothing, Pictures
from speq.dashboard.panel import Panel
from speq.dashboard.recording import Recording
from speq.dashboard.run_record import RunRecord
from speq.errors import SpeqError
from speq.generator import Generator, Token
from speq.options.typed import SamplingOptions
from speq.text.prompts import Prompt
from speq.units import Progress

# Of a prompt that is shown.
SHOWN_CHARACTERS = 20_000


class Watched:
    """Generates as the generator does, for one thread, and tells `broadcast` of it.

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

    # --- for the engine's thread ---

    def reserve(self, context: int) -> None:
        self._generator.reserve(context)

    def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        top_logprobs: int | None = None,
        asked_s: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Coroutine[Token, None, None]:
        """As `Generator.stream`."""
        ends: list[tuple[str, dict[str, Any]]] = []
        ids = self._generator.encode(prompt)
        self._recording.begin(len(ids), dict(options))
        shown = prompt if isinstance(prompt, str) else self._generator.tokenizer.decode(ids)
        self.broadcast.begin({"prompt": shown[-SHOWN_CHARACTERS:], "sampling": dict(options)})
        self._pictures.begin()

        def told(what: str, done: int, total: int) -> None:
            self.broadcast.newest("prompt", {"what": what, "done": done, "total": total})
            if progress is not None:
                progress(what, done, total)

        stream = self._generator.stream(
            prompt,
            on_finish=lambda reason, stats: ends.append((reason, stats)),
            progress=told,
            top_logprobs=top_logprobs,
            asked_s=asked_s,
            **options,
        )
        kind: str = "finished"
        data: dict[str, Any] = {"finish_reason": STOPPED, "stats": None}
        try:
            with contextlib.closing(stream):
                for token in stream:
                    self.broadcast.token(asdict(self._recording.placed(token)))
                    yield token
                    if self._pictures.due:
                        self._pictures.draw(self.record())
            reason, stats = ends[0]
            self._pictures.draw(self.record())
            data = {"finish_reason": reason, "stats": stats}
            if on_finish is not None:
                on_finish(reason, stats)
        except SpeqError as error:
            kind, data = "failed", {"error": str(error)}
            raise
        finally:
            self.broadcast.end(kind, data)

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
