"""Passes that are recorded as graphs: the same numbers, from fixed memory."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.config import RunConfig
from speq.devices.device import Cut, Processor
from speq.engine.draft import Draft
from speq.engine.draft_pass import EagerPass, RecordedPass
from speq.engine.drafters.int4 import Int4Drafter
from speq.engine.verification import EagerVerification, RecordedVerification
from speq.layers.draft_experts import DraftExperts
from speq.load import Loaded, load
from speq.models import recorded as graphs
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.opened import open_model
from speq.models.packed_batch import BatchSpan, SequenceTokens
from speq.models.recorded import recording_device
from speq.routing import Route
from tests.helpers.host_device import host_device
from tests.helpers.host_graph import HostGraph, capture
from tests.helpers.tiny_models import BY_WALKED, WITH_STATES, greedy_tokens, load_plain, write_model

CPU = torch.device("cpu")
TEXT = [7, 21, 200, 3, 90, 41, 5, 17, 133, 64, 2, 77]
CAPACITY = 24
BUCKET = 8
# States are cut back by the host: no graph holds a pass with them.
WITH_ENTRIES = [each for each in BY_WALKED if each.values[0] not in WITH_STATES]
# Two ways to one number, which sum in different orders.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class DoneEvent:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainStream:
    """Copies at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self) -> DoneEvent:
        return DoneEvent()


class Recorder:
    """The processor, as a device that records graphs.

    captured  graphs so far
    """

    def __init__(self) -> None:
        self.torch = CPU
        self.compute = PlainStream()
        self.captured: list[HostGraph] = []

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def capture(self, run: Callable[[Cut], None], beside: Any = None) -> HostGraph:
        self.captured.append(capture(run, CPU, beside))
        return self.captured[-1]


@pytest.fixture(autouse=True)
def passes_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched here stands for what a device launches, which is transformers' own pass."""
    monkeypatch.setattr("speq.models.moe_model.install_fused_decoder", lambda *_, **__: None)
    monkeypatch.setattr("speq.models.moe_model.attention_on", lambda _, each: each.attention_by)


@dataclass(frozen=True, slots=True)
class Ready:
    """A tiny model with a draft in memory, and two caches to run it over."""

    loaded: Loaded
    backend: DraftExperts
    plain: KVCache
    recorded: KVCache

    @property
    def model(self) -> MoEModel:
        return self.loaded.model

    def graphs(self, device: Recorder) -> RecordedPass:
        return RecordedPass(self.model, self.recorded, self.backend, device)  # type: ignore[arg-type]


@contextmanager
def ready(path: Path, **options: Any) -> Iterator[Ready]:
    opened = open_model(path)
    # INT4 products round their inputs: a last bit of attention may turn a tie, and makes a large
    # difference then. In float64 it is too small for that.
    given = {"dtype": "float64", "device": "cpu", "draft_dense": "none"}
    config = RunConfig.of("32MiB", 4, **given, **options)
    loaded = load(opened, config)
    assert loaded.draft_backend is not None
    caches = [opened.shape.cache(CAPACITY, torch.float64, CPU) for _ in range(2)]
    yield Ready(loaded, loaded.draft_backend, caches[0], caches[1])
    opened.close()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BUCKET", BUCKET)


class Told:
    """Routes as they are told, kept."""

    def __init__(self) -> None:
        self.routes: list[tuple[int, list[int], Tensor]] = []

    def __call__(self, layer: int, route: Route) -> None:
        self.routes.append((layer, route.topk_ids.tolist(), route.topk_weights.clone()))


def behind(cache: KVCache, pending_id: int, draft: Draft) -> list[SequenceTokens]:
    return [SequenceTokens(cache, [pending_id, *draft.token_ids], draft.tree)]


def compare(made: Ready, recorded: RecordedPass, token_id: int) -> None:
    """One token by both: logits, and routes of all layers in their order."""
    wanted, got = Told(), Told()
    eager = EagerPass(made.model, made.backend)
    logits = eager.run(behind(made.plain, token_id, Draft()), wanted)
    found = recorded.run(behind(made.recorded, token_id, Draft()), got)
    torch.testing.assert_close(found, logits, **CLOSE)
    assert [route[:2] for route in got.routes] == [route[:2] for route in wanted.routes]
    for (_, _, weights), (_, _, expected) in zip(got.routes, wanted.routes, strict=True):
        torch.testing.assert_close(weights, expected, **CLOSE)


