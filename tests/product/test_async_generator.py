"""Many tasks over one generator: each stream is what it would be alone."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from speq import SpeqError
from speq.async_generator import AsyncGenerator
from speq.generator import Generator, Token
from tests.helpers.tiny_models import greedy_tokens, load_plain

OPTIONS: dict[str, Any] = {"dtype": "float32", "draft_length": 2, "context_length": 96}


@contextmanager
def generating(path: Path, max_batch: int) -> Iterator[AsyncGenerator]:
    made = AsyncGenerator.from_pretrained(path, "64MiB", max_batch=max_batch, **OPTIONS)
    try:
        yield made
    finally:
        made.close()


def test_streams_side_by_side_are_each_alone(tiny: Callable[[str], Path]) -> None:
    """Of more texts than run together, a third of which is no longer wanted."""
    plain, rng = load_plain(tiny("olmoe")), random.Random(3)
    prompts = [[rng.randrange(250) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    told: dict[int, tuple[str, dict[str, Any]]] = {}

    async def one(generator: AsyncGenerator, number: int) -> list[int]:
        wanted = 5 if number % 3 == 2 else 100
        got: list[Token] = []
        stream = generator.stream(
            prompts[number],
            max_new_tokens=24,
            ignore_eos=True,
            on_finish=lambda *each: told.update({number: each}),
        )
        async with aclosing(stream):
            async for token in stream:
                got.append(token)
                if len(got) == wanted:
                    break
        return [token.id for token in got]

    async def all_of_them(generator: AsyncGenerator) -> list[list[int]]:
        return await asyncio.gather(*(one(generator, number) for number in range(len(prompts))))

    with generating(tiny("olmoe"), max_batch=3) as generator:
        made = asyncio.run(all_of_them(generator))
        for number, tokens in enumerate(made):
            wanted = greedy_tokens(plain, prompts[number], 24)
            assert tokens == (wanted[:5] if number % 3 == 2 else wanted)
        assert set(told) == {number for number in range(12) if number % 3 != 2}
        assert {reason for reason, _ in told.values()} == {"length"}
        assert all(stats["new_tokens"] == 24 for _, stats in told.values())
        # What was given up has left, and its caches serve others.
        again = asyncio.run(all_of_them(generator))
        assert again == made
        assert generator.alive


def test_refusals_reach_the_one_who_asked(tiny: Callable[[str], Path]) -> None:
    plain = load_plain(tiny("olmoe"))

    async def both(generator: AsyncGenerator) -> tuple[Any, Any]:
        good = generator.generate([5] * 8, max_new_tokens=20, ignore_eos=True)
        bad = generator.generate([5] * 90, max_new_tokens=20)
        found = await asyncio.gather(good, bad, return_exceptions=True)
        return found[0], found[1]

    with generating(tiny("olmoe"), max_batch=2) as generator:
        good, bad = asyncio.run(both(generator))
        assert good.token_ids == greedy_tokens(plain, [5] * 8, 20)
        assert isinstance(bad, SpeqError)
        assert "need a context of 110 tokens" in str(bad)

        async def unknown() -> None:
            await generator.generate([1], temperatur=1.0)  # type: ignore[call-arg]

        with pytest.raises(SpeqError, match="temperatur"):
            asyncio.run(unknown())


def test_a_cancelled_task_ends_its_text(tiny: Callable[[str], Path]) -> None:
    """Within a step: the batch is empty when the next text begins."""

    async def scenario(generator: AsyncGenerator) -> list[int]:
        first = asyncio.Event()

        async def endless() -> None:
            stream = generator.stream([3] * 4, max_new_tokens=90, ignore_eos=True)
            async with aclosing(stream):
                async for _ in stream:
                    first.set()

        task = asyncio.create_task(endless())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        made = await generator.generate([4] * 4, max_new_tokens=6, ignore_eos=True)
        return made.token_ids

    plain = load_plain(tiny("olmoe"))
    with generating(tiny("olmoe"), max_batch=1) as generator:
        assert asyncio.run(scenario(generator)) == greedy_tokens(plain, [4] * 4, 6)


def test_calls_of_the_generator_itself_wait(tiny: Callable[[str], Path]) -> None:
    plain = load_plain(tiny("olmoe"))

    async def both(generator: AsyncGenerator) -> tuple[list[int], list[int]]:
        task = asyncio.create_task(generator.generate([8] * 3, max_new_tokens=20, ignore_eos=True))
        alone = await asyncio.to_thread(
            generator.generator.generate, [6] * 3, max_new_tokens=20, ignore_eos=True
        )
        return (await task).token_ids, alone.token_ids

    with generating(tiny("olmoe"), max_batch=2) as generator:
        found = asyncio.run(both(generator))
    assert found == (greedy_tokens(plain, [8] * 3, 20), greedy_tokens(plain, [6] * 3, 20))


def test_a_closed_generator_says_so(tiny: Callable[[str], Path]) -> None:
    async def scenario(generator: AsyncGenerator) -> None:
        stream = generator.stream([3] * 4, max_new_tokens=90, ignore_eos=True)
        async with aclosing(stream):
            await anext(stream)
            await generator.aclose()
            with pytest.raises(SpeqError, match="closed"):
                async for _ in stream:
                    pass
        with pytest.raises(SpeqError, match="closed"):
            await generator.generate([1, 2])

    with generating(tiny("olmoe"), max_batch=2) as generator:
        asyncio.run(scenario(generator))
        assert not generator.alive


def test_a_failure_of_ours_is_told_and_ends_all(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator.from_pretrained(tiny("olmoe"), "64MiB", max_batch=2, **OPTIONS)
    together = AsyncGenerator(generator)

    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(generator.runtime.engine.verification, "score", fail)
    try:
        for _ in range(2):
            with pytest.raises(SpeqError, match=r"engine died .ZeroDivisionError"):
                asyncio.run(together.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True))
        assert not together.alive
    finally:
        together.close()
