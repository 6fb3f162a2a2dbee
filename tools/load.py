"""Thousands of requests against a server of the bundled model, many at once, a third cancelled.

python -m tools.load [--requests N] [--at-once N]

Says what came of them, how long clients waited, and what the server's process held of memory,
handles and threads on the way. Every twentieth prompt is long, so that running answers wait for
its chunks: the longest silence within an answer is told. It fails where a request fails, or where
the process grows.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "tiny-moe"
WORDS = (ROOT / "README.md").read_text().split()
BATCH, CONTEXT = 8, 1024
# Words of a prompt; the bundled tokenizer makes two tokens of one.
SHORT, LONG = 12, 350
LONG_EVERY, CANCELLED_EVERY = 20, 3
# Looks at the process. Records of steps and files of prefixes are full by the first.
LOOKS = (0.5, 0.75, 1.0)
# Most growth between the first look and the last one.
MOST_GROWTH = 0.01
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """prompt, tokens: of a request; leaves_after: tokens after which its client leaves, if any"""

    prompt: str
    tokens: int
    leaves_after: int | None


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    handles: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Held":
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        handles = len([*Path(f"/proc/{pid}/fd").iterdir()])
        return cls(int(fields["VmRSS"].split()[0]) << 10, handles, int(fields["Threads"]))


@dataclass(slots=True)
class Outcomes:
    """Requests by what came of them, and times in s: to the first token, of the longest silence
    within an answer, and of whole answers.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    silence_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, outcome: str) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


def asked(number: int, draws: random.Random) -> Asked:
    count = LONG if number % LONG_EVERY == 0 else SHORT
    at = draws.randrange(len(WORDS) - count)
    tokens = draws.randrange(4, 33)
    leaves = draws.randrange(0, tokens) if number % CANCELLED_EVERY == 0 else None
    return Asked(" ".join(WORDS[at : at + count]), tokens, leaves)


async def send(host: str, port: int, each: Asked, outcomes: Outcomes) -> None:
    """Ask for one completion as a stream, and read it to its end, or to where its client leaves."""
    reader, writer = await asyncio.open_connection(host, port)
    body = {"prompt": each.prompt, "max_tokens": each.tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body | {"temperature": 0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    begun_s = last_s = time.perf_counter()
    silence_s, tokens = 0.0, 0
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            outcomes.add(f"refused with {status[1].decode() if status[1:] else 'nothing'}")
            return
        if each.leaves_after == 0:
            outcomes.add("cancelled")
            return
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                outcomes.add("whole")
                outcomes.whole_s.append(time.perf_counter() - begun_s)
                outcomes.silence_s.append(silence_s)
                return
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            if tokens == 0:
                outcomes.first_s.append(now_s - begun_s)
            else:
                silence_s = max(silence_s, now_s - last_s)
            last_s, tokens = now_s, tokens + 1
            outcomes.tokens += 1
            if tokens == each.leaves_after:
                outcomes.add("cancelled")
                return
        outcomes.add("cut off")
    finally:
        writer.close()


async def run(url: str, pid: int, count: int, at_once: int) -> tuple[Outcomes, list[Held]]:
    parts = urlsplit(url)
    outcomes, held, draws = Outcomes(), [], random.Random(1)
    numbers = iter(range(count))
    looks = [round(count * share) for share in LOOKS]
    done = 0

    async def client() -> None:
        nonlocal done
        for number in numbers:
            await asyncio.wait_for(
                send(parts.hostname or "", parts.port or 80, asked(number, draws), outcomes), WAIT_S
            )
            done += 1
            if done in looks:
                held.append(Held.of(pid))
                print(f"{done} of {count} requests: {held[-1]}", file=sys.stderr, flush=True)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return outcomes, held


def summary(outcomes: Outcomes, held: list[Held], took_s: float) -> str:
    def told(name: str, values: list[float]) -> str:
        ordered = sorted(values)
        most = ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
        return f"{name}: median {median(values):.2f} s, p99 {most:.2f} s, most {ordered[-1]:.2f} s"

    lines = [", ".join(f"{count} {name}" for name, count in sorted(outcomes.counts.items()))]
    lines.append(f"{outcomes.tokens} tokens in {took_s:.0f} s")
    lines.append(told("first token", outcomes.first_s))
    lines.append(told("longest silence within an answer", outcomes.silence_s))
    lines.append(told("whole answer", outcomes.whole_s))
    first, last = held[0], held[-1]
    growth = last.rss_bytes / first.rss_bytes - 1
    lines.append(
        f"memory {first.rss_bytes >> 20} MiB, then {last.rss_bytes >> 20} MiB ({growth:+.1%}); "
        f"handles {first.handles}, then {last.handles}; threads {first.threads}, then "
        f"{last.threads}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    command = [
        *(sys.executable, "-m", "speq", "serve", str(MODEL), "--memory-budget", "112MiB"),
        *("--context-length", str(CONTEXT), "--max-batch", str(BATCH), "--port", "0"),
        *("--max-waiting", str(options.at_once), "--profile", "none", "--quiet"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            if server.stdout is None or not (url := server.stdout.readline().strip()):
                sys.exit("the server did not start; it says why above")
            begun_s = time.perf_counter()
            outcomes, held = asyncio.run(run(url, server.pid, options.requests, options.at_once))
            print(summary(outcomes, held, time.perf_counter() - begun_s))
        finally:
            server.terminate()
            server.wait(60)
    unexpected = outcomes.counts.keys() - {"whole", "cancelled"}
    grown = held[-1].rss_bytes > held[0].rss_bytes * (1 + MOST_GROWTH)
    left = held[-1].handles > held[0].handles + options.at_once
    if unexpected or grown or left:
        sys.exit(f"failed: {', '.join(sorted(unexpected)) or 'the process grew'}")


if __name__ == "__main__":
    main()
