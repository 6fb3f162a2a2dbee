"""Transformers with offloading says what plain Transformers says, and keeps to its memory."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speq.bench.rivals import transformers_offload
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.transformers_offload import TransformersOffload, load
from speq.errors import SpeqError
from speq.models.opened import open_model
from tests.helpers.paths import BUNDLED
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPTS = [[*range(30, 70)], [7, 5, 11]]
CONTINUATION = [*range(100, 112)]
# In float32: all of the bundled model, some of its layers, and none of them.
ALL, SOME, FEW = 128 << 20, 32 << 20, 12 << 20


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_plain(BUNDLED)


@pytest.fixture
def job(tmp_path: Path) -> RivalJob:
    return RivalJob(
        task="tokens",
        system="transformers",
        model=str(BUNDLED),
        memory_bytes=ALL,
        prompts=PROMPTS,
        max_new_tokens=12,
        scratch=str(tmp_path),
        dtype="float32",
        threads=1,
        continuations=[CONTINUATION],
    )


@contextmanager
def loaded(job: RivalJob) -> Iterator[TransformersOffload]:
    contestant = load(job)
    try:
        yield contestant
    finally:
        contestant.close()


@pytest.mark.parametrize("memory_bytes", [ALL, SOME, FEW])
def test_tokens_are_plain_transformers(
    job: RivalJob, plain: Any, memory_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each stream begins anew, and so do choices."""
    with loaded(replace(job, memory_bytes=memory_bytes)) as contestant:
        for prompt in PROMPTS:
            assert [*contestant.stream(prompt, 4)] == greedy_tokens(plain, prompt, 4)
        with torch.no_grad():
            text = torch.tensor([PROMPTS[0] + CONTINUATION])
            expected = plain(text).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(dim=-1).tolist()
        assert contestant.choices(PROMPTS[0], CONTINUATION) == expected
        held = contestant.settled()["held_bytes"]
        offloaded = contestant.settled()["offloaded_bytes"]
        folder = Path(job.scratch) / transformers_offload.OFFLOADED
        assert folder.exists() == (memory_bytes < ALL)
    total = sum(weight.nbytes for weight in plain.parameters())
    assert held + offloaded == total
    layer = sum(weight.nbytes for weight in plain.model.layers[0].parameters())
    # What is brought for the time of a pass has room as well.
    assert held == total if memory_bytes == ALL else held + layer <= memory_bytes
    assert (held > layer) == (memory_bytes > FEW)
    assert not folder.exists()
    assert capfd.readouterr().out == ""


def test_dtype_as_published(job: RivalJob) -> None:
    with loaded(replace(job, dtype="auto")) as contestant:
        settled = contestant.settled()
        tokens = [*contestant.stream(PROMPTS[0], 12)]
    assert (settled["dtype"], settled["offloaded_bytes"]) == ("bfloat16", 0)
    assert settled["held_bytes"] == sum(
        weight.nbytes for weight in load_plain(BUNDLED, torch.bfloat16).parameters()
    )
    assert len(tokens) == 12


def test_what_a_killed_process_left_is_removed(job: RivalJob) -> None:
    folder = Path(job.scratch) / transformers_offload.OFFLOADED
    folder.mkdir()
    (folder / "old.safetensors").write_bytes(b"x")
    with loaded(job):
        assert not folder.exists()


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes what the card does not, but not all that it has free."""
    monkeypatch.setattr(transformers_offload, "available_bytes", lambda: 1000)
    assert transformers_offload.memory_by_device("cuda", 70) == {0: 70, "cpu": 900}
    assert transformers_offload.memory_by_device("cpu", 70) == {"cpu": 70}


def test_room_beside_the_weights(job: RivalJob) -> None:
    """Keys and values of 8 layers with 4 heads of 64 for every token, and what a pass makes."""
    opened = open_model(BUNDLED)
    short, long = replace(job, max_new_tokens=60), replace(job, max_new_tokens=80)
    more = transformers_offload.working_bytes(opened, long)
    assert more - transformers_offload.working_bytes(opened, short) >= 20 * 4 * 2 * 8 * 4 * 64
    published = transformers_offload.working_bytes(opened, replace(short, dtype="auto"))
    assert published < transformers_offload.working_bytes(opened, short)
    opened.close()
    with pytest.raises(SpeqError, match=r"has 1 MiB of memory and takes \d.* MiB beside"):
        load(replace(job, memory_bytes=1 << 20))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "holds neither"),
        (lambda path: (path / "config.json").write_text("{"), "is not valid JSON"),
        (lambda path: (path / "config.json").write_text('{"model_type": "x"}'), "of family 'x'"),
    ],
)
def test_refused_models(
    job: RivalJob, tmp_path: Path, damage: Callable[[Path], Any], sentence: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(BUNDLED, path, ignore=shutil.ignore_patterns(".speq"))
    damage(path)
    with pytest.raises(SpeqError, match=sentence):
        load(replace(job, model=str(path)))
    assert not (tmp_path / transformers_offload.OFFLOADED).exists()


def test_what_transformers_refuses(job: RivalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: Any, offload_folder: str, **named: Any) -> None:
        (Path(offload_folder)).mkdir()
        raise RuntimeError("a reason\nof several lines")

    monkeypatch.setattr(
        transformers_offload.AutoModelForCausalLM, "from_pretrained", staticmethod(refuses)
    )
    with pytest.raises(SpeqError, match=r"does not load .*: a reason of several lines; compare"):
        load(job)
    assert list(Path(job.scratch).iterdir()) == []
