"""Metrics for Prometheus: vLLM's names where they mean the same, ours for what moves experts.

They add up over the life of the process, and have a registry of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from speq.engine.engine_thread import FAILED, STOPPED, Observer
from speq.engine.request import Token
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError
from speq.stats import Origin, Recorder, StepStats

MODEL, PHASE, REASON, POSITION = "model_name", "phase", "finished_reason", "position"
# Reasons to finish as vLLM names them.
REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    STOPPED: "abort",
    FAILED: "error",
}
# vLLM's own, in seconds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
# By field of `StepStats`: name and help. They are counted by phase, "prefill" or "decode".
OF_STEPS = {
    "requests": (
        "speq:expert_requests",
        "Distinct experts of a layer that the exact model asked for.",
    ),
    "hits": ("speq:expert_hits", "Of these, those that lay in a slot."),
    "moved_bytes": ("speq:moved_bytes", "Bytes of experts brought into slots."),
    "ahead_bytes": ("speq:ahead_bytes", "Of these, those asked for ahead of their need."),
    "rejected_bytes": (
        "speq:rejected_bytes",
        "Of these, those of experts that only rejected tokens of a draft wanted.",
    ),
    "read_bytes": ("speq:read_bytes", "Bytes read from the disk, in whole blocks."),
    "stall_s": ("speq:stall_seconds", "Time in which the computation waited for experts."),
    "late_s": (
        "speq:late_seconds",
        "Of this, the time for experts that were asked for ahead of their need.",
    ),
}


class Metrics(Observer):
    """Counts what generators of one model do."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (MODEL, *labels), registry=self.registry)

        def of_model(name: str, text: str) -> Counter:
            return counter(name, text).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, (MODEL,), buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self._prompt = of_model("vllm:prompt_tokens", "Tokens of prompts that were run.")
        self._looked_up = of_model(
            "vllm:prefix_cache_queries", "Tokens of prompts whose KV was looked for."
        )
        self._found = of_model("vllm:prefix_cache_hits", "Of these, tokens whose KV was reused.")
        self._generated = of_model("vllm:generation_tokens", "Tokens generated.")
        self._success = counter(
            "vllm:request_success", "Requests that ended, by the reason.", REASON
        )
        self._running = Gauge(
            "vllm:num_requests_running", "Running requests.", (MODEL,), registry=self.registry
        ).labels(model_name)
        self._waiting = Gauge(
            "vllm:num_requests_waiting",
            "Waiting requests.",
            (MODEL,),
            registry=self.registry,
        ).labels(model_name)
        self._cached = Gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV-cache capacity that running requests use: 1 is all of it.",
            (MODEL,),
            registry=self.registry,
        ).labels(model_name)
        self._queued = histogram(
            "vllm:request_queue_time_seconds", "Time that a request waited.", FIRST_TOKEN_S
        )
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From the request to its first token.",
            FIRST_TOKEN_S,
        )
        self._token = histogram(
            "vllm:time_per_output_token_seconds",
            "Of each token after the first: the time of its step over the tokens of the step.",
            TOKEN_S,
        )
        self._drafts = of_model("vllm:spec_decode_num_drafts", "Drafts of a token or more.")
        self._drafted = of_model("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = of_model("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft, from 0.",
            POSITION,
        )
        self._draft_length = histogram(
            "speq:draft_length", "Tokens drafted in a step of decoding.", DRAFT_LENGTHS
        )
        self._of_steps = {
            field: counter(name, text, PHASE) for field, (name, text) in OF_STEPS.items()
        }

    def on_queue(self, waiting: int) -> None:
        self._waiting.set(waiting)

    def on_cache(self, share: float) -> None:
        self._cached.set(share)

    def on_start(self, stream: TokenStream) -> None:
        self._running.inc()
        self._queued.observe(stream.queued_s)

    def on_tokens(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None:
        if origins[:1] != ["prompt"]:
            return
        metrics, prompt_tokens = stream.request.metrics, len(stream.request.prompt_token_ids)
        self._prompt.inc(prompt_tokens)
        self._looked_up.inc(prompt_tokens)
        self._found.inc(metrics.cached_tokens)
        self._first_token.observe(metrics.ttft_s)

    def on_end(self, stream: TokenStream, end: End | SpeqError) -> None:
        reason = end.finish_reason if isinstance(end, End) else FAILED
        self._running.dec()
        self._success.labels(self._model, REASONS[reason]).inc()

    @contextmanager
    def listening(self, recorder: Recorder) -> Iterator[None]:
        """Count the steps of a recorder as long as the block lasts."""
        recorder.listeners.append(self.count)
        try:
            yield
        finally:
            recorder.listeners.remove(self.count)

    def count(self, step: StepStats) -> None:
        """Count a step that has ended.

        Steps of measurements, which are neither of a prompt nor of decoding, do not count.
        """
        if step.phase not in ("prefill", "decode"):
            return
        for field, counter in self._of_steps.items():
            counter.labels(self._model, step.phase).inc(getattr(step, field))
        self._generated.inc(step.emitted)
        if step.phase == "decode":
            self._count_draft(step)
            for _ in range(step.emitted):
                self._token.observe(step.duration_s * step.sequences / step.emitted)

    def _count_draft(self, step: StepStats) -> None:
        for draft in step.each_draft:
            self._draft_length.observe(draft.draft_length)
            self._drafts.inc(draft.draft_length > 0)
            self._drafted.inc(draft.draft_length)
            self._accepted.inc(draft.accepted)
            for position in range(draft.accepted):
                self._accepted_at.labels(self._model, str(position)).inc()

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
