"""The draft of a widened model errs as its source's draft does, and residual still decodes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.bench.widen import Settings, copies_of, place_copies, run, widen
from speq.bench.widen_draft import Moves, Placed, group_size_for, moved_codes, rounding_error
from speq.bench.widen_words import shared_out
from speq.drafts.draft_source import gptq_path
from speq.drafts.gptq_folder import GptqFolder
from speq.errors import SpeqError
from speq.experts.int4 import group_size_of
from speq.files.checkpoint import Checkpoint
from speq.kernels.reference import quantize_int4, unpack_int4
from speq.kernels.windows import WINDOW, window_starts
from speq.models.opened import open_model


def test_copies_err_together_as_is_wanted_and_stay_decodable() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator).bfloat16()
    wide = shared_out(weight, 8, 1.0, generator).flatten(1)
    wanted = torch.randn(64, 64, generator=generator) * 0.05
    lie = Placed(torch.arange(64), torch.arange(512).view(64, 8))
    moves = Moves()
    codes, scales = moved_codes(wide, 128, wanted, lie, moves)
    rounded, same_scales = quantize_int4(wide, 128)
    assert torch.equal(scales, same_scales)
    first = torch.stack([rounded & 15, rounded >> 4], 2).flatten(1).int() - 8
    steps = scales.double().repeat_interleave(128, 1)
    errs = (codes * steps - wide.double()).view(64, 64, 8).sum(2)
    # Eight copies' own rounding is beside it, and does not depend on what is wanted.
    slope = (errs * wanted).sum() / wanted.double().square().sum()
    assert slope == pytest.approx(moves.as_json()["reached"], rel=1e-3)
    assert 0.85 < slope < 1.05
    rest = (errs - slope * wanted).square().mean().sqrt() / steps.mean()
    assert rest == pytest.approx((8 / 12) ** 0.5, rel=0.1)
    changed = codes != first
    assert moves.moved == int(changed.sum()) > 0
    assert (codes - first).abs().max() == 1
    # A moved code that is not 0 has the exact word in its window.
    held = changed & (codes != 0)
    words = wide.view(torch.int16).int() & 0xFFFF
    starts = window_starts(codes, scales.repeat_interleave(128, 1))
    assert ((words - starts >= 0) & (words - starts < WINDOW))[held].all()


def test_copies_are_where_widening_puts_them() -> None:
    """Of an output projection inputs are whole heads; of a query outputs are."""
    head_dim = 2
    for name, shape in (
        ("model.layers.0.self_attn.o_proj.weight", (3, 4)),
        ("model.layers.0.self_attn.q_proj.weight", (4, 3)),
        ("model.layers.0.mlp.experts.0.up_proj.weight", (2, 3)),
    ):
        weight = torch.arange(12.0)[: shape[0] * shape[1]].view(shape) * 8
        copy = copies_of(name, 2, 3, 2)
        settings = Settings(noise=0.0)
        wide = widen(name, weight, copy, settings, head_dim)
        lie = place_copies(name, weight.shape, copy, head_dim)
        back = wide[:, lie.columns].sum(2)
        assert torch.equal(back, weight[lie.rows])


def gate_of_first_expert(model: Path) -> Tensor:
    """[F, H] float32, as the draft beside a model has it."""
    opened = open_model(str(model))
    experts = opened.shape.experts
    folder = GptqFolder(gptq_path(model), experts)
    rows = experts.expert_width
    found = folder.sample(0, rows)[: rows * experts.hidden_size]
    folder.close()
    opened.close()
    return found.view(rows, experts.hidden_size)


def slope(made: Tensor, wanted: Tensor) -> float:
    """How much of the errors wanted [N, K] copies [N, 2, K] make."""
    return float((made * wanted[:, None]).sum() / (2 * wanted.square().sum()))


@pytest.mark.wide
def test_draft_of_the_bundled_model_errs_as_its_own(bundled: Path, tmp_path: Path) -> None:
    path = tmp_path / "wide"
    made = run(str(bundled), path, Settings(512, 128, draft_noise=1.0))
    assert 0.05 < made["draft"]["moved"] < 0.4
    draft = gate_of_first_expert(path)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    checkpoint = Checkpoint(bundled)
    weight = checkpoint.tensors[name][0].tensor(name)
    checkpoint.close()
    errors = unpack_int4(*quantize_int4(weight, group_size_of(weight.shape[1]))) - weight.float()
    summed = draft.view(len(weight), 2, weight.shape[1], 2).sum(3) - weight.float()[:, None]
    assert torch.equal(errors, rounding_error(weight))
    assert 0.8 < slope(summed, errors) < 1.05
    wide = Checkpoint(path)
    rounded = rounding_error(wide.tensors[name][0].tensor(name))
    wide.close()
    assert abs(slope(rounded.view(len(weight), 2, -1, 2).sum(3), errors)) < 0.2
    generator = Generator.from_pretrained(path, "160MiB", draft_length=4)
    result = generator.generate("The sea", max_new_tokens=32, ignore_eos=True)
    generator.close()
    assert 0 < result.stats["acceptance_rate"] <= 1


def test_sizes_that_no_group_divides_are_refused() -> None:
    assert group_size_for({2048, 1408}) == 128
    assert group_size_for({192, 96}) == 32
    with pytest.raises(SpeqError, match="no group of INT4 codes divides 40 and 100"):
        group_size_for({40, 100})
