"""The tool that runs the keystone on other releases of transformers."""

from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tools import releases


def test_what_it_runs_is_there() -> None:
    for each in (*releases.LAYERS, *releases.SHORT):
        file, _, test = each.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test.partition('[')[0]}(" in source


def test_a_release_that_is_not_to_be_had_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setitem(releases.RELEASES, "oldest", f"{tmp_path}/none-1.0-py3-none-any.whl")
    said = r"releases: .*none-1.0-py3-none-any.whl \(oldest\) cannot be fetched: "
    with pytest.raises(SystemExit, match=said):
        releases.environment("oldest")
    assert (tmp_path / "venv-oldest" / "bin" / "python").exists()
