"""Windows of INT4 codes: a code and its scale determine most exact BF16 words up to the low byte.

A code selects a window of 256 consecutive words, and the low byte selects one word in it. So the
exact weight is the code, which the draft has anyway, and a byte. A word outside its code's window
has an escape: its high byte is stored too. csrc/compact.h has the same in C++.

Words are the bits of BF16, 0 to 65,535, in int32; codes are whole numbers from -8 to 7 of any
integer dtype; scales are float16. Arguments broadcast.
"""

import torch
from torch import Tensor

# The first word of a code's window, in scales, by the code's magnitude. Words that round to a code
# span less than the two octaves of a window. So windows begin low enough to include most words that
# GPTQ moves to the code. For code 0 it is the word from which classes count down.
WINDOW_STARTS = (1 / 2, 7 / 16, 3 / 4, 5 / 4, 2.0, 5 / 2, 3.0, 7 / 2, 4.0)
WINDOW = 256
SIGN = 0x8000
# Three bits, the class, determine the high byte of a word with code 0. It is this many steps below
# the start's high byte, or 0, or the same three steps with a negative sign, or none of these.
ZERO_CLASS_STEPS = 3
TINY_CLASS = 3
ESCAPE_CLASS = 7


def words_of(weights: Tensor) -> Tensor:
    """Words of weights in bfloat16, or in float32 that bfloat16 holds exactly."""
    if weights.dtype == torch.bfloat16:
        return weights.view(torch.int16).to(torch.int32) & 0xFFFF
    return weights.view(torch.int32) >> 16 & 0xFFFF


def codes_and_scales(qweight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack an INT4 matrix into codes, int32, and the scale of each, [N, K]."""
    codes = torch.stack([qweight & 0xF, qweight >> 4], dim=2).flatten(1).to(torch.int32) - 8
    return codes, scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def window_starts(codes: Tensor, scales: Tensor) -> Tensor:
    """First word of each code's window. A scale that is not finite counts as 0."""
    starts = torch.tensor(WINDOW_STARTS, device=codes.device)[codes.abs().long()]
    starts = starts.where(codes >= 0, -starts)
    steps = scales.where(scales.isfinite(), 0).float()
    # A product of a float16 and a start has few bits: it is exact.
    return words_of(starts * steps)


def high_bytes(low_bytes: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """High bytes, int32, of words in the windows of codes other than 0."""
    starts = window_starts(codes, scales)
    return (starts >> 8) + (low_bytes < (starts & 0xFF)).to(torch.int32)


def zero_classes(words: Tensor, scales: Tensor) -> Tensor:
    """Classes, int32, of words with code 0; ESCAPE_CLASS for words without another."""
    steps = _zero_start(scales) - (words >> 8 & 0x7F)
    classes = torch.where(words < SIGN, steps, steps + TINY_CLASS + 1)
    classes = classes.where((steps >= 0) & (steps < ZERO_CLASS_STEPS), ESCAPE_CLASS)
    return classes.where(words >= WINDOW, TINY_CLASS)


def zero_high_bytes(classes: Tensor, scales: Tensor) -> Tensor:
    """High bytes, int32, of words with code 0, from their classes; no escapes."""
    negative = classes > TINY_CLASS
    steps = classes.where(~negative, classes - TINY_CLASS - 1)
    found = (_zero_start(scales) - steps & 0x7F) + negative.to(torch.int32) * (SIGN >> 8)
    return found.where(classes != TINY_CLASS, 0)


def _zero_start(scales: Tensor) -> Tensor:
    """High byte of half a scale, without the sign."""
    return window_starts(torch.zeros((), dtype=torch.int32), scales) >> 8 & 0x7F


def escapes(words: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Bool mask of words that need their high byte besides code and low byte, or class."""
    offsets = words - window_starts(codes, scales)
    inside = (offsets >= 0) & (offsets < WINDOW)
    decodable = torch.where(codes == 0, zero_classes(words, scales) != ESCAPE_CLASS, inside)
    return ~decodable
