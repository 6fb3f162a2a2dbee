"""Models quantised by tests."""

from pathlib import Path

import torch
from torch import Tensor

from speq.models.opened import open_model
from speq.quantizing.calibration import calibration_of
from speq.quantizing.quantizer import quantize
from speq.quantizing.report import QuantizeReport
from speq.quantizing.settings import QuantizeSettings
from speq.units import Progress

LENGTH = 48  # longer than the smallest sliding window
# One group for all columns: it fits every family's odd widths.
SETTINGS = QuantizeSettings(codes="free", group_size=-1, samples=8, sequence_length=LENGTH)
AMPLE = 1 << 30


def text(windows: int = 11, seed: int = 0) -> Tensor:
    """Tokens that every small model knows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (windows * LENGTH,), generator=generator)


def quantise_to(
    out: Path,
    model: Path,
    settings: QuantizeSettings = SETTINGS,
    budget: int = AMPLE,
    tokens: Tensor | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    opened = open_model(model)
    try:
        calibration = calibration_of(text() if tokens is None else tokens, settings)
        return quantize(opened, calibration, settings, out, budget, "0", progress)
    finally:
        opened.close()
