"""Dense layers and embeddings: how they are held, chosen and planned for."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speq import Generator, SpeqError
from speq.config import RunConfig
from speq.devices.device import Processor
from speq.drafts.dense_draft import DenseDraft
from speq.kernels import dense_ops, library, ops
from speq.kernels.dense_ops import RecordMatrix
from speq.kernels.library import KERNELS
from speq.layers.dense_linear import DenseEmbedding, DenseLinear
from speq.layers.dense_matrix import RawMatrix
from speq.layers.offloaded_experts import ActiveBackend
from speq.load import load
from speq.measure.plan import plan
from speq.models import moe_model
from speq.models.dense import encode_dense, hold_dense, matrices_in, matrix_bytes
from speq.models.dense_form import DenseForm
from speq.models.opened import Opened, open_model
from speq.planning.candidates import candidates_of
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget, demand_of
from speq.planning.dense import DenseTrial, MemoryContext, choose_dense_form
from speq.planning.model_spec import ModelSpec
from speq.routing import Route
from tests.helpers.cells import Folder
from tests.helpers.host_device import host_device
from tests.helpers.packing import pack_to
from tests.helpers.picture_files import stored_tensors
from tests.helpers.smallest import two_slot_budget
from tests.helpers.tiny_models import BY_FAMILY, write_model

# Weights outside routers and biases that are no matrices of dense layers.
LEFT = re.compile(r"\.router\.|indexer\.weights_proj")


class Bank:
    """Experts that add nothing."""

    def __init__(self, drafts: bool) -> None:
        self.drafts = drafts

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        return torch.zeros_like(hidden_states)


def test_modules_of_torch_are_replaced_and_those_derived_from_them_are_not() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 6), Special(6, 8), nn.Linear(8, 5))
    model[3].weight = model[0].weight
    ids = torch.tensor([[4, 0, 1]])
    with torch.no_grad():
        before = model(ids)
        nbytes = sum(tensor.nbytes for tensor in model.parameters())
        hold_dense(model, ActiveBackend(), {})
        torch.testing.assert_close(model(ids), before)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["DenseEmbedding", "DenseLinear", "Special", "DenseLinear"]
    assert model[0].table is model[3].exact
    assert matrix_bytes(model) + sum(tensor.nbytes for tensor in model.parameters()) == nbytes


def test_a_draft_has_matrices_of_its_own() -> None:
    exact, draft = RawMatrix(torch.eye(4)), RawMatrix(2 * torch.eye(4))
    switch, inputs = ActiveBackend(), torch.ones(1, 4)
    layer = DenseLinear(exact, torch.ones(4), switch)

    def under(backend: Bank | None) -> float:
        switch.use(backend)
        return float(layer(inputs)[0, 0])

    banks = [None, Bank(drafts=False), Bank(drafts=True)]
    assert [under(backend) for backend in banks] == [2, 2, 2]
    layer.draft = draft
    assert [under(backend) for backend in banks] == [2, 2, 3]


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_by_records_are_those_by_words(rows: int) -> None:
    generator = torch.Generator().manual_seed(18)
    words = torch.randn(24, 64, generator=generator).bfloat16()
    inputs = torch.randn(2, rows, 64, generator=generator).bfloat16()
    bias = torch.randn(24, generator=generator).bfloat16()
    ids = torch.tensor([[0, 23], [7, 7]])
    pair = ops.quantize_int4(words.float(), 32)
    records = (
        RecordMatrix(dense_ops.encode_dense(words), *words.shape),
        RecordMatrix(dense_ops.encode_dense(words, pair), *words.shape, pair),
    )
    raw = RawMatrix(words)
    for matrix in records:
        assert (matrix.outputs, matrix.columns) == (raw.outputs, raw.columns) == (24, 64)
        assert torch.equal(matrix.words(), words)
        assert torch.equal(matrix.rows(ids), words[ids])
        for added in (bias, None):
            assert torch.equal(matrix.product(inputs, added), raw.product(inputs, added))


# Loading.


def loaded_lossless(opened: Opened, threads: int = 2) -> moe_model.MoEModel:
    records = partial(encode_dense, threads=threads, device=torch.device("cpu"))
    form = opened.family, opened.checkpoint, torch.bfloat16, Processor()
    return moe_model.load(*form, records)


@pytest.mark.parametrize("family", BY_FAMILY)
def test_every_matrix_of_a_family_is_held_as_what_takes_less(
    family: str, tiny_bfloat16: Folder
) -> None:
    opened = open_model(tiny_bfloat16(family))
    stored = stored_tensors(tiny_bfloat16(family))
    model = loaded_lossless(opened)
    shapes = [(matrix.outputs, matrix.columns) for matrix in matrices_in(model._hf_model)]
    assert tuple(shapes) == opened.shape.dense
    others = {
        "lfm2_moe": "2.self_attn.out_proj",
        "granitemoehybrid": "2.self_attn.o_proj",
        "nemotron_h": "2.mixer.o_proj",
        "kimi_linear": "2.self_attn.o_proj",
        "bailing_hybrid": "2.self_attn.o_proj",
        "deepseek_v4": "0.self_attn.o_b_proj",
    }
    attention = others.get(family, "0.self_attn.o_proj")
    assert {"lm_head", f"model.layers.{attention}"} <= set(model.dense)
    for name, layer in model.dense.items():
        tied = name == "lm_head" and opened.shape.tied
        module = "model.embed_tokens" if tied else name
        words = stored[f"{module}.weight"]
        assert torch.equal(layer.exact.words(), words)
        record = dense_ops.encode_dense(words)
        # Latent attention multiplies parts of it by other rows than a dense layer's, or files have
        # parts of it.
        plain = name.endswith(("kv_b_proj", "gate_up_proj"))
        packed = words.nbytes if plain else record.nbytes
        assert layer.exact.nbytes == min(packed, words.nbytes)
        bias = stored.get(f"{name}.bias")
        assert (layer.bias is None) == (bias is None)
        assert bias is None or torch.equal(layer.bias, bias)  # type: ignore[arg-type]
    names = [name for name, _ in model._hf_model.named_parameters() if not LEFT.search(name)]
    # Biases of experts are no matrices, and DeepSeek-V4's o_a_proj is one for each group of heads.
    beside = ("_bias", "o_a_proj.weight")
    assert [name for name in names if "proj" in name and not name.endswith(beside)] == []
    opened.close()


def test_a_tied_head_shares_the_record_of_the_embedding(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", "olmoe", torch.bfloat16, tie_word_embeddings=True)
    opened = open_model(path)
    model = loaded_lossless(opened)
    head, embedding = model.dense["lm_head"], model.body.embed_tokens
    assert isinstance(embedding, DenseEmbedding) and isinstance(head.exact, RecordMatrix)
    assert embedding.table is head.exact
    assert len(model.dense_sizes) == len(opened.shape.dense) == 1 + 3 * 4
    assert opened.shape.tied
    saved = sum(2 * rows * columns for rows, columns in opened.shape.dense) - sum(model.dense_sizes)
    assert saved > 0
    assert model.nbytes == opened.shape.resident_bytes(torch.bfloat16) - saved
    opened.close()


def test_words_and_records_that_lie_beside_one_another_are_counted(
    monkeypatch: pytest.MonkeyPatch, tiny_bfloat16: Folder
) -> None:
    """By one thread: every matrix is asked for once, and the largest first."""
    opened = open_model(tiny_bfloat16("qwen2_moe"))
    asked: list[int] = []
    encode = dense_ops.encode_dense

    def watched(words: Tensor, prepare: Callable[[Tensor], None]) -> Tensor:
        asked.append(words.nbytes)
        return encode(words, prepare=prepare)

    monkeypatch.setattr(dense_ops, "encode_dense", watched)
    sizes = loaded_lossless(opened, threads=1).dense_sizes
    words = [2 * rows * columns for rows, columns in opened.shape.dense]
    assert asked == sorted(words, reverse=True)
    form = DenseForm("lossless", tuple(sizes), tuple(words))
    order = sorted(range(len(words)), key=lambda at: -words[at])
    held, most = 0, 0
    for at in order:
        most = max(most, held + words[at] + sizes[at])
        held += sizes[at]
    assert form.loading_bytes(1, 0) == max(0, most - sum(sizes))
    assert form.loading_bytes(2, 0) > form.loading_bytes(1, 0)
    # Stored in another dtype, words of all exist at once.
    assert form.loading_bytes(1, 4 * sum(words)) == 4 * sum(words) + sum(words) - sum(sizes)
    assert DenseForm.raw(opened.shape.dense, 2).loading_bytes(1, 77) == 77
    opened.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_records_that_were_not_read_yet_are_loaded_in_what_is_planned(threads: int) -> None:
    """A plan counts them without an escape, and real ones have some."""
    shapes = [(16384, 2048), (16384, 2048), *[(2048, 2048)] * 24]
    planned = DenseForm.least("lossless", shapes, 2)
    weights = [rows * columns for rows, columns in shapes]
    real = [each * 11.39 / 8 for each in weights]
    peak = max(
        sum(real[:at]) + sum(2 * weights[each] + real[each] for each in range(at, at + threads))
        for at in range(len(shapes) - threads + 1)
    )
    assert peak <= planned.nbytes + planned.loading_bytes(threads, 0) < 1.01 * peak


def test_memory_that_is_held_is_what_is_planned(tiny_bfloat16: Folder) -> None:
    model = tiny_bfloat16("glm4_moe_lite")
    smallest, demand = two_slot_budget(model, 64, "bfloat16", 0, draft="none")
    slots, saved = {}, {}
    for dense in ("raw", "lossless"):
        generator = Generator.from_pretrained(
            model, smallest, draft="none", codec="raw", dense=dense, context_length=64
        )
        runtime = generator.runtime
        assert runtime.plan.items["non_expert_weights"] == runtime.model.nbytes
        slots[dense] = runtime.plan.slots
        saved[dense] = demand.non_expert_bytes - runtime.model.nbytes
        generator.close()
    assert (slots["raw"], saved["raw"]) == (2, 0)
    assert slots["lossless"] == 2 + saved["lossless"] // demand.slot_bytes > 2


def test_prompts_restore_one_matrix_at_a_time(tiny_bfloat16: Folder) -> None:
    """The largest of a layer; the head's only where it scores many."""
    opened = open_model(tiny_bfloat16("qwen3_moe"))
    raw = ModelSpec.of_model("model", opened, "auto")
    compact = raw.with_dense("lossless")
    budget = Budget(1 << 24, 64, on_cpu=True, longest_draft=64)
    way = candidates_of(raw, on_cpu=True)[0]
    drafting = replace(way, drafter="ngram")

    def more(rows: int, held: ResidencyPlan) -> int:
        made, plain = (demand_of(each, held, budget) for each in (compact, raw))
        return made.workspace(rows, 64) - plain.workspace(rows, 64)

    head, *body = opened.shape.dense
    few = ops.MAX_LINEAR_ROWS
    assert more(few, way) == 0
    assert more(few + 1, way) == 2 * max(
        rows * columns for rows, columns in body if rows != head[0]
    )
    assert more(17, drafting) == 2 * head[0] * head[1]
    opened.close()


