"""Comparison of bfloat16 words with those of a reference."""

import numpy as np
import torch
from torch import Tensor


def same_words(found: Tensor, wanted: np.ndarray | Tensor) -> bool:
    """Equal with signs of zeros; NaNs, whose bits processors choose, where there are NaNs."""
    bits = torch.as_tensor(wanted).view(torch.int16)
    nan = bits.view(torch.bfloat16).isnan()
    same = (found.view(torch.int16) == bits) | nan
    return bool((same & (found.isnan() == nan)).all())
