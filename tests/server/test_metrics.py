"""Metrics: the figures of the runs they are of, as Prometheus would read them."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.engine.request import Request, RequestMetrics, Token
from speq.engine.token_stream import End, TokenStream
from speq.server.metrics import OF_STEPS, Metrics
from speq.stats import Recorder, RunStats, StepStats

Labels = dict[str, str]
PREFIX = "vllm:spec_decode_num"


class Parsed:
    """Samples of a text, by name and labels; the model's name stands in all of them."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.types: dict[str, str] = {}
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(metrics.text().decode()):
            self.types[family.name] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == model
                self._samples[sample.name, frozenset(labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples[name, frozenset(labels.items())]

    def labels_of(self, name: str) -> list[Labels]:
        return [dict(labels) for found, labels in self._samples if found == name]


def stream_of(prompt_tokens: int, cached_tokens: int, ttft_s: float) -> TokenStream:
    """A request whose first token has come."""
    metrics = RequestMetrics(first_token_s=ttft_s, cached_tokens=cached_tokens)
    request = Request([5] * prompt_tokens, SamplingParams(), metrics=metrics)

    async def made() -> TokenStream:
        return TokenStream(request, 0.0)

    return asyncio.run(made())


def test_steps_by_hand() -> None:
    metrics, recorder = Metrics("m"), Recorder()
    recorder.begin_run(RunStats(10.0, {}))
    steps = [
        StepStats("prefill", emitted=1, requests=8, moved_bytes=800, start_s=10.5, end_s=12.0),
        # Two of three drafted tokens stand, then the exact model's own: 0.6 s for three.
        StepStats(
            "decode",
            draft_length=3,
            accepted=2,
            emitted=3,
            requests=10,
            hits=7,
            moved_bytes=300,
            ahead_bytes=200,
            rejected_bytes=100,
            read_bytes=4096,
            stall_s=0.25,
            late_s=0.125,
            start_s=12.0,
            end_s=12.6,
        ),
        # None of two stands.
        StepStats(
            "decode", draft_length=2, emitted=1, requests=6, hits=6, start_s=13.0, end_s=13.5
        ),
        # No draft.
        StepStats(
            "decode", emitted=1, requests=4, hits=3, moved_bytes=100, start_s=14.0, end_s=16.0
        ),
        # A measurement's, which is no request's.
        StepStats("forced", emitted=5, requests=100, hits=100, moved_bytes=10**6),
    ]
    stream = stream_of(17, 8, 2.0)
    metrics.on_start(stream)
    metrics.on_tokens(stream, [Token(1, "a")], ["prompt"])
    metrics.on_tokens(stream, [Token(1, "a")], ["exact"])
    with metrics.listening(recorder):
        for step in steps:
            for listener in recorder.listeners:
                listener(step)
    assert recorder.listeners == []
    during = Parsed(metrics, "m")
    assert during("vllm:num_requests_running") == 1
    metrics.on_end(stream, End("eos"))
    read = Parsed(metrics, "m")
    assert read("vllm:num_requests_running") == 0
    assert read("vllm:request_success_total", finished_reason="stop") == 1
    assert read("vllm:prompt_tokens_total") == 17
    assert read("vllm:prefix_cache_queries_total") == 17
    assert read("vllm:prefix_cache_hits_total") == 8
    assert read("vllm:generation_tokens_total") == 1 + 3 + 1 + 1
    assert read(f"{PREFIX}_drafts_total") == 2
    assert read(f"{PREFIX}_draft_tokens_total") == 5
    assert read(f"{PREFIX}_accepted_tokens_total") == 2
    assert read(f"{PREFIX}_accepted_tokens_per_pos_total", position="0") == 1
    assert read(f"{PREFIX}_accepted_tokens_per_pos_total", position="1") == 1
    assert len(read.labels_of(f"{PREFIX}_accepted_tokens_per_pos_total")) == 2
    assert read("vllm:time_to_first_token_seconds_sum") == 2.0
    assert read("vllm:time_to_first_token_seconds_count") == 1
    # Three tokens of 0.2 s, one of 0.5 s and one of 2 s.
    of_token = "vllm:time_per_output_token_seconds"
    assert read(f"{of_token}_sum") == pytest.approx(0.6 + 0.5 + 2.0)
    assert read(f"{of_token}_count") == 5
    assert [read(f"{of_token}_bucket", le=le) for le in ("0.15", "0.3", "0.5", "1.0", "2.5")] == [
        *(0, 3, 4, 4, 5)
    ]
    assert read("speq:draft_length_sum") == 5
    assert [read("speq:draft_length_bucket", le=le) for le in ("0.0", "1.0", "2.0", "3.0")] == [
        *(1, 1, 2, 3)
    ]
    assert read("speq:expert_requests_total", phase="prefill") == 8
    assert read("speq:moved_bytes_total", phase="prefill") == 800
    for name, value in (
        ("expert_requests", 20),
        ("expert_hits", 16),
        ("moved_bytes", 400),
        ("ahead_bytes", 200),
        ("rejected_bytes", 100),
        ("read_bytes", 4096),
        ("stall_seconds", 0.25),
        ("late_seconds", 0.125),
    ):
        assert read(f"speq:{name}_total", phase="decode") == value, name


def test_the_share_of_caches_is_a_gauge() -> None:
    metrics = Metrics("m")
    for share in (0.75, 0.25):
        metrics.on_cache(share)
    parsed = Parsed(metrics, "m")
    assert parsed.types["vllm:kv_cache_usage_perc"] == "gauge"
    assert parsed("vllm:kv_cache_usage_perc") == 0.25


def test_names_and_kinds() -> None:
    """As dashboards for vLLM ask for them: counters are written with `_total` behind the name."""
    metrics = Metrics("m")
    types = Parsed(metrics, "m").types
    kinds = {
        "vllm:prompt_tokens": "counter",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:num_requests_running": "gauge",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:time_per_output_token_seconds": "histogram",
        "vllm:spec_decode_num_drafts": "counter",
        "vllm:spec_decode_num_draft_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens": "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
        "speq:draft_length": "histogram",
    } | {name: "counter" for name, _ in OF_STEPS.values()}
    assert {name: types[name] for name in kinds} == kinds
    # Nothing of ours stands where other libraries' metrics are.
    assert not [each.name for each in REGISTRY.collect() if each.name.startswith(("vllm", "speq"))]
    assert metrics.content_type.startswith("text/plain; version=")


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("eos", "stop"),
        ("stop", "stop"),
        ("length", "length"),
        ("stopped", "abort"),
        ("failed", "error"),
    ],
)
def test_reasons_as_vllm_names_them(reason: str, named: str) -> None:
    metrics, stream = Metrics("m"), stream_of(1, 0, 0.0)
    metrics.on_start(stream)
    metrics.on_end(stream, SpeqError("a fault") if named == "error" else End(reason))
    read = Parsed(metrics, "m")
    assert read.labels_of("vllm:request_success_total") == [{"finished_reason": named}]


