"""A bound on how long a model thinks: then its thought ends, and its answer follows."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from speq.engine.request import Constraint

# The mark that opens a thought is among the first tokens of an answer, behind white space.
FIRST = 4


class ThoughtTokens(NamedTuple):
    """Token ids of the marks around a thought. is_thinking: the prompt ends within one"""

    begin_id: int
    end_id: int
    is_thinking: bool


class ThoughtState(NamedTuple):
    """State of an answer.

    tokens    of the answer
    thinking  whether these end within a thought
    thought   tokens of the thought
    """

    tokens: int
    thinking: bool
    thought: int

    def after(self, token_id: int, marks: ThoughtTokens) -> "ThoughtState":
        if self.thinking:
            return ThoughtState(self.tokens + 1, token_id != marks.end_id, self.thought + 1)
        opens = self.tokens < FIRST and token_id == marks.begin_id
        return ThoughtState(self.tokens + 1, opens, self.thought)


@dataclass(slots=True, eq=False)
class ThoughtBudget:
    """A constraint of one request's answer: once its thought has so many tokens, it ends.

    Which tokens may follow depends on the answer's own tokens alone, so drafts change nothing.

    most        tokens of a thought, its last mark not included
    vocab_size  of the model's logits
    answer      what all of it must follow besides; None: nothing
    """

    most: int
    marks: ThoughtTokens
    vocab_size: int
    answer: Constraint | None = None
    _read: int = field(default=0, init=False)
    _state: ThoughtState = field(init=False)

    def __post_init__(self) -> None:
        self._state = ThoughtState(0, self.marks.is_thinking, 0)

    def allowed(self, output_token_ids: list[int], ahead: list[int]) -> Tensor | None:
        """Do as `GrammarConstraint.allowed`."""
        state = self._after(output_token_ids)
        for token_id in ahead:
            if self._is_over(state) and token_id != self.marks.end_id:
                return None
            state = state.after(token_id, self.marks)
        may = torch.ones(self.vocab_size, dtype=torch.bool)
        if self._is_over(state):
            may.zero_()
            may[self.marks.end_id] = True
        if self.answer is None:
            return may
        allowed = self.answer.allowed(output_token_ids, ahead)
        return None if allowed is None else allowed & may

    def forced(self, output_token_ids: list[int]) -> list[int]:
        """Do as `GrammarConstraint.forced`."""
        if self._is_over(self._after(output_token_ids)):
            return [self.marks.end_id]
        return [] if self.answer is None else self.answer.forced(output_token_ids)

    def _after(self, output_token_ids: list[int]) -> ThoughtState:
        for token_id in output_token_ids[self._read :]:
            self._state = self._state.after(token_id, self.marks)
        self._read = len(output_token_ids)
        return self._state

    def _is_over(self, state: ThoughtState) -> bool:
        return state.thinking and state.thought >= self.most
