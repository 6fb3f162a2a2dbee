"""Passes over many experts or matrices with several threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

from speq.units import Done

Made = TypeVar("Made")


def spread_by_layer(num_layers: int, num_experts: int) -> list[tuple[int, int]]:
    """All (layer, expert), ordered so that any number of the first ones covers all layers
    evenly.
    """
    return [(layer, expert) for expert in range(num_experts) for layer in range(num_layers)]


def for_each_key(
    work: Callable[..., None],
    keys: Sequence[tuple[int, ...]],
    threads: int,
    progress: Done | None = None,
) -> None:
    """Call `work` for each (layer, expert), or other key, in several threads. Raises the first
    error.

    After an error or an interrupt no more calls begin, and all threads have ended on return.
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


def results_in_flight(threads: int) -> int:
    """Most results that `map_in_order` holds at a time."""
    return 1 if threads == 1 else threads + 1


def map_in_order(
    work: Callable[[int], Made], items: Iterable[int], threads: int
) -> Generator[Made, None, None]:
    """Yield the results of `work` for each item, in order, while later items are computed.

    At most `results_in_flight(threads)` results exist at a time, including the last one yielded.
    Raises the first error in that order. All threads have ended when the iterator ends or is
    closed. One of the threads is the caller's.
    """
    if threads == 1:
        yield from map(work, items)
        return
    ahead: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
