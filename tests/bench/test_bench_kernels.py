"""`speq bench kernels`: what it counts and refuses, on a tiny layer and with a false clock."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speq.bench.machine import kernels as bench
from speq.bench.machine.expert_layer import Layer, LayerShape
from speq.bench.machine.kernels import Settings
from speq.errors import SpeqError
from speq.kernels import library, ops
from speq.measure import memory_read
from speq.measure.memory_read import MemoryRead, step_times
from tests.helpers.command import Command
from tests.helpers.told import Told

CPU = torch.device("cpu")
TINY = LayerShape("tiny", hidden_size=64, expert_width=32, top_k=2, num_experts=8)
GROUP_SIZE = 16
# By hand: 3 matrices of 64 x 32; in bfloat16, and as codes of 4 bits with a 16-bit scale to 16.
EXACT_BYTES = 3 * 64 * 32 * 2
INT4_BYTES = 3 * (64 * 32 // 2 + 64 * 32 // 16 * 2)
READ_BYTES = 1 << 16
KEYS = {
    "kernel",
    "shape",
    "T",
    "K",
    "E",
    "experts_held",
    "distinct_experts",
    "dtype",
    "backend",
    "time_s",
    "gb_per_s",
    "bandwidth_share",
}
SETTINGS = Settings(
    shapes=["tiny"],
    rows=[1, 3],
    kernels=list(bench.KERNELS),
    group_size=GROUP_SIZE,
    device="cpu",
    rounds=3,
    reference=True,
)

native_cpu = pytest.mark.skipif(library.MISSING["cpu"] is not None, reason="no native CPU kernels")


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    monkeypatch.setitem(bench.READ_BYTES, "cpu", READ_BYTES)
    monkeypatch.setattr(bench, "MAX_CALLS", 4)


def clock_of(*durations_s: float) -> Callable[[], float]:
    """A clock whose times between calls repeat."""

    def marks() -> Iterator[float]:
        now = 0.0
        while True:
            for duration_s in durations_s:
                yield now
                now += duration_s

    return marks().__next__


def run(settings: Settings, **options: Any) -> list[dict[str, Any]]:
    return bench.run(settings, **options).rows


def test_a_row_for_each_shape_rows_and_kernel() -> None:
    rows = run(SETTINGS)
    assert all(set(row) == KEYS for row in rows)
    assert [(row["T"], row["kernel"]) for row in rows] == [
        (count, kernel) for count in (1, 3) for kernel in bench.KERNELS
    ]
    for row in rows:
        assert (row["shape"], row["K"], row["E"], row["experts_held"]) == ("tiny", 2, 8, 8)
        assert row["dtype"] == "bfloat16"
        assert min(row["time_s"], row["gb_per_s"], row["bandwidth_share"]) > 0
        op = bench.KERNELS[row["kernel"]]
        assert row["backend"] == (library.backend_of(op, "cpu").name if op else "torch")
        # Three rows of two experts name from two to six.
        assert row["distinct_experts"] == 2 if row["T"] == 1 else 2 < row["distinct_experts"] < 6


@pytest.mark.parametrize(
    ("kernel", "one"),
    [
        ("moe_int4", INT4_BYTES),
        ("moe_int4_unfused", INT4_BYTES),
        ("moe_grouped", EXACT_BYTES),
        ("torch", EXACT_BYTES),
    ],
)
def test_bytes_time_and_share(kernel: str, one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of known routes and times: reads of 2 s, rounds of 1 s, nothing between."""
    # Four calls a round, which name 2, 3, 4 and 2 experts.
    routes = [[[0, 1], [0, 1]], [[0, 1], [1, 2]], [[4, 5], [6, 7]], [[3, 2], [2, 3]]]
    monkeypatch.setattr(
        bench, "draw_routes", lambda calls, *_: torch.tensor(routes).repeat(calls // 4, 1, 1)
    )
    monkeypatch.setattr(bench, "READ_BYTES", {"cpu": 1 << 20})
    settings = replace(SETTINGS, rows=[2], kernels=[kernel], rounds=2)
    # Marks: before the read, after it, after the calls.
    (row,) = run(settings, clock=clock_of(2, 1, 0))
    distinct = (2 + 3 + 4 + 2) / 4
    assert row["distinct_experts"] == distinct
    assert row["time_s"] == 1 / 4
    assert row["gb_per_s"] == pytest.approx(distinct * one / (1 / 4) / 1e9)
    read_gb_per_s = (1 << 20) / 2 / 1e9
    assert row["bandwidth_share"] == pytest.approx(row["gb_per_s"] / read_gb_per_s)


def test_shares_are_of_the_read_of_the_same_round() -> None:
    """A machine at a third of its speed in one round, at half in another: shares stay the same."""
    settings = replace(SETTINGS, rows=[1], kernels=["moe_int4"], rounds=3)
    (slow,) = run(settings, clock=clock_of(2, 1, 0, 6, 3, 0, 4, 2, 0))
    (fast,) = run(settings, clock=clock_of(2, 1, 0))
    assert slow["bandwidth_share"] == pytest.approx(fast["bandwidth_share"])
    assert slow["time_s"] == 2 * fast["time_s"]  # the median of 1, 3 and 2


def test_median_of_shares_is_not_share_of_medians() -> None:
    """Reads of 1, 2 and 4 s, calls of 1 s: the share is that of the middle round."""
    settings = replace(SETTINGS, rows=[1], kernels=["moe_int4"], rounds=3)
    (row,) = run(settings, clock=clock_of(1, 1, 0, 4, 1, 0, 2, 1, 0))
    assert row["bandwidth_share"] == pytest.approx(row["gb_per_s"] * 1e9 / (READ_BYTES / 2))


def test_one_row_walks_through_all_experts() -> None:
    routes = bench.draw_routes(calls=5, rows=1, top_k=3, held=8)
    assert routes.shape == (5, 1, 3)
    assert routes.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6]


