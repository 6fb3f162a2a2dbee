"""The commands of `speq bench`."""

from speq.cli.bench import experts, machine, runs
from speq.cli.bench.app import bench_app

__all__ = ["bench_app", "experts", "machine", "runs"]
