"""What needs a CUDA device. Run by `make gpu`; elsewhere these skip visibly."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.engine.draft_pass import RecordedPass
from speq.engine.drafters.int4 import Int4Drafter
from speq.engine.verification import RecordedVerification
from speq.kernels import compact_ops, library, ops
from speq.models import recorded
from tests.helpers.expert_problems import SILU
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain

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
        tiny(family), "128MiB", device="cuda", draft_length=draft_length
    )
    result = generator.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
    assert result.token_ids == expected
    assert (result.stats["draft_length_mean"] > 0) == (draft_length > 0)
    generator.close()


# What torch's allocator may keep at its peak beyond the plan: it rounds activations of different
# sizes up and keeps them apart, and the plan counts them once, by their bytes.
KEPT_BYTES = 20 << 20
# A process of its own, in which cuBLAS has no workspace yet that others paid for.
PEAK = """
import json, re, sys, torch
from speq import Generator, SpeqError

options = dict(device="cuda", draft_length=4, codec="raw")
try:
    Generator.from_pretrained(sys.argv[1], 1 << 20, **options)
except SpeqError as error:
    least = int(re.search(r"smallest workable budget is (\\d+) bytes", str(error))[1])
generator = Generator.from_pretrained(sys.argv[1], least + (8 << 20), **options)
result = generator.generate([*range(40, 60)], max_new_tokens=64, ignore_eos=True)
memory = result.stats["memory"]
planned = memory["budget"] - memory["unused"]
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
generator.close()
print(json.dumps([len(result.token_ids), planned, memory["device_overhead"], *peaks]))
"""


def test_bundled_model_stays_within_its_plan(bundled: Path) -> None:
    """What a whole run takes of the device at its peak, by tensors and by the allocator."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(bundled)], capture_output=True, text=True, check=True
    )
    tokens, planned, overhead, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    assert tokens == 64 and overhead > 0
    assert allocated <= planned
    assert reserved <= planned + KEPT_BYTES


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phimoe"])
def test_recorded_passes_give_the_exact_tokens(
    family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, over six buckets and more shapes than graphs are kept of; and recording again
    and again takes no more memory of the device.
    """
    monkeypatch.setattr(recorded, "BUCKET", 16)
    monkeypatch.setattr(recorded, "MAX_GRAPHS", 3)
    expected = greedy_tokens(load_plain(tiny(family)).cuda(), PROMPT, 80)
    generator = Generator.from_pretrained(
        tiny(family), "64MiB", device="cuda", dtype="float32", draft_length=3, context_length=128
    )
    held = []
    for _ in range(3):
        result = generator.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
        assert result.token_ids == expected
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    engine = generator.runtime.engine
    assert isinstance(engine.drafters[0], Int4Drafter)
    assert isinstance(engine.drafters[0].draft_pass, RecordedPass)
    assert isinstance(engine.verification, RecordedVerification)
    assert len(engine.drafters[0].draft_pass.passes.shapes) == 3
    assert len(engine.verification.passes.shapes) == 3
    assert held[2] <= held[1]
    generator.close()


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_a_recorded_draft_is_the_one_launched(family: str, tiny: Callable[[str], Path]) -> None:
    """Acceptance does not suffer from attention over a whole bucket."""
    rates = {}
    for graphs in ("auto", "none"):
        generator = Generator.from_pretrained(
            tiny(family), "64MiB", device="cuda", dtype="float32", draft_length=3, graphs=graphs
        )
        result = generator.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
        rates[graphs] = result.stats["acceptance_rate"]
        generator.close()
    assert rates["auto"] == pytest.approx(rates["none"], abs=0.03)


@pytest.mark.parametrize(
    "op", ["moe_int4", "moe_grouped", "moe_grouped_lossless", "moe_grouped_residual"]
)
def test_kernels_are_captured_in_a_graph(op: str) -> None:
    """Replayed with other inputs and other ids than were there when it was captured."""
    assert library.backend_of(op, "cuda").name == "cuda"
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn(6, 3 * 64 * 256, generator=generator).mul(0.1).bfloat16()
    gate_up = arena[:, : 2 * 64 * 256].unflatten(1, (128, 256))
    down = arena[:, 2 * 64 * 256 :].unflatten(1, (256, 64))
    codes = [quantised(matrices) for matrices in (gate_up, down)]
    backend = ops.Int4Slots(codes[0], codes[1])
    on_device = ops.Int4Slots(
        (codes[0][0].cuda(), codes[0][1].cuda()), (codes[1][0].cuda(), codes[1][1].cuda())
    )

    lossless = [compact_ops.encode(*pair) for pair in zip(gate_up, down, strict=True)]
    residual = [
        compact_ops.encode(
            *pair, (codes[0][0][e], codes[0][1][e]), (codes[1][0][e], codes[1][1][e])
        )
        for e, pair in enumerate(zip(gate_up, down, strict=True))
    ]
    slots = {"lossless": in_slots(lossless), "residual": in_slots(residual)}
    # Before anything is captured: a copy from the host is no part of a graph.
    held = {
        device: (
            {"cpu": backend, "cuda": on_device}[device],
            (gate_up.to(device), down.to(device)),
            {codec: records.to(device) for codec, records in slots.items()},
            torch.arange(6, device=device),
        )
        for device in ("cpu", "cuda")
    }

    def run(hidden: Tensor, ids: Tensor, chances: Tensor) -> Tensor:
        of_draft, words, records, table = held[hidden.device.type]
        if op == "moe_int4":
            return ops.moe_int4(hidden, ids, chances, table, of_draft, SILU)
        out = hidden.new_empty(*ids.shape, 256)
        head = hidden, ids, table
        if op == "moe_grouped":
            ops.moe_grouped(*head, *words, SILU, out)
        elif op == "moe_grouped_lossless":
            compact_ops.moe_grouped_lossless(*head, records["lossless"], 64, SILU, out)
        else:
            compact_ops.moe_grouped_residual(*head, records["residual"], table, of_draft, SILU, out)
        return out

    def problem() -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(4)])
        hidden = torch.randn(4, 256, generator=generator).bfloat16()
        return hidden, ids, torch.rand(4, 3, generator=generator)

    static = tuple(tensor.cuda() for tensor in problem())
    run(*static)  # what is set up at the first call is no part of a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*static)
    for _ in range(2):
        arguments = problem()
        for target, source in zip(static, arguments, strict=True):
            target.copy_(source)
        graph.replay()
        wanted = run(*arguments)
        error = (out.cpu().float() - wanted.float()).abs().max() / wanted.float().std()
        assert error < 0.05


def in_slots(records: list[Tensor]) -> Tensor:
    slots = torch.zeros(len(records), -(-max(map(len, records)) // 64) * 64, dtype=torch.uint8)
    for slot, record in zip(slots, records, strict=True):
        slot[: len(record)] = record
    return slots


def quantised(matrices: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [ops.quantize_int4(matrix, 64) for matrix in matrices]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