def test_more_rows_draw_distinct_experts_uniformly() -> None:
    routes = bench.draw_routes(calls=400, rows=4, top_k=3, held=8)
    assert routes.shape == (400, 4, 3)
    assert torch.equal(routes, bench.draw_routes(calls=400, rows=4, top_k=3, held=8))
    ids = routes.sort(dim=2).values
    assert bool((ids[..., 1:] > ids[..., :-1]).all())
    assert not torch.equal(ids[0], ids[1])
    counts = routes.flatten().bincount(minlength=8)
    # 600 each; five standard deviations of a binomial are about 100.
    assert len(counts) == 8
    assert bool(((counts - 600).abs() < 100).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compute_the_layer(dtype: str) -> None:
    """All are calls of the same layer: INT4 ones agree, and so do the exact ones."""
    layer = Layer(TINY, 8, frozenset({"exact", "int4"}), GROUP_SIZE, CPU)
    # Weights large enough that outputs say something.
    layer.exact[0].mul_(5)
    hidden_states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    hidden_states = hidden_states.to(getattr(torch, dtype))
    topk_ids = torch.tensor([[0, 5], [5, 1], [7, 2]])
    topk_weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]])
    outputs = {
        kernel: bench.call(kernel, layer, hidden_states, topk_ids, topk_weights)
        for kernel in bench.KERNELS
        if bench.FORMS[kernel] <= {"exact", "int4"}
    }
    exact = ops.combine(outputs["moe_grouped"], topk_weights, hidden_states.dtype)
    assert outputs["torch"].dtype == hidden_states.dtype
    scale = float(exact.abs().max())
    torch.testing.assert_close(outputs["torch"], exact, rtol=0, atol=0.03 * scale)
    scale = float(outputs["moe_int4"].abs().max())
    assert scale > 0
    torch.testing.assert_close(
        outputs["moe_int4"], outputs["moe_int4_unfused"], rtol=0, atol=0.03 * scale
    )


def test_compact_kernels_compute_the_first_expert() -> None:
    """Every record is of it."""
    layer = Layer(TINY, 8, bench.forms(list(bench.KERNELS)), GROUP_SIZE, CPU)
    hidden_states = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    topk_weights = torch.full((3, 2), 0.5)
    first, others = torch.zeros(3, 2, dtype=torch.int64), torch.tensor([[0, 5], [5, 1], [7, 2]])
    wanted = bench.call("moe_grouped", layer, hidden_states, first, topk_weights)
    assert bool(wanted.any(2).all())
    for kernel in ("moe_grouped_lossless", "moe_grouped_residual"):
        assert torch.equal(bench.call(kernel, layer, hidden_states, others, topk_weights), wanted)
    for kernel in (
        "moe_grouped_fp8",
        "moe_grouped_mxfp4",
        "moe_grouped_int4",
        "moe_grouped_nvfp4",
    ):  # of weights of their own
        wanted = bench.call(kernel, layer, hidden_states, first, topk_weights)
        assert bool(wanted.any(2).all())
        assert torch.equal(bench.call(kernel, layer, hidden_states, others, topk_weights), wanted)


