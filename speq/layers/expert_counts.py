"""Expert counts: how often the tokens of a text chose each expert (MoE-Spec, Eq. 4), in a file.

A static ranking keeps a layer's most chosen experts. Counts come from a calibration text; results
on that same text would flatter them.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speq.errors import FileError, SpeqError, checked_int, checked_text
from speq.files.atomic_file import write_whole
from speq.files.json_file import read_json

FORMAT = "speq-expert-counts-1"
COUNT_AGAIN = "count again with `python -m bench.lab.hit_rate MODEL --counts FILE`"
INSTEAD = "give a file that `python -m bench.lab.hit_rate MODEL --counts FILE` wrote"
# Tokens that any text could have.
MOST_TOKENS = 1 << 50


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Counts of the experts chosen in a model's MoE layers.

    The file is one JSON object of these fields, and of `format`, which is `speq-expert-counts-1`.

    model   the model as it was named when counted; only the sizes are checked
    tokens  number of tokens counted
    top_k   experts that each token chose in each layer
    counts  [layers][experts]: tokens that chose the expert; a layer's add up to tokens * top_k

    Raises SpeqError for inconsistent counts.
    """

    model: str
    tokens: int
    top_k: int
    counts: list[list[int]]

    def __post_init__(self) -> None:
        checked_text("model", self.model)
        checked_int("tokens", self.tokens, 1, MOST_TOKENS)
        checked_int("top_k", self.top_k, 1)
        rows = self.counts
        if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
            raise FileError("counts must be a list of layers, each a list of whole numbers")
        if len({len(row) for row in rows}) != 1 or len(rows[0]) < self.top_k:
            raise FileError(
                f"counts have layers of {', '.join(str(len(row)) for row in rows[:8])} experts; "
                f"all must have the same number, at least {self.top_k}"
            )
        for layer, row in enumerate(rows):
            for expert, count in enumerate(row):
                checked_int(f"counts[{layer}][{expert}]", count, 0, self.tokens)
            if sum(row) != self.tokens * self.top_k:
                raise FileError(
                    f"counts[{layer}] add up to {sum(row)}; {self.tokens} tokens with "
                    f"{self.top_k} experts each make {self.tokens * self.top_k}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.counts)

    @property
    def num_experts(self) -> int:
        return len(self.counts[0])

    def ranked(self, layer: int) -> list[int]:
        """Experts of a layer, the most chosen first; ties go to the lower number."""
        row = self.counts[layer]
        return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))

    def check_sizes(self, source: Path, num_layers: int, num_experts: int, top_k: int) -> None:
        """Raise SpeqError if a model has other sizes. source: the file of these counts."""
        if (self.num_layers, self.num_experts, self.top_k) != (num_layers, num_experts, top_k):
            raise FileError(
                f"expert counts {source} are of {self.model}, with {self.top_k} of "
                f"{self.num_experts} experts in {self.num_layers} MoE layers, and this model has "
                f"{top_k} of {num_experts} in {num_layers}; {COUNT_AGAIN}"
            )

    def write(self, path: Path) -> None:
        """Write as JSON, atomically. Raises SpeqError if that fails."""
        write_whole(path, (json.dumps({"format": FORMAT} | asdict(self)) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "ExpertCounts":
        """Read a file of counts. Raises SpeqError, naming the file, if it is not one."""
        content = read_json(path, COUNT_AGAIN, INSTEAD)
        if content.get("format") != FORMAT:
            raise FileError(
                f"{path} has the format {content.get('format')!r:.60}, and expert counts have "
                f"{FORMAT!r}; {INSTEAD}"
            )
        return cls._of(path, {name: value for name, value in content.items() if name != "format"})

    @classmethod
    def _of(cls, path: Path, fields: dict[str, Any]) -> "ExpertCounts":
        if set(fields) != set(cls.__slots__):
            raise FileError(
                f"{path} has the fields {sorted(fields)!r:.200} besides its format; expert "
                f"counts have {sorted(cls.__slots__)}; {COUNT_AGAIN}"
            )
        try:
            return cls(**fields)
        except SpeqError as error:
            raise FileError(f"{path} holds no expert counts: {error}; {COUNT_AGAIN}") from error
