"""Stages of a model: in threads of one process, with queues in the place of a network, or in
processes that meet over gloo.
"""

import queue
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.generator import Generator
from speq.load import load
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings, current_versions
from speq.pipeline.first_stage import RingStages, open_stage
from speq.pipeline.later_stage import Stage, with_run_settings
from speq.pipeline.settings import StagesSettings, with_stages
from speq.pipeline.wire import StageMessage, sizes_of, unpack
from speq.runtime import Runtime
from tests.helpers.command import arguments_of

PATIENCE_S = 60.0
MOST_BYTES = 1 << 24
# What stages of no model in particular agree on.
AGREED = ModelFingerprint("f" * 64, current_versions(), [2, 1])
SHARED = RunSettings("float32", "auto", "ngram", None, None, 1)


@dataclass
class QueueRing:
    """A stage's place in a ring of queues, one before each stage. Messages are packed as they are
    for gloo.
    """

    queues: list[queue.Queue[Any]]
    number: int

    @property
    def count(self) -> int:
        return len(self.queues)

    def send(self, message: StageMessage, wait_s: float | None = None) -> None:
        self.queues[self.number % self.count].put(message.pack())

    def receive(self, wait_s: float) -> StageMessage:
        try:
            head, payload = self.queues[self.number - 1].get(timeout=min(wait_s, PATIENCE_S))
        except queue.Empty:
            raise SpeqError(f"nobody spoke to stage {self.number}") from None
        kind, text_bytes, row_bytes = sizes_of(head, MOST_BYTES)
        assert payload.numel() == text_bytes + row_bytes
        return unpack(kind, text_bytes, payload)


@contextmanager
def in_threads(model: Path, stages: str, budgets: list[str], **options: Any) -> Iterator[Generator]:
    """A generator over the first of some stages, which have these memory budgets.

    options  of the run
    """
    given = [with_stages(RunConfig.of(budget, **options)) for budget in budgets]
    configs = [given[0], *(with_run_settings(each, RunSettings.of(given[0])) for each in given[1:])]
    queues: list[queue.Queue[Any]] = [queue.Queue() for _ in configs]
    failures: list[BaseException] = []
    with ExitStack() as stack:
        first, *others = [
            stack.enter_context(closing_opened(model, stages, number, config.verify_reads))
            for number, config in enumerate(configs, start=1)
        ]
        threads = []
        for at, (opened, config) in enumerate(zip(others, configs[1:], strict=True), start=2):
            runtime = Runtime(load(opened, config))
            stack.callback(runtime.engine.close)

            def serve(stage: Stage) -> None:
                try:
                    stage.serve()
                except BaseException as error:
                    failures.append(error)

            stage = Stage(runtime, QueueRing(queues, at))
            threads.append(threading.Thread(target=serve, args=[stage], daemon=True))
            threads[-1].start()
        ring = RingStages(QueueRing(queues, 1), PATIENCE_S)
        generator = Generator.of_opened(first, configs[0], remote=ring)
        try:
            yield generator
        finally:
            generator.close()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)


@contextmanager
def closing_opened(model: Path, stages: str, number: int, verify_reads: bool) -> Iterator[Any]:
    opened = open_stage(str(model), stages, number, verify_reads)[0]
    try:
        yield opened
    finally:
        opened.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def stage_process(
    model: Path, met: str, budget: str, *options: object
) -> Iterator["subprocess.Popen[str]"]:
    """The second of two stages in a process of its own. met: HOST:PORT; options: of the command"""
    words = ("stage", model, "--stage", 2, "--stages", 2, "--rendezvous", met)
    process = subprocess.Popen(
        arguments_of(*words, "--memory-budget", budget, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def first_of(model: Path, met: str, **options: Any) -> Iterator[Generator]:
    """The first of two stages in this process."""
    settings = StagesSettings(stages="2", rendezvous=met, stage_wait_s=PATIENCE_S)
    config = RunConfig.of("24MiB", dtype="float32", **options)
    generator = Generator.load(model, config, stages=settings)
    try:
        yield generator
    finally:
        generator.close()