def test_weights_that_no_kernel_reads_are_not_held() -> None:
    layer = Layer(TINY, 8, bench.forms(["moe_int4"]), GROUP_SIZE, CPU)
    int4 = [*layer.backend.gate_up, *layer.backend.down]
    assert sum(part.nbytes for part in int4) == 8 * INT4_BYTES
    assert sum(part.nbytes for part in layer.exact) == 0
    layer = Layer(TINY, 8, bench.forms(["torch"]), GROUP_SIZE, CPU)
    assert sum(part.nbytes for part in layer.exact) == 8 * EXACT_BYTES
    assert layer.backend.gate_up[0].numel() == 0


def test_calls_read_about_as_much_as_the_read() -> None:
    layer = Layer(TINY, 8, frozenset({"exact", "int4"}), GROUP_SIZE, CPU)
    two = 2 * EXACT_BYTES
    calls = [bench.calls_of("torch", layer, 1, GROUP_SIZE, two * n) for n in (0, 3, 1000)]
    assert calls == [bench.MIN_CALLS, 3, bench.MAX_CALLS]
    # 16 rows of two experts are at most all 8.
    assert bench.calls_of("torch", layer, 16, GROUP_SIZE, 8 * EXACT_BYTES * 3) == 3
    assert bench.calls_of("moe_int4", layer, 1, GROUP_SIZE, 2 * INT4_BYTES * 3) == 3


def test_little_memory_holds_fewer_experts() -> None:
    memory = 5 * (EXACT_BYTES + INT4_BYTES) + 1
    settings = replace(SETTINGS, memory=str(memory), rows=[1], kernels=["moe_int4"])
    told = Told()
    report = bench.run(settings, told)
    assert told.steps("measuring layers") == len(settings.shapes)
    assert [(row["experts_held"], row["E"]) for row in report.rows] == [(5, 8)]
    (note,) = (note for note in bench.notes(report) if note.startswith("tiny"))
    assert note == (
        f"tiny: 5 of 8 experts held, all that --memory {memory} has room for; routes name only "
        "those."
    )
    whole = bench.run(replace(settings, memory="6GiB"))
    assert not any(note.startswith("tiny") for note in bench.notes(whole))


def test_shapes_are_those_of_the_models() -> None:
    """Against figures of the models: parameters of all experts of a layer."""
    qwen = bench.SHAPES["qwen1.5-moe"]
    assert qwen.exact_bytes == 2 * 8_650_752
    assert qwen.int4_bytes(128) == 4_325_376 + 135_168
    assert bench.SHAPES["mixtral-8x7b"].weights == 176_160_768
    # By default, all layers are held whole.
    for shape in bench.SHAPES.values():
        assert bench.experts_held(shape, 6 << 30, 16) == shape.num_experts


def test_settings_say_how_it_was_measured() -> None:
    report = bench.run(replace(SETTINGS, rows=[1]))
    assert report.bench == "kernels"
    found = report.settings
    assert found["device"] == "cpu"
    assert found["threads"] == torch.get_num_threads()
    assert found["read_bytes"] == READ_BYTES
    assert found["rounds"] == 3
    assert found["isa"] == (library.isa() if library.MISSING["cpu"] is None else None)


@native_cpu
def test_isa_is_limited_for_the_run_alone() -> None:
    before = library.isa()
    report = bench.run(replace(SETTINGS, rows=[1], isa="portable"))
    assert report.settings["isa"] == "portable"
    assert library.isa() == before


BAD: list[tuple[dict[str, Any], str]] = [
    ({"shapes": ["gpt"]}, "shapes is 'gpt'; it must be one of qwen1.5-moe, "),
    ({"kernels": ["moe"]}, "kernels is 'moe'; it must be one of moe_int4, "),
    ({"rows": [1, 0]}, "rows is 0; it must be at least 1"),
    ({"rounds": -1}, "rounds is -1; it must be at least 1"),
    ({"dtype": "float64"}, "dtype is 'float64'; it must be one of bfloat16, float16, float32"),
    ({"device": "tpu"}, "device is 'tpu'"),
    ({"group_size": 0}, "group_size is 0; it must be at least 2"),
    ({"group_size": 3}, "group_size is 3; it must be even and divide the 64 and 32 columns"),
    ({"group_size": 64}, "group_size is 64; it must be even and divide"),
    ({"memory": "lots"}, "memory size 'lots' is not understood"),
    ({"memory": "50KB"}, "which holds 3 experts of tiny; at least 4 are needed: give "),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD)
def test_bad_settings(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError) as refused:
        run(replace(SETTINGS, **wrong))
    assert sentence in str(refused.value)


@native_cpu
def test_an_unknown_isa() -> None:
    before = library.isa()
    with pytest.raises(SpeqError, match=r"isa is 'mmx'; it must be one of .*portable"):
        run(replace(SETTINGS, isa="mmx"))
    assert library.isa() == before


