"""Which experts an INT4 draft holds where it holds a part of each layer's: those used most.

What was counted of a model is kept beside it, or in the user's cache folder where that cannot be
written.
"""

import hashlib
import logging
import math
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from speq.drafts.draft_file import FOLDER
from speq.errors import Broken, OptionError, SpeqError
from speq.files.cache_folder import COUNTS, cache_folder
from speq.files.checkpoint import Checkpoint
from speq.layers.expert_counts import ExpertCounts
from speq.models.shape import ModelShape

logger = logging.getLogger("speq")


@dataclass(frozen=True, slots=True)
class DraftPart:
    """The experts that a draft holds.

    count   of each layer; None: all
    covers  share of what tokens choose that is of these: of texts that were counted, or of tokens
            that choose all alike
    """

    count: int | None = None
    covers: float = 1.0


WHOLE = DraftPart()
# What the planner chooses among, beside all experts.
SHARES = (0.5, 0.25)


@dataclass(frozen=True, slots=True)
class UsedExperts:
    """The experts of a model's MoE layers, by how often they were chosen.

    counts  None: nothing was counted
    """

    num_layers: int
    num_experts: int
    counts: ExpertCounts | None = None

    def most(self, count: int) -> list[list[int]]:
        """By layer, the experts used most, ascending; the first ones where nothing was counted."""
        return [sorted(self.ranked(layer)[:count]) for layer in range(self.num_layers)]

    def ranked(self, layer: int) -> list[int]:
        """A layer's experts, those used most first; by number where nothing was counted."""
        return [*range(self.num_experts)] if self.counts is None else self.counts.ranked(layer)

    @property
    def shares(self) -> tuple[float, ...]:
        """By the number n of a layer's experts, share of what tokens choose that is of the n used
        most: [E + 1].
        """
        if self.counts is None:
            return tuple(count / self.num_experts for count in range(self.num_experts + 1))
        by_rank = zip(*(sorted(row, reverse=True) for row in self.counts.counts), strict=True)
        choices = self.counts.tokens * self.counts.top_k * self.num_layers
        return tuple(chosen / choices for chosen in accumulate(map(sum, by_rank), initial=0))

    def parts(self, asked: int | float | str | None) -> tuple[DraftPart, ...]:
        """Those that a draft may hold.

        asked  the option draft_experts

        Raises SpeqError for more experts than a layer has.
        """
        if asked != "auto":
            return (self.part(asked),)
        if self.counts is None:  # nothing says which experts, and others are worth little
            return (WHOLE,)
        return tuple(dict.fromkeys([WHOLE, *map(self.part, SHARES)]))

    def part(self, asked: int | float | str | None) -> DraftPart:
        """asked: experts of each layer or a share of them; None: all of them.

        Raises SpeqError for more experts than a layer has.
        """
        if isinstance(asked, str):
            raise Broken(f"the planner has not chosen how many experts {asked!r} are")
        if asked is None:
            return WHOLE
        count = math.ceil(asked * self.num_experts) if isinstance(asked, float) else asked
        if count > self.num_experts:
            raise OptionError(
                f"draft_experts is {asked} and a layer has {self.num_experts} experts; give "
                f"0 to {self.num_experts}, or a share such as 50%"
            )
        if count == self.num_experts:
            return WHOLE
        if self.counts is None:
            return DraftPart(count, count / self.num_experts)
        rows = zip(self.counts.counts, self.most(count), strict=True)
        chosen = sum(row[expert] for row, experts in rows for expert in experts)
        choices = self.counts.tokens * self.counts.top_k * self.num_layers
        return DraftPart(count, chosen / choices)


def used_experts(
    asked: int | float | str | None,
    named: Path | None,
    checkpoint: Checkpoint | None,
    shape: ModelShape,
) -> UsedExperts:
    """What is known of a model: the file that is named, or what is kept of a checkpoint.

    asked  the option draft_experts; named: draft_counts

    Raises SpeqError where that is damaged or another model's, by its sizes.
    """
    layers, experts = len(shape.experts.layers), shape.experts.num_experts
    if asked is None:
        return UsedExperts(layers, experts)
    path = named
    if path is None and checkpoint is not None:
        path = counts_path(checkpoint)
    if path is None:
        return UsedExperts(layers, experts)
    counts = ExpertCounts.read(path)
    counts.check_sizes(path, layers, experts, shape.top_k)
    return UsedExperts(layers, experts, counts)


def warn_without_counts(used: UsedExperts, asked: int | float | str | None) -> None:
    """Say so where nothing tells which experts a draft should hold. asked: as `parts`."""
    if used.counts is not None or asked is None:
        return
    if asked == "auto":
        logger.warning(
            "nothing was counted of which experts are used most: only a draft of all of them is "
            "considered; `speq tune` counts them, and draft_counts names counts"
        )
    elif used.part(asked).count:
        logger.warning(
            "nothing was counted of which experts are used most: the draft holds the first ones of "
            "each layer by their number, and would draft better with counts, which `speq tune` "
            "keeps and draft_counts names"
        )


def counts_paths(checkpoint: Checkpoint) -> list[Path]:
    """Paths where counts of a model may be kept, the preferred one first."""
    digest = hashlib.sha256(checkpoint.fingerprint().encode()).hexdigest()[:16]
    name = f"expert-counts-{digest}.json"
    paths, cache = [checkpoint.path / FOLDER / name], cache_folder(COUNTS)
    if cache is not None:
        paths.append(cache / name)
    return paths


def counts_path(checkpoint: Checkpoint) -> Path | None:
    """Path of the counts of a model; None: there are none."""
    # Unlike Path.exists, it takes a locked folder for no.
    return next((path for path in counts_paths(checkpoint) if os.path.exists(path)), None)


def write_counts(counts: ExpertCounts, checkpoint: Checkpoint) -> Path | None:
    """Write counts to the first place that takes them, and return it; say so where none does."""
    reasons = []
    for path in counts_paths(checkpoint):
        try:
            counts.write(path)
            return path
        except SpeqError as error:
            reasons.append(str(error))
    logger.warning("counts of the experts could not be kept (%s)", "; ".join(reasons))
    return None
