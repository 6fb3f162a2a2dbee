"""Step-by-step training of a head on features. A step depends only on its number and the steps
before it, so an interrupted run ends with the same bits.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from speq.errors import SpeqError, present
from speq.files.atomic_file import replacing
from speq.files.range_file import bytes_of
from speq.files.safetensors_file import SafetensorsFile, header_of
from speq.heads.head_file import sum_of
from speq.heads.losses import (
    LossWeights,
    Predictions,
    Targets,
    cross_entropies,
    regressions,
    total,
)
from speq.heads.moe_head import BranchState, MoEHead, rotations
from speq.training.features import FeatureFile
from speq.training.settings import HeadSettings

BETAS, WEIGHT_DECAY, GRADIENT_NORM = (0.9, 0.95), 0.01, 0.5
# Steps over which the learning rate rises, independent of the total.
WARMUP_STEPS = 20
FINAL_RATE_SHARE = 0.05
# Uniform noise on the head's input, relative to a feature's root mean square: drafts continue from
# the head's own features, which differ a little from the model's.
NOISE = 0.1
# Elements of the logits of a block of rows, and fewest rows of a block.
BLOCK_ELEMENTS, FEWEST_ROWS = 1 << 21, 16
STATE = "state.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingVocabulary:
    """Embedding table [V, H] of the model, and its head: weights [V, H] and bias [V]."""

    table: Tensor
    words: Tensor
    bias: Tensor | None

    def logits(self, features: Tensor) -> Tensor:
        return functional.linear(features, self.words, self.bias)

    @property
    def nbytes(self) -> int:
        parts = {id(part): part for part in (self.table, self.words, self.bias) if part is not None}
        return sum(part.nbytes for part in parts.values())

    @property
    def block_rows(self) -> int:
        return max(BLOCK_ELEMENTS // len(self.words), FEWEST_ROWS)


class Trainer:
    """A head in training.

    taken  steps so far
    """

    def __init__(
        self,
        head: MoEHead,
        features: FeatureFile,
        vocabulary: TrainingVocabulary,
        settings: HeadSettings,
        weights: LossWeights | None = None,
    ) -> None:
        self.head, self.taken = head, 0
        self._features, self._vocabulary, self._settings = features, vocabulary, settings
        self._weights = weights or LossWeights()
        self._names = [name for name, _ in head.shape.tensors()]
        self._parameters = [head.weight(name) for name in self._names]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    def step(self, steps: int | None) -> dict[str, float]:
        """Take one step of a schedule of `steps`; None: one of its first. Return the loss by
        term.
        """
        at = self.taken
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * learning_rate_share(at, steps)
        self._optimizer.zero_grad(set_to_none=True)
        tokens, features = self._features.batch(self.windows_of(at))
        found = self._learn(tokens, features, unrolled=at % 2 == 1)
        torch.nn.utils.clip_grad_norm_(self._parameters, GRADIENT_NORM)
        self._optimizer.step()
        self.taken += 1
        return found

    def windows_of(self, step: int) -> list[int]:
        """Windows of a step: all come once before any comes again, each time in another order."""
        count, size = len(self._features), self._settings.batch_size
        places = range(step * size, (step + 1) * size)
        return [self._order(place // count)[place % count] for place in places]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._settings.seed + 7919 * epoch)
        return torch.randperm(len(self._features), generator=generator).tolist()

    def _learn(self, tokens: Tensor, features: Tensor, unrolled: bool) -> dict[str, float]:
        """Add the gradients of a batch: rows that continue from the model's features and, if
        `unrolled`, rows that continue from the head's own, as drafts do.
        """
        head, device = self.head, self._vocabulary.table.device
        tokens, features = tokens.to(device), features.to(device)
        wanted = features
        rms = features.square().mean().sqrt()
        generator = torch.Generator().manual_seed(self._settings.seed + 104729 * self.taken)
        noise = torch.rand(features.shape, generator=generator).to(device) * 2 - 1
        embedded = functional.embedding(tokens, self._vocabulary.table)
        count = features.shape[1] - 3
        attention = TrainedAttention(count, head.shape.window, device)
        given = (features + NOISE * rms * noise)[:, :count]
        rotation = rotations(torch.arange(count, device=device), head.shape.head_width)
        state = head(embedded[:, 1 : count + 1], given, rotation, attention.first)
        found = self._backward(state, wanted[:, 1:], keep=unrolled)
        if not unrolled:
            return found
        # Row i + 1 takes the feature predicted by row i in place of the model's.
        rotation = rotations(torch.arange(1, count + 1, device=device), head.shape.head_width)
        drafted = state.feature.detach()
        again = head(embedded[:, 2 : count + 2], drafted, rotation, attention.second)
        self._backward(again, wanted[:, 2:], keep=False)
        return found

    def _backward(self, state: BranchState, wanted: Tensor, keep: bool) -> dict[str, float]:
        """Add the gradients of rows [B, T, ...]: feature terms of all rows, and token terms of some
        rows, in blocks to limit the memory of logits.

        wanted  [B, T + 1 or more, H]: row i's next feature is at i, and the one after at i + 1
        """
        parts = [state.feature, state.mixing, state.branches]
        parts += [] if state.after is None else [state.after]
        ends = [part.detach().requires_grad_() for part in parts]
        batch, count = state.feature.shape[:2]
        sums: dict[str, float] = {}

        def learn(loss: dict[str, Tensor], share: float) -> None:
            (total(loss, self._weights) * share).backward()
            for name, value in loss.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach()) * share

        after = None if state.after is None else ends[3]
        learn(regressions(ends[0], after, wanted[:, :count], wanted[:, 1 : count + 1]), 1.0)
        for window, rows in enumerate(self._token_rows(batch, count)):
            for chosen in rows.split(self._vocabulary.block_rows):
                found = self._predictions(*(part[window, chosen] for part in ends))
                pairs = wanted[window, torch.stack((chosen, chosen + 1), 1)]
                loss = cross_entropies(found, self._targets(pairs))
                learn(loss, len(chosen) / (batch * len(rows)))
        torch.autograd.backward(parts, [end.grad for end in ends], retain_graph=keep)
        return sums

    def _token_rows(self, batch: int, count: int) -> list[Tensor]:
        """Choose the rows of each window whose tokens are trained on in this step, ascending."""
        kept = max(round(self._settings.token_share * count), 1)
        generator = torch.Generator().manual_seed(self._settings.seed + 15485863 * self.taken)
        device = self._vocabulary.table.device
        orders = (torch.randperm(count, generator=generator)[:kept] for _ in range(batch))
        return [order.sort().values.to(device) for order in orders]

    def _predictions(
        self, feature: Tensor, mixing: Tensor, branches: Tensor, after: Tensor | None = None
    ) -> Predictions:
        say = self._vocabulary.logits
        after_logits = None if after is None else say(after)
        return Predictions(feature, mixing, say(feature), say(branches), after, after_logits)

    def _targets(self, features: Tensor) -> Targets:
        """Build the targets from features [R, 2, H] of the next token and of the one after."""
        with torch.no_grad():
            probs = self._vocabulary.logits(features).softmax(-1)
        return Targets(*features.unbind(1), *probs.unbind(1))

    def save(self, folder: Path) -> None:
        tensors = {f"weight.{name}": w for name, w in self.head.weights().items()}
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        for name, state in zip(self._names, states, strict=True):
            tensors |= {f"{key}.{name}": state[key] for key in sorted(state) if key != "step"}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"taken": str(self.taken), "sha256": sum_of(tensors)}
        entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with replacing(folder / STATE) as file:
            file.write(header_of(entries, metadata))
            for tensor in tensors.values():
                file.write(bytes_of(tensor.view(-1).view(torch.uint8)))

    def resume(self, folder: Path) -> bool:
        """Continue from a saved state. Return True if there is a complete one."""
        if not (folder / STATE).exists():
            return False
        try:
            with SafetensorsFile(folder / STATE) as file:
                tensors = {name: file.tensor(name) for name in file.tensors}
                taken, digest = file.metadata["taken"], file.metadata["sha256"]
        except (SpeqError, KeyError):
            return False
        if sum_of(tensors) != digest:
            return False
        self.taken = int(taken)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            with torch.no_grad():
                parameter.copy_(tensors[f"weight.{name}"])
            if self.taken:
                moments = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
                state = {key: value.to(parameter.device) for key, value in moments.items()}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(taken)), **state}
        return True


class TrainedAttention:
    """Attention of a window's rows, in both passes over them."""

    def __init__(self, count: int, window: int, device: torch.device) -> None:
        at = torch.arange(count, device=device)
        back = at[:, None] - at[None]
        self._mask = (back >= 0) & (back < window)
        # The second pass is one position further: it sees the first pass's KV before that, and its
        # own row.
        text = (back >= 0) & (back < window - 1)
        self._second_mask = torch.cat((text, back == 0), dim=1)
        self._first: tuple[Tensor, Tensor] | None = None

    def first(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._first = keys, values
        return functional.scaled_dot_product_attention(queries, keys, values, self._mask)

    def second(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        before = present(self._first, "a second pass comes before the first")
        keys, values = (torch.cat(each, dim=2) for each in zip(before, (keys, values), strict=True))
        return functional.scaled_dot_product_attention(queries, keys, values, self._second_mask)


def learning_rate_share(step: int, steps: int | None) -> float:
    """Share of the peak learning rate at a step of `steps`; None: more than the first ones."""
    if step < WARMUP_STEPS or steps is None:
        return min((step + 1) / WARMUP_STEPS, 1.0)
    done = (step - WARMUP_STEPS) / max(steps - WARMUP_STEPS, 1)
    return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * done)) / 2
