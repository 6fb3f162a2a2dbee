"""Checkpoints shared by the tests, made once a run."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from speq.machine import host
from speq.measure.this_machine import MachineRates
from speq.planning import kept_file
from tests.helpers.cells import Folder, Folders
from tests.helpers.command import Command, command_in_process
from tests.helpers.paths import BUNDLED
from tests.helpers.tiny_models import write_model, write_perturbed

# Models this small are fastest on one thread, and the tests run in as many processes as cores.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--need",
        action="append",
        default=[],
        help="what tests may not be skipped for lack of, such as a backend of kernels",
    )


def pytest_collection_finish() -> None:
    """Loading a model collects garbage, which looks at all objects there are: those of modules and
    of the tests themselves last as long as the process, and need not be looked at again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of the tests' own: runs would go by profiles that a user keeps in his."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        # A machine's rates, so that no test measures this one's for seconds.
        rates = MachineRates(80e9, 5.6e9, 1e12, time.time())
        kept_file.keep(host(), asdict(rates), rates.measured_at)
        yield


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a folder of its own: drafts made by tests stay out of the checkout."""
    path = tmp_path_factory.mktemp("bundled") / "tiny-moe"
    path.mkdir()
    for file in BUNDLED.iterdir():
        if file.is_file():
            (path / file.name).symlink_to(file)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the small random model of a family."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_model(root / model_type, model_type)
        return made[model_type]

    return folder


@pytest.fixture(scope="session")
def tiny_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the small random model of a family, in bfloat16."""
    root = tmp_path_factory.mktemp("tiny-bfloat16")
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_model(root / model_type, model_type, torch.bfloat16)
        return made[model_type]

    return folder


@pytest.fixture(scope="session")
def poor_draft(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Folder of a checkpoint that drafts badly for the small model of a family."""
    root = tmp_path_factory.mktemp("poor")
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = write_perturbed(root / model_type, tiny(model_type), noise=0.5)
        return made[model_type]

    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the `speq` command inside this process."""
    return command_in_process(monkeypatch, capsys)


@pytest.fixture(scope="session")
def folders(
    tiny: Folder, tiny_bfloat16: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Folders:
    """The small models in the forms that cells ask for."""
    return Folders(tmp_path_factory.mktemp("forms"), tiny, tiny_bfloat16)
