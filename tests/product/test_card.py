"""What the driver says of a card, and what it costs where it says nothing: one line."""

import importlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speq import Generator
from speq.devices import card
from speq.devices.card import CardReading, NvmlCard, card_of, summary, watch_card
from tests.helpers.host_device import HostDevice, host_device

# `speq.cli` names the command so.
doctor = importlib.import_module("speq.cli.doctor")

READING = CardReading(2 << 30, 8 << 30, 1800, 9000, 12_000_000_000, 3_000_000, 4, 16, 7.5)


def nvml(**changed: Any) -> SimpleNamespace:
    """pynvml of a machine with one card, whose answers are those of READING."""
    answers: dict[str, Any] = {
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_PCIE_UTIL_TX_BYTES": 0,
        "NVML_PCIE_UTIL_RX_BYTES": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": {"GPU-12-34": "handle"}.__getitem__,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2 << 30, total=8 << 30),
        "nvmlDeviceGetClockInfo": lambda handle, of: {1: 1800, 2: 9000}[of],
        "nvmlDeviceGetPcieThroughput": lambda handle, of: {0: 3_000, 1: 12_000_000}[of],
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
    }
    return SimpleNamespace(**(answers | changed))


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    card_of.cache_clear()
    yield
    card_of.cache_clear()


def test_a_card_is_found_by_torchs_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card.importlib, "import_module", {"pynvml": nvml()}.__getitem__)
    monkeypatch.setattr(card.time, "perf_counter", lambda: READING.time_s)
    found = card_of("12-34")
    assert found is not None
    assert found.read() == READING


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_refuses_is_said_once(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(card.importlib, "import_module", lambda name: nvml(**{failing: refuse}))
    with caplog.at_level(logging.INFO, "speq"):
        assert card_of("12-34") is None
        assert card_of("12-34") is None
    assert caplog.messages == ["no figures of PCIe and clocks: NVML reports Driver Not Loaded"]


def test_nvidia_ml_py_need_not_be_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(card.importlib, "import_module", absent)
    with caplog.at_level(logging.INFO, "speq"):
        assert card_of("12-34") is None
        assert card_of("12-34") is None
    assert len(caplog.messages) == 1
    assert "pip install nvidia-ml-py" in caplog.text


class Counted:
    """A card that is read so many times, and then breaks. `read_s` is set at each reading."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.broke = threading.Event()

    def read(self) -> CardReading:
        if not self.left:
            self.broke.set()
            raise RuntimeError("GPU is lost")
        self.left -= 1
        return READING


def test_readings_grow_while_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(card, "PERIOD_S", 0.0)
    told = Counted(3)
    with caplog.at_level(logging.INFO, "speq"), watch_card(told) as readings:
        assert told.broke.wait(60)
    assert readings == [READING] * 3
    assert caplog.messages == ["figures of PCIe and clocks end here: NVML reports GPU is lost"]
    assert not [thread for thread in threading.enumerate() if thread.name == "speq-card"]


def test_the_summary_of_readings() -> None:
    fast = CardReading(3 << 30, 8 << 30, 1500, 9000, 24_000_000_000, 0, 5, 8, 8.0)
    assert summary([]) is None
    assert summary([READING, fast]) == {
        "readings": 2,
        "pcie_received_bytes_per_s": 18e9,
        "pcie_received_bytes_per_s_most": 24_000_000_000,
        "pcie_generation": 5,
        "pcie_width": 16,
        "sm_clock_mhz": 1650,
        "memory_clock_mhz": 9000,
        "used_bytes_most": 3 << 30,
    }


def test_a_run_has_it_among_its_statistics(tiny: Any) -> None:
    model: Path = tiny("qwen3_moe")
    with host_device() as device:
        device.told = NvmlCard(nvml(), "handle")
        generator = Generator.from_pretrained(model, "16MiB", device="cuda", draft_length=0)
        stats = generator.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True).stats
        generator.close()
    assert stats["card"]["pcie_received_bytes_per_s"] == 12e9
    assert stats["card"]["used_bytes_most"] == 2 << 30


def test_doctor_shows_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card.time, "perf_counter", lambda: READING.time_s)
    device = HostDevice()
    device.told = NvmlCard(nvml(), "handle")
    assert doctor.card_reading(device) == READING  # type: ignore[arg-type]
    device.told = Counted(0)
    assert doctor.card_reading(device) is None  # type: ignore[arg-type]
    (line,) = doctor._card(
        {
            "used_bytes": 2 << 30,
            "total_bytes": 8 << 30,
            "link_generation": 4,
            "link_width": 16,
            "sm_clock_mhz": 1800,
            "memory_clock_mhz": 9000,
        }
    )
    assert line == (
        "card:          2 GiB of 8 GiB in use; PCIe 4 x16 now; 1800 MHz, memory 9000 MHz"
    )
