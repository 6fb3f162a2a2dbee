"""Many requests of which a third leave at random moments: afterwards all is as it was before."""

import asyncio
import os
import random
import threading
from pathlib import Path

import openai
import pytest

from speq import Generator
from tests.helpers.api_server import NAME, Rig

AT_ONCE = 6
# Of allocators and of clients' own caches; what leaks at each request would be more.
MORE_BYTES = 32 << 20
PROMPTS = ("Once upon a time", "The sea", "def main(argv):", "### Instruction: Count to ten.")


def process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def slots_of(generator: Generator) -> tuple[int, int]:
    """(slots that are free or hold an expert, experts that may not leave)."""
    cache = generator.runtime.engine.offload.loader.cache
    return len(cache) + cache.free_slots, sum(cache._pins.values())


def entries_of(generator: Generator) -> list[tuple[int, int, list[int]]]:
    """Of each text's KV cache: which it is, its room, and where its tensors lie."""
    caches = generator.runtime.engine.caches
    return [
        (cache.number, cache.capacity, [tensor.data_ptr() for tensor in cache.tensors()])
        for cache in caches
    ]


def threads() -> int:
    """Those of loops left out, which are so many at most and stay."""
    return sum(not each.name.startswith("asyncio_") for each in threading.enumerate())


@pytest.mark.wide
def test_nothing_is_left_behind_of_single_texts(served: Rig, generator: Generator) -> None:
    check_nothing_is_left(served, generator, 60)


@pytest.mark.parametrize(
    "requests",
    [pytest.param(60, marks=pytest.mark.wide), pytest.param(300, marks=pytest.mark.full)],
)
def test_nothing_is_left_behind(side_by_side: Rig, batched: Generator, requests: int) -> None:
    check_nothing_is_left(side_by_side, batched, requests)


def check_nothing_is_left(served: Rig, generator: Generator, requests: int) -> None:
    wanted = {
        prompt: generator.generate(prompt, max_new_tokens=16, ignore_eos=True).text
        for prompt in PROMPTS
    }
    engine = generator.runtime.engine
    slots, entries, memory = slots_of(generator), entries_of(generator), process_bytes()
    before_files, before_threads = open_files(), threads()
    dice = random.Random(7)
    plans = [
        (dice.choice(PROMPTS), dice.randrange(1, 14), dice.random() < 1 / 3)
        for _ in range(requests)
    ]

    async def ask_all() -> list[str | None]:
        client = openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=100)
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(prompt: str, leaves_after: int, leaves: bool) -> str | None:
            async with turns:
                stream = await client.completions.create(
                    model=NAME,
                    prompt=prompt,
                    max_tokens=16,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                text = ""
                at = 0
                async for chunk in stream:
                    text += chunk.choices[0].text
                    at += 1
                    if leaves and at == leaves_after:
                        await stream.close()
                        return None
                return text

        async with client:
            return list(await asyncio.gather(*(ask(*plan) for plan in plans)))

    told = asyncio.run(ask_all())
    for (prompt, _, _), text in zip(plans, told, strict=True):
        assert text is None or text == wanted[prompt]
    assert sum(text is None for text in told) >= requests // 5
    while (stats := served.worker.queue_lengths).running or stats.waiting:
        served.get("/health")
    assert served.worker.failure is None
    # The same engine, with as many slots, whose texts are what they were.
    assert generator.runtime.engine is engine
    assert slots_of(generator) == slots == (engine.offload.loader.cache.num_slots, 0)
    # The same KV caches, and a text has each of them at a time.
    assert entries_of(generator) == entries
    assert len(entries) == generator.max_batch
    together = generator.generate_batch([*PROMPTS], max_new_tokens=16, ignore_eos=True)
    assert [each.text for each in together] == [*wanted.values()]
    for prompt, text in wanted.items():
        assert (
            served.complete(prompt=prompt, max_tokens=16, temperature=0, ignore_eos=True).json[
                "choices"
            ][0]["text"]
            == text
        )
    assert threads() <= before_threads
    assert process_bytes() <= memory + MORE_BYTES
    # Connections that clients keep for a while count among them.
    assert open_files() <= before_files + AT_ONCE