# Choosing.


@pytest.fixture
def small(tiny_bfloat16: Folder) -> Iterator[ModelSpec]:
    opened = open_model(tiny_bfloat16("qwen3_moe"))
    yield ModelSpec.of_model("model", opened, "auto")
    opened.close()


def room(budget_bytes: int, on_cpu: bool = True) -> MemoryContext:
    budget = Budget(budget_bytes, 64, on_cpu)
    return MemoryContext(budget, partial(candidates_of, on_cpu=on_cpu))


def refused() -> DenseTrial:
    raise AssertionError("nothing is to be measured")


def unexpected(_: ModelSpec) -> float:
    raise AssertionError("nothing is to be weighed")


def took(lossless_s: float) -> Callable[[], DenseTrial]:
    return lambda: DenseTrial(1.0, lossless_s, 0.7)


ROOMY, SCARCE = 64 << 20, 600 << 10


@pytest.mark.parametrize(
    ("slower", "wanted"), [(0.8, "lossless"), (1.02, "lossless"), (1.1, "raw")]
)
def test_auto_measures_where_there_is_room(small: ModelSpec, slower: float, wanted: str) -> None:
    made = choose_dense_form(small, "auto", room(ROOMY), took(slower), unexpected)
    assert made.dense.name == wanted


def test_auto_saves_memory_where_it_is_short(small: ModelSpec) -> None:
    def form(budget_bytes: int, trial: Callable[[], DenseTrial] | None) -> str:
        return choose_dense_form(small, "auto", room(budget_bytes), trial, unexpected).dense.name

    assert form(SCARCE, None) == "lossless"
    assert form(SCARCE, took(1.02)) == "lossless"
    assert form(ROOMY, None) == "raw"


