"""Many requests at once, for programs that use asyncio: one thread runs them as a batch."""

import asyncio
from collections.abc import AsyncGenerator as AsyncIteration
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

from transformers import GenerationConfig

from speq.engine.engine_thread import EngineThread
from speq.engine.request import Token
from speq.errors import present
from speq.generator import CLOSED, Generation, Generator
from speq.options.typed import RunOptions, SamplingOptions
from speq.text.prompts import Prompt
from speq.units import Progress


class AsyncGenerator:
    """Generates for many requests at once, each with exactly the output that it has alone.

    At most `max_batch` of the generator's options run together; others wait, first come, first
    served. All methods may be called from any number of tasks. A task that is cancelled, or closes
    its stream, ends its request before the next step.
    """

    def __init__(self, generator: Generator) -> None:
        """generator: closed with this object; its own calls wait until no request runs."""
        self.generator = generator
        self._closed = False
        self._thread = EngineThread(generator, closing=CLOSED)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        memory_budget: str | int = "auto",
        *,
        progress: Progress | None = None,
        **options: Unpack[RunOptions],
    ) -> "AsyncGenerator":
        """Load a model as `Generator.from_pretrained` does."""
        return cls(Generator.from_pretrained(model, memory_budget, progress=progress, **options))

    @property
    def alive(self) -> bool:
        """True while requests are run: until `close`, or until the engine fails."""
        return not self._closed and self._thread.failure is None

    async def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncIteration[Token, None]:
        """Yield tokens as they come; options are those of `Generator.stream`.

        on_finish  told (finish_reason, the request's own figures) at the end

        Raises SpeqError where the request is refused, also for memory that it would never have.
        """
        request = self.generator.prepare(prompt, generation_config, options)
        tokens = self._thread.submit(request)
        try:
            async for token in tokens:
                yield token
        finally:
            self._thread.cancel(tokens)
        if on_finish is not None:
            end = present(tokens.end, "a stream that is read to its end has none")
            on_finish(end.finish_reason, end.stats)

    async def generate(
        self,
        prompt: Prompt,
        *,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate to the end; `stats` are the request's own figures."""
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

    async def resize(self, memory_budget: str | int) -> None:
        """Change the memory budget without blocking other tasks: see `Generator.resize`."""
        await asyncio.to_thread(self.generator.resize, memory_budget)

    async def aclose(self) -> None:
        """Close it without blocking other tasks."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End all requests, whose readers hear of it, and release files and memory."""
        self._closed = True
        self._thread.close()
        self.generator.close()
