"""How likely the exact model found the tokens of a text, and which it found likeliest.

These are the model's own log-probabilities, before temperature, penalties and what cuts off.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speq.engine.draft import Outcome


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprob: of the token, the natural logarithm; top: (token id, logprob), likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Logprobs:
    """Keeps the odds of one sequence's tokens until they are taken.

    count  of the likeliest tokens that are told beside each one
    """

    count: int
    _noted: list[TokenLogprobs] = field(default_factory=list)

    def note(self, logits: Tensor, outcome: Outcome) -> None:
        """logits: [N, V]; row `outcome.path[i]` is what `outcome.token_ids[i]` was chosen from."""
        path = torch.tensor(outcome.path, device=logits.device)
        scores = torch.log_softmax(logits[path].float(), dim=-1)
        chosen = torch.tensor(outcome.token_ids, device=logits.device)
        own = scores.gather(1, chosen[:, None])[:, 0].tolist()
        values, ids = scores.topk(min(self.count, scores.shape[1]))
        for logprob, row_ids, row in zip(own, ids.tolist(), values.tolist(), strict=True):
            self._noted.append(TokenLogprobs(logprob, tuple(zip(row_ids, row, strict=True))))

    def take(self, count: int) -> list[TokenLogprobs]:
        """Of the next `count` tokens. Tokens behind the end of the text are forgotten."""
        noted, self._noted = self._noted[:count], []
        return noted
