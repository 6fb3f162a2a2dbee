"""Run damaged inputs: `python -m tests.fuzz --inputs 3000 --seed 7`."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.campaign import opened, repeated
from tests.fuzz.case import shown
from tests.fuzz.table import CLASSES, shares
from tests.fuzz.target import Limits


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=400, help="of all classes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--class", dest="name", choices=CLASSES, help="of this class alone")
    parser.add_argument("--case", type=int, help="this number alone; needs --class")
    parser.add_argument(
        "--speq",
        type=Path,
        default=Path(sys.executable),
        help="another speq: its interpreter, or a folder with .venv/bin/python",
    )
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds; a hang after that")
    given = parser.parse_args()
    if given.case is not None and given.name is None:
        parser.error("--case needs --class")
    python = given.speq / ".venv" / "bin" / "python" if given.speq.is_dir() else given.speq
    counts = shares(given.inputs) if given.name is None else {given.name: given.inputs}
    numbers = {
        name: range(count) if given.case is None else [given.case] for name, count in counts.items()
    }
    # The path is not resolved: an interpreter of a venv is a link.
    limits = Limits(deadline_s=given.deadline)
    failed: Counter[str] = Counter()
    start_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="speq-fuzz-") as root,
        opened(python.absolute(), Path(root), limits) as campaign,
    ):
        for name, wanted in numbers.items():
            begun_s = time.monotonic()
            for number in wanted:
                outcome = campaign.outcome(name, given.seed, number)
                if outcome.faults or given.case is not None:
                    print(f"{name} {number}: {repeated(name, given.seed, number)}")
                    print(shown(outcome), flush=True)
                failed[name] += bool(outcome.faults)
            print(
                f"{name}: {failed[name]} of {len(wanted)} inputs failed, "
                f"{time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
    total = sum(map(len, numbers.values()))
    print(f"{failed.total()} of {total} failed, {time.monotonic() - start_s:.0f} s")
    return 1 if failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
