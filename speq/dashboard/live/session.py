"""One generation at a time, in a thread of its own, and what is told of it."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import Any, Protocol, Unpack

from speq.config import SamplingParams
from speq.dashboard.live.broadcast import Broadcast
from speq.dashboard.panel import Panel
from speq.dashboard.run_record import RunRecord, TokenRecord
from speq.errors import SpeqError, checked_text
from speq.options.declared import build
from speq.options.typed import SamplingOptions
from speq.units import Progress

logger = logging.getLogger("speq")

# Pictures are made no more often than this, and take no more than this share of the time.
PICTURES_EVERY_S = 1.0
PICTURES_SHARE = 0.1
# Reasons to finish, beside "eos", "length" and "stop".
STOPPED, FAILED = "stopped", "failed"


class Recording(Protocol):
    """Generates and records: `speq.dashboard.recording.Recording`."""

    def stream(
        self,
        prompt: str,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[TokenRecord, None, None]:
        """As `Generator.stream`, of tokens with where they are from."""

    def record(self) -> RunRecord | None:
        """The last run as far as it has come; None before the first one."""


class Observer(Protocol):
    """Counts generations."""

    def begun(self) -> None: ...
    def prompted(self, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None: ...
    def ended(self, reason: str) -> None:
        """reason: "eos", "length", "stop", "stopped" or "failed"."""


class Busy(SpeqError):
    """A generation is asked for while another one runs."""


class Nothing(SpeqError):
    """The record is asked for before there is one."""


class Stopped(Exception):
    """Ends a prompt that somebody stopped."""


class Shown(Protocol):
    """What a live page shows. Safe to use from any thread.

    asks  whether the page asks for generations itself, or only watches those of others
    """

    asks: bool
    broadcast: Broadcast

    def start(self, prompt: Any, sampling: dict[str, Any]) -> int: ...
    def stop(self) -> bool: ...
    def record(self) -> RunRecord: ...


class Pictures:
    """Makes pictures of a run and tells of them, now and then. `clock` gives seconds.

    They are made between two steps by the thread that generates: no step's time has them in it, as
    a thread beside it would.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        panels_of: Callable[[RunRecord], list[Panel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broadcast, self._panels_of, self._clock = broadcast, panels_of, clock
        self._due_s = 0.0

    def begin(self) -> None:
        """A run begins: the first pictures are due."""
        self._due_s = self._clock()

    @property
    def due(self) -> bool:
        """Whether somebody looks, and has waited long enough."""
        return self._broadcast.heard and self._clock() >= self._due_s

    def draw(self, record: RunRecord) -> None:
        """Make the pictures of a record, and tell of them."""
        begun_s = self._clock()
        panels = [panel.to_dict() for panel in self._panels_of(record)]
        self._broadcast.newest("panels", {"panels": panels, "stats": record.stats})
        now_s = self._clock()
        rest_s = (now_s - begun_s) * (1 / PICTURES_SHARE - 1)
        self._due_s = now_s + max(PICTURES_EVERY_S, rest_s)


class Session:
    """Generates what is asked for, and tells `broadcast` of it. Safe to use from any thread.

    `clock` gives seconds.
    """

    asks = True

    def __init__(
        self,
        recording: Recording,
        panels_of: Callable[[RunRecord], list[Panel]],
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broadcast = Broadcast()
        self._recording, self._observer = recording, observer
        self._pictures = Pictures(self.broadcast, panels_of, clock)
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._running = False
        self._stop = threading.Event()
        self._closed = False

    @property
    def running(self) -> bool:
        return self._running

    def start(self, prompt: Any, sampling: dict[str, Any]) -> int:
        """Begin a generation and return its number. sampling: those of `SamplingParams` that are
        given.

        Raises Busy while one runs, and SpeqError for what no run would take.
        """
        text = checked_prompt(prompt)
        build(SamplingParams, sampling, ("prompt",))
        with self._lock:
            if self._closed:
                raise SpeqError("the session was closed; start `speq dashboard` again")
            if self._running:
                raise Busy("a generation runs already; stop it or wait for its end")
            self._stop.clear()
            number = self.broadcast.begin({"prompt": text, "sampling": sampling})
            self._worker = threading.Thread(
                target=self._work, args=(text, sampling), name="speq-live-generation"
            )
            self._running = True
            self._worker.start()
            return number

    def stop(self) -> bool:
        """End the generation that runs after its present step; return whether there is one."""
        with self._lock:
            self._stop.set()
            return self._running

    def wait(self) -> None:
        """Return when no generation runs."""
        worker = self._worker
        if worker is not None:
            worker.join()

    def record(self) -> RunRecord:
        """The last run as far as it has come. Raises Nothing before the first one."""
        record = self._recording.record()
        if record is None:
            raise Nothing("nothing was generated yet; ask for something first")
        return record

    def close(self) -> None:
        """End what runs and send listeners home; what is asked for afterwards is refused."""
        with self._lock:
            self._closed = True
        self.stop()
        self.wait()
        self.broadcast.close()

    def _work(self, prompt: str, sampling: dict[str, Any]) -> None:
        self._observer.begun()
        reason, kind = FAILED, "failed"
        data: dict[str, Any] = {"error": "the run was interrupted"}
        try:
            reason = self._generate(prompt, sampling)
            record = self.record()
            self._pictures.draw(record)
            kind, data = "finished", {"finish_reason": reason, "stats": record.stats}
        except Stopped:
            reason = STOPPED
            kind, data = "finished", {"finish_reason": reason, "stats": None}
        except SpeqError as error:
            data = {"error": str(error)}
        except Exception as error:  # a fault of ours, which must not look like a run without end
            logger.exception("a generation for the live page failed")
            data = {"error": f"speq failed ({type(error).__name__}); its log has more"}
        finally:
            self._observer.ended(reason)
            # Under the lock: who hears of the end may ask for more at once.
            with self._lock:
                self.broadcast.end(kind, data)
                self._running = False

    def _generate(self, prompt: str, sampling: dict[str, Any]) -> str:
        """Generate to the end, and return the reason for it."""
        reasons: list[str] = []
        self._pictures.begin()
        stream = self._recording.stream(
            prompt,
            on_finish=lambda reason, _: reasons.append(reason),
            progress=self._of_prompt,
            **sampling,
        )
        with contextlib.closing(stream):
            for at, token in enumerate(stream):
                self.broadcast.token(asdict(token))
                if at == 0:
                    record = self.record()
                    cached, ttft_ms = record.stats["cached_tokens"], record.stats["ttft_ms"]
                    self._observer.prompted(record.prompt_tokens, cached, ttft_ms / 1e3)
                if self._stop.is_set():
                    break
                if self._pictures.due:
                    self._pictures.draw(self.record())
        return reasons[0] if reasons else STOPPED

    def _of_prompt(self, what: str, done: int, total: int) -> None:
        if self._stop.is_set():
            raise Stopped
        self.broadcast.newest("prompt", {"what": what, "done": done, "total": total})


def checked_prompt(prompt: Any) -> str:
    """A text that tokenizers take. Raises SpeqError for any other value."""
    text = checked_text("prompt", prompt)
    if not text:
        raise SpeqError("prompt is empty; give a text to go on from")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpeqError(
            f"prompt is no Unicode text (half a character at {error.start}); give another"
        ) from error
    return text
