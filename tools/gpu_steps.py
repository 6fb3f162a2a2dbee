"""The steps of a run on a GPU: commands, time limits and results.

Short steps come first, so that a long one takes no time from them. The list is made during the run:
budgets are shares of a model that a step writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Test files with tests for a GPU; a test looks that none is missing.
GPU_TESTS = (
    *("tests/product/test_gpu.py", "tests/product/test_gpu_transfer.py"),
    *("tests/kernels/test_kernels.py", "tests/kernels/test_compact_cuda.py"),
    *("tests/kernels/test_dense_cuda.py", "tests/kernels/test_scaled.py"),
    *("tests/kernels/test_grouped_int4.py", "tests/kernels/test_many_rows.py"),
    *("tests/kernels/test_nvfp4.py", "tests/kernels/test_sum_order.py"),
    *("tests/kernels/test_ungated.py", "tests/bench/test_bench_kernels.py"),
    "tests/bench/test_lab.py",
)
KERNEL_TESTS = ("tests/kernels/test_kernels.py", "tests/kernels/test_compact_cuda.py")
# A call of each op.
EACH_OP = (
    "every_scale or int4_dtypes or leaves_absent or absent_experts or read_sum or decoded_lossless "
    "or decoded_words"
)
# Small shapes: the sanitizer makes kernels some hundred times slower.
SMALL = "all_rows_on_one_expert or permuted or absent or read_sum or damaged"
SANITIZER = "compute-sanitizer"
SANITIZER_S = 60
TINY = "models/tiny-moe"
SHARES = (0.5, 0.35, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class GpuStep:
    """command: arguments of the interpreter. reports: whether `--json FILE` is to be added.

    under        arguments of a program that the interpreter runs under
    skipped      reason that the step cannot run yet
    host_only    True if it computes nothing on the GPU
    rehearsed_by arguments that are added to the command without a GPU
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    reports: bool = False
    under: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    skipped: str | None = None
    host_only: bool = False
    rehearsed_by: tuple[str, ...] = ()


def tests(name: str, limit_s: int, *arguments: str) -> GpuStep:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments)
    return GpuStep(name, command, limit_s, rehearsed_by=("--maxfail", "2"))


def speq(name: str, limit_s: int, *arguments: str) -> GpuStep:
    return GpuStep(name, ("-m", "speq", *arguments), limit_s, reports=True)


def lab(name: str, limit_s: int, bench: str, *arguments: str) -> GpuStep:
    return GpuStep(name, ("-m", f"bench.lab.{bench}", *arguments), limit_s, reports=True)


def steps(work: Path, shares: tuple[float, ...] = SHARES) -> Iterator[GpuStep]:
    """All steps, in order; `work` takes what they write for each other."""
    yield tests("each op", 60, *KERNEL_TESTS, "-k", EACH_OP)
    yield tests("tests", 90, *GPU_TESTS)
    yield speq("doctor", 30, "doctor", "--device", "cuda")
    yield lab("link", 40, "gpu_link")
    yield speq(
        *("kernels", 75, "bench", "kernels", "--device", "cuda", "--rows", "1,4,16"),
        *("--shapes", "qwen1.5-moe,qwen3-30b-a3b,mixtral-8x7b", "--rounds", "9"),
    )
    tiny = ("--device", "cuda", "--memory-budget", "96MiB")
    yield speq("agreement in float32", 40, "prove", TINY, *tiny, "--minutes", "0")
    yield speq(
        *("agreement in bfloat16", 40, "prove", TINY, *tiny),
        *("--minutes", "0", "--dtype", "bfloat16"),
    )
    # A draft token and a verification, each launched and recorded, are among its rows.
    yield lab("parts of a token", 60, "step", TINY, *tiny)
    # Qwen3-30B-A3B's shapes, 12 of 48 layers: written, with the host's share and without.
    yield lab("split", 200, "split", "--folder", str(work / "shapes"))
    yield from whole_model(work, shares)
    yield from sanitizer_steps()


def whole_model(work: Path, shares: tuple[float, ...]) -> Iterator[GpuStep]:
    """A model with layers of real shape, made here, at shares of its bytes."""
    wide = work / "wide"
    made = ("-m", "speq", "bench", "widen", TINY, str(wide))
    small = ("--hidden-size", "512", "--expert-width", "64")
    there = "an earlier run made it" if (wide / "widened.json").exists() else None
    yield GpuStep("widen", made, 150, skipped=there, host_only=True, rehearsed_by=small)
    total = sum(path.stat().st_size for path in wide.glob("*.safetensors")) or 1 << 30
    for share in shares:
        for codec, prefetch, host in (
            *(("raw", "none", "none"), ("lossless", "three-phase", "auto")),
            *(("raw", "three-phase", "none"), ("lossless", "none", "none")),
        ):
            name = f"tpot at {share}, {codec}, prefetch {prefetch}, host {host}"
            yield speq(
                *(name, 90, "bench", "tpot", str(wide)),
                *("--device", "cuda", "--budgets", str(int(share * total))),
                *("--draft-lengths", "0,2,4,8", "--codec", codec, "--prefetch", prefetch),
                *("--rounds", "1", "--num-prompts", "2", "--max-new-tokens", "48"),
                *("--set", f"host_compute={host}"),
            )


def sanitizer_steps() -> Iterator[GpuStep]:
    """Last: what they find is worth more than their time, and their time is long."""
    for tool in ("memcheck", "racecheck"):
        tested = tests(tool, SANITIZER_S, *KERNEL_TESTS, "-k", SMALL)
        yield GpuStep(
            tool,
            tested.command,
            SANITIZER_S,
            under=(SANITIZER, "--tool", tool, "--error-exitcode", "3"),
            # Otherwise torch's allocator hides strays: its blocks are larger than tensors.
            environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
            rehearsed_by=tested.rehearsed_by,
        )
