"""A stage behind the first: it runs rows through its layers for as long as the first one asks."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from speq.config import RunConfig
from speq.devices.failures import translate_errors
from speq.engine.engine import Engine
from speq.errors import Broken, SpeqError, present
from speq.load import load
from speq.models.packed_batch import SequenceTokens
from speq.pipeline.fingerprint import RunSettings
from speq.pipeline.first_stage import bytes_of, most_row_bytes, open_stage
from speq.pipeline.messages import ForwardPass, Reservation
from speq.pipeline.rendezvous import join_ring
from speq.pipeline.settings import StageSettings, with_stages
from speq.pipeline.wire import Message, MessageKind, Ring
from speq.runtime import Runtime
from speq.scheduler.row_pruning import RowValues
from speq.units import Progress

# A server may rest for days. A process that ends is noticed at once.
IDLE_S = 7 * 24 * 3600.0
# Of a neighbour that is told that this stage ends.
PARTING_S = 10.0
# Whoever drafts elsewhere: it has memory planned for the rows of drafts, and takes none itself.
DRAFTER_ELSEWHERE = "ngram"
# What a stage has an answer to; it passes other messages on.
ASKING = (MessageKind.RESERVE, MessageKind.PASS)


@dataclass(slots=True)
class Stage:
    """Layers of a model, and the ring that rows come by."""

    runtime: Runtime
    ring: Ring

    def serve(self) -> None:
        """Answer until the first stage closes the run. Raises SpeqError where a neighbour is gone,
        and tells the stages behind this one.
        """
        while True:
            try:
                message = self.ring.receive(IDLE_S)
            except SpeqError as error:
                self._say_failed(error, ended=True)
                raise
            if message.kind == MessageKind.CLOSE:
                if self.ring.number < self.ring.count:
                    self.ring.send(message)
                return
            if message.kind in ASKING:
                try:
                    with translate_errors():
                        message = self._answer(message)
                except (SpeqError, Broken) as error:
                    message = failed(self.ring, error)
            self.ring.send(message)

    def _say_failed(self, error: SpeqError, ended: bool) -> None:
        try:
            self.ring.send(failed(self.ring, error, ended), PARTING_S)
        except SpeqError:
            return  # the stage behind is gone as well, and whoever waits for it learns that

    def _answer(self, message: Message) -> Message:
        content = message.content
        if message.kind == MessageKind.RESERVE:
            asked = Reservation.of(message)
            engine = self.runtime.reserve(asked.context)
            for cache in engine.caches:
                cache.clear()
            return Message(MessageKind.RESERVE, content | {"chunk": min(asked.chunk, engine.chunk)})
        return Message(MessageKind.PASS, content, bytes_of(self._pass(message)))

    def _pass(self, message: Message) -> Tensor:
        """What the layers make of rows: [T, H]."""
        engine, dtype = self.runtime.engine, self.runtime.model.dtype
        with engine.invalidate_on_error():
            width = self.runtime.shape.hidden_size
            asked = ForwardPass.of(message, engine.caches, width, dtype, engine.chunk)
        out = run_rows(engine, asked.sequences, asked.rows, asked.reading)
        for sequence in asked.sequences:
            sequence.cache.written = sequence.cache.length + len(sequence.token_ids)
        return out


def run_rows(
    engine: Engine, sequences: list[SequenceTokens], rows: Tensor, reading: bool
) -> Tensor:
    """One pass over exact experts. reading: of a prompt's rows, all of whose experts are wanted."""
    offload = engine.offload
    engine.recorder.begin("prefill" if reading else "decode")
    backend, count = (offload.reader if reading else offload.target), len(rows)
    with engine.invalidate_on_error(), ExitStack() as stack:
        if reading:
            stack.enter_context(offload.stream.prompt(count, count, None))
        else:
            stack.callback(begin_verification(engine, sequences))
        out = engine.model.forward_rows(backend, sequences, rows, reading)
    offload.loader.report()
    engine.recorder.finish()
    return out


def begin_verification(engine: Engine, sequences: list[SequenceTokens]) -> Callable[[], object]:
    """Tell who serves experts that rows follow of which no draft has named any; returns the end."""
    offload = engine.offload
    offload.prefetcher.begin(0, len(sequences))
    offload.prefetcher.end()
    offload.prefetcher.lookahead.scored([len(sequence.token_ids) for sequence in sequences])
    # Rows are never given up here, so that it does not matter behind which of them others are.
    parents = [
        -1 if not node else 0 for sequence in sequences for node in range(len(sequence.token_ids))
    ]
    offload.rows.begin(RowValues(parents, [1.0] * len(parents), 0.0, 0.0))
    return offload.rows.end


def failed(ring: Ring, error: SpeqError | Broken, ended: bool = False) -> Message:
    """What a stage says in the place of an answer. ended: it answers no more."""
    where = f"stage {ring.number} of {ring.count}"
    return Message(MessageKind.FAILED, {"sentence": f"{where}: {error}", "ended": ended})


def with_run_settings(config: RunConfig, shared: RunSettings) -> RunConfig:
    """The options of a stage behind the first, with what that one has decided."""
    return replace(
        config,
        dtype=shared.dtype,
        drafter="none" if shared.drafter == "none" else DRAFTER_ELSEWHERE,
        draft_length=shared.draft_length,
        context_length=shared.context_length,
        max_batch=shared.max_batch,
    )


def run_stage(
    model: str,
    config: RunConfig,
    settings: StageSettings,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> None:
    """Come to the rendezvous, load the stage's layers, and run rows until the run is over.

    say  told, in a sentence each, how far it is. Raises SpeqError where options, files or the
         budget do not allow it, and where another stage differs or is gone
    """
    config = with_stages(config)
    number = settings.stage
    opened, agreement = open_stage(model, settings.stages, number, config.verify_reads, progress)
    with ExitStack() as stack:
        stack.callback(opened.close)
        part = present(opened.part, "a stage opened a whole model")
        named = f"stage {number} of {len(agreement.counts)}: layers {part.first} to {part.last - 1}"
        say(f"{named}, coming to {settings.rendezvous}")
        ring, shared = join_ring(
            settings.rendezvous, number, agreement, most_row_bytes(opened), settings.stage_wait_s
        )
        config = with_run_settings(config, shared)
        try:
            with translate_errors():
                loaded = load(opened, config, progress)
                stack.callback(loaded.close)
                runtime = Runtime(loaded, progress)
        except SpeqError as error:
            # The first stage asks when it has loaded its own layers.
            say(f"{named} cannot be loaded: {error}")
            ring.receive(IDLE_S)
            ring.send(failed(ring, error, ended=True))
            raise
        stack.callback(runtime.engine.close)
        say(f"{named}, ready")
        Stage(runtime, ring).serve()
        say(f"{named}: the first stage has closed the run")
