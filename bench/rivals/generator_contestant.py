"""Speq itself as a contestant: a generator, however its options have it hold the model."""

from collections.abc import Generator as Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.devices.failures import translate_errors
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.generator import Generator
from speq.measure.probe import follow, verify


@dataclass(frozen=True, slots=True)
class GeneratorContestant:
    """A Contestant over a generator, which it closes.

    details  what `settled` tells besides
    """

    generator: Generator
    details: dict[str, Any] = field(default_factory=dict)

    def stream(
        self, prompt_token_ids: list[int], max_new_tokens: int
    ) -> Coroutine[int, None, None]:
        self.generator.forget()  # others keep nothing from one stream to the next
        with closing(
            self.generator.stream(prompt_token_ids, max_new_tokens=max_new_tokens, ignore_eos=True)
        ) as tokens:
            for token in tokens:
                yield token.id

    def figures(self) -> dict[str, Any]:
        """Those of docs/statistics.md; none before the first stream."""
        run = self.generator.last_run
        return {} if run is None else run.summary()

    def choices(self, prompt_token_ids: list[int], continuation: list[int]) -> list[int]:
        """In passes as long as the longest verification that memory is planned for."""
        if not continuation:
            return []
        self.generator.reserve(len(prompt_token_ids) + len(continuation))
        runtime = self.generator.runtime
        engine = runtime.engine
        rows = 1 + (runtime.longest_draft if runtime.residency_plan.drafts else 0)
        request = Request(prompt_token_ids, SamplingParams(max_new_tokens=1, ignore_eos=True))
        engine.recorder.begin_run(runtime.begin_stats(0.0))  # not the last stream's
        with translate_errors():
            chosen = engine.prefill(request)
            # Nothing is asked behind the last token.
            for start in range(0, len(continuation) - 1, rows):
                tokens = continuation[start : start + rows][: len(continuation) - 1 - start]
                engine.recorder.begin("forced")
                engine.lookahead.clear()  # of a draft's routes, which name other tokens
                scored = verify(engine, tokens[0], Draft.chain(tokens[1:]))
                chosen += scored.logits.argmax(-1).tolist()
                follow(engine, tokens, scored)
        return chosen

    def settled(self) -> dict[str, Any]:
        """How experts and other weights are held, who drafts, and memory item by item.

        draft_length  tokens of each draft; "auto": the governor chooses them; 0: nobody drafts
        """
        runtime = self.generator.runtime
        residency_plan, fixed = runtime.residency_plan, runtime.config.draft_length
        asked = "auto" if fixed is None else fixed
        begun = runtime.begin_stats(0.0)
        return {
            "codec": begun.codec,
            "dtype": str(runtime.dtype).removeprefix("torch."),
            "encoded": residency_plan.encoded,
            "dense": begun.dense,
            "drafter": residency_plan.drafter,
            "draft_length": asked if residency_plan.drafts else 0,
            "slots": runtime.plan.slots,
            "memory": begun.memory,
            "planned": begun.planned,
            **self.details,
        }

    def close(self) -> None:
        self.generator.close()
