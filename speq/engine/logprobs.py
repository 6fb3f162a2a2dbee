"""Log-probabilities of a sequence's tokens, and of the likeliest ones.

They are the exact model's own, before temperature, penalties and truncation.
"""

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
        scores = torch.log_softmax(logits[path].float(), dim=-1)
        chosen = torch.tensor(outcome.token_ids, device=logits.device)
        own = scores.gather(1, chosen[:, None])[:, 0].tolist()
        values, ids = scores.topk(min(self.count, scores.shape[1]))
        for logprob, row_ids, row in zip(own, ids.tolist(), values.tolist(), strict=True):
            self._noted.append(TokenLogprobs(logprob, tuple(zip(row_ids, row, strict=True))))

    def take(self, count: int) -> list[TokenLogprobs]:
        """Take the next `count` tokens' log-probabilities, and drop those after the end."""
        noted, self._noted = self._noted[:count], []
        return noted
