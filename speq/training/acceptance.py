"""Acceptance of a head's drafts by depth, measured in runs over held-out texts."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from speq.errors import present
from speq.generator import Generator
from speq.stats import StepStats
from speq.units import Progress, no_progress

# Sizes of the evaluation: tokens of each prompt and of its continuation, and prompts.
PROMPT_TOKENS, NEW_TOKENS, NUM_PROMPTS = 64, 64, 16
# Tokens drafted in each step.
DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Acceptance of chains of drafted tokens.

    tried, stood   tokens by depth, from 1 on, that follow accepted ones; how many of them were
                   accepted
    accept_length  mean tokens emitted by a step
    """

    steps: int
    tried: list[int]
    stood: list[int]
    accept_length: float

    @classmethod
    def of(cls, steps: Iterable[StepStats]) -> "ChainAcceptance":
        found = [step for step in steps if step.draft_length]
        depths = range(1, max((step.draft_length for step in found), default=0) + 1)
        reached = [
            [step for step in found if step.draft_length >= depth and step.accepted >= depth - 1]
            for depth in depths
        ]
        stood = [
            sum(step.accepted >= depth for step in steps)
            for depth, steps in zip(depths, reached, strict=True)
        ]
        emitted = sum(step.accepted + 1 for step in found)
        return cls(len(found), list(map(len, reached)), stood, emitted / max(len(found), 1))

    @property
    def by_depth(self) -> list[float]:
        pairs = zip(self.stood, self.tried, strict=True)
        return [stood / tried if tried else 0.0 for stood, tried in pairs]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"by_depth": self.by_depth}


def measure_acceptance(
    generator: Generator,
    prompts: Sequence[list[int]],
    temperature: float,
    progress: Progress = no_progress,
) -> ChainAcceptance:
    """Continue each prompt, with chains of `DRAFT_LENGTH`."""
    steps: list[StepStats] = []
    for done, prompt in enumerate(prompts):
        generator.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=done,
            ignore_eos=True,
        )
        run = present(generator.last_run, "a text has ended and left no run")
        # The last drafts of a sequence are truncated.
        steps += [s for s in run.decode if s.draft_length == DRAFT_LENGTH]
        progress("measuring acceptance", done + 1, len(prompts))
    return ChainAcceptance.of(steps)
