"""Pipeline rank 0: opens the first stage, and sends passes through the other stages."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speq.config import RunConfig
from speq.errors import CheckpointError, EngineLost, OptionError, PeerError, SpeqError
from speq.files.checkpoint import locate
from speq.files.json_file import read_json
from speq.models.families import family_of
from speq.models.kv_cache import Change
from speq.models.opened import Opened, open_model
from speq.models.packed_batch import BatchSpan
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings, part_for
from speq.pipeline.messages import Reservation
from speq.pipeline.rendezvous import Rendezvous, check_gloo, open_ring
from speq.pipeline.settings import StagesSettings, with_stages
from speq.pipeline.stage_key import StageKey
from speq.pipeline.wire import OTHER_PROTOCOL, MessageKind, Ring, StageMessage
from speq.planning.memory import MAX_CHUNK
from speq.units import Progress

logger = logging.getLogger("speq")

# An idle stage receives at once.
CLOSING_S = 10.0
CHECK_S = 60.0
INTERRUPTED = "a pass through the pipeline stages was interrupted; start all of them again"
OTHER_ANSWER = f"the pipeline stages answered another message; {OTHER_PROTOCOL}"
OTHER_ROWS = "the pipeline stages returned another number of rows; start all of them again"


@dataclass(slots=True)
class RingStages:
    """The other pipeline stages, reached over a ring. Implements `RemoteStages`.

    wait_s   longest wait for an answer
    changes  of the KV caches here that the other stages' caches have yet to follow
    """

    ring: Ring
    wait_s: float
    changes: list[Change] = field(default_factory=list)
    _pass: dict[str, Any] = field(default_factory=dict, init=False)
    _lost: str | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def reserve(self, context: int) -> int:
        self.changes.clear()
        answer = self._request(
            StageMessage(MessageKind.RESERVE, {"context": context, "chunk": MAX_CHUNK})
        )
        try:
            return Reservation.of(answer).chunk
        except SpeqError as error:
            raise self._lose(str(error)) from error

    def begin(self, spans: Sequence[BatchSpan], reading: bool) -> None:
        sequences = [
            [span.cache.number, span.last - span.first, span.tree and list(span.tree.parents)]
            for span in spans
        ]
        self._pass = {"texts": sequences, "reading": reading}

    def run(self, hidden_states: Tensor) -> Tensor:
        changes = [list(change) for change in self.changes]
        self.changes.clear()
        rows = bytes_of(hidden_states)
        content = self._pass | {"changes": changes}
        answer = self._request(StageMessage(MessageKind.PASS, content, rows))
        if answer.rows.numel() != rows.numel():
            raise self._lose(OTHER_ROWS)
        return answer.rows.view(hidden_states.dtype).view(hidden_states.shape)

    def check(self) -> None:
        self._request(StageMessage(MessageKind.CHECK), min(self.wait_s, CHECK_S))

    def _lose(self, sentence: str) -> EngineLost:
        self._lost = sentence
        return EngineLost(sentence)

    def _request(self, message: StageMessage, wait_s: float | None = None) -> StageMessage:
        if self._lost is not None:
            raise EngineLost(self._lost)
        self._lost = INTERRUPTED  # until the answer comes
        try:
            self.ring.send(message, wait_s)
            answer = self.ring.receive(wait_s or self.wait_s)
        except SpeqError as error:
            raise self._lose(str(error)) from error
        if answer.kind == MessageKind.FAILED:
            sentence = f"{answer.content.get('sentence', 'failed')!s:.1000}"
            if answer.content.get("ended"):
                raise self._lose(sentence)
            self._lost = None
            raise PeerError(sentence)
        if answer.kind != message.kind:
            raise self._lose(OTHER_ANSWER)
        self._lost = None
        return answer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            # No stage answers this message: each ends on it.
            self._lost = "the pipeline stages were closed"
            try:
                self.ring.send(StageMessage(MessageKind.CLOSE), CLOSING_S)
            except SpeqError as error:
                logger.warning("%s", error)


def bytes_of(rows: Tensor) -> Tensor:
    """View rows as contiguous bytes."""
    return rows.contiguous().view(-1).view(torch.uint8)


def most_row_bytes(opened: Opened) -> int:
    """Most bytes of one pass's hidden states, in any dtype."""
    return MAX_CHUNK * opened.shape.hidden_size * torch.float64.itemsize


def open_stage(
    model: str,
    stages: str,
    number: int,
    verify_reads: bool = False,
    progress: Progress | None = None,
) -> tuple[Opened, ModelFingerprint]:
    """Open the layers of one pipeline stage, and take the model's fingerprint.

    verify_reads  see `open_model`. Raises SpeqError for packs that need a draft
    progress      called with (what, done, total) while a model without a known digest is read
    """
    path = locate(model)
    config = read_json(path / "config.json")
    layers = family_of(config, path).config(config, path).get("num_hidden_layers")
    if type(layers) is not int:
        raise CheckpointError(f"{path / 'config.json'} has no num_hidden_layers; download it again")
    counts, part = part_for(stages, layers, number)
    opened = open_model(path, verify_reads, part)
    codec = opened.store.codec
    if codec.needs_draft:
        opened.close()
        raise OptionError(
            f"{path} is packed with codec {codec.name}, whose records need a draft's codes, and "
            "pipeline stages have no draft; give the folder that was packed, or pack it with "
            "--codec lossless"
        )
    try:
        return opened, ModelFingerprint.of(opened, counts, progress)
    except BaseException:
        opened.close()
        raise


def open_first(
    model: str,
    config: RunConfig,
    settings: StagesSettings,
    rendezvous: Rendezvous | None = None,
    progress: Progress | None = None,
) -> tuple[Opened, RunConfig, RingStages]:
    """Open the layers of rank 0 and wait for the other stages; return also the stage's options.

    rendezvous  to wait at; None: the one of `settings`
    """
    if settings.stages is None or (rendezvous is None and settings.rendezvous is None):
        raise OptionError("stages is given and rendezvous is not; pipeline parallelism needs both")
    check_gloo()
    key = StageKey.read(settings.stage_key_file)
    config = with_stages(config)
    opened, fingerprint = open_stage(model, settings.stages, 1, config.verify_reads, progress)
    try:
        ring = open_ring(
            rendezvous or Rendezvous.at(str(settings.rendezvous)),
            fingerprint,
            RunSettings.of(config),
            most_row_bytes(opened),
            settings.stage_wait_s,
            key,
        )
    except BaseException:
        with closing(opened):
            raise
    return opened, config, RingStages(ring, settings.stage_wait_s)
