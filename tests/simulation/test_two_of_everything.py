"""Several processes at once on one model, one home folder, one pack and one folder of prompts: each
ends as it does alone, or with one sentence.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.command import arguments_of
from tests.helpers.paths import BUNDLED

PATIENCE_S = 300.0
# Of which a chunk is kept in a folder.
PROMPT = "The sea was calm, and the old man sat in his boat. " * 24
SCRIPT = """
import sys
from speq import Generator, SpeqError
try:
    generator = Generator.from_pretrained(sys.argv[1], "26MiB", prefix_cache=sys.argv[2])
    print(generator.generate(sys.argv[3], max_new_tokens=48, ignore_eos=True).token_ids)
    generator.close()
except SpeqError as error:
    sys.exit(str(error))
"""


def generate(model: Path, prefixes: Path) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(model), str(prefixes), PROMPT]


def together(commands: Sequence[list[str]], home: Path) -> list[tuple[int, str, str]]:
    """Run commands at the same time; how each ended."""
    environment = os.environ | {"HOME": str(home)}
    running = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    ended = []
    for process in running:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in err, err
        ended.append((process.returncode, out, err))
    return ended


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.mark.full
def test_runs_share_what_they_keep(model: Path, tmp_path: Path) -> None:
    """Drafts, profiles, what governors learned, forecasts, and prompts in a folder."""
    alone = tmp_path / "alone"
    [(code, wanted, err)] = together([generate(model, alone / "prefixes")], alone)
    assert code == 0, err
    home, prefixes = tmp_path / "home", tmp_path / "prefixes"
    tune = arguments_of("tune", model, "--memory-budget", "26MiB")
    for _ in range(2):
        ended = together(
            [
                generate(model, prefixes),
                generate(model, prefixes),
                [*tune, "--num-prompts", "1", "--quiet"],
                generate(model, prefixes),
            ],
            home,
        )
        for at, (code, out, err) in enumerate(ended):
            assert code == 0, err
            assert at == 2 or out == wanted
    kept = json.loads((home / ".cache/speq/forecasts.json").read_text())
    assert kept["runs"]


@pytest.mark.wide
def test_one_pack_is_written_by_one(model: Path, tmp_path: Path) -> None:
    """The other says so, and a third that comes later has nothing to do."""
    home, packed = tmp_path / "home", tmp_path / "packed"
    command = arguments_of("pack", model, "--out", packed, "--codec", "lossless", "--quiet")
    ended = together([command, command], home)
    assert sorted(code for code, _, _ in ended) in ([0, 1], [0, 0]), ended
    for code, _, err in ended:
        told = "another process packs to" in err or "is a model already" in err
        assert code == 0 or (told and err.count("\n") <= 2), err
    [(code, _, err)] = together([command], home)
    assert code == 1 and "is a model already" in err
    prefixes = tmp_path / "prefixes"
    ended = together([generate(packed, prefixes)] * 2 + [generate(model, prefixes)], home)
    assert [code for code, _, _ in ended] == [0, 0, 0]
    assert len({out for _, out, _ in ended}) == 1


@pytest.mark.wide
def test_a_model_is_replaced_while_it_is_read(model: Path, tmp_path: Path) -> None:
    """A run keeps the files it has opened, or says that they changed; it never mixes them."""
    home, prefixes = tmp_path / "home", tmp_path / "prefixes"
    [(_, wanted, _)] = together([generate(model, prefixes)], home)
    new = shutil.copytree(BUNDLED, tmp_path / "new")
    environment = os.environ | {"HOME": str(home)}
    command = generate(model, tmp_path / "others")
    for _ in range(2):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            for file in sorted(Path(new).glob("*.safetensors")):
                os.replace(shutil.copy(file, tmp_path / "part"), model / file.name)
            out, err = running.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in err, err
        assert (running.returncode == 0 and out == wanted) or running.returncode == 1, err
