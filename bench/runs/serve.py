"""A running server under requests that arrive by chance: how soon text begins, and how it comes.

Times between arrivals are drawn from an exponential distribution (a Poisson process): nobody waits
for the answer before. A row for each rate. Times are those of clients: queue and HTTP are in them.

TTFT is the time from a request to its first text. TPOT is the time between then and the end over
the tokens that follow. Percentiles are by nearest rank, over requests that were answered whole.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

from speq.bench.kinds import texts_of
from speq.bench.runs.http_client import AnswerTimes, Target, ask
from speq.bench.settings import ServeBenchSettings as Settings
from speq.errors import FileError, PeerError
from speq.files.regular_file import read_text
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report
from speq.units import Clock, Progress, no_progress

SHARES = (50, 95, 99)
COLUMNS: dict[str, Column] = {
    "rate /s": ("rate", "{:g}"),
    "requests": ("requests", "{}"),
    "whole": ("whole", "{}"),
    "refused": ("refused", "{}"),
    "failed": ("failed", "{}"),
    "tokens/s": ("tokens_per_s", "{:.1f}"),
    **{
        f"{figure} p{share} ms": (f"{name}_p{share}_ms", "{:.1f}")
        for figure, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("all", "latency"))
        for share in SHARES
    },
}
RATE = (Axis("rate", "requests a second"),)


def _percentiles(name: str, title: str) -> Picture:
    times = tuple(Axis(f"{name}_p{share}_ms", f"p{share}, ms") for share in SHARES)
    return Picture(name, title, RATE, times, aid="Lower is sooner.")


OUTCOMES = tuple(Axis(name, name) for name in ("whole", "refused", "failed"))
PICTURES = (
    _percentiles("ttft", "Time to first token"),
    _percentiles("tpot", "Time per output token"),
    _percentiles("latency", "Time of a whole answer"),
    _percentiles("queued", "Time in the server's queue"),
    Picture("speed", "Tokens of all requests together", RATE, (Axis("tokens_per_s", "tokens/s"),)),
    Picture("outcomes", "What came of the requests", RATE, OUTCOMES, mark="stack"),
)


def run(
    url: str,
    settings: Settings,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Report:
    """Ask the server at each rate. Raises SpeqError where there is none, and where it answers no
    request at all.
    """
    prompts = [prompt for _, prompt in texts_of(settings.prompts, settings.num_prompts)]
    target = Target.of(url, key_of(settings.api_key_file), settings.max_seconds)
    first = target.first_model()
    model = settings.served_model_name or first
    rows = []
    for rate in settings.rates:
        arrivals = arrivals_at(rate, settings.num_requests, settings.seed)

        def one(prompt: str) -> AnswerTimes:
            return ask(target, model, prompt, settings.max_new_tokens, clock)

        heard = load(one, prompts, arrivals, settings.max_seconds, progress, clock, sleep)
        rows.append(summed_up(rate, heard))
    report = Report("serve", model, settings.as_json() | {"url": url}, rows)
    report.settings.pop("api_key_file")
    if not any(row["whole"] for row in rows):
        statuses = sorted({status for row in rows for status in row["statuses"]})
        raise PeerError(
            f"{url} answered none of the requests (statuses {', '.join(statuses)}; 0: it did not "
            "answer); see what the server says"
        )
    return report


def key_of(path: Path | None) -> str | None:
    """The first line of a file. Raises SpeqError where there is none."""
    if path is None:
        return None
    lines = read_text(path, "write the server's key in its first line").split()
    if not lines:
        raise FileError(f"{path} is empty; write the server's key in its first line")
    return lines[0]


def arrivals_at(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive, `rate` of them a second on average."""
    dice = random.Random(seed)
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))


def load(
    one: Callable[[str], AnswerTimes],
    prompts: Sequence[str],
    arrivals: Sequence[float],
    max_seconds: float,
    progress: Progress | None,
    clock: Clock,
    sleep: Callable[[float], None],
) -> list[AnswerTimes]:
    """Send each request at its time, whatever came of those before, and wait for all."""
    told = progress or no_progress
    heard: list[AnswerTimes] = []
    threads = []
    start_s = clock()
    for at, arrival_s in enumerate(arrivals):
        rest_s = start_s + arrival_s - clock()
        if rest_s > 0:
            sleep(rest_s)
        if clock() - start_s > max_seconds:
            break
        prompt = prompts[at % len(prompts)]

        def send(prompt: str = prompt) -> None:
            heard.append(one(prompt))

        # An interrupt ends the bench, whatever they wait for.
        threads.append(threading.Thread(target=send, daemon=True))
        threads[-1].start()
        told("sending requests", at, len(arrivals))
    told("sending requests", len(arrivals), len(arrivals))
    for at, thread in enumerate(threads):
        told("waiting for answers", at, len(threads))
        thread.join()
    told("waiting for answers", len(threads), len(threads))
    return heard


def summed_up(rate: float, heard: Sequence[AnswerTimes]) -> dict[str, Any]:
    """A row: what came of the requests of a rate."""
    whole = [each for each in heard if each.whole]
    ends_s = [each.end_s for each in whole if each.end_s is not None]
    took_s = max(ends_s) - min(each.sent_s for each in heard) if ends_s else None
    tokens = sum(each.tokens for each in whole)
    statuses = [str(each.status) for each in heard]
    row: dict[str, Any] = {
        "rate": rate,
        "requests": len(heard),
        "whole": len(whole),
        "refused": statuses.count("429"),
        "failed": len(heard) - len(whole) - statuses.count("429"),
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "took_s": took_s,
        "tokens": tokens,
        "tokens_per_s": tokens / took_s if took_s else None,
    }
    figures: dict[str, list[float]] = {
        "ttft": [(each.first_s - each.sent_s) * 1e3 for each in whole if each.first_s is not None],
        "tpot": [
            (each.end_s - each.first_s) * 1e3 / (each.tokens - 1)
            for each in whole
            if each.end_s is not None and each.first_s is not None and each.tokens > 1
        ],
        "latency": [(each.end_s - each.sent_s) * 1e3 for each in whole if each.end_s is not None],
        "queued": [each.queued_ms for each in whole if each.queued_ms is not None],
    }
    for name, values in figures.items():
        for share in SHARES:
            row[f"{name}_p{share}_ms"] = percentile(values, share)
    return row


def percentile(values: Sequence[float], share: int) -> float | None:
    """The smallest value that `share` of 100 do not exceed; None of nothing."""
    return sorted(values)[max(ceil(len(values) * share / 100), 1) - 1] if values else None