@pytest.fixture(scope="module")
def generator(tiny: Callable[[str], Path]) -> Iterator[Generator]:
    made = Generator.from_pretrained(
        tiny("qwen3_moe"), "1MiB", draft_length=3, reader_threads=2, context_length=64
    )
    yield made
    made.close()


def test_two_real_runs(generator: Generator) -> None:
    metrics = Metrics("tiny")
    figures: list[dict[str, Any]] = []
    steps = []
    with metrics.listening(generator.runtime.recorder):
        for prompt in ("hello there", "and again"):
            done = generator.generate(prompt, max_new_tokens=16, ignore_eos=True)
            figures.append(done.stats)
            assert generator.last_run is not None
            steps += generator.last_run.decode
    generator.generate("nobody counts this", max_new_tokens=8, ignore_eos=True)
    read = Parsed(metrics, "tiny")

    def total(name: str) -> Any:
        return sum(each[name] for each in figures)

    assert total("moved_bytes") > 0
    for name, figure in (
        ("moved_bytes", "moved_bytes"),
        ("ahead_bytes", "ahead_bytes"),
        ("rejected_bytes", "rejected_bytes"),
        ("read_bytes", "read_bytes"),
        ("stall_seconds", "stall_s"),
        ("late_seconds", "late_s"),
    ):
        assert read(f"speq:{name}_total", phase="decode") == pytest.approx(total(figure)), name
    for name in ("moved_bytes", "read_bytes", "stall_seconds"):
        figure = f"prefill_{name.replace('_seconds', '_s')}"
        assert read(f"speq:{name}_total", phase="prefill") == pytest.approx(total(figure)), name
    asked = [sum(layer["requests"] for layer in each["layers"]) for each in figures]
    hits = [each["hit_rate"] * requests for each, requests in zip(figures, asked, strict=True)]
    assert read("speq:expert_requests_total", phase="decode") == sum(asked)
    assert read("speq:expert_hits_total", phase="decode") == pytest.approx(sum(hits))

    assert read("vllm:generation_tokens_total") == total("new_tokens") == 32
    drafted = read(f"{PREFIX}_draft_tokens_total")
    means = [each["draft_length_mean"] * each["steps"] for each in figures]
    assert drafted == pytest.approx(sum(means)) and drafted > 0
    assert read("speq:draft_length_count") == total("steps")
    assert read("speq:draft_length_sum") == drafted
    kept = [each["acceptance_rate"] * mean for each, mean in zip(figures, means, strict=True)]
    accepted = read(f"{PREFIX}_accepted_tokens_total")
    assert accepted == pytest.approx(sum(kept))
    by_place = [
        read(f"{PREFIX}_accepted_tokens_per_pos_total", **labels)
        for labels in read.labels_of(f"{PREFIX}_accepted_tokens_per_pos_total")
    ]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)

    of_token = "vllm:time_per_output_token_seconds"
    assert read(f"{of_token}_count") == total("new_tokens") - 2
    spent_s = [each["tpot_ms"] / 1e3 * (each["new_tokens"] - 1) for each in figures]
    assert read(f"{of_token}_sum") == pytest.approx(sum(spent_s))
    assert read(f"{PREFIX}_drafts_total") == sum(step.draft_length > 0 for step in steps)
