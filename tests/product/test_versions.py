"""Files of another version of speq: they are refused in a sentence, or made anew, never misread."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from speq import SpeqError
from speq.dashboard.run_record import read_run
from speq.experts.packed_store import Manifest
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint
from speq.files.checksums import seal
from speq.files.contents import content_digest
from speq.layers.expert_counts import ExpertCounts
from speq.measure.route_trace import RouteTrace
from speq.measure.this_machine import MachineRates, machine_rates
from speq.planning import forecasts, kept_file
from speq.quantizing.models import pack
from tests.helpers.run_records import changed
from tests.helpers.traces import DRAFTED

Folder = Callable[[str], Path]


def make_newer(path: Path) -> None:
    """Give a file the format that would follow."""
    content = json.loads(path.read_text())
    if isinstance(content["format"], int):
        content["format"] += 100
    else:
        content["format"] = re.sub(
            r"\d+$", lambda found: f"{int(found[0]) + 100}", content["format"]
        )
    if content.pop("crc32", None) is not None:
        content = seal(content)
    path.write_text(json.dumps(content))


@dataclass(frozen=True)
class Kind:
    """A file that users give. write: to a path; read: raises for another format"""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]


def write_counts(path: Path) -> None:
    ExpertCounts("a model", 4, 1, [[1, 3]]).write(path)


KINDS = {
    "run": Kind(lambda path: changed().write(path), read_run),
    "routes": Kind(lambda path: DRAFTED.write(path), RouteTrace.read),
    "expert counts": Kind(write_counts, ExpertCounts.read),
}


@pytest.mark.parametrize("name", KINDS)
def test_newer_files_are_refused(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / "file.json"
    kind.write(path)
    kind.read(path)
    make_newer(path)
    with pytest.raises(SpeqError, match=rf"{re.escape(str(path))} .*format"):
        kind.read(path)


def test_a_newer_pack_is_refused(tiny: Folder, tmp_path: Path) -> None:
    pack(tiny("olmoe"), tmp_path / "packed")
    path = tmp_path / "packed" / EXPERTS_MANIFEST
    Manifest.of(path)
    make_newer(path)
    with pytest.raises(
        SpeqError, match=r"has format 'speq-experts-102'; this version reads .*pack"
    ):
        Manifest.of(path)


def test_a_newer_digest_is_made_anew(
    tiny: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = Checkpoint(tiny("olmoe"))
    wanted = content_digest(checkpoint)
    (path,) = tmp_path.rglob("*.json")
    content = json.loads(path.read_text())
    for shard in content["shards"].values():
        shard["sha256"] = "0" * 64  # which means something else there
    path.write_text(json.dumps(content))
    assert content_digest(checkpoint) != wanted  # it is read
    make_newer(path)
    assert content_digest(checkpoint) == wanted
    checkpoint.close()


def test_newer_rates_of_this_machine_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found, measured = MachineRates(1e9, 1e9, 1e9, time.time()), []
    monkeypatch.setattr("speq.measure.this_machine.measure", lambda *_: measured.append(1) or found)
    assert machine_rates() == machine_rates() == found and len(measured) == 1
    (path,) = tmp_path.rglob(kept_file.NAME)
    make_newer(path)
    assert machine_rates() == machine_rates() == found and len(measured) == 2


def test_newer_forecasts_are_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = forecasts.ForecastRun("a model", "raw", 1 << 20, 0.1, 0.1, 0.1, 0.1, 0.2, 40, 0)
    path = present_path()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": forecasts.FORMAT, "runs": [asdict(run)]}))
    assert forecasts.kept() == [run]
    make_newer(path)
    assert forecasts.kept() == []


def present_path() -> Path:
    path = forecasts._path()
    assert path is not None
    return path
