"""The draft head: its pass beside numpy's, its losses by hand, and its file."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from bench.lab.fidelity_counts import Fidelity
from speq import Generator, SpeqError, plan
from speq.config import SamplingParams
from speq.engine.drafter import DraftLimits, DraftRequest
from speq.engine.request import Request
from speq.files.safetensors_file import SafetensorsFile
from speq.heads import losses
from speq.heads.head_file import head_path, model_digest, read_head, write_head
from speq.heads.head_shape import HeadShape, NamedLayers
from speq.heads.losses import LossWeights, Predictions, Targets
from speq.heads.moe_head import MoEHead, mix_logits, rotations
from speq.heads.predicted_experts import head_worth_weighing
from speq.measure.plan import head_beside_model
from speq.measure.probe import attempt
from speq.measure.teacher_forced import forced_passes
from speq.models.kv_cache import causal_mask
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from tests.helpers.heads import head_in_numpy, random_head, write_random_head
from tests.helpers.tiny_models import write_model

SHAPES = (
    HeadShape(16, 12, window=5),
    HeadShape(128, 24, contrast=False, named=NamedLayers((0, 3), 6, 2)),
    HeadShape(18, 7, branches=1, contrast=False, window=3),
)


def forward(head: MoEHead, embedded: Tensor, features: Tensor) -> dict[str, Tensor]:
    """All rows in one pass, as training runs it."""
    positions = torch.arange(len(embedded))
    mask = causal_mask(positions[None], len(embedded), head.shape.window)
    rotation = rotations(positions, head.shape.head_width, embedded.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask)

    state = head(embedded[None], features[None], rotation, attend)
    found = {"branches": state.branches, "mixing": state.mixing, "feature": state.feature}
    if state.after is not None:
        found["after"] = state.after
    return {name: rows[0] for name, rows in found.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_is_the_formulas(shape: HeadShape) -> None:
    head = random_head(shape).double()
    rows = torch.randn(2, 9, shape.hidden_size, dtype=torch.float64)
    wanted = head_in_numpy(head, *rows.numpy())
    found = forward(head, *rows)
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        close = torch.from_numpy(wanted[name])
        torch.testing.assert_close(values.double(), close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drafting", [False, True])
def test_names_are_those_of_the_formula(drafting: bool) -> None:
    """In numpy: what leads in each layer, and by how much over the best that is not named."""
    named = NamedLayers((1, 4), 7, 3)
    head = random_head(HeadShape(16, 8, named=named))
    embedded, features = torch.randn(2, 5, 16)
    if drafting:
        head = head.load(torch.float32, torch.device("cpu"))
    with torch.no_grad():
        routes = head.routes(embedded, features)
    assert head.predicted_layers == (1, 4) and len(routes) == 2
    w = {name: weight.double().numpy() for name, weight in head.weights().items()}
    pair = []
    for rows, norm in ((embedded, "embedding_norm"), (features, "feature_norm")):
        values = rows.double().numpy()
        pair.append(values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6) * w[norm])
    for route, weights in zip(routes, w["routes"], strict=True):
        logits = np.concatenate(pair, 1) @ weights.T
        order = np.argsort(-logits, axis=1)
        assert route.ids == order[:, :3].tolist()
        ordered = np.take_along_axis(logits, order, 1)
        assert route.margins is not None and not route.from_router
        np.testing.assert_allclose(route.margins, ordered[:, :3] - ordered[:, 3:4], atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "experts", "sentence"),
    [
        ((), (4, 2), "ascending"),
        ((1, 1), (4, 2), "ascending"),
        ((-1,), (4, 2), "ascending"),
        (("0",), (4, 2), "ascending"),
        ((0,), (4, 5), "predicts 5 of 4 experts"),
    ],
)
def test_layers_that_cannot_be_named(layers: Any, experts: tuple[int, int], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        NamedLayers(layers, *experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_of_16_bits_hold_heads_in_eight(dtype: torch.dtype) -> None:
    """A byte a weight and a scale for 128 twice over; what passes make differs by a percent."""
    shape = HeadShape(128, 96, window=8)
    head = random_head(shape).to(dtype)
    rows = torch.randn(2, 9, shape.hidden_size).to(dtype)
    held = head.load(dtype, torch.device("cpu"))
    matrices = {"enter": (128, 256), "qkv": (384, 128), "output": (128, 128)}
    matrices |= {f"gate_up.{j}": (192, 128) for j in (0, 1)}
    coded = sum(n * k + 2 * 2 * n * k // 128 for n, k in matrices.values())
    down = 2 * (128 * 96 + 2 * 2 * 128 * 96 // 32)
    words = 2 * (4 * 128 + 2 * 2 * 128 + 2)  # norms, gate, contrast and its bias
    assert held.nbytes == shape.nbytes(dtype) == sum(shape.sizes(dtype)) == coded + down + words
    wanted = head_in_numpy(head, *rows.double().numpy())
    for name, values in forward(held, *rows).items():
        close = torch.from_numpy(wanted[name])
        error = (values.double() - close).norm() / close.norm()
        assert error < 0.03, name


def test_heads_to_draft_with_compute_the_same() -> None:
    """Kernels of few rows in place of torch's products."""
    shape = SHAPES[0]
    head = random_head(shape)
    rows = torch.randn(2, 4, shape.hidden_size)
    held = head.load(torch.float32, torch.device("cpu"))
    wanted, found = forward(head, *rows), forward(held, *rows)
    for name, values in found.items():
        torch.testing.assert_close(values, wanted[name], rtol=1e-4, atol=1e-5)
    assert not any(weight.requires_grad for weight in held.parameters())
    assert (
        held.nbytes
        == shape.nbytes(torch.float32)
        == 4 * sum(math.prod(size) for _, size in shape.tensors())
    )


