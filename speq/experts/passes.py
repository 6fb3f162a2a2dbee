"""A pass over many experts, or matrices, by several threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

from speq.units import Done

Made = TypeVar("Made")


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


def made_at_once(threads: int) -> int:
    """Results that `in_turn` holds at a time."""
    return 1 if threads == 1 else threads + 1


def in_turn(
    work: Callable[[int], Made], items: Iterable[int], threads: int
) -> Generator[Made, None, None]:
    """What some work makes of each item, in their order, while later items are at work.

    At most `made_at_once(threads)` results exist at a time, the one that was given last among them.
    Raises the first error in that order. No thread is at work when the iterator has ended or was
    closed. One thread is the caller's own.
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
