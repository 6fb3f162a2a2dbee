"""A later pipeline stage: runs hidden states through its layers until rank 0 closes the run."""

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
from speq.pipeline.stage_key import StageKey
from speq.pipeline.wire import MessageKind, Ring, StageMessage
from speq.runtime import Runtime
from speq.scheduler.row_pruning import RowValues
from speq.units import Progress

# A server may be idle for days. A process that ends is noticed at once.
IDLE_S = 7 * 24 * 3600.0
# Longest wait for a neighbour to receive that this stage ends.
PARTING_S = 10.0
# Placeholder drafter: reserves memory for draft rows and needs none itself; rank 0 drafts.
PLACEHOLDER_DRAFTER = "ngram"
# Messages that a stage answers; it forwards others.
ANSWERED = (MessageKind.RESERVE, MessageKind.PASS)


@dataclass(slots=True)
class Stage:
    """The layers of one pipeline stage, and the ring that connects it."""

    runtime: Runtime
    ring: Ring

    def serve(self) -> None:
        """Answer until rank 0 closes the run.

        If a neighbour is gone, it tells the next stages and raises SpeqError.
        """
        while True:
            try:
                message = self.ring.receive(IDLE_S)
            except SpeqError as error:
                self._send_failure(error)
                raise
            if message.kind == MessageKind.CLOSE:
                if self.ring.number < self.ring.count:
                    self.ring.send(message)
                return
            if message.kind in ANSWERED:
                try:
                    with translate_errors():
                        message = self._answer(message)
                except (SpeqError, Broken) as error:
                    message = failure_message(self.ring, error)
            self.ring.send(message)

    def _send_failure(self, error: SpeqError) -> None:
        try:
            self.ring.send(failure_message(self.ring, error, ended=True), PARTING_S)
        except SpeqError:
            return  # the next stage is gone too, and the stage that waits for it learns that

    def _answer(self, message: StageMessage) -> StageMessage:
        content = message.content
        if message.kind == MessageKind.RESERVE:
            reservation = Reservation.of(message)
            engine = self.runtime.reserve(reservation.context)
            for cache in engine.caches:
                cache.clear()
            chunk = min(reservation.chunk, engine.chunk)
            return StageMessage(MessageKind.RESERVE, content | {"chunk": chunk})
        return StageMessage(MessageKind.PASS, content, bytes_of(self._forward(message)))

    def _forward(self, message: StageMessage) -> Tensor:
        """Run the rows of a message through the stage's layers: [T, H]."""
        engine, dtype = self.runtime.engine, self.runtime.model.dtype
        with engine.invalidate_on_error():
            width = self.runtime.shape.hidden_size
            forward = ForwardPass.of(message, engine.caches, width, dtype, engine.chunk)
        out = run_rows(engine, forward.sequences, forward.rows, forward.prefill)
        for sequence in forward.sequences:
            sequence.cache.written = sequence.cache.length + len(sequence.token_ids)
        return out


def run_rows(
    engine: Engine, sequences: list[SequenceTokens], rows: Tensor, prefill: bool
) -> Tensor:
    """Run a pass over exact experts. prefill: rows of a prompt, whose experts are streamed."""
    offload = engine.offload
    engine.recorder.begin("prefill" if prefill else "decode")
    backend, count = (offload.reader if prefill else offload.target), len(rows)
    with engine.invalidate_on_error(), ExitStack() as stack:
        if prefill:
            stack.enter_context(offload.stream.prompt(count, count, None))
        else:
            stack.callback(begin_verification(engine, sequences))
        out = engine.model.forward_rows(backend, sequences, rows, prefill)
    offload.loader.report()
    engine.recorder.finish()
    return out


def begin_verification(engine: Engine, sequences: list[SequenceTokens]) -> Callable[[], object]:
    """Begin a verification whose rows have no drafted experts; return the call that ends it."""
    offload = engine.offload
    offload.prefetcher.begin(0, len(sequences))
    offload.prefetcher.end()
    offload.prefetcher.lookahead.scored([len(sequence.token_ids) for sequence in sequences])
    # Rows are never pruned here, so any tree will do.
    parents = [
        -1 if not node else 0 for sequence in sequences for node in range(len(sequence.token_ids))
    ]
    offload.rows.begin(RowValues(parents, [1.0] * len(parents), 0.0, 0.0))
    return offload.rows.end


def failure_message(ring: Ring, error: SpeqError | Broken, ended: bool = False) -> StageMessage:
    """Make the message that replaces an answer. ended: the stage will not answer again."""
    where = f"stage {ring.number} of {ring.count}"
    return StageMessage(MessageKind.FAILED, {"sentence": f"{where}: {error}", "ended": ended})


def with_run_settings(config: RunConfig, shared: RunSettings) -> RunConfig:
    """Apply the settings of rank 0 to a later stage's options."""
    return replace(
        config,
        dtype=shared.dtype,
        sums=shared.sums,
        drafter="none" if shared.drafter == "none" else PLACEHOLDER_DRAFTER,
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
    """Join the pipeline at the rendezvous, load the stage's layers, and serve until the end.

    Raises SpeqError for invalid options, files or budget, and if another stage differs or is gone.

    say  called with a sentence at each point of progress
    """
    config = with_stages(config)
    number, key = settings.stage, StageKey.read(settings.stage_key_file)
    opened, fingerprint = open_stage(model, settings.stages, number, config.verify_reads, progress)
    with ExitStack() as stack:
        stack.callback(opened.close)
        part = present(opened.part, "a stage opened a whole model")
        count = len(fingerprint.counts)
        name = f"stage {number} of {count}: layers {part.first} to {part.last - 1}"
        say(f"{name}, connecting to {settings.rendezvous}")
        ring, shared = join_ring(
            *(settings.rendezvous, number, fingerprint, most_row_bytes(opened)),
            settings.stage_wait_s,
            key,
        )
        config = with_run_settings(config, shared)
        try:
            with translate_errors():
                loaded = load(opened, config, progress)
                stack.callback(loaded.close)
                runtime = Runtime(loaded)
        except SpeqError as error:
            # Rank 0 sends its first message when it has loaded its own layers.
            say(f"{name} cannot be loaded: {error}")
            ring.receive(IDLE_S)
            ring.send(failure_message(ring, error, ended=True))
            raise
        stack.callback(runtime.engine.close)
        say(f"{name}, ready")
        Stage(runtime, ring).serve()
        say(f"{name}: the first stage has closed the run")