@pytest.mark.parametrize(("words_s", "wanted"), [(0.2, "lossless"), (0.05, "raw")])
def test_auto_weighs_slower_products_against_memory(
    small: ModelSpec, words_s: float, wanted: str
) -> None:
    seen: list[ModelSpec] = []

    def expected_s(form: ModelSpec) -> float:
        seen.append(form)
        return words_s if form.dense.name == "raw" else 0.1

    made = choose_dense_form(small, "auto", room(SCARCE), took(1.4), expected_s)
    assert made.dense.name == wanted
    assert {form.dense.name for form in seen} == {"raw", "lossless"}
    # The bytes that a pass reads of records count for those of words, times 1.4.
    [coded] = [form for form in seen if form.dense.name == "lossless"]
    embedding = coded.dense.sizes[0]
    other = coded.non_expert_bytes - coded.dense.nbytes
    records = coded.dense.nbytes - embedding
    assert coded.dense_byte_cost == pytest.approx(2.0)
    assert coded.pass_bytes.fixed_bytes == other + 2 * records


def test_auto_takes_records_where_words_do_not_fit(small: ModelSpec) -> None:
    coded = small.with_dense("lossless")
    least = next(kib for kib in range(600) if room(kib << 10).fits(coded)) << 10
    assert not room(least).fits(small)
    made = choose_dense_form(small, "auto", room(least), took(1.4), unexpected)
    assert made.dense.name == "lossless"


