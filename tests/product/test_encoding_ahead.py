"""A miss of published experts: each matrix is encoded while the next one is read."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import SpeqError
from speq.experts.codec import LosslessCodec, ResidualCodec, codec_of
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import SafetensorsExpertStore, expert_slot
from speq.experts.int4 import Int4Arena, Int4Layout
from speq.files.safetensors_file import SafetensorsFile
from speq.kernels.compact_ops import Part
from speq.models.opened import Opened, open_model
from tests.helpers.tiny_models import write_fused

ENCODERS = "speq-encode"
CODECS = ("lossless", "residual")
# What is encoded at a time, by how the matrices lie on disk.
ONE_BY_ONE, FUSED = [(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]
FORMS = {
    "qwen2_moe": ONE_BY_ONE,
    "qwen2_moe fused": FUSED,
    "qwen3_vl_moe": FUSED,  # transposed
    "gpt_oss": FUSED,  # transposed, gate and up interleaved
    "nemotron_h": FUSED,  # without a gate
}


@dataclass
class Encodings:
    """What codecs have encoded: parts, and the threads that did. before: called with each part"""

    before: Callable[[Part], object] = lambda part: None
    parts: list[tuple[int, int]] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    running: int = 0


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Encodings:
    """Encodings of parts, as the store has them made."""
    made = Encodings()
    for codec in (LosslessCodec, ResidualCodec):
        encode: Any = codec.encode

        def counted(
            self: Any, exact: Any, base: Any, slot: Tensor, *parts: Part, encode: Any = encode
        ) -> int:
            made.running += len(parts)
            for part in parts:
                made.before(part)
                made.parts.append(part[:2])
                made.threads.append(threading.current_thread().name)
            nbytes: int = encode(self, exact, base, slot, *parts)
            made.running -= len(parts)
            return nbytes

        monkeypatch.setattr(codec, "encode", counted)
    return made


@dataclass
class Published:
    """A model's store, experts encoded whole, and the store that encodes them while reading."""

    opened: Opened
    words: SafetensorsExpertStore
    store: EncodingStore

    @classmethod
    def of(cls, model: Path, codec_name: str = "lossless") -> "Published":
        opened = open_model(model)
        words = opened.store
        assert isinstance(words, SafetensorsExpertStore)
        codec = codec_of(codec_name, words.codec.shape)
        made = cls(opened, words, EncodingStore(words, codec))
        if codec.needs_draft:
            shape = words.codec.shape
            layout = Int4Layout(shape.hidden_size, shape.expert_width, gated=shape.gated)
            count = words.num_layers * words.num_experts
            arena = Int4Arena(layout, words.num_layers, words.num_experts, torch.device("cpu"))
            for at in range(count):
                arena.quantize_into(at, *made.exact(at))
            made.store._base = arena
        return made

    @property
    def count(self) -> int:
        return self.words.num_layers * self.words.num_experts

    def exact(self, at: int) -> tuple[Tensor, Tensor]:
        slot = expert_slot(self.words)
        self.words.read(*divmod(at, self.words.num_experts), slot)
        return self.words.codec.decode(slot)

    def whole(self, at: int) -> Tensor:
        """The record of expert `at`, encoded once all of it was read."""
        room = expert_slot(self.store)
        base = None if self.store._base is None else self.store._base.expert(at)
        return room[: self.store.codec.encode(self.exact(at), base, room)]

    def read(self, at: int) -> Tensor:
        slot = expert_slot(self.store).fill_(0xA5)
        key = divmod(at, self.words.num_experts)
        assert self.store.read(*key, slot) > 0
        return slot[: self.store.record_bytes(*key)]

    def close(self) -> None:
        self.store.close()
        self.opened.close()
        assert ENCODERS not in encoding_threads()


def encoding_threads() -> str:
    return " ".join(thread.name for thread in threading.enumerate())


@pytest.fixture
def published(tiny_bfloat16: Callable[[str], Path]) -> Iterator[Published]:
    made = Published.of(tiny_bfloat16("qwen2_moe"))
    yield made
    made.close()


