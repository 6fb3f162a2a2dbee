"""Many short requests in one process, which must not grow: `python -m tests.simulation.long_life`.

Requests of the bundled model join and leave as a batch; some are cancelled, some interrupted by
Ctrl-C, the memory budget changes, and the model is loaded again from time to time. Every text is
compared with the first one of its kind. Says what the process holds on the way.

What the allocators have handed out must stay within 1%. The resident size is told beside it: it
has in it what they keep for later, which is up to 35 MB more or less by what came last.
"""

import argparse
import ctypes
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer

from speq import Generator
from speq.config import SamplingParams
from speq.engine.batch import Batch
from speq.engine.request import Request
from tests.helpers.paths import BUNDLED, ROOT
from tools.load import Held

LIBC = ctypes.CDLL(None)
MALLOC_COUNTS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
WORDS = (ROOT / "README.md").read_text().split()
PROMPTS, SIDE_BY_SIDE = 50, 4
# Requests between two runs of the model, at most and on average half of it.
RELOAD = 4000
LOOKS, MOST_GROWTH = 10, 0.01


class MallocInfo(ctypes.Structure):
    """What malloc counts: https://man7.org/linux/man-pages/man3/mallinfo.3.html"""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLOC_COUNTS]


LIBC.mallinfo2.restype = MallocInfo


@dataclass(frozen=True)
class Kept:
    """What the process holds once all that is freed is given back.

    native_bytes   that malloc has handed out
    python_blocks  that Python's own allocator has
    """

    native_bytes: int
    python_blocks: int
    process: Held

    @classmethod
    def now(cls) -> "Kept":
        gc.collect()
        LIBC.malloc_trim(0)
        malloc = LIBC.mallinfo2()
        native_bytes = malloc.uordblks + malloc.hblkhd
        return cls(native_bytes, sys.getallocatedblocks(), Held.of(os.getpid()))


class LongLife:
    """texts: of each (prompt, tokens, seed), by the first request that asked for it"""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.texts: dict[tuple[int, int, int], list[int]] = {}
        self.counts = Counter[str]()
        # One for all loads: tokenizers 0.23 keeps the words of each that a process had.
        self.tokenizer = AutoTokenizer.from_pretrained(BUNDLED)

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
        return batch.add(generator.request(self.tokenizer(text)["input_ids"], sampling))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.long_life")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    life, start_s, looks = LongLife(given.seed), time.monotonic(), list[Kept]()
    for look in range(1, LOOKS + 1):
        while life.done < given.requests * look // LOOKS:
            life.run(given.requests * look // LOOKS)
        looks.append(Kept.now())
        print(f"{life.done} requests, {time.monotonic() - start_s:.0f} s: {looks[-1]}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(life.counts.items())))
    first, last = looks[0], looks[-1]
    native = last.native_bytes / first.native_bytes - 1
    python = last.python_blocks / first.python_blocks - 1
    resident = last.process.rss_bytes / first.process.rss_bytes - 1
    handles = last.process.handles - first.process.handles
    threads = last.process.threads - first.process.threads
    print(
        f"since the first tenth: native memory {native:+.2%}, Python's blocks {python:+.2%}, "
        f"resident {resident:+.1%}, handles {handles:+d}, threads {threads:+d}"
    )
    return 0 if max(native, python) <= MOST_GROWTH and handles == threads == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
