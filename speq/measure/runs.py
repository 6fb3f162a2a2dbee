"""Generations to measure: each text to its full length, as runs or step by step."""

from collections.abc import Callable, Iterator

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import present
from speq.generator import Generation, Generator
from speq.stats import RunStats, StepStats
from speq.units import Progress, tracked


def steps_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    draft_length: Callable[[], int | None] = lambda: None,
    progress: Progress | None = None,
) -> Iterator[StepStats]:
    """Yield the record of every step behind the prompts; each text goes on to its full length.

    `Engine.lookahead` holds the routes of a step until the next one is asked for.

    draft_length  asked before each step; None leaves the choice to the governor
    """
    encoded = [generator.encode(prompt) for prompt in prompts]
    generator.reserve(max(map(len, encoded)) + max_new_tokens)
    engine = generator.runtime.engine
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    for prompt_token_ids in tracked("running texts", encoded, len(encoded), progress):
        request = Request(prompt_token_ids, sampling)
        engine.prefill(request)
        while request.finish_reason is None:
            engine.step([request], draft_length())
            yield engine.recorder.step


def texts_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    warm_up: int = 0,
    progress: Progress | None = None,
) -> Iterator[Generation]:
    """Generate each text to its full length, all of them under one layout of memory, and each from
    its first token on. What was measured of a text is `Generator.last_run` until the next one is
    asked for.

    warm_up  so many tokens of the last text come first, to fill the slots, and do not count
    """
    longest = max(len(generator.encode(prompt)) for prompt in prompts)
    generator.reserve(longest + max_new_tokens)
    if warm_up:
        generator.generate(prompts[-1], max_new_tokens=min(warm_up, max_new_tokens))
    for prompt in tracked("running texts", prompts, len(prompts), progress):
        generator.forget()
        yield generator.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)


def runs_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    warm_up: int = 0,
    progress: Progress | None = None,
) -> list[RunStats]:
    """What was measured of each of `texts_of`."""
    runs = []
    for _ in texts_of(generator, prompts, max_new_tokens, warm_up, progress):
        runs.append(present(generator.last_run, "a text has ended and left no run"))
    return runs
