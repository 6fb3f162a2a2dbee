"""Runs generations for measurements, each to its full length, as runs or step by step."""

from collections.abc import Callable, Iterator

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import present
from speq.generator import Generation, Generator
from speq.stats import RunStats, StepStats
from speq.units import Progress, track


def steps_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    draft_length: Callable[[], int | None] = lambda: None,
    progress: Progress | None = None,
) -> Iterator[StepStats]:
    """Yield the statistics of every decode step; each request runs to its full length.

    `Engine.lookahead` has the routes of a step until the next one.

    draft_length  called before each step; None leaves the choice to the governor
    """
    encoded = [generator.encode(prompt) for prompt in prompts]
    generator.reserve(max(map(len, encoded)) + max_new_tokens)
    engine = generator.runtime.engine
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    for prompt_token_ids in track("running prompts", encoded, len(encoded), progress):
        request = Request(prompt_token_ids, sampling)
        engine.prefill(request)
        while request.finish_reason is None:
            engine.step([request], draft_length())
            yield engine.recorder.step


def generations_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    warm_up: int = 0,
    progress: Progress | None = None,
) -> Iterator[Generation]:
    """Generate from each prompt to the full length, with one memory layout and no prefix reuse.

    `Generator.last_run` has the statistics of a generation until the next one.

    warm_up  tokens of the last prompt that are generated first, to fill the slots
    """
    longest = max(len(generator.encode(prompt)) for prompt in prompts)
    generator.reserve(longest + max_new_tokens)
    if warm_up:
        generator.generate(prompts[-1], max_new_tokens=min(warm_up, max_new_tokens))
    for prompt in track("running prompts", prompts, len(prompts), progress):
        generator.forget()
        yield generator.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)


def runs_of(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    warm_up: int = 0,
    progress: Progress | None = None,
) -> list[RunStats]:
    """Return the statistics of each generation of `generations_of`."""
    runs = []
    for _ in generations_of(generator, prompts, max_new_tokens, warm_up, progress):
        runs.append(present(generator.last_run, "a generation has ended without statistics"))
    return runs
