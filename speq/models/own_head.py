"""A head that a checkpoint has of its own, beside its embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from speq.files.checkpoint import Checkpoint

# Names of a model's head and, in different families, of its embedding.
HEAD = "lm_head.weight"
EMBEDDINGS = tuple(
    f"model.{each}.weight" for each in ("embed_tokens", "embeddings", "word_embeddings")
)
# Tensors are compared by samples: number of blocks, and bytes of each.
BLOCKS, BLOCK_BYTES = 64, 4096


def has_own_head(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint has a head that differs from its embedding. transformers then leaves
    them apart, whatever config.json says.
    """
    embedding = next((each for each in EMBEDDINGS if each in checkpoint.tensors), None)
    if embedding is None or HEAD not in checkpoint.tensors:
        return False
    return differ(checkpoint, HEAD, embedding)


def differ(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """True if samples of two tensors differ, or their dtypes or shapes."""
    (_, info), (_, beside) = (checkpoint.tensors[each] for each in (name, other))
    if (info.dtype, info.shape) != (beside.dtype, beside.shape):
        return True
    pairs = zip(*(samples(checkpoint, each) for each in (name, other)), strict=True)
    return any(not torch.equal(*pair) for pair in pairs)


def samples(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Read blocks spread over a tensor, as bytes."""
    file, info = checkpoint.tensors[name]
    block_bytes = min(BLOCK_BYTES, info.nbytes)
    for at in range(BLOCKS):
        block = torch.empty(block_bytes, dtype=torch.uint8)
        file.read_into(info.offset + at * (info.nbytes - block_bytes) // (BLOCKS - 1), block)
        yield block
