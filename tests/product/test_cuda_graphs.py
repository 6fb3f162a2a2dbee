"""How graphs of a GPU are cut into pieces, with torch's own class put aside."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speq.devices import cuda
from speq.devices.device import Cut

LOG: list[Any] = []


class Piece:
    """Notes what is asked of a CUDAGraph. refused: what ending fails with, if it does."""

    refused: str | None = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        # Other threads look whether their copies are through: "global" would fail by them.
        assert capture_error_mode == "thread_local"
        LOG.append(("begin", pool))

    def capture_end(self) -> None:
        LOG.append("end")
        if self.refused is not None:
            raise RuntimeError(self.refused)

    def replay(self) -> None:
        LOG.append("replay")


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Piece)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    LOG.clear()
    yield


def test_pieces_end_and_begin_at_cuts() -> None:
    """All in one pool; the host's work is done at replays, between them."""

    def run(cut: Cut) -> None:
        LOG.append("attention")
        cut(lambda: LOG.append("experts"))
        LOG.append("head")

    graph = cuda.record_graph(run, None)
    begin = ("begin", "a pool")
    assert [begin, "attention", "end", begin, "head", "end"] == LOG
    for _ in range(2):
        LOG.clear()
        graph.replay()
        assert LOG == ["replay", "experts", "replay"]
    LOG.clear()
    beside = cuda.record_graph(lambda cut: None, cuda.pool_of(graph))
    assert [begin, "end"] == LOG
    assert beside.pool == "a pool"


@pytest.mark.parametrize("refused", [None, "the capture was invalidated"])
def test_a_recording_that_fails_is_ended(
    refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first error is the one that is told."""
    monkeypatch.setattr(Piece, "refused", refused)

    def run(cut: Cut) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        cuda.record_graph(run, None)
    assert LOG == [("begin", "a pool"), "end"]
