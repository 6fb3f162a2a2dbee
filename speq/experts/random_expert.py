"""Random experts for trying kernels and codecs."""

import torch

from speq.experts.codec import ExpertShape, Matrices
from speq.files.published_format import FP8, INT4, MXFP4, NVFP4
from speq.kernels.ops import matrices_of
from speq.kernels.scaled_words import (
    fp8_codes,
    fp8_words,
    int4_codes,
    int4_words,
    mxfp4_codes,
    mxfp4_words,
    nvfp4_codes,
    nvfp4_words,
)

SPREAD = 0.02


def random_expert(shape: ExpertShape, generator: torch.Generator) -> Matrices:
    """Generate an expert with weights distributed like trained ones, in its published format."""
    gate_up_proj, down_proj = (
        (torch.randn(size, generator=generator) * SPREAD).to(shape.dtype)
        for size in (shape.gate_up_shape, shape.down_shape)
    )
    matrices = matrices_of(gate_up_proj, down_proj)
    if shape.published == FP8:
        *gate_up, down = (fp8_words(*fp8_codes(each)) for each in matrices)
        return torch.cat(gate_up), down
    if shape.published == MXFP4:
        return mxfp4_words(*mxfp4_codes(gate_up_proj)), mxfp4_words(*mxfp4_codes(down_proj))
    if shape.published == NVFP4:
        *gate_up, down = (nvfp4_words(*nvfp4_codes(each), divides=False) for each in matrices)
        return torch.cat(gate_up), down
    if shape.published == INT4:
        size = gate_up_proj.shape[1] if shape.groups is None else shape.groups.size
        return int4_words(*int4_codes(gate_up_proj, size)), int4_words(*int4_codes(down_proj, size))
    return gate_up_proj, down_proj
