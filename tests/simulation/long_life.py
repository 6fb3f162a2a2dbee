"""Many short requests in one process, which must not grow: `python -m tests.simulation.long_life`.

Requests of the bundled model join and leave as a batch; some are cancelled, some interrupted by
Ctrl-C, the memory budget changes, and the model is loaded again from time to time. Every text is
compared with the first one of its kind. Says what the process holds on the way.
"""

import argparse
import ctypes
import gc
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import torch

from speq import Generator
from speq.config import SamplingParams
from speq.engine.batch import Batch
from speq.engine.request import Request
from tests.helpers.paths import BUNDLED, ROOT
from tools.load import Held

# What is freed stays with the allocator, and that is 15 to 35 MB by what happened last.
LIBC = ctypes.CDLL(None)
WORDS = (ROOT / "README.md").read_text().split()
PROMPTS, SIDE_BY_SIDE = 50, 4
# Requests between two runs of the model, at most and on average half of it.
RELOAD = 4000
LOOKS, MOST_GROWTH = 10, 0.01


class LongLife:
    """texts: of each (prompt, tokens, seed), by the first request that asked for it"""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.texts: dict[tuple[int, int, int], list[int]] = {}
        self.counts = Counter[str]()

    @property
    def done(self) -> int:
        return self.counts["text"] + self.counts["cancelled"] + self.counts["interrupted"]

    def run(self, until: int) -> None:
        generator = Generator.from_pretrained(
            BUNDLED, "32MiB", max_batch=SIDE_BY_SIDE, context_length=128, profile="none"
        )
        self.counts["load"] += 1
        until = min(until, self.done + self.rng.randrange(1, RELOAD))
        while self.done < until:
            with suppress(KeyboardInterrupt), generator.batch() as batch:
                self.play(generator, batch, until)
        generator.close()

    def play(self, generator: Generator, batch: Batch, until: int) -> None:
        rng, under_way = self.rng, dict[Request, tuple[int, int, int]]()
        try:
            while self.done < until:
                while len(under_way) < SIDE_BY_SIDE:
                    kind = rng.randrange(PROMPTS), rng.randint(1, 6), rng.choice([0, 0, 5])
                    under_way[self.added(generator, batch, *kind)] = kind
                if rng.random() < 0.02:
                    request = rng.choice([*under_way])
                    batch.drop(request)
                    del under_way[request]
                    self.counts["cancelled"] += 1
                if rng.random() < 0.01:
                    least = generator.runtime.least_budget
                    generator.resize(rng.randint(least, 32 << 20))
                    self.counts["resized"] += 1
                if rng.random() < 0.002:
                    os.kill(os.getpid(), signal.SIGINT)
                for output in batch.step():
                    if output.error is not None:
                        raise output.error
                    if output.request.finish_reason is not None:
                        kind = under_way.pop(output.request)
                        made = output.request.output_token_ids
                        assert self.texts.setdefault(kind, made) == made, f"another text of {kind}"
                        self.counts["text"] += 1
        except KeyboardInterrupt:
            self.counts["interrupted"] += len(under_way)
            raise

    def added(
        self, generator: Generator, batch: Batch, prompt: int, tokens: int, seed: int
    ) -> Request:
        text = " ".join(WORDS[10 * prompt : 10 * prompt + 4 + prompt % 9])
        temperature = 0.8 if seed else 0.0
        sampling = SamplingParams(
            max_new_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed
        )
        return batch.add(generator.request(generator.encode(text), sampling))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.long_life")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    life, start_s, looks = LongLife(given.seed), time.monotonic(), list[Held]()
    for look in range(1, LOOKS + 1):
        while life.done < given.requests * look // LOOKS:
            life.run(given.requests * look // LOOKS)
        gc.collect()
        LIBC.malloc_trim(0)
        looks.append(Held.of(os.getpid()))
        print(f"{life.done} requests, {time.monotonic() - start_s:.0f} s: {looks[-1]}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(life.counts.items())))
    first, last = looks[0], looks[-1]
    grown = last.rss_bytes / first.rss_bytes - 1
    print(f"memory {grown:+.1%}, handles {last.handles - first.handles:+d}", end=", ")
    print(f"threads {last.threads - first.threads:+d} since the first tenth")
    same = (first.handles, first.threads) == (last.handles, last.threads)
    return 0 if grown <= MOST_GROWTH and same else 1


if __name__ == "__main__":
    raise SystemExit(main())
