"""What needs a CUDA device. Run by `make gpu`; elsewhere these skip visibly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speq import Generator, ops
from tests.tiny_models import FAMILIES, greedy_tokens, load_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

PROMPT = [*range(40, 60)]


@pytest.mark.parametrize("draft_length", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_exact_models(
    family: str, draft_length: int, tiny: Callable[[str], Path]
) -> None:
    """In float32, against plain transformers on the same device."""
    expected = greedy_tokens(load_plain(tiny(family)).cuda(), PROMPT, 100)
    generator = Generator.from_pretrained(
        tiny(family), "16MiB", device="cuda", draft_length=draft_length
    )
    result = generator.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
    assert result.token_ids == expected
    assert (result.stats["draft_length_mean"] > 0) == (draft_length > 0)
    generator.close()


def test_bundled_model_stays_within_its_budget(bundled: Path) -> None:
    """Allocations of ours on the device, at their peak, over a whole run."""
    budget = 24 << 20
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    generator = Generator.from_pretrained(bundled, budget, device="cuda", draft_length=4)
    result = generator.generate(PROMPT, max_new_tokens=64, ignore_eos=True)
    assert len(result.token_ids) == 64
    assert torch.cuda.max_memory_allocated() - before <= budget
    generator.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpacking_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    qweight, scales = ops.quantize_int4(torch.randn(24, 256), 64)
    out = torch.empty(24, 256, dtype=dtype)
    ops.unpack_int4(qweight, scales, out)
    on_device = torch.empty_like(out, device="cuda")
    ops.unpack_int4(qweight.cuda(), scales.cuda(), on_device)
    assert torch.equal(on_device.cpu(), out)
