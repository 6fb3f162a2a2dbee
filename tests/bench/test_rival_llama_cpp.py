"""llama.cpp on the bundled model, where llama-cpp-python is installed; and what needs it not."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speq.bench.rivals import llama_cpp
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.llama_cpp import LlamaCpp, gpu_bytes, layers_that_fit, load
from speq.errors import SpeqError
from speq.text.tokenizer import load_tokenizer, tokens_of
from tests.helpers.needed import absent
from tests.helpers.paths import BUNDLED, ROOT
from tests.helpers.tiny_models import load_plain

PROMPT = [*range(30, 70)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def job(scratch: Path) -> RivalJob:
    return RivalJob(
        task="time",
        system="llama.cpp",
        model=str(BUNDLED),
        memory_bytes=1 << 30,
        prompts=[PROMPT],
        max_new_tokens=16,
        scratch=str(scratch),
        threads=1,
    )


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> None:
    if find_spec("llama_cpp") is None:
        absent(request.config, "llama-cpp", "llama-cpp-python is not installed")


@contextmanager
def loaded(job: RivalJob) -> Iterator[LlamaCpp]:
    contestant = load(job)
    try:
        yield contestant
    finally:
        contestant.close()


@pytest.mark.usefixtures("installed")
def test_streams_begin_anew_and_are_its_own_choices(
    job: RivalJob, capfd: pytest.CaptureFixture[str]
) -> None:
    with loaded(job) as contestant:
        tokens = [*contestant.stream(PROMPT, 16)]
        other = [*contestant.stream([7, 5, 11], 16)]
        assert [*contestant.stream(PROMPT, 16)] == tokens
        settled = contestant.settled()
    assert len(tokens) == 16 and other != tokens
    assert (settled["threads"], settled["gpu_layers"]) == (1, 0)
    assert settled["file_bytes"] == (Path(job.scratch) / settled["file"]).stat().st_size
    choosing = replace(job, task="choices", continuations=[tokens])
    with loaded(choosing) as contestant:
        # A pass of many tokens may round otherwise than passes of one.
        agreed = sum(map(int.__eq__, contestant.choices(PROMPT, tokens), tokens))
    assert agreed >= 15
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("installed")
def test_tokens_are_drawn_at_a_temperature(job: RivalJob) -> None:
    """Near 0 they are the likeliest; high up hardly any is."""
    with loaded(job) as contestant:
        likeliest = [*contestant.stream(PROMPT, 16)]
    with loaded(replace(job, temperature=1e-6)) as contestant:
        assert [*contestant.stream(PROMPT, 16)] == likeliest
    with loaded(replace(job, temperature=100.0)) as contestant:
        drawn = [*contestant.stream(PROMPT, 16)]
    assert sum(map(int.__eq__, drawn, likeliest)) <= 2


@pytest.mark.usefixtures("installed")
def test_choices_are_nearly_always_the_exact_models(job: RivalJob) -> None:
    """Its bfloat16 products and float16 cache are not ours: 99 % and more agree on four texts."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    token_ids = tokens_of(load_tokenizer(BUNDLED), text)[:340]
    prompt, continuation = token_ids[:40], token_ids[40:]
    choosing = replace(job, task="choices", prompts=[prompt], continuations=[continuation])
    with loaded(choosing) as contestant:
        chosen = contestant.choices(prompt, continuation)
    with torch.no_grad():
        logits = load_plain(BUNDLED)(torch.tensor([token_ids])).logits[0]
    exact = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert len(chosen) == 300
    assert sum(map(int.__eq__, chosen, exact)) >= 0.97 * 300


@pytest.mark.usefixtures("installed")
def test_damaged_file_is_refused(job: RivalJob, tmp_path: Path) -> None:
    file = llama_cpp.gguf_of(job.model, tmp_path)
    file.write_bytes(file.read_bytes()[: 1 << 20])
    with pytest.raises(SpeqError, match=r"llama.cpp does not load .*; remove that file"):
        load(replace(job, scratch=str(tmp_path)))


def test_gpu_without_a_build_for_it(job: RivalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(llama_supports_gpu_offload=lambda: False)
    monkeypatch.setattr(llama_cpp, "rival_package", lambda name: library)
    with pytest.raises(SpeqError, match="built without CUDA and the device is cuda"):
        load(replace(job, device="cuda"))


def test_llama_cpp_that_is_not_installed(job: RivalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(
        SpeqError, match=r"llama_cpp is not installed.*pip install llama-cpp-python"
    ):
        load(job)


def test_bytes_on_a_gpu(job: RivalJob) -> None:
    """A layer's weights and its share of a cache of 256 tokens; the head's and a batch's logits."""
    layers, head = gpu_bytes(llama_cpp.gguf_of(job.model, Path(job.scratch)), job)
    # Experts, shared expert and attention in two bytes, routers, norms and biases in four.
    words = 3 * 32 * 64 * 256 + 3 * 256 * 256 + 4 * 256 * 256
    float32 = 32 * 256 + 256 + 2 * 256 + 3 * 256
    assert layers == [2 * words + 4 * float32 + 256 * 2 * 256 * 2] * 8
    assert head == 2 * 4096 * 256 + 4 * 256 + 512 * 4096 * 4


@pytest.mark.parametrize(
    ("memory_bytes", "count"),
    [(0, 0), (99, 0), (100, 1), (129, 1), (130, 2), (149, 2), (150, 3), (160, 4), (10**9, 4)],
)
def test_layers_that_fit(memory_bytes: int, count: int) -> None:
    """The head first, and then the last layer."""
    assert layers_that_fit([10, 20, 30], 100, memory_bytes) == count


def test_its_process_is_without_torch(job: RivalJob) -> None:
    """Its budget is the page cache's: torch would take of that, once the file is there."""
    file = llama_cpp.gguf_of(job.model, Path(job.scratch))
    code = (
        "import sys, pathlib, speq.bench.rivals.llama_cpp as rival\n"
        f"print(rival.gguf_of({job.model!r}, pathlib.Path({job.scratch!r})).name)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [file.name, "[]"]