def test_the_contrast_begins_where_the_paper_has_it() -> None:
    """beta 1.2 and 0.3 of Eq. 10, and an even gate, before anything is learnt."""
    shape = HeadShape(16, 8)
    head, rows = MoEHead.random(shape, seed=1), torch.randn(2, 3, 16)
    zeroed = {n: w * (not n.startswith("down")) for n, w in head.weights().items()}
    u = forward(MoEHead(shape, zeroed), *rows)["feature"]
    found = forward(head, *rows)
    assert torch.equal(found["mixing"], torch.full((3, 2), 0.5))
    first, second = (branch - u for branch in found["branches"].unbind(1))
    assert float(first.detach().abs().min()) > 0
    torch.testing.assert_close(found["after"], u + 1.2 * first - 0.3 * second, rtol=1e-4, atol=1e-5)


def test_the_mixture_is_of_distributions() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0]]])
    mixing = torch.tensor([[0.25, 0.75]])
    # Of (1/4, 3/4) and (4/5, 1/5).
    wanted = [0.25 * 0.25 + 0.75 * 0.8, 0.25 * 0.75 + 0.75 * 0.2]
    assert mix_logits(mixing, logits)[0].exp().tolist() == pytest.approx(wanted)


def test_losses_by_hand() -> None:
    found = Predictions(
        feature=torch.tensor([[0.5, 3.0]]),
        mixing=torch.tensor([[0.5, 0.5]]),
        logits=torch.tensor([[0.0, math.log(3.0)]]),
        branch_logits=torch.tensor([[[0.0, 0.0], [0.0, math.log(3.0)]]]),
        after=torch.tensor([[1.0, -1.0]]),
        after_logits=torch.tensor([[math.log(9.0), 0.0]]),
    )
    wanted = Targets(
        feature=torch.tensor([[0.0, 1.0]]),
        after=torch.tensor([[1.0, 1.0]]),
        probs=torch.tensor([[0.5, 0.5]]),
        after_probs=torch.tensor([[1.0, 0.0]]),
    )
    parts = losses.terms(found, wanted)
    by_hand = {
        "feature": (0.5 * 0.25 + (2 - 0.5)) / 2,
        "next_tokens": -(0.5 * math.log(1 / 4) + 0.5 * math.log(3 / 4)),
        "mixture": -(0.5 * math.log(3 / 8) + 0.5 * math.log(5 / 8)),
        "after": (0 + (2 - 0.5)) / 2,
        "after_tokens": -math.log(0.9),
    }
    assert {name: float(value) for name, value in parts.items()} == pytest.approx(by_hand)
    weights = LossWeights(after=2.0, next_tokens=3.0, after_tokens=5.0, mixture=7.0)
    factors = {"feature": 1, "next_tokens": 3, "mixture": 7, "after": 2, "after_tokens": 5}
    wanted_sum = sum(factors[name] * value for name, value in by_hand.items())
    assert float(losses.total(parts, weights)) == pytest.approx(wanted_sum)


