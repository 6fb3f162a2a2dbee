"""A pass over many experts, or matrices, by several threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from speq.units import Done


def by_layer(num_layers: int, num_experts: int) -> list[tuple[int, int]]:
    """All (layer, expert), as they lie on the disk."""
    return [(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]


def spread(num_layers: int, num_experts: int) -> list[tuple[int, int]]:
    """All (layer, expert), so that the first of them, however many, are of all layers alike."""
    return [(layer, expert) for expert in range(num_experts) for layer in range(num_layers)]


def over_all(
    work: Callable[..., None],
    keys: Sequence[tuple[int, ...]],
    threads: int,
    progress: Done | None = None,
) -> None:
    """Do some work for each (layer, expert), or for other numbers, several at a time. Raises the
    first error.

    After an error or an interrupt no more is begun, and no thread is at work on return.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, *key) for key in keys]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                if progress is not None:
                    progress(done, len(futures))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
