"""What if a draft were better, or worse: drafted tokens that stand as often as one says.

The text is run plainly first, so that its greedy tokens are known. From then on each token that the
drafter chooses is replaced: by the known next one with a probability, else by a wrong one. The
drafter goes on from the replaced token. So the output stays exact, and drafting, routes,
verification and rollback cost what they would cost with such a draft. The routes of tokens that
stand are the draft's own.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from speq.engine.drafter import PlainDecoding
from speq.engine.drafters.head import HeadDrafter
from speq.engine.drafters.next_token import Chosen, NextTokens, Run, SamplePosition
from speq.engine.drafters.self_drafter import SelfDrafter
from speq.engine.request import Request
from speq.errors import OptionError
from speq.generator import Generator
from speq.text.prompts import Prompt

# How tables and notes say that it was set.
WHAT_IF = "WHAT-IF: acceptance set to {:g}"


@dataclass(frozen=True, slots=True)
class KnownText:
    """What the exact model generates behind a prompt. stands: of each token, whether a draft of it
    is to be right; a position is drafted once behind tokens that stand.
    """

    token_ids: list[int]
    stands: list[bool]


class SetAcceptance:
    """Chooses as the drafter does, and replaces what it chose.

    known       texts by their prompts' token ids
    vocab_size  bounds the wrong tokens
    """

    def __init__(
        self, chooses: NextTokens, known: dict[tuple[int, ...], KnownText], vocab_size: int
    ) -> None:
        self._chooses = chooses
        self._known = known
        self._vocab_size = vocab_size

    def __call__(self, run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        """Raises SpeqError for a text that is not known, or that is not generated greedily."""
        pairs = zip(self._chooses(run, positions), positions, strict=True)
        return [self._choice(chosen, each.request, each.drafted) for chosen, each in pairs]

    def _choice(self, chosen: Chosen | None, request: Request, drafted: list[int]) -> Chosen | None:
        text = self._text(request)
        at = request.position + len(drafted)
        if chosen is None or at >= len(text.token_ids):
            return chosen
        if drafted != text.token_ids[request.position : at]:
            return Chosen(chosen.token_id, None)  # it falls with the wrong one before it
        right = text.token_ids[at]
        if text.stands[at]:
            return Chosen(right, None)
        wrong = chosen.token_id if chosen.token_id != right else (right + 1) % self._vocab_size
        return Chosen(wrong, None)

    def _text(self, request: Request) -> KnownText:
        if not request.sampling.greedy or request.sampling.penalises:
            raise OptionError(
                "a synthetic acceptance is for greedy texts and this one is drawn or penalised; "
                "leave temperature and penalties as they are"
            )
        text = self._known.get(tuple(request.prompt_token_ids))
        if text is None:
            raise OptionError(
                "a synthetic acceptance is for texts whose tokens are known and this one is not "
                "among them; give its prompt beforehand"
            )
        return text


@contextmanager
def synthetic_acceptance(
    generator: Generator,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    acceptance: float | None,
    seed: int = 0,
) -> Iterator[None]:
    """Make drafted tokens of these texts stand with a probability, during the block.

    acceptance  that a drafted token stands if those before it do, from 0 to 1; None: as it is
    seed        of which tokens stand: the same ones for any draft length

    Runs each text first, without drafting. A generator that does not draft stays as it is.

    Raises SpeqError for an acceptance out of bounds and for drafters without passes of a model.
    """
    if acceptance is None:
        yield
        return
    if not 0 <= acceptance <= 1:
        raise OptionError(f"synthetic_acceptance is {acceptance}; it must be from 0 to 1")
    encoded = [generator.encode(prompt) for prompt in prompts]
    generator.reserve(max(map(len, encoded)) + max_new_tokens)  # drafters are made anew with it
    drafter = generator.runtime.engine.drafters[0]
    if isinstance(drafter, PlainDecoding):
        yield
        return
    if not isinstance(drafter, SelfDrafter | HeadDrafter):
        raise OptionError(
            "a synthetic acceptance is set for the drafters int4, cached and head and another one "
            "is asked for; leave drafter to be auto, or give one of these"
        )
    known = {}
    with generator.with_draft_length(0):  # the governor learns nothing of it
        for at, (prompt, prompt_token_ids) in enumerate(zip(prompts, encoded, strict=True)):
            made = generator.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
            draws = random.Random(f"{seed}, {at}")
            stands = [draws.random() < acceptance for _ in made.token_ids]
            known[tuple(prompt_token_ids)] = KnownText(made.token_ids, stands)
    chooses = drafter.next_tokens
    drafter.next_tokens = SetAcceptance(chooses, known, generator.runtime.shape.vocab_size)
    try:
        yield
    finally:
        drafter.next_tokens = chooses