@pytest.mark.parametrize(("wants_draft", "wanted"), [(True, "lossless"), (False, "raw")])
def test_auto_takes_records_where_a_draft_that_is_asked_for_has_no_room_beside_words(
    small: ModelSpec, wants_draft: bool, wanted: str
) -> None:
    coded = small.with_dense("lossless")
    budgets = [replace(room(kib << 10), wants_draft=wants_draft) for kib in range(1000)]
    least = next(each for each in budgets if each.holds_draft(coded))
    assert not least.holds_draft(small)
    assert least.fits(small)

    def words_win(form: ModelSpec) -> float:
        return 0.1 if form.dense.name == "raw" else 0.2

    made = choose_dense_form(small, "auto", least, took(1.4), words_win)
    assert made.dense.name == wanted


def test_auto_keeps_words_without_a_fast_kernel(
    small: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "speq")
    monkeypatch.setitem(library.MISSING, "cuda", "torch sees no CUDA device")
    made = choose_dense_form(small, "auto", room(SCARCE, on_cpu=False), refused, unexpected)
    assert made.dense.name == "raw"
    assert "no fast kernel here (torch sees no CUDA device)" in caplog.text
    monkeypatch.setitem(library.MISSING, "cpu", "it was not built")
    assert choose_dense_form(small, "auto", room(SCARCE), refused, unexpected).dense.name == "raw"
    assert "no fast kernel here (it was not built)" in caplog.text