def test_gradients_reach_every_weight() -> None:
    shape = HeadShape(16, 8, window=4)
    head = random_head(shape)
    found = forward(head, *torch.randn(2, 6, 16))
    (found["feature"].square().sum() + found["after"].square().sum()).backward()
    assert all(float(weight.grad.abs().sum()) > 0 for weight in head.parameters())


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"branches": 3}, "branches must be 1 or 2"),
        ({"branches": 1}, "a head of one branch has no contrast"),
        ({"hidden_size": 15}, "need an even one"),
        ({"width": 0}, "width is 0; it must be at least 1"),
    ],
)
def test_sizes_that_no_head_has(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        HeadShape(**({"hidden_size": 16, "width": 8} | sizes))


@pytest.mark.parametrize(
    ("hidden_size", "width"), [(64, 64), (256, 64), (2880, 64), (3000, 60), (18, 18), (22, 22)]
)
def test_heads_of_the_attention_divide_the_hidden_size(hidden_size: int, width: int) -> None:
    shape = HeadShape(hidden_size, 8)
    assert shape.head_width == width
    assert shape.num_heads * width == hidden_size


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """One of its own, with a head beside it."""
    path = tmp_path / "model"
    shutil.copytree(tiny("olmoe"), path, ignore=shutil.ignore_patterns(".speq"))
    write_random_head(path)
    return path


def digest_of(model: Path) -> str:
    opened = open_model(model)
    try:
        return model_digest(opened.checkpoint, opened.family.names)
    finally:
        opened.close()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(shape: HeadShape, dtype: torch.dtype, tmp_path: Path) -> None:
    head = random_head(shape)
    path = tmp_path / "h.safetensors"
    write_head(path, head, "of that model", dtype)
    again = read_head(path, "of that model", shape.hidden_size)
    assert again.shape == head.shape and again.acceptance_rates == ()
    head.acceptance_rates = 0.75, 1.0
    write_head(path, head, "of that model", dtype)
    held = read_head(path, "of that model", shape.hidden_size).load(dtype, torch.device("cpu"))
    assert held.acceptance_rates == (0.75, 1) and held.shape == shape
    # As files were before any head named experts.
    sizes = json.loads(safe_open(path, "pt").metadata()["shape"])
    assert ("named" in sizes) == (shape.named is not None)
    plain = load_file(path)
    assert plain.keys() == dict(head.shape.tensors()).keys()
    for name, weight in head.weights().items():
        assert torch.equal(again.weight(name), weight.to(dtype))
        assert torch.equal(plain[name], weight.to(dtype))


def test_a_head_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "olmoe", seed=1)
    assert digest_of(other) != digest_of(model)
    with pytest.raises(SpeqError, match=r"was trained on another model.*train-head"):
        read_head(head_path(model), digest_of(other), 64)
    with pytest.raises(SpeqError, match="was trained on another model"):
        Generator.from_pretrained(
            other, "64MiB", drafter="head", head=head_path(model), dtype="float32"
        )


def test_a_model_without_a_head(model: Path) -> None:
    head_path(model).unlink()
    with pytest.raises(SpeqError, match=r"no head at .*train one with `speq train-head`"):
        Generator.from_pretrained(model, "64MiB", drafter="head")
    with pytest.raises(SpeqError, match="head is x and drafter is auto"):
        Generator.from_pretrained(model, "64MiB", head="x")


def test_damaged_heads_are_refused_in_one_sentence(model: Path) -> None:
    path, digest = head_path(model), digest_of(model)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(SpeqError) as error:
            read_head(path, digest, 64)
        sentence = str(error.value)
        assert str(path) in sentence and "\n" not in sentence
        return sentence

    def with_header(**metadata: str) -> bytes:
        changed = header | {"__metadata__": header["__metadata__"] | metadata}
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    flipped = bytearray(whole)
    flipped[-3] ^= 16
    assert "truncated" in refused(whole[:-4])
    assert "not those of its checksum" in refused(bytes(flipped))
    assert "not a complete safetensors file" in refused(b"")
    assert "not a head of this version" in refused(with_header(format="speq-head-9"))
    assert "is damaged" in refused(with_header(shape="{"))
    assert "is damaged" in refused(with_header(shape='{"hidden_size": 64}'))
    sizes = json.loads(header["__metadata__"]["shape"])
    assert "is damaged" in refused(with_header(shape=json.dumps(sizes | {"width": "x"})))
    for named in (1, {}, {"layers": 0, "num_experts": 4, "top_k": 2}):
        assert "is damaged" in refused(with_header(shape=json.dumps(sizes | {"named": named})))
    for shares in ("{", "{}", '["x"]', "[1.5]", "[true]", "[NaN]"):
        assert f"acceptance rates are {shares}" in refused(with_header(stand=shares))
    assert "are not those of a head" in refused(with_header(shape=json.dumps(sizes | {"width": 8})))
    path.write_bytes(whole)
    assert read_head(path, digest, 64).shape.width == 32