def compare_entries(made: Ready, length: int) -> None:
    for got, wanted in zip(made.recorded.tensors(), made.plain.tensors(), strict=True):
        torch.testing.assert_close(got[:, :, :length], wanted[:, :, :length], **CLOSE)


def compare_caches(made: Ready, length: int) -> None:
    for got, wanted in zip(made.recorded.tensors(), made.plain.tensors(), strict=True):
        torch.testing.assert_close(got[:, :, :length], wanted[:, :, :length], **CLOSE)
        assert not got[:, :, length:].any()  # nothing was written behind


@pytest.mark.parametrize("family", WITH_ENTRIES)
def test_graphs_give_what_launched_passes_give(family: str, tiny: Callable[[str], Path]) -> None:
    """Token by token over three buckets, the last one no longer than the cache."""
    device = Recorder()
    with ready(tiny(family)) as made:
        recorded = made.graphs(device)
        for at in range(18):
            compare(made, recorded, TEXT[at % len(TEXT)])
            made.plain.advance(1)
            made.recorded.advance(1)
            compare_caches(made, at + 1)
        assert recorded.passes.shapes == [(1, 8), (1, 16), (1, 24)]
        assert len(device.captured) == 3


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 4), ("deepseek_v3", 1)])
def test_graphs_of_drafts_with_some_experts(
    family: str, count: int, tiny: Callable[[str], Path]
) -> None:
    """The host has no part in what rows choose again."""
    device = Recorder()
    with ready(tiny(family), draft_experts=count) as made:
        assert not made.backend.whole
        recorded = made.graphs(device)
        for token_id in TEXT[:6]:
            compare(made, recorded, token_id)
            made.plain.advance(1)
            made.recorded.advance(1)
        assert len(device.captured) == 1


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        ),
    ],
    ids=["one window", "a window in some layers"],
)
def test_windows_of_graphs_move_on(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    with ready(write_model(tmp_path / family, family, **overrides)) as made:
        recorded = made.graphs(Recorder())
        for token_id in TEXT:
            compare(made, recorded, token_id)
            made.plain.advance(1)
            made.recorded.advance(1)
        compare_caches(made, len(TEXT))


def test_drafts_are_rewound_and_run_again(tiny: Callable[[str], Path]) -> None:
    """Forgotten entries lie behind the position and are not seen, across a bucket's end as well."""
    device = Recorder()
    with ready(tiny("mixtral")) as made:
        recorded = made.graphs(device)
        caches = (made.plain, made.recorded)
        for token_id in TEXT[:6]:
            compare(made, recorded, token_id)
            for cache in caches:
                cache.advance(1)
        for other in (50, 60, 70):
            for token_id in (other, other + 1, other + 2, other + 3):
                compare(made, recorded, token_id)
                for cache in caches:
                    cache.advance(1)
            for cache in caches:
                cache.rewind(4)
        assert len(device.captured) == 2


class Counted:
    """A bank that is told by the host when a layer's experts are asked for.

    What it answers depends on rows and routes, and rounds nothing: INT4 experts would make last
    bits large differences. It is never close to 0, since norms behind it would do the same.
    """

    drafts = True

    def __init__(self) -> None:
        self.routes: list[tuple[int, list[list[int]]]] = []

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self.routes.append((layer, route.topk_ids.tolist()))
        return hidden_states * (2 + (route.topk_ids * route.topk_weights).sum(1, True).sin()) / 16


@pytest.mark.parametrize("family", WITH_ENTRIES)
def test_verifications_are_recorded_between_their_experts(
    family: str, tiny: Callable[[str], Path]
) -> None:
    """Chains of several lengths, some kept in part, over the end of a bucket and at the cache's."""
    device = Recorder()
    with ready(tiny(family)) as made:
        told, wanted = Counted(), Counted()
        eager = EagerVerification(made.model, wanted)
        recorded = RecordedVerification(made.model, made.recorded, told, device)  # type: ignore[arg-type]
        length = 0
        for drafted, kept in ((3, 2), (0, 1), (3, 4), (3, 1), (1, 2), (3, 4), (3, 2), (3, 4)):
            draft = Draft.chain([(7 * length + 31 * at) % 250 for at in range(drafted)])
            (scores,) = eager.score(behind(made.plain, TEXT[length % 12], draft))
            (got,) = recorded.score(behind(made.recorded, TEXT[length % 12], draft))
            torch.testing.assert_close(got.logits, scores.logits, **CLOSE)
            torch.testing.assert_close(got.features, scores.features, **CLOSE)
            assert told.routes == wanted.routes
            for cache in (made.plain, made.recorded):
                cache.advance(kept)
            length += kept
        compare_entries(made, length)
        shapes = [(4, 8), (1, 8), (4, 16), (2, 16), (4, 24)]
        assert sorted(recorded.passes.shapes) == sorted(shapes)
        # Five recordings asked no bank for anything.
        assert len(told.routes) == 8 * made.model.num_moe_layers
        assert len(device.captured) == len(shapes)


def test_what_is_no_number_does_not_outlive_an_interrupt(tiny: Callable[[str], Path]) -> None:
    """Of a pass that ended half way, in entries that recorded passes run over."""
    expected = greedy_tokens(load_plain(tiny("olmoe")), TEXT[:4], 3)
    with host_device():
        generator = Generator.from_pretrained(
            tiny("olmoe"), "16MiB", device="cuda", dtype="float32", draft_length=2
        )
        generator.reserve(24)
        engine = generator.runtime.engine
        with pytest.raises(KeyboardInterrupt), engine.invalidate_on_error():
            engine.caches[0].layers[0].values.fill_(float("nan"))
            raise KeyboardInterrupt
        result = generator.generate(TEXT[:4], max_new_tokens=3, ignore_eos=True)
        assert generator.runtime.engine is engine
        generator.close()
    assert result.token_ids == expected


class Steps:
    """A graph of the host's work alone, and a device that makes such."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()

    def capture(self, run: Callable[[Cut], None], beside: Any = None) -> "Steps":
        made = Steps()
        run(made.steps.append)
        return made


def test_memory_of_graphs_is_given_back_at_once(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arenas are laid out anew in it: nothing waits for the garbage collector."""
    device = Recorder()
    monkeypatch.setattr(device, "capture", Steps().capture)
    with ready(tiny("olmoe")) as made:
        draft = made.graphs(device)
        verification = RecordedVerification(made.model, made.recorded, made.backend, device)  # type: ignore[arg-type]
        pending = behind(made.recorded, 3, Draft())
        gc.disable()
        try:
            kept = [
                weakref.ref(draft.run(pending, lambda layer, route: None)),
                weakref.ref(verification.score(pending)[0].logits),
                *(weakref.ref(each.passes) for each in (draft, verification)),
            ]
            assert all(ref() is not None for ref in kept)
            del draft, verification
            assert [ref() for ref in kept] == [None] * 4
        finally:
            gc.enable()


def test_trees_are_launched(tiny: Callable[[str], Path]) -> None:
    device = Recorder()
    with ready(tiny("olmoe")) as made:
        eager = EagerVerification(made.model, made.backend)
        recorded = RecordedVerification(made.model, made.recorded, made.backend, device)  # type: ignore[arg-type]
        tree = Draft([5, 6, 7], [0, 0, 1])
        (got,) = recorded.score(behind(made.recorded, 3, tree))
        (wanted,) = eager.score(behind(made.plain, 3, tree))
        assert torch.equal(got.logits, wanted.logits)
        assert device.captured == []


def test_the_graphs_used_last_are_kept(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all use the memory of the first: what one leaves there is nothing to the others."""
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    device = Recorder()
    with ready(tiny("olmoe")) as made:
        recorded = made.graphs(device)
        kept = []
        for length in (0, 9, 1, 17, 2, 10):
            made.plain.length = made.recorded.length = length
            compare(made, recorded, 33)
            kept.append([seen for _, seen in recorded.passes.shapes])
        assert kept == [[8], [8, 16], [16, 8], [8, 24], [24, 8], [8, 16]]
        assert len(device.captured) == 4
        assert all(graph.beside is device.captured[0].beside for graph in device.captured)


def test_a_length_that_python_knows_is_caught(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of the usual pass goes on writing where it was recorded."""

    def usual(self: MoEModel, backend: Any, cache: KVCache, token: Tensor, *_: Any) -> Tensor:
        positions, mask = self._seen(BatchSpan(cache, 0, 1, None))
        return self._run(backend, cache, token, positions, self._masks(mask))

    monkeypatch.setattr(MoEModel, "forward_at", usual)
    with ready(tiny("qwen3_moe")) as made:
        recorded = made.graphs(Recorder())
        compare(made, recorded, TEXT[0])
        for cache in (made.plain, made.recorded):
            cache.advance(1)
        with pytest.raises(AssertionError):
            compare(made, recorded, TEXT[1])


@pytest.mark.parametrize(
    "read",
    [
        lambda hidden: hidden.sum().item(),
        lambda hidden: hidden[hidden > 0],
        lambda hidden: bool(hidden.isnan().any()),
        lambda hidden: hidden.nonzero(),
    ],
    ids=["item", "mask", "bool", "nonzero"],
)
def test_a_read_in_the_pass_cannot_be_recorded(
    read: Callable[[Tensor], object],
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The recording fails; drafts go on without it and say so once."""
    with ready(tiny("qwen2_moe")) as made:
        kernel = made.backend.kernel

        def reading(hidden_states: Tensor, *rest: Any) -> Tensor:
            read(hidden_states)
            return kernel(hidden_states, *rest)

        monkeypatch.setattr(made.backend, "kernel", reading)
        device = Recorder()
        recorded = made.graphs(device)
        with caplog.at_level(logging.WARNING, "speq"):
            for token_id in TEXT[:3]:
                compare(made, recorded, token_id)
                for cache in (made.plain, made.recorded):
                    cache.advance(1)
        [message] = caplog.messages
        assert message.startswith("drafts run without graphs: recording one failed: aten.")
        assert message.endswith(" while a graph is recorded")
        assert recorded.passes.shapes == device.captured == []


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("qwen2_moe", "auto"),
        pytest.param("mixtral", "auto", marks=pytest.mark.full),
        pytest.param("deepseek_v2", "auto", marks=pytest.mark.wide),
        pytest.param("mixtral", "none", marks=pytest.mark.full),
    ],
)
def test_recorded_drafts_give_the_exact_tokens(
    family: str, graphs: str, tiny: Callable[[str], Path]
) -> None:
    """On a device of the host's making, by the kernels of a GPU, over two buckets."""
    expected = greedy_tokens(load_plain(tiny(family)), TEXT, 10)
    with host_device() as device:
        generator = Generator.from_pretrained(
            tiny(family), "16MiB", device="cuda", dtype="float32", draft_length=3, graphs=graphs
        )
        result = generator.generate(TEXT, max_new_tokens=10, ignore_eos=True)
        drafter = generator.runtime.engine.drafters[0]
        verification = generator.runtime.engine.verification
        planned = generator.runtime.plan.items
        generator.close()
    assert result.token_ids == expected
    assert result.stats["acceptance_rate"] > 0.1
    assert isinstance(drafter, Int4Drafter)
    assert ("graphs" in planned) == (graphs == "auto")
    if graphs == "auto":
        assert isinstance(drafter.draft_pass, RecordedPass)
        assert isinstance(verification, RecordedVerification)
        assert (4, 24) in verification.passes.shapes
        assert drafter.draft_pass.passes.shapes == [(1, 16), (1, 24)]
    else:
        assert isinstance(drafter.draft_pass, EagerPass)
        assert isinstance(verification, EagerVerification)
    # Nobody reads the device from within a recorded pass, or from a launched one.
    assert not [read for read in device.reads if "draft_pass.py" in read[1]]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_the_host_looks_at_are_not_recorded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factors = [1.0] * 8
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": factors, "long_factor": factors}
        rope["original_max_position_embeddings"] = 512
    path = write_model(tmp_path / "model", "mixtral", rope_parameters=rope, head_dim=16)
    device: Any = Recorder()
    with ready(path) as made, caplog.at_level(logging.WARNING, "speq"):
        assert recording_device("auto", device, made.model) is None
        assert [message for message in caplog.messages if "graphs" in message] == [
            f"passes run without graphs: rotary embeddings of type {kind} look at positions on the "
            "host"
        ]


def test_phimoe_is_not_recorded(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A graph of it would fail: its class makes frequencies on the host and copies them."""
    with ready(tiny("phimoe")) as made:
        device: Any = Recorder()
        assert recording_device("auto", device, made.model) is None
        assert caplog.messages[-1] == (
            "passes run without graphs: rotary embeddings of family phimoe make their frequencies "
            "on the host"
        )


def test_who_records(tiny: Callable[[str], Path]) -> None:
    device: Any = Recorder()
    with ready(tiny("mixtral")) as made:
        assert recording_device("auto", device, made.model) is device
        assert recording_device("none", device, made.model) is None
        assert recording_device("auto", Processor(), made.model) is None
        assert made.loaded.graphs_on is None
