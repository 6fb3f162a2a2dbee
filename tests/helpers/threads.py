"""Numbers of threads that torch and our kernels use."""

from collections.abc import Callable

import torch
from torch import Tensor


def by_threads(run: Callable[[], Tensor]) -> list[Tensor]:
    """What a computation gives with one, two and five threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    return results
