"""The bundled model behind a server, beside plain transformers on the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from speq import Generator
from speq.server.metrics import Metrics
from tests.helpers.api_server import NAME, Rig, api_server


@pytest.fixture(scope="session")
def generator(bundled: Path) -> Iterator[Generator]:
    """In float32, in which the same text comes whatever is drafted."""
    made = Generator.from_pretrained(
        bundled, "80MiB", dtype="float32", draft_length=3, context_length=512, reader_threads=2
    )
    yield made
    made.close()


@pytest.fixture
def served(generator: Generator) -> Iterator[Rig]:
    metrics = Metrics(NAME)
    with (
        metrics.listening(generator.runtime.recorder),
        api_server(generator, generator, metrics=metrics) as rig,
    ):
        yield rig


@pytest.fixture(scope="session")
def batched(bundled: Path) -> Iterator[Generator]:
    """The same for four texts at a time."""
    made = Generator.from_pretrained(
        bundled,
        "80MiB",
        dtype="float32",
        draft_length=3,
        context_length=512,
        reader_threads=2,
        max_batch=4,
    )
    yield made
    made.close()


@pytest.fixture
def side_by_side(batched: Generator) -> Iterator[Rig]:
    metrics = Metrics(NAME)
    with (
        metrics.listening(batched.runtime.recorder),
        api_server(batched, batched, metrics=metrics, max_waiting=2) as rig,
    ):
        yield rig
