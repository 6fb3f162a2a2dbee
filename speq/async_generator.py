"""Many requests at once, for programs that use asyncio: one thread runs them side by side."""

import asyncio
import threading
from collections.abc import AsyncGenerator as AsyncIteration
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Unpack

from transformers import GenerationConfig

from speq.batching import Batch, Emitted, Request
from speq.decode.sequence import Sequence
from speq.errors import SpeqError
from speq.generator import Generation, Generator, Token, tokens_of
from speq.options.typed import RunOptions, SamplingOptions
from speq.text.prompts import Prompt
from speq.units import Progress


@dataclass(frozen=True, slots=True)
class Ended:
    """The last news of a text.

    stats  its own figures; those of all texts together are `Generator.last_run`'s
    """

    finish_reason: str
    stats: dict[str, Any]


# What a text's reader hears, one after another.
News = list[Token] | Ended | Exception


@dataclass(slots=True, eq=False)
class Ticket:
    """A text that is asked for, and who reads it. request: once it has been added to the batch."""

    sequence: Sequence
    tell: Callable[[News], None]
    request: Request | None = None


class AsyncGenerator:
    """Generates texts side by side, each with exactly the output that it has alone.

    At most `max_batch` of the generator's options run together; others wait, first come, first
    served. All methods may be called from any number of tasks. A task that is cancelled, or closes
    its stream, ends its text before the next step.
    """

    def __init__(self, generator: Generator) -> None:
        """generator: closed with this object; its own calls wait until no text is under way."""
        self.generator = generator
        # Tickets that begin; or that end, if their text has not; None at the end of all.
        self._commands: SimpleQueue[Ticket | None] = SimpleQueue()
        self._tickets: dict[Request, Ticket] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="speq batch", daemon=True)
        self._thread.start()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        memory_budget: str | int,
        *,
        progress: Progress | None = None,
        **options: Unpack[RunOptions],
    ) -> "AsyncGenerator":
        """As `Generator.from_pretrained`."""
        return cls(Generator.from_pretrained(model, memory_budget, progress=progress, **options))

    @property
    def alive(self) -> bool:
        """Whether requests are still run: not behind `close`, nor behind a failure of ours."""
        return not self._closed and self._failure is None

    async def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncIteration[Token, None]:
        """Yield tokens as they come; options are those of `Generator.stream`.

        on_finish  told (finish_reason, the text's own figures) at the end

        Raises SpeqError where the request is refused, also for memory that it would never have.
        """
        if not self.alive:
            raise self._refusal()
        sequence = self.generator.prepare(prompt, generation_config, options)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()

        def tell(each: News) -> None:
            with suppress(RuntimeError):  # a loop that is closed has no readers
                loop.call_soon_threadsafe(news.put_nowait, each)

        ticket = Ticket(sequence, tell)
        self._commands.put(ticket)
        try:
            while True:
                each = await news.get()
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, Ended):
                    break
                for token in each:
                    yield token
        finally:
            self._commands.put(ticket)
        if on_finish is not None:
            on_finish(each.finish_reason, each.stats)

    async def generate(
        self,
        prompt: Prompt,
        *,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate to the end; `stats` are the text's own figures."""
        ended: list[tuple[str, dict[str, Any]]] = []
        stream = self.stream(
            prompt,
            on_finish=lambda *each: ended.append(each),
            generation_config=generation_config,
            **options,
        )
        async with aclosing(stream):
            tokens = [token async for token in stream]
        reason, stats = ended[0]
        text = "".join(token.text for token in tokens)
        return Generation(text, [token.id for token in tokens], reason, stats)

    def _refusal(self) -> Exception:
        """Why no more requests are run."""
        closed = "this generator was closed; make a new one with from_pretrained"
        return self._failure or SpeqError(closed)

    async def aclose(self) -> None:
        """As `close`, without blocking other tasks."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End all texts, whose readers hear of it, and release files and memory."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        self._thread.join()
        self._end_all(self._refusal())  # of those who asked at the last moment
        self.generator.close()

    def _serve(self) -> None:
        """Run batches, each until no text is left, for as long as commands come."""
        while (ticket := self._commands.get()) is not None:
            if ticket.request is not None:  # it has ended
                continue
            try:
                with self.generator.batch() as batch:
                    self._hear(batch, ticket)
                    while not batch.idle and self._hear_all(batch):
                        for emitted in batch.step(self.generator.fixed_draft_length):
                            self._tell(emitted)
            except SpeqError as error:
                self._end_all(error, ticket)
            except Exception as error:
                self._failure = error
                self._end_all(error, ticket)
                return
            if self._closed:
                return

    def _hear_all(self, batch: Batch) -> bool:
        """Take in the commands that have come; whether to go on."""
        with suppress(Empty):
            while True:
                ticket = self._commands.get_nowait()
                if ticket is None:
                    return False
                self._hear(batch, ticket)
        return True

    def _hear(self, batch: Batch, ticket: Ticket) -> None:
        if ticket.request is not None:
            batch.drop(ticket.request)
            self._tickets.pop(ticket.request, None)
            return
        try:
            ticket.request = batch.add(ticket.sequence)
        except SpeqError as error:
            ticket.request = Request(ticket.sequence, 0.0)  # its reader will end it
            ticket.tell(error)
        else:
            self._tickets[ticket.request] = ticket

    def _tell(self, emitted: Emitted) -> None:
        ticket = self._tickets[emitted.request]
        sequence = emitted.request.sequence
        if emitted.error is not None:
            del self._tickets[emitted.request]
            ticket.tell(emitted.error)
            return
        if emitted.token_ids:
            ticket.tell(tokens_of(sequence, emitted.token_ids))
        if sequence.finish_reason is not None:
            del self._tickets[emitted.request]
            ticket.tell(Ended(sequence.finish_reason, emitted.request.figures))

    def _end_all(self, error: Exception, *others: Ticket) -> None:
        """Tell all readers, and those who have asked and were not heard, that their texts end."""
        tickets = {*self._tickets.values(), *(each for each in others if each.request is None)}
        self._tickets.clear()
        with suppress(Empty):
            while not self.alive:
                ticket = self._commands.get_nowait()
                if ticket is not None and ticket.request is None:
                    tickets.add(ticket)
        for ticket in tickets:
            ticket.request = ticket.request or Request(ticket.sequence, 0.0)
            ticket.tell(error)
