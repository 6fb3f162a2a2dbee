"""The other stages, as the first one sees them."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speq.config import RunConfig
from speq.errors import EngineLost, SpeqError
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
from speq.pipeline.wire import OTHER_PROTOCOL, Message, MessageKind, Ring
from speq.planning.memory import MAX_CHUNK
from speq.units import Progress

logger = logging.getLogger("speq")

# A stage that has nothing to do hears at once.
CLOSING_S = 10.0
CHECK_S = 60.0
BROKEN_OFF = "a pass through the stages was broken off; start all of them again"
OTHER_ANSWER = f"the stages gave the answer to another message; {OTHER_PROTOCOL}"
OTHER_ROWS = "the stages gave back another number of rows; start all of them again"


@dataclass(slots=True)
class RingStages:
    """Passes and other messages sent around a ring. `RemoteStages` says what each is for.

    wait_s   that an answer may take
    changes  of the KV caches here, which those of the other stages have yet to follow
    """

    ring: Ring
    wait_s: float
    changes: list[Change] = field(default_factory=list)
    _pass: dict[str, Any] = field(default_factory=dict, init=False)
    _lost: str | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def reserve(self, context: int) -> int:
        self.changes.clear()
        answer = self._asked(Message(MessageKind.RESERVE, {"context": context, "chunk": MAX_CHUNK}))
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
        answer = self._asked(Message(MessageKind.PASS, self._pass | {"changes": changes}, rows))
        if answer.rows.numel() != rows.numel():
            raise self._lose(OTHER_ROWS)
        return answer.rows.view(hidden_states.dtype).view(hidden_states.shape)

    def check(self) -> None:
        self._asked(Message(MessageKind.CHECK), min(self.wait_s, CHECK_S))

    def _lose(self, sentence: str) -> EngineLost:
        self._lost = sentence
        return EngineLost(sentence)

    def _asked(self, message: Message, wait_s: float | None = None) -> Message:
        if self._lost is not None:
            raise EngineLost(self._lost)
        self._lost = BROKEN_OFF  # unless the answer comes
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
            raise SpeqError(sentence)
        if answer.kind != message.kind:
            raise self._lose(OTHER_ANSWER)
        self._lost = None
        return answer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            # Nobody answers: who has heard it is gone.
            self._lost = "the stages were closed"
            try:
                self.ring.send(Message(MessageKind.CLOSE), CLOSING_S)
            except SpeqError as error:
                logger.warning("%s", error)


def bytes_of(rows: Tensor) -> Tensor:
    """Rows as bytes, one behind another."""
    return rows.contiguous().view(-1).view(torch.uint8)


def most_row_bytes(opened: Opened) -> int:
    """Of the hidden states of one pass, at most, in any dtype."""
    return MAX_CHUNK * opened.shape.hidden_size * torch.float64.itemsize


def open_stage(
    model: str,
    stages: str,
    number: int,
    verify_reads: bool = False,
    progress: Progress | None = None,
) -> tuple[Opened, ModelFingerprint]:
    """The layers of one stage, opened, and what has to be the same on all.

    verify_reads  as of `open_model`. Raises SpeqError for packs that are read over a draft
    progress      told (what, done, total) while a model is read whose digest is not known
    """
    path = locate(model)
    config = read_json(path / "config.json")
    layers = family_of(config, path).config(config, path).get("num_hidden_layers")
    if type(layers) is not int:
        raise SpeqError(f"{path / 'config.json'} has no num_hidden_layers; download it again")
    counts, part = part_for(stages, layers, number)
    opened = open_model(path, verify_reads, part)
    codec = opened.store.codec
    if codec.needs_draft:
        opened.close()
        raise SpeqError(
            f"{path} is packed with codec {codec.name}, whose records are read over a draft's "
            "codes, and the model runs in stages, which hold none; give the folder that was "
            "packed, or pack it with --codec lossless"
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
    """The first stage's layers, its options, and the stages behind it, which have come.

    meeting  where they come to; None: to the rendezvous of the settings
    """
    if settings.stages is None or (rendezvous is None and settings.rendezvous is None):
        raise SpeqError("stages is given and rendezvous is not; stages take both")
    check_gloo()
    config = with_stages(config)
    opened, agreement = open_stage(model, settings.stages, 1, config.verify_reads, progress)
    try:
        ring = open_ring(
            rendezvous or Rendezvous.at(str(settings.rendezvous)),
            agreement,
            RunSettings.of(config),
            most_row_bytes(opened),
            settings.stage_wait_s,
        )
    except BaseException:
        with closing(opened):
            raise
    return opened, config, RingStages(ring, settings.stage_wait_s)
