"""What a request adds to logits before a token is chosen: a bias of some tokens, and minus infinity
for those that would end an answer too soon.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """values: added, by token id; ends: tokens that end no answer before `min_new_tokens`"""

    values: Mapping[int, float] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    min_new_tokens: int = 0

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the token ids [N] int64 that have a bias at a place among generated tokens, and
        the biases [N] float32.
        """
        ends = self.ends if position < self.min_new_tokens else frozenset()
        values = {**self.values, **dict.fromkeys(sorted(ends), -torch.inf)}
        ids = torch.tensor([*values], dtype=torch.long)
        return ids, torch.tensor([*values.values()], dtype=torch.float32)
