"""The sizes of a draft head."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speq.errors import FileError
from speq.heads.head_matrix import held_sizes

# Widest heads of the attention; narrower ones if it does not divide the hidden size.
HEAD_WIDTH = 64
# Base of the rotary frequencies.
ROPE_BASE = 10_000.0
BRANCHES = (1, 2)


@dataclass(frozen=True, slots=True)
class NamedLayers:
    """Layers whose experts a head predicts.

    layers       MoE layers of the model, ascending
    num_experts  of each
    top_k        experts that it predicts of each for a token: as many as the model chooses
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        numbers = (*self.layers, self.num_experts, self.top_k)
        whole = all(type(number) is int for number in numbers)
        ascending = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if not whole or not self.layers or self.layers[0] < 0 or not ascending:
            raise FileError(
                f"a head predicts experts of layers {list(self.layers)!r:.80}; they must be layer "
                "numbers, ascending"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise FileError(
                f"a head predicts {self.top_k} of {self.num_experts} experts; it must be from 1 "
                "to all of them"
            )

    @classmethod
    def of_json(cls, value: Any) -> "NamedLayers":
        """Parse the JSON of `asdict`. Raises SpeqError for anything else."""
        known = isinstance(value, dict) and value.keys() == cls.__dataclass_fields__.keys()
        if not known or not isinstance(value["layers"], list):
            raise FileError(
                f"a head predicts experts of {value!r:.80}; it must be {list(cls.__slots__)}"
            )
        return cls(**value | {"layers": tuple(value["layers"])})


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and settings of a head.

    hidden_size  of the model
    width        of each branch's MLP
    branches     MLPs side by side, mixed by a gate
    contrast     whether the branches' contrast predicts the token after the next
    window       tokens that its attention looks back, the last one included
    named        layers whose experts it predicts; None: none
    """

    hidden_size: int
    width: int
    branches: int = 2
    contrast: bool = True
    window: int = 512
    named: NamedLayers | None = None

    def __post_init__(self) -> None:
        for name, least in (("hidden_size", 2), ("width", 1), ("branches", 1), ("window", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise FileError(f"a head's {name} is {value!r}; it must be at least {least}")
        if self.branches not in BRANCHES or type(self.contrast) is not bool:
            raise FileError(
                f"a head has {self.branches} branches and contrast {self.contrast!r}; branches "
                "must be 1 or 2, and contrast true or false"
            )
        if self.contrast and self.branches < 2:
            raise FileError("a head of one branch has no contrast; leave one of the two out")
        if self.hidden_size % 2:
            raise FileError(
                f"a head's hidden_size is {self.hidden_size}; rotary embeddings need an even one"
            )

    @classmethod
    def of_json(cls, value: Any) -> "HeadShape":
        """Parse the output of `as_json`. Raises SpeqError for anything else."""
        known = set(cls.__dataclass_fields__)
        if not isinstance(value, dict) or value.keys() | {"named"} != known:
            raise FileError(f"a head's sizes are {value!r:.80}; they must be {list(cls.__slots__)}")
        if "named" in value:
            value = value | {"named": NamedLayers.of_json(value["named"])}
        return cls(**value)

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON; a head that predicts no experts keeps the form of earlier versions."""
        sizes = asdict(self)
        if self.named is None:
            del sizes["named"]
        return sizes

    @property
    def head_width(self) -> int:
        """Width of one attention head: the widest even divisor of the hidden size."""
        widest = min(HEAD_WIDTH, self.hidden_size)
        return next(w for w in range(widest, 1, -1) if self.hidden_size % w == w % 2 == 0)

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_width

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """No layers: it reads the model's last hidden states."""
        return ()

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return ((self.num_heads, self.head_width),) * 2

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.hidden_size

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all weights, in the order in which a file has them."""
        d, w, j = self.hidden_size, self.width, self.branches
        yield "embedding_norm", (d,)
        yield "feature_norm", (d,)
        yield "enter", (d, 2 * d)
        yield "attention_norm", (d,)
        yield "qkv", (3 * d, d)
        yield "output", (d, d)
        yield "branch_norm", (d,)
        for branch in range(j):
            yield f"gate_up.{branch}", (2 * w, d)
            yield f"down.{branch}", (d, w)
        yield "gate", (j, d)
        if self.contrast:
            yield "contrast", (2, d)
            yield "contrast_bias", (2,)
        if self.named is not None:
            yield "routes", (len(self.named.layers), self.named.num_experts, 2 * d)

    def sizes(self, dtype: torch.dtype) -> list[int]:
        return [size for _, shape in self.tensors() for size in held_sizes(shape, dtype)]

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        """Upper estimate of a pass's memory: activations of its rows, and the logits of one row's
        branches.

        rows  rows of the widest pass
        """
        d, j = self.hidden_size, self.branches
        seen = min(context, self.window + rows)
        products = rows * (10 * d + 3 * self.width * j)
        if dtype.itemsize == 2:  # matrices in eight bits make two, and add them
            products += rows * (4 * d + 4 * self.width * j)
        activations = products + 4 * seen * d
        scores = 2 * rows * seen * self.num_heads
        return (activations + scores) * max(dtype.itemsize, 4) + 16 * (j + 2) * vocab_size

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """No bytes: a pass has its last hidden states anyway."""
        return 0
