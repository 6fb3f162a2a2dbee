"""Compares results of exact experts bit for bit, between instruction sets and the CUDA kernels
built for the processor: `python -m tests.kernels.sum_order --problems 100 --seed 0`.

A comparison is a pair of results of one op on one problem, [T, K, H]: that of the CUDA kernels, and
that of one instruction set.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from speq.kernels import library
from speq.kernels.checks import activation_numbers
from tests.helpers.backends import HOST_NAMESPACE, ISAS, load_host_ops
from tests.helpers.expert_problems import SIZES, SIZES_OF_CODES, Problem


@contextmanager
def limited_to(isa: str) -> Iterator[None]:
    """Inside, kernels of that instruction set run, in the order of csrc/sum_order.h."""
    before = library.isa()
    library.limit_isa(isa)
    try:
        with library.ordered_sums():  # AVX-512 BF16 has another order else
            yield
    finally:
        library.limit_isa(before)


@dataclass
class Comparisons:
    """of  by op and instruction set; differing: those of them that differ in a bit"""

    of: Counter[tuple[str, str]] = field(default_factory=Counter)
    differing: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, given: Problem) -> None:
        """Compare the results of a problem, in all forms that its sizes allow."""
        numbers, every = activation_numbers(given.activation), slice(None)
        on_host = getattr(torch.ops, HOST_NAMESPACE)
        for op, weights in given.forms():
            wanted = given.run(getattr(on_host, op), weights, numbers, every)
            for isa in (each for each in ISAS if each in library.supported_isas()):
                with limited_to(isa):
                    found = given.run(getattr(torch.ops.speq, op), weights, numbers, every)
                self.of[op, isa] += 1
                if not torch.equal(found, wanted):  # so does what is NaN: no result may be
                    self.differing[op, isa] += 1


def problem_of(seed: int) -> Problem:
    """Every third one has sizes of its own, odd ones among them."""
    rng = random.Random(seed)
    drawn = [(rng.randint(2, 300), rng.randint(1, 120))]
    return Problem.of(rng, (SIZES_OF_CODES, SIZES, drawn)[seed % 3])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sum_order", description=__doc__)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    given = parser.parse_args()
    load_host_ops()
    found, start_s = Comparisons(), time.monotonic()
    for seed in range(given.seed, given.seed + given.problems):
        before = found.differing.total()
        found.add(problem_of(seed))
        if found.differing.total() > before:
            print(f"problem {seed} differs", flush=True)
    for (op, isa), count in sorted(found.of.items()):
        print(f"{op:26} {isa:14} {count:6} comparisons, {found.differing[op, isa]} differ")
    print(
        f"{given.problems} problems, {found.of.total()} comparisons, "
        f"{found.differing.total()} differ; {time.monotonic() - start_s:.0f} s"
    )
    return min(found.differing.total(), 1)


if __name__ == "__main__":
    sys.exit(main())