@pytest.mark.parametrize(("form", "codec"), [*product(FORMS, CODECS)])
def test_records_are_those_of_whole_experts(
    form: str,
    codec: str,
    tiny_bfloat16: Callable[[str], Path],
    tmp_path: Path,
    encodings: Encodings,
) -> None:
    family, *fused = form.split()
    model = tiny_bfloat16(family)
    made = Published.of(write_fused(tmp_path / "fused", model) if fused else model, codec)
    for at in range(made.count):
        assert torch.equal(made.read(at), made.whole(at))
    assert encodings.parts == FORMS[form] * made.count
    ahead = [ENCODERS in name for name in encodings.threads]
    assert ahead == [end < 3 for _, end in encodings.parts]
    made.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_many_read_at_a_time(workers: int, published: Published) -> None:
    """Also more than threads that encode, which then wait for those before them."""
    published.store._encoders = ThreadPoolExecutor(workers, ENCODERS)
    order = [*range(published.count)] * 3
    wanted = [published.whole(at) for at in range(published.count)]
    with ThreadPoolExecutor(8) as readers:
        found = [*readers.map(published.read, order)]
    assert all(torch.equal(record, wanted[at]) for at, record in zip(order, found, strict=True))


@pytest.mark.parametrize("matrix", [0, 1, 2])
@pytest.mark.parametrize("error", [SpeqError, OSError, KeyboardInterrupt])
def test_a_read_that_fails_leaves_nobody_writing(
    error: type[BaseException],
    matrix: int,
    published: Published,
    encodings: Encodings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, reads, read = threading.Event(), list[int](), SafetensorsFile.read_scattered

    def fail(*arguments: Any) -> int:
        reads.append(len(reads))
        if len(reads) > matrix:
            failed.set()
            raise error("the disk is gone")
        return read(*arguments)

    # What precedes the failure is encoded after it, if it had begun.
    encodings.before = lambda part: part.end < matrix or failed.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "read_scattered", fail)
        with pytest.raises(error, match="the disk is gone"):
            published.read(0)
    begun = encodings.parts
    assert encodings.running == 0 and len(begun) <= matrix
    assert begun == ONE_BY_ONE[: len(begun)]
    assert published.store._scratch.qsize() == 1
    assert torch.equal(published.read(1), published.whole(1))


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_where_no_thread_can_begin_the_reader_encodes(
    refused: int, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was asked of one writes to a slot later."""
    start, refusals = threading.Thread.start, list[str]()

    def begin(self: threading.Thread) -> None:
        if self.name.startswith(ENCODERS) and len(refusals) < refused:
            refusals.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", begin)
    slot = expert_slot(published.store)
    published.store.read(0, 0, slot)
    assert refusals
    assert torch.equal(slot[: published.store.record_bytes(0, 0)], published.whole(0))
    slot.copy_(torch.arange(len(slot)).to(torch.uint8))
    kept = slot.clone()
    for at in range(1, published.count):
        assert torch.equal(published.read(at), published.whole(at))
    assert torch.equal(slot, kept)


@pytest.mark.parametrize("end", [1, 2, 3])
def test_errors_of_encoding_reach_the_reader(
    end: int, published: Published, encodings: Encodings
) -> None:
    def fail(part: Part) -> None:
        if part.end == end:
            raise MemoryError("no room for streams")

    encodings.before = fail
    with pytest.raises(MemoryError, match="no room for streams"):
        published.read(0)
    assert encodings.parts == ONE_BY_ONE[: end - 1]
    encodings.before = lambda part: None
    assert torch.equal(published.read(0), published.whole(0))


@pytest.mark.parametrize("matrix", [0, 1, 2])
def test_experts_that_fit_no_slot_are_found_at_any_matrix(
    matrix: int, published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    codec, room = published.store.codec, expert_slot(published.store)
    sizes = [0]
    for first, end in ONE_BY_ONE:
        sizes.append(codec.encode(published.exact(0), None, room, Part(first, end, sizes[-1])))
    room.fill_(0xA5)
    nbytes = sizes[matrix + 1] - 1
    assert published.store.read(0, 0, room[:nbytes]) > 0
    assert published.store.record_bytes(0, 0) == 0 and published.store._wide[0] == {0}
    assert bool((room[nbytes:] == 0xA5).all())
    assert caplog.text.count("is larger than the slots") == 1
    assert torch.equal(published.read(1), published.whole(1))
