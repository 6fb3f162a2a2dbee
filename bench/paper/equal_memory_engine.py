"""Systems at equal memory in the real engine, on packed models from disk.

Each candidate is tried once, on a text that no figure counts; what the trial recommends is each
system's candidate, and auto's among all of them. Systems are then measured in rotation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from speq.bench.paper.candidates import Candidate, Outcome, Standing, choose
from speq.bench.rotation import rotated
from speq.bench.runs.schedule import budget_for
from speq.errors import SpeqError
from speq.files.checkpoint import locate
from speq.generator import Generator
from speq.measure.runs import runs_of
from speq.text.tokenizer import load_tokenizer, tokens_of
from speq.units import Progress

# Tokens that warm the slots before texts are measured.
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineRuns:
    """What is run. stores: the model by codec; trial: the text to try candidates on."""

    stores: Mapping[str, str]
    texts: list[str]
    trial: str
    max_new_tokens: int
    rounds: int
    reader_threads: int

    @property
    def context(self) -> int:
        """Tokens of KV cache that every text has room in."""
        tokenizer = load_tokenizer(locate(self.stores["raw"]))
        texts = [*self.texts, self.trial]
        return max(len(tokens_of(tokenizer, text)) for text in texts) + self.max_new_tokens

    def compete(
        self,
        systems: Mapping[str, list[Candidate]],
        fraction: float,
        progress: Progress | None = None,
    ) -> dict[str, Standing]:
        """Every system under one budget."""
        context = self.context
        budget = budget_for(self.stores["raw"], fraction, context)
        every = list(dict.fromkeys(c for candidates in systems.values() for c in candidates))
        done, total = 0, len(every) + self.rounds * len(systems)

        def measured(candidate: Candidate, texts: list[str], warm_up: bool) -> Outcome:
            nonlocal done
            outcome = self._measure(candidate, budget, context, texts, warm_up)
            done += 1
            if progress is not None:
                progress(f"engine, f = {fraction}", done, total)
            return outcome

        token_ms = {c: measured(c, [self.trial], warm_up=False).tpot_ms for c in every}
        chosen = {
            name: choose({candidate: token_ms[candidate] for candidate in candidates})
            for name, candidates in systems.items()
        }
        names = list(systems)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for turn in range(self.rounds):
            for name in rotated(names, turn):
                outcomes[name].append(measured(chosen[name], self.texts, warm_up=True))
        return {name: Standing(chosen[name], outcomes[name]) for name in names}

    def _measure(
        self, candidate: Candidate, budget: int, context: int, texts: list[str], warm_up: bool
    ) -> Outcome:
        """All texts, one after the other, out of a generator of their own."""
        generator = Generator.from_pretrained(
            self.stores[candidate.codec],
            budget,
            context_length=context,
            codec=candidate.codec,
            draft="auto" if candidate.has_draft else "none",
            draft_length=candidate.draft_length,
            profile="none",
            cache_policy=candidate.cache_policy,
            prefetch=candidate.prefetch,
            reader_threads=self.reader_threads,
            device="cpu",
        )
        try:
            plan = generator.runtime.plan
            if candidate.has_draft and not plan.has_draft:
                raise SpeqError(
                    f"{candidate}: a budget of {budget} bytes has no room for the draft; give "
                    "larger engine_fractions"
                )
            if warm_up:
                warm = min(WARM_UP_TOKENS, self.max_new_tokens)
                generator.generate(self.trial, max_new_tokens=warm)
            return Outcome.of(plan.slots, runs_of(generator, texts, self.max_new_tokens))
        finally:
            generator.close()
