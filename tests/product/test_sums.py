"""The order of sums of a run: the same bits on all processors, where that is asked for."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.errors import OptionError
from speq.kernels import library
from speq.models.moe_model import MoEModel
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.host_device import host_device

PROMPT, NEW_TOKENS = [7, 3, 200, 41, 9], 8


@pytest.fixture
def best() -> Iterator[str]:
    before = library.isa()
    yield before
    library.limit_isa(before)


def logits_of(model: Path, monkeypatch: pytest.MonkeyPatch, isa: str, sums: str) -> Tensor:
    """The logits of a prompt and of some tokens behind it, in bfloat16."""
    found: list[Tensor] = []
    whole = MoEModel.logits

    def noted(self: MoEModel, *given: object) -> Tensor:
        logits = whole(self, *given)  # type: ignore[arg-type]
        found.append(logits.clone())
        return logits

    library.limit_isa(isa)
    with monkeypatch.context() as patch:
        patch.setattr(MoEModel, "logits", noted)
        generator = Generator.from_pretrained(
            model, "40MiB", sums=sums, dtype="bfloat16", drafter="none", codec="raw", dense="raw"
        )
        result = generator.generate("The sea was", max_new_tokens=24, ignore_eos=True)
        generator.close()
    assert result.stats["sums"] == sums
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def test_canonical_sums_are_the_same_on_all_processors(
    bundled: Path, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = logits_of(bundled, monkeypatch, best, "canonical")
    for isa in library.supported_isas()[1:]:
        assert torch.equal(logits_of(bundled, monkeypatch, isa, "canonical"), wanted), isa


def test_fast_sums_are_those_of_pairs(
    bundled: Path, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above tells orders apart."""
    if best not in ("avx512_amx", "avx512_bf16", "neon_bf16"):
        pytest.skip("this processor multiplies no pairs of BF16")
    wanted = logits_of(bundled, monkeypatch, best, "canonical")
    assert not torch.equal(logits_of(bundled, monkeypatch, best, "fast"), wanted)


@pytest.mark.parametrize(("device", "order"), [("cpu", "fast"), ("cuda", "canonical")])
def test_the_order_follows_the_device(device: str, order: str, folders: Folders) -> None:
    cell = Cell(0, "half", "own")
    model, draft = folders.of("qwen3_moe", cell)
    with host_device() if device == "cuda" else nullcontext():
        context = len(PROMPT) + NEW_TOKENS
        generator, _ = loaded(cell, model, draft, "float32", context, device)
        result = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        generator.close()
    assert result.stats["sums"] == order


def test_a_gpu_and_its_host_have_no_other_order(folders: Folders) -> None:
    cell = Cell(0, "half", "own")
    model, draft = folders.of("qwen3_moe", cell)
    with host_device(), pytest.raises(OptionError, match="GPUs have the canonical order alone"):
        loaded(cell, model, draft, "float32", 16, "cuda", sums="fast")


def test_reference_kernels_have_no_order_of_their_own(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(library.MISSING, "cpu", "none was built")
    with pytest.raises(OptionError, match="there are no native CPU kernels"):
        Generator.from_pretrained(bundled, "40MiB", sums="canonical")
