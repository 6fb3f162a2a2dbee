"""Devices that fail, or cannot be used: one sentence each, and nothing of the host stays locked."""

import ctypes
import errno
import logging
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from speq import Generator, SpeqError
from speq.devices import named
from speq.devices.cuda import CudaDevice
from speq.devices.failures import translate_errors
from speq.engine.engine import Engine
from speq.engine_layout import EngineLayout
from speq.models.moe_model import MoEModel
from speq.planning.run_budget import run_budget
from speq.runtime import Runtime
from tests.helpers.command import Command
from tests.helpers.host_device import HostDevice, host_device

OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
)
LOST = torch.AcceleratorError(
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"
)
# As torch says it (c10/cuda/CUDAFunctions.cpp).
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version from the URL"
)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OUT_OF_MEMORY, r"^the GPU has no memory left \(CUDA out of memory\); give a smaller mem"),
        (LOST, r"^the GPU failed \(CUDA error: unspecified launch failure\); its work is lost"),
        (RuntimeError("CUDA error: device lost"), r"^the GPU failed \(CUDA error: device lost\);"),
        (RuntimeError("CUDA driver error: 4"), r"^the GPU failed \(CUDA driver error: 4\);"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            r"^the GPU failed \(CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        ),
        (
            RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory"),
            r"^the host has no memory left \(.*DefaultCPUAllocator.*\); give a smaller memory_b",
        ),
        (
            OSError(errno.EIO, "Input/output error", "model/config.json"),
            r"^input or output failed: .*Input/output error: 'model/config.json'; check the disk",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            r"^the host has no memory left \(\[Errno 12\] Cannot allocate memory\); give a small",
        ),
        (
            MemoryError(),
            r"^the host has no memory left \(MemoryError\); give a smaller memory_b",
        ),
    ],
)
def test_failures_are_sentences(error: Exception, sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence) as caught, translate_errors():
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        ValueError("CUDA"),
        SpeqError("as it is"),
        BrokenPipeError(),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, translate_errors():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LOST])
