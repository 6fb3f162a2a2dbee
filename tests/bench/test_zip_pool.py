"""The pool of compressed experts: what it keeps, and that it keeps no more than its cells."""

import random
import threading
from collections import Counter

import torch
from torch import Tensor

from speq.bench.rivals.zip_pool import Key, RecordPool


def cells(count: int) -> list[Tensor]:
    return list(torch.zeros(count, 8, dtype=torch.uint8))


def asked(pool: RecordPool, key: Key, own: Tensor) -> tuple[bool, Tensor]:
    """Ask for a record as a reader does that marks its cells; (found, the reader's cell now)."""
    mark = 1 + key[0] * 16 + key[1]
    cell = pool.take(key)
    if cell is not None:
        assert bool((cell == mark).all())
        pool.give_back(key, cell)
        return True, own
    own.fill_(mark)
    return False, pool.offer(key, own)


def test_the_one_asked_for_least_leaves_and_the_least_recent_of_those() -> None:
    pool, own = RecordPool(cells(2)), cells(1)[0]
    a, b, c, d = ((0, each) for each in range(4))
    for key, wanted in [(a, False), (b, False), (b, True), (a, True), (c, False)]:
        found, own = asked(pool, key, own)
        assert (found, key) == (wanted, key)
    assert pool.keys == [b, a]  # c was asked for once, they twice
    found, own = asked(pool, c, own)
    assert not found and pool.keys == [a, c]
    for _ in range(3):
        _, own = asked(pool, d, own)
    assert set(pool.keys) == {c, d}


def test_a_pool_without_cells_keeps_nothing() -> None:
    pool, own = RecordPool([]), cells(1)[0]
    for _ in range(3):
        found, now = asked(pool, (0, 0), own)
        assert not found and now is own
    assert pool.keys == []


def test_no_more_than_its_cells_whatever_is_asked() -> None:
    """Against a pool written as its docstring says, with cells told apart by their memory."""
    for seed in range(20):
        choose = random.Random(seed)
        size = choose.randrange(0, 6)
        given, own = cells(size), cells(1)[0]
        pool = RecordPool(list(given))
        every = {each.data_ptr() for each in [*given, own]}
        held: list[Key] = []  # the least recent first
        counts: Counter[Key] = Counter()
        for _ in range(300):
            key = (choose.randrange(3), min(choose.randrange(5), choose.randrange(5)))
            counts[key] += 1
            wanted = key in held
            found, own = asked(pool, key, own)
            assert found == wanted
            if wanted:
                held.remove(key)
                held.append(key)
            elif len(held) < size:
                held.append(key)
            elif held:
                leaving = min(held, key=lambda each: counts[each])
                if counts[leaving] <= counts[key]:
                    held.remove(leaving)
                    held.append(key)
            assert pool.keys == held
            assert len(pool.free) + len(held) == size
            found_cells = {each.data_ptr() for each in [*pool.free, own]}
            taken = [pool.take(each) for each in held]
            found_cells |= {each.data_ptr() for each in taken if each is not None}
            assert found_cells == every
            for each, cell in zip(held, taken, strict=True):
                assert cell is not None
                pool.give_back(each, cell)
            for each in held:  # asking after them does not count
                pool.asked[each] -= 1


def test_readers_at_the_same_time_never_share_a_cell() -> None:
    pool, errors = RecordPool(cells(3)), []
    start = threading.Barrier(4)

    def reader(seed: int) -> None:
        choose, own = random.Random(seed), cells(1)[0]
        start.wait()
        try:
            for _ in range(2000):
                _, own = asked(pool, (choose.randrange(2), choose.randrange(4)), own)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and not any(thread.is_alive() for thread in threads)
    assert len(pool.free) + len(pool.keys) == 3
