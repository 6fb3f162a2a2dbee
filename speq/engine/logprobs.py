"""Log-probabilities of a sequence's tokens, and of the likeliest ones.

They are the exact model's own, before temperature, penalties and truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speq.engine.draft import Outcome


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability. top: (token id, logprob) of the likeliest ones, in order"""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Logprobs:
    """Keeps the log-probabilities of one sequence's tokens until they are taken.

    count  number of likeliest tokens that are kept with each one
    """

    count: int
    _noted: list[TokenLogprobs] = field(default_factory=list)

    def note(self, logits: Tensor, outcome: Outcome) -> None:
        """Note an outcome: row `outcome.path[i]` of logits [N, V] gave `outcome.token_ids[i]`."""
        path = torch.tensor(outcome.path, device=logits.device)
        self._noted += logprobs_of(logits[path], outcome.token_ids, self.count)

    def take(self, count: int) -> list[TokenLogprobs]:
        """Take the next `count` tokens' log-probabilities, and drop those after the end."""
        noted, self._noted = self._noted[:count], []
        return noted


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, from the second one on; each given those before it.

    count  number of likeliest tokens that are kept with each one
    """

    count: int
    noted: list[TokenLogprobs] = field(default_factory=list)

    def note(self, logits: Tensor, token_ids: Sequence[int]) -> None:
        """Note the next tokens of the prompt, which [N, V] logits were computed for."""
        self.noted += logprobs_of(logits, token_ids, self.count)


def logprobs_of(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of a token in each row of [N, V], and of the row's `count` likeliest."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)
    own = scores.gather(1, chosen[:, None])[:, 0].tolist()
    values, ids = scores.topk(min(count, scores.shape[1]))
    rows = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(own, tuple(zip(ids, row, strict=True))) for own, ids, row in rows]
