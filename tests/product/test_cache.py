"""`speq cache`: what runs keep is listed, removed, and held to a limit."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from speq.cli import app
from speq.errors import SpeqError
from speq.files import kept
from speq.files.alone import lock_folder
from speq.files.checkpoint import Checkpoint
from tests.helpers.damage import flip

Folder = Callable[[str], Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user who has none."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "speq"


def copy(home: Path, name: str, model: Path | str, nbytes: int, read_s: float) -> Path:
    """A copy of a model's experts that was read at a time, as far as it is looked at."""
    folder = home / "experts" / name
    folder.mkdir(parents=True)
    (folder / "experts.bin").write_bytes(bytes(nbytes))
    (folder / "source.json").write_text(json.dumps({"model": str(model), "fingerprint": name}))
    (folder / "experts.json").write_text("{}")
    for file in folder.iterdir():
        os.utime(file, (read_s, read_s))
    return folder


def told(*words: str) -> Any:
    done = CliRunner().invoke(app, ["cache", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def listed(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(told("list", "--json", "-", *words))["kept"]
    return found


def test_what_is_kept_is_listed(home: Path, tmp_path: Path, tiny: Folder) -> None:
    model = tmp_path / "model"
    (model / ".speq").mkdir(parents=True)
    (model / ".speq" / "draft-int4-rtn-0.safetensors").write_bytes(bytes(500))
    (model / ".speq" / "head.safetensors").write_bytes(bytes(500))  # was asked for
    folder = copy(home, "one", model, 4096, 86400)
    with closing(Checkpoint(tiny("olmoe"))) as checkpoint:
        key = {"model": checkpoint.fingerprint()}
    (home / "profiles").mkdir()
    (home / "profiles" / "some.json").write_text(json.dumps({"key": key}))
    copied, profile, draft = listed()
    assert copied == {
        "kind": "packed copy",
        "path": str(folder),
        "model": str(model),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "last_read": "1970-01-02T00:00:00+00:00",
        "beside_model": False,
    }
    assert (profile["kind"], profile["model"]) == ("profile", None)
    assert (draft["kind"], draft["model"], draft["bytes"]) == ("draft", str(model), 500)
    assert draft["beside_model"]
    (profile,) = (each for each in listed("--of", str(tiny("olmoe"))) if not each["beside_model"])
    assert (profile["kind"], profile["model"]) == ("profile", str(tiny("olmoe")))
    assert [each["kind"] for each in listed("--of", str(model))] == ["packed copy", "draft"]
    whole = json.loads(told("list", "--json", "-"))
    assert whole["limit_bytes"] is None
    assert whole["bytes"] == copied["bytes"] + (home / "profiles" / "some.json").stat().st_size
    assert "1970-01-0" in told("list")
    (home / "profiles" / "some.json").write_text('{"key": "damaged"}')
    assert [(each["kind"], each["model"]) for each in listed()][1] == ("profile", None)


def test_what_is_kept_is_removed_by_model_or_all(home: Path, tmp_path: Path) -> None:
    gone = copy(home, "one", tmp_path / "gone", 10, 1)
    hub = copy(home, "two", "/hub/models--some--model/snapshots/0", 10, 1)
    other = copy(home, "three", tmp_path / "other", 10, 1)
    with pytest.raises(SpeqError, match="give one of --of MODEL and --all; neither was given"):
        told("clear")
    assert "1 removed" in told("clear", "--of", str(tmp_path / "gone"))
    assert not gone.exists()
    assert "1 removed" in told("clear", "--of", "some/model")
    assert not hub.exists() and other.exists()
    with (
        lock_folder(other, "a run writes it"),
        pytest.raises(SpeqError, match=r"a run writes to .*three; end it"),
    ):
        told("clear", "--all")
    assert len(list(other.iterdir())) == 3
    told("clear", "--all")
    assert listed() == []


def test_a_limit_removes_what_was_read_least_recently(home: Path) -> None:
    old = copy(home, "a", "/a", 6000, 100)
    new = copy(home, "b", "/b", 6000, 300)
    middle = copy(home, "c", "/c", 6000, 200)
    assert "holds 14 KiB at most" in told("limit", "14KiB")
    assert not old.exists() and new.exists() and middle.exists()
    assert json.loads((home / "limit.json").read_text())["limit_bytes"] == 14 << 10
    assert kept.limit_bytes() == 14 << 10
    # More than can be had: nothing goes for it.
    assert not kept.keep_within(14 << 10, 15 << 10)
    assert new.exists() and middle.exists()
    assert kept.keep_within(14 << 10, 6000, middle)
    assert middle.exists() and not new.exists()
    told("limit", "none")
    assert kept.limit_bytes() is None
    for damaged in ("much", 10**400):
        (home / "limit.json").write_text(json.dumps({"limit_bytes": damaged}))
        with pytest.raises(SpeqError, match="has no number of bytes; set it again with `speq cac"):
            told("list")


def test_copies_are_compared(home: Path, tmp_path: Path, bundled: Path) -> None:
    folder = home / "experts" / "copy"
    done = CliRunner().invoke(app, ["pack", str(bundled), "--out", str(folder)])
    assert done.exit_code == 0
    assert "all records are what was written" in told("verify")
    flip("experts.bin", 0.5)(folder)
    with pytest.raises(SpeqError, match="1 records are not what was written"):
        told("verify")
    (folder / "experts.json").unlink()
    assert "not whole" in told("verify")
