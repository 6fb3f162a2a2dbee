"""The whole engine over the CUDA kernels, built for the host: long prompts and long drafts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speq import Generator
from speq.experts.slots import SlotExperts
from tests.helpers.backends import cuda_kernels_on_host, need_backend, poisoned_memory
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = [*range(40, 140)]
TOKENS = 24
DRAFT_LENGTH = 20


@pytest.fixture(autouse=True)
def on_host(request: pytest.FixtureRequest) -> Iterator[None]:
    need_backend(request, "cuda_on_host")
    with cuda_kernels_on_host(), poisoned_memory():
        yield


@pytest.mark.parametrize("codec", ["raw", "lossless", "residual"])
def test_greedy_tokens_are_the_exact_models(
    codec: str, tiny_bfloat16: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a kernel takes: in blocks in verifications, by expert in the prompt."""
    run, seen = SlotExperts.run, set()

    def watched(*arguments: Any) -> None:
        _, _, hidden_states, grouping, *_ = arguments
        seen.add((len(hidden_states), "fused" if grouping.index is None else "by expert"))
        run(*arguments)

    monkeypatch.setattr(SlotExperts, "run", watched)
    model = tiny_bfloat16("olmoe")
    generator = Generator.from_pretrained(
        model, "64MiB", dtype="float32", draft_length=DRAFT_LENGTH, codec=codec
    )
    result = generator.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    generator.close()
    assert result.token_ids == greedy_tokens(load_plain(model), PROMPT, TOKENS)
    assert result.stats["codec"] == codec
    assert {(len(PROMPT), "by expert"), (1 + DRAFT_LENGTH, "fused")} <= seen