def test_a_gpu_that_fails_at_loading_leaves_nothing_locked(
    error: Exception, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[dict[int, int]] = []

    def fail(runtime: Runtime) -> None:
        locked.append(dict(device.pinned))
        raise error

    with host_device() as device:
        monkeypatch.setattr(Runtime, "_lay_out", fail)
        with pytest.raises(SpeqError, match=r"^the GPU "):
            Generator.from_pretrained(tiny("olmoe"), "8MiB", device="cuda", host_budget="8MiB")
    assert locked != [{}] and device.pinned == {}


def test_a_gpu_that_fails_in_a_run_leaves_nothing_locked_behind(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named_ones: object) -> None:
        raise LOST

    with host_device() as device:
        generator = Generator.from_pretrained(
            tiny("olmoe"), "8MiB", device="cuda", host_budget="8MiB", draft_length=0
        )
        memory = generator.runtime.begin_stats(0.0).memory
        assert memory["host_records"] == memory["host_pinned"] == sum(device.pinned.values()) > 0
        monkeypatch.setattr(MoEModel, "forward", fail)
        with pytest.raises(SpeqError, match=r"^the GPU failed"):
            list(generator.stream([1, 2, 3], max_new_tokens=2))
        generator.close()
    assert device.pinned == {}


def test_the_command_line_says_it_in_a_line(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def fail(*arguments: object, **named_ones: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr("speq.models.moe_model.load", fail)
    ended = command("generate", tiny("olmoe"), "--memory-budget", "8MiB", "--prompt", "a")
    assert ended.code == 1 and "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("error: the GPU has no memory left (CUDA out of")


# GPUs that torch cannot use.


def torch_that_says(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_an_old_driver_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch_that_says(monkeypatch, RuntimeError(OLD_DRIVER))
    wanted = (
        "torch sees no CUDA device: The NVIDIA driver on your system is too old (found version "
        "12040); use --device cpu, or install a newer driver, or a torch that is built for this one"
    )
    with pytest.raises(SpeqError, match=f"{re.escape(wanted)}$"):
        named.find_device("cuda")
    assert named.find_device("auto").torch.type == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "there is a GPU, and the run is on the cpu: The NVIDIA driver on your" in record.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have one"),
        RuntimeError("No CUDA GPUs are available"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_no_gpu_is_no_news_unless_one_is_asked_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch_that_says(monkeypatch, error)
    assert named.find_device("auto").torch.type == "cpu"
    assert caplog.records == []
    reason = re.escape(str(error).partition(". ")[0])
    with pytest.raises(SpeqError, match=f"no CUDA device: {reason}; use .* a CUDA build of torch$"):
        named.find_device("cuda")


# What is locked by way of CUDA.


class Runtimes:
    """torch's binding of the CUDA runtime: calls return a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", nbytes))
        return self.status

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append(("unregister", 0))
        return self.status


@pytest.mark.parametrize(("status", "forgotten"), [(0, 0), (2, 2)])
def test_a_lock_that_is_refused_is_no_error_of_the_next_kernel(
    status: int, forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    library = type("Library", (), {"cudaGetLastError": lambda self: errors.append("forgotten")})
    runtimes = Runtimes(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtimes)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library())
    device, memory = CudaDevice(0), torch.empty(4096, dtype=torch.uint8)
    assert device.pin(memory) == (status == 0)
    device.unpin(memory)
    assert runtimes.calls == [("register", 4096), ("unregister", 0)]
    assert len(errors) == forgotten


# A budget of the host's memory.


def test_the_cpu_has_no_host_budget(tiny: Callable[[str], Path], command: Command) -> None:
    given = ["--memory-budget", "8MiB", "--host-budget", "1GiB", "--device", "cpu"]
    ended = command("generate", tiny("olmoe"), *given, "--prompt", "a")
    assert ended.code == 1
    assert "host_budget is given and the device is cpu, where experts lie in the" in ended.err
    ended = command("plan", tiny("olmoe"), *given)
    assert ended.code == 1 and "host_budget is given and the device is cpu" in ended.err


def test_the_hosts_budget_is_a_share_of_what_is_free_or_as_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from speq import RunConfig

    monkeypatch.setattr("speq.machine.available_bytes", lambda: 1000)
    device = HostDevice()
    for given, wanted in (({}, 800), ({"host_budget": "1KiB"}, 1024)):
        config = RunConfig.of("1GiB", **given)
        made = run_budget(config, config, device, readers=2, graphs=True)
        assert made.beside is not None and made.beside.host_bytes == wanted
        assert not made.on_cpu


@pytest.mark.parametrize(
    ("free", "budget", "said"),
    [
        (
            1 << 20,
            "2MiB",
            r"the run would take 1\.\d+ MiB of the memory budget and 1 MiB are free here; give a "
            "smaller budget, or the system may end the run",
        ),
        (
            1 << 30,
            "200GiB",
            "the memory budget is 200 GiB and 1 GiB are free here; a longer context may take what "
            "is not there: give a smaller budget, or a context_length",
        ),
        (1 << 30, "1GiB", None),
    ],
)
def test_a_budget_beyond_what_is_free_is_said(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    budget: str,
    said: str | None,
) -> None:
    monkeypatch.setattr("speq.devices.device.available_bytes", lambda: free)
    Generator.from_pretrained(tiny("olmoe"), memory_budget=budget, dtype="float32").close()
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [bool(re.fullmatch(said, each)) for each in warned] == [True] if said else not warned


def test_a_run_without_memory_takes_it_again(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory can be laid out neither anew nor as it was, nothing runs on what is gone."""
    short, long = [5, 17, 40], [5, 17, 40] * 40
    options = {"max_new_tokens": 8, "ignore_eos": True}
    with closing(Generator.from_pretrained(tiny("olmoe"), "8MiB", draft="none")) as generator:
        wanted = generator.generate(short, **options).token_ids
        lay_out, failures = EngineLayout.engine, iter([OUT_OF_MEMORY] * 3)

        def failing(layout: EngineLayout) -> Engine:
            for error in failures:
                raise error
            return lay_out(layout)

        monkeypatch.setattr(EngineLayout, "engine", failing)
        for prompt in (long, short):
            with pytest.raises(SpeqError, match="no memory left"):
                generator.generate(prompt, **options)
        generator.resize("7MiB")
        assert generator.generate(short, **options).token_ids == wanted
        assert generator.runtime.plan.budget == 7 << 20
        assert len(generator.generate(long, **options).token_ids) == 8