def test_isa_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.MISSING, "cpu", "nobody built them")
    backend = library.Backend("reference", "nobody built them")
    monkeypatch.setattr(library, "backend_of", lambda op, device: backend)
    with pytest.raises(SpeqError, match="no native kernels: nobody built them"):
        run(replace(SETTINGS, isa="avx2"))


def test_more_than_is_left_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ("lossless", "residual", "fp8", "mxfp4", "published int4", "nvfp4")
    in_records = sum(TINY.most_bytes(form, GROUP_SIZE) for form in records)
    needed = READ_BYTES + 8 * (EXACT_BYTES + INT4_BYTES + in_records)
    monkeypatch.setattr("speq.devices.device.available_bytes", lambda: needed - 1)
    with pytest.raises(SpeqError, match=r"tiny needs .* are left; give less --memory than 6GiB"):
        run(SETTINGS)
    monkeypatch.setattr("speq.devices.device.available_bytes", lambda: needed)
    assert run(replace(SETTINGS, rows=[1]))


@pytest.mark.parametrize("op", ["linear_int4", "moe_int4", "moe_grouped", "read_sum"])
def test_the_reference_is_not_timed_unasked(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend_of(asked: str, device: str) -> library.Backend:
        assert device == "cpu"
        return library.Backend(*(("reference", "it rained") if asked == op else ("cpu", "avx2")))

    monkeypatch.setattr(library, "backend_of", backend_of)
    settings = replace(SETTINGS, rows=[1])
    with pytest.raises(SpeqError, match=f"{op} would run on the slow reference on cpu: it rained"):
        run(replace(settings, reference=False))
    slow = {row["kernel"] for row in run(settings) if row["backend"] == "reference"}
    assert slow == {kernel for kernel, needed in bench.KERNELS.items() if needed == op}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of calls, and calls that no graph can hold."""
    monkeypatch.setitem(bench.READ_BYTES, "cuda", 1 << 26)
    rows = run(replace(SETTINGS, device="cuda", rows=[1, 3, library.KERNELS["cuda"].max_rows + 1]))
    assert len(rows) == 3 * len(bench.KERNELS)
    for row in rows:
        assert row["time_s"] > 0 < row["bandwidth_share"]


def test_numbers_of_rows() -> None:
    assert Settings(rows="1, 2,16").rows == (1, 2, 16)  # type: ignore[arg-type]
    for text in ("", "1,two", "1.5"):
        with pytest.raises(SpeqError, match="must be whole numbers separated by commas"):
            Settings(rows=text)


def test_steps_are_timed_one_behind_the_other() -> None:
    order: list[str] = []
    steps = [lambda: order.append("read"), lambda: order.append("run")]
    assert step_times(steps, CPU, clock_of(5, 3, 0)) == [5, 3]
    assert order == ["read", "run"]


def test_a_read_reads_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    read_words: list[torch.Tensor] = []
    monkeypatch.setattr(
        memory_read.library, "call", lambda op, words, out: read_words.append(words)
    )
    read = MemoryRead(4096, CPU)
    read()
    assert read.nbytes == 4096 == read_words[0].nbytes
    # Pages that were written to.
    assert bool((read_words[0] == 1).all())


def test_the_command(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    arguments = [
        "bench", "kernels", "--shapes", "tiny", "--rows", "1, 2", "--kernels", "moe_int4,torch",
        "--group-size", 16, "--device", "cpu", "--rounds", 2, "--dtype", "float32",
        "--memory", "70KB", "--reference", "--json", target,
    ]  # fmt: skip
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    for title in ("shape", "kernel", "time ms", "GB/s", "share"):
        assert title in ended.out
    assert "share: of a plain read of 64 KiB, which ran at " in ended.out
    assert "tiny: 4 of 8 experts held, all that --memory 70KB has room for" in ended.out
    report = json.loads(target.read_text())
    assert [(row["T"], row["kernel"], row["dtype"]) for row in report["rows"]] == [
        (1, "moe_int4", "float32"),
        (1, "torch", "float32"),
        (2, "moe_int4", "float32"),
        (2, "torch", "float32"),
    ]

    before = target.read_bytes()
    ended = command(*arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {target} exists already; choose another name or add --force\n"
    assert target.read_bytes() == before
    assert command(*arguments, "--force").code == 0


def test_all_shapes_are_the_default(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings, **_: Any) -> None:
        raise SpeqError(f"{settings}")

    monkeypatch.setattr(bench, "run", refuse)
    ended = command("bench", "kernels")
    assert ended.err == f"error: {Settings()}\n"
    assert bench.spelt_out(Settings()) == Settings(
        list(bench.SHAPES), [1, 2, 4, 8, 16], list(bench.KERNELS)
    )