def test_weights_are_read_of_heads_that_are_weighed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the header says is enough for a plan, and to leave aside a head that says nothing."""
    read: list[str] = []
    plainly = SafetensorsFile.tensor

    def tensor(file: SafetensorsFile, name: str) -> Tensor:
        read.append(name)
        return plainly(file, name)

    monkeypatch.setattr(SafetensorsFile, "tensor", tensor)
    for stand in ((), (0.75, 0.5)):
        path = write_random_head(model, stand=stand)
        opened = open_model(model)
        label = head_beside_model(opened)
        assert label is not None
        assert (label.shape.width, label.acceptance_rates, read) == (32, stand, [])
        found = head_worth_weighing(opened)
        assert (found is not None and found.acceptance_rates == stand) == bool(read) == bool(stand)
        opened.close()
    # Of damaged weights nobody hears who does not read them; sizes are checked all the same.
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    opened = open_model(model)
    assert head_beside_model(opened) == label
    assert head_worth_weighing(opened) is None
    assert "is not used: " in caplog.text and "not those of its checksum" in caplog.text
    path.write_bytes(whole[:-1])
    assert head_beside_model(opened) is None
    opened.close()


def test_a_head_takes_its_share_of_the_budget(model: Path) -> None:
    generator = Generator.from_pretrained(
        model, "64MiB", drafter="head", dtype="float32", draft_length=2, context_length=64
    )
    plan = generator.runtime.plan
    head = generator.runtime._loaded.head
    assert head is not None and plan.items["head"] == head.nbytes
    alone = Generator.from_pretrained(
        model, "64MiB", drafter="none", dtype="float32", context_length=64
    )
    # Keys and values of one layer as wide as the model.
    assert plan.items["kv_cache"] - alone.runtime.plan.items["kv_cache"] == 64 * 2 * 64 * 4
    assert "head" not in alone.runtime.plan.items
    generator.close()
    alone.close()


@pytest.mark.parametrize("nodes", [None, 6])
def test_a_text_that_is_read_by_hand_is_heard(nodes: int | None, model: Path) -> None:
    """Pass by pass, with rounds between that are forgotten again, as benches do: drafts are those
    of a head that has heard the text as a prompt.
    """
    generator = Generator.from_pretrained(
        model, "64MiB", drafter="head", dtype="float32", draft_length=3, context_length=64
    )
    runtime, engine = generator.runtime, generator.runtime.engine
    drafter: Any = engine.drafters[0]
    text = [(7 * i * i + 3 * i) % 256 for i in range(30)]
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    limits = DraftLimits(3, nodes)

    def behind(end: int) -> Request:
        return Request(text[: end + 1], sampling)

    found = {}
    counts = Fidelity.empty(engine.lookahead.num_layers, 8, 3)
    for forced in forced_passes(runtime, text, 4):
        end = forced.start + forced.tokens
        if end < len(text):
            turns = [attempt(engine, behind(end), limits) for _ in range(2)]
            # A pass of one row rounds otherwise than one of several.
            first, again = (turn.draft for turn in turns)
            assert (first.token_ids, first.parents) == (again.token_ids, again.parents)
            assert engine.caches[0].length == end
            found[end] = turns[0].draft
            counts.run_freely(runtime, text[: end + 1])
    assert [position.proposed for position in counts.positions] == [len(found)] * 3
    for end, draft in found.items():
        engine.begin_prefill(behind(end))
        tokens = SequenceTokens(engine.caches[0], text[:end])
        runtime.model.prefill(engine.offload.reader, tokens, drafter.observe_verified)
        wanted = drafter.propose(
            DraftRequest(behind(end), limits, lambda *_: None, lambda *_: True)
        )
        assert draft.token_ids == wanted.token_ids
    generator.close()


def test_each_text_of_a_batch_has_entries_of_the_head(model: Path) -> None:
    generator = Generator.from_pretrained(
        model, "64MiB", drafter="head", dtype="float32", context_length=64, max_batch=3
    )
    engine = generator.runtime.engine
    drafters: list[Any] = engine.drafters
    heads = [drafter._context.cache for drafter in drafters]
    assert len({entries.layers[0].keys.data_ptr() for entries in heads}) == 3
    held = sum(cache.nbytes for cache in (*engine.caches, *heads))
    assert generator.runtime.plan.items["kv_cache"] == held
    generator.close()


def test_a_plan_says_what_the_head_takes(model: Path) -> None:
    options = {"preset": "laptop-ddr5", "context_length": 64, "dtype": "float32", "device": "cpu"}
    made = plan(model, "1280KiB", **options)  # type: ignore[arg-type]
    generator = Generator.from_pretrained(
        model, "1280KiB", drafter="head", dtype="float32", draft_length=None, context_length=64
    )
    run = generator.runtime.plan
    generator.close()
    assert made.with_head is not None
    assert made.with_head.items["head"] == run.items["head"]
    assert made.with_head.items["kv_cache"] == run.items["kv_cache"]
    assert made.to_dict()["with_head"]["slots"] == made.with_head.slots
    plain = next(m for h, m in zip(made.candidates, made.memory, strict=True) if not h.drafts)
    assert made.with_head.slots < plain.slots
    head_path(model).unlink()
    without = plan(model, "1280KiB", **options)  # type: ignore[arg-type]
    assert without.with_head is None
    assert without.to_dict()["with_head"] is None