def test_forms_that_there_are_none_of_are_refused(small: ModelSpec) -> None:
    wide = replace(small, dtype=torch.float32).with_dense("raw")
    assert choose_dense_form(wide, "auto", room(SCARCE), refused, unexpected).dense.name == "raw"
    with pytest.raises(SpeqError, match=r"^dense lossless codes bf.* float32; use dense raw$"):
        choose_dense_form(wide, "lossless", room(ROOMY), refused, unexpected)
    bare = replace(small, dense_draft=DenseDraft({}))
    with pytest.raises(SpeqError, match=r"^dense residual .* no such draft; use dense lossless$"):
        choose_dense_form(bare, "residual", room(ROOMY), refused, unexpected)


def test_a_run_refuses_before_it_loads(tiny: Folder) -> None:
    config = RunConfig.of("8MiB", dense="lossless")
    opened = open_model(tiny("qwen3_moe"))
    with pytest.raises(SpeqError, match="dense lossless codes bfloat16"):
        load(opened, config)
    opened.close()


def test_a_trial_times_one_matrix_in_copies(tiny_bfloat16: Folder) -> None:
    opened = open_model(tiny_bfloat16("qwen3_moe"))
    ticks = iter([0.0, 64.0, 96.0] * 3)
    limit = 1 << 30
    names = opened.family.names
    made = DenseTrial.of(opened.checkpoint, names.is_expert, limit, lambda: next(ticks))
    opened.close()
    assert (made.raw_s, made.lossless_s) == (1.0, 0.5)
    assert made.pays


def test_plans_count_usual_records(tiny_bfloat16: Folder) -> None:
    model = tiny_bfloat16("qwen3_moe")
    found = {}
    for dense in ("raw", "lossless"):
        made = plan(model, "2MiB", dense=dense, preset="laptop-ddr5", device="cpu").to_dict()
        assert made["dense"] == dense
        found[dense] = made["items"]["non_expert_weights"]
    words = sum(2 * rows * columns for rows, columns in open_model(model).shape.dense)
    assert 0.2 * words < found["raw"] - found["lossless"] < 0.31 * words


# Records that are too large for a GPU's kernels.

LARGE = [(1_600_000, 1024), (64, 70_000), (300, 1024)]


def test_no_record_is_planned_that_a_gpu_does_not_take() -> None:
    """A record of 2.1 GiB, one of too many columns, and a usual one."""
    words = tuple(2 * rows * columns for rows, columns in LARGE)
    on_gpu = DenseForm.usual("lossless", LARGE, 2, KERNELS["cuda"]).sizes
    assert on_gpu[:2] == words[:2]
    assert on_gpu[2] < words[2]
    on_cpu = DenseForm.usual("lossless", LARGE, 2, KERNELS["cpu"]).sizes
    assert all(record < whole for record, whole in zip(on_cpu, words, strict=True))
    assert on_cpu[0] > (1 << 31) > KERNELS["cuda"].max_record_bytes
    assert on_cpu[2] == on_gpu[2]


@pytest.mark.wide
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_words_stay_where_a_gpu_takes_no_record(
    packed: bool, tmp_path: Path, tiny_bfloat16: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest matrices, by a limit that small models reach; and the plan knows it."""
    model = tiny_bfloat16("olmoe")
    if packed:
        pack_to(model, tmp_path / "packed", codec="lossless").close()
        model = tmp_path / "packed"
    opened = open_model(model)
    words = [2 * rows * columns for rows, columns in opened.shape.dense]
    opened.close()
    with host_device():
        kernels = replace(library.KERNELS["cuda"], max_record_bytes=max(words) // 2)
        monkeypatch.setitem(library.KERNELS, "cuda", kernels)
        tokens = {}
        for dense in ("raw", "lossless"):
            generator = Generator.from_pretrained(
                model, "64MiB", device="cuda", dense=dense, draft="none", packed_copy="none"
            )
            runtime = generator.runtime
            made = generator.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
            tokens[dense], sizes = made.token_ids, runtime.model.dense_sizes
            planned, held = runtime.plan.items["non_expert_weights"], runtime.model.nbytes
            generator.close()
    assert planned == held
    assert tokens["raw"] == tokens["lossless"]
    large = [size for size, whole in zip(sizes, words, strict=True) if whole == max(words)]
    assert large == [max(words)] * 2  # the embedding and the head
    assert sum(sizes) < sum(words)
