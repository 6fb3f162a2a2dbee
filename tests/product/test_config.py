"""Options as users type them: sizes, settings of a run, and transformers' GenerationConfig."""

import logging
import random
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from speq.config import DraftOptions, MemoryOptions, RunConfig, SamplingParams, TransferOptions
from speq.engine.generation_config import options_of
from speq.errors import SpeqError
from speq.options.declared import Options
from speq.units import format_bytes, parse_bytes
from tests.helpers.paths import BUNDLED


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        (12345, 12345),
        ("7B", 7),
        ("3kib", 3072),
        ("8GiB", 8 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5 GB", 1_500_000_000),
        ("  2 TB\t", 2 * 10**12),
        ("0.5KiB", 512),
        ("1.5TiB", 3 * 2**39),
        ("10mb", 10**7),
        ("250 Kb", 250_000),
        ("12G", 12 * 1024**3),
        ("512m", 512 * 1024**2),
    ],
)
def test_sizes_are_understood(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "+1GiB",
        "1e9",
        "8 Gi",
        "8GiBs",
        "1.GB",
        ".5GB",
        "1,5GB",
        "0",
        0,
        -5,
        "0.0001B",
        "8 GiB 1",
        "1_000",
        "nan",
        "inf",
        True,
        None,
        "9" * 400,
        "9" * 5000 + "GiB",
    ],
    ids=lambda text: repr(text)[:12],
)
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(SpeqError, match=r"memory size .* is not understood; give a"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1.5 * 1024**2, "1.5 MiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "1000 KiB"),
        (1023 * 1024, "1023 KiB"),
        (12_345_678_901, "11.5 GiB"),
        (5 * 1024**4, "5 TiB"),
        (2048 * 1024**4, "2048 TiB"),
        (-3 * 1024**3, "-3 GiB"),
    ],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_formatted_sizes_read_back_to_three_digits() -> None:
    rng = random.Random(31)
    sizes = [int(2 ** rng.uniform(0, 52)) for _ in range(2000)]
    # Where three digits round up to a fourth.
    sizes += [int(factor * 1024**power) for factor in (999.4, 999.6, 1023.4) for power in (1, 2, 3)]
    for size in sizes:
        text = format_bytes(size)
        assert re.fullmatch(r"\d{1,4}(\.\d{1,2})? (B|[KMGT]iB)", text), text
        assert parse_bytes(text) == pytest.approx(size, rel=0.00501)


def test_run_config_defaults() -> None:
    config = RunConfig.of("1GiB")
    assert config == RunConfig(2**30)
    assert (config.device, config.dtype, config.draft, config.drafter) == ("auto",) * 4
    assert (config.draft_length, config.cache_policy, config.prefetch) == (
        None,
        "lookahead",
        "three-phase",
    )


def test_each_option_belongs_to_one_group() -> None:
    groups = [each for each in RunConfig.__bases__ if issubclass(each, Options)]
    names = [field.name for group in groups for field in fields(group)]
    assert sorted(names) == sorted(field.name for field in fields(RunConfig))
    config = RunConfig.of("1GiB", 4, draft_nodes=8, host_budget="2GiB", reader_threads=3)
    assert config.group(MemoryOptions) == MemoryOptions(2**30, host_budget=2**31)
    assert config.group(DraftOptions) == DraftOptions(draft_length=4, draft_nodes=8)
    assert config.group(TransferOptions) == TransferOptions(reader_threads=3)


def test_run_config_takes_what_is_given() -> None:
    config = RunConfig.of(
        "2KiB",
        draft_length="3",
        context_length=77,
        draft=Path("some/folder"),
        device="cpu",
        dtype="bfloat16",
    )
    assert config.memory_budget == 2048
    assert config.draft_length == 3
    assert config.context_length == 77
    assert config.draft == "some/folder"
    assert (config.device, config.dtype) == ("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("given", "length"), [("auto", None), (None, None), (0, 0), ("0", 0), ("63", 63), (5, 5)]
)
def test_draft_lengths(given: Any, length: int | None) -> None:
    assert RunConfig.of("1GiB", given).draft_length == length


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "lots"}, r"memory size 'lots' is not understood"),
        ({"draft_length": "some"}, r"draft_length is 'some'; it must be auto or a whole number"),
        ({"draft_length": "2.5"}, r"draft_length is '2\.5'; it must be auto or a whole number"),
        ({"draft_length": 2.5}, r"draft_length is 2\.5; it must be a whole number"),
        ({"draft_length": True}, r"draft_length is True; it must be a whole number"),
        ({"draft_length": -1}, r"draft_length is -1; it must be from 0 to 63"),
        ({"draft_length": "64"}, r"draft_length is 64; it must be from 0 to 63"),
        ({"context_length": 0}, r"context_length is 0; it must be at least 1"),
        ({"context_length": "9"}, r"context_length is '9'; it must be a whole number"),
        ({"device": "tpu"}, r"device is 'tpu'; it must be one of auto, cpu, cuda"),
        ({"device": None}, r"device is None; it must be one of"),
        ({"dtype": "int8"}, r"dtype is 'int8'; it must be one of auto, bfloat16, float16"),
        ({"cache_policy": "random"}, r"cache_policy is 'random'; it must be one of"),
        ({"prefetch": "psychic"}, r"prefetch is 'psychic'; it must be one of"),
        ({"draft": ""}, r"draft is empty; give auto, none, a folder or a hub id"),
        (
            {"tpot_slo_ms": 0},
            r"tpot_slo_ms is 0; it must be above 0 and at most 86400000 milliseconds",
        ),
        ({"latency_slo_ms": "9"}, r"latency_slo_ms is '9'; it must be a number of mill"),
        (
            {"latency_slo_ms": 50, "draft_length": 4},
            r"latency_slo_ms is given and draft_length is 4; objectives .* must be auto",
        ),
        ({"tpot_slo_ms": 10**19}, r"tpot_slo_ms is 10{19}; it must be above 0 and at most"),
        ({"profile": "\0"}, r"profile is '.x00', with a character 0 in it; give auto, none, or"),
        ({"memory_budget": "99999999999999999999TiB"}, r"it must be at most 1024 TiB"),
        ({"draft_nodes": 0}, r"draft_nodes is 0; it must be from 1 to 63"),
        ({"draft_nodes": 64}, r"draft_nodes is 64; it must be from 1 to 63"),
        (
            {"draft_nodes": 8, "drafter": "ngram"},
            r"draft_nodes is 8 and drafter is ngram; trees are drafted by int4, cached and",
        ),
        ({"head": "x"}, r"head is x and drafter is auto; a head drafts with drafter head"),
        ({"prune_rows": "maybe"}, r"prune_rows is 'maybe'; it must be one of auto, on, off"),
        ({"drafter": "oracle"}, r"drafter is 'oracle'; it must be one of auto, none, int4, ngram"),
        ({"speed": 11}, r"unknown option speed; the options are memory_budget, .*draft_length"),
        ({"b": 1, "a": 2}, r"unknown option a, b; the options are"),
    ],
)
def test_bad_run_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeqError, match=message):
        RunConfig.of(**({"memory_budget": "1GiB"} | options))


def test_generation_config_greedy() -> None:
    config = GenerationConfig(max_new_tokens=9, temperature=0.3, top_k=4, top_p=0.2)
    assert options_of(config, prompt_tokens=5) == {"max_new_tokens": 9}


def test_generation_config_sampling() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.3, top_k=4, top_p=0.2)
    options = options_of(config, prompt_tokens=5)
    assert options == {"temperature": 0.3, "top_k": 4, "top_p": 0.2}


def test_generation_config_min_p_and_repetition_penalty() -> None:
    config = GenerationConfig(do_sample=True, min_p=0.1, repetition_penalty=1.2)
    options = options_of(config, prompt_tokens=5)
    assert options.items() >= {"min_p": 0.1, "repetition_penalty": 1.2}.items()
    greedy = GenerationConfig(min_p=0.1, repetition_penalty=1.2)
    assert options_of(greedy, prompt_tokens=5) == {"repetition_penalty": 1.2}


def test_generation_config_sampling_defaults_are_those_of_transformers() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    names = ("temperature", "top_k", "top_p")
    options = options_of(GenerationConfig(do_sample=True), prompt_tokens=5)
    assert options == {name: defaults[name] for name in names}


def test_generation_config_lengths() -> None:
    assert options_of(GenerationConfig(max_length=30), 12) == {"max_new_tokens": 18}
    both = GenerationConfig(max_length=30, max_new_tokens=7)
    assert options_of(both, 12) == {"max_new_tokens": 7}
    with pytest.raises(SpeqError, match="max_new_tokens is -2; it must be at least 1"):
        SamplingParams(**options_of(GenerationConfig(max_length=10), 12))


def test_generation_config_ends() -> None:
    assert options_of(GenerationConfig(eos_token_id=0), 1) == {"eos_ids": frozenset({0})}
    several = GenerationConfig(eos_token_id=[3, 5], stop_strings=["a", "b"])
    assert options_of(several, 1) == {"eos_ids": frozenset({3, 5}), "stop": ("a", "b")}
    assert options_of(GenerationConfig(stop_strings="end"), 1) == {"stop": ("end",)}


def test_generation_config_unset_fields_ask_for_nothing() -> None:
    assert options_of(GenerationConfig(), 1) == {}
    assert options_of(GenerationConfig(do_sample=False, temperature=None, top_k=None), 1) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_return_sequences": 2, "do_sample": True},
        {"min_new_tokens": 3},
        {"bad_words_ids": [[3]]},
        {"suppress_tokens": [1]},
        {"no_repeat_ngram_size": 2},
        {"typical_p": 0.9, "do_sample": True},
        {"forced_eos_token_id": 3},
        {"guidance_scale": 2.0},
        {"output_scores": True, "return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generation_config_fields_without_support_are_named(options: dict[str, Any]) -> None:
    names = ", ".join(sorted(set(options) - {"do_sample"}))
    with pytest.raises(SpeqError, match=f"generation_config sets {names}, which speq does not"):
        options_of(GenerationConfig(**options), 1)


def test_generation_config_fields_at_their_defaults_do_no_harm() -> None:
    """Many published files spell defaults out."""
    for name, value in GenerationConfig._get_default_generation_params().items():
        if name not in ("max_length", "do_sample"):
            options = options_of(GenerationConfig(**{name: value}), 1)
            assert SamplingParams(**options) == SamplingParams(), name


def test_generation_config_of_the_bundled_model_is_taken() -> None:
    config = GenerationConfig.from_pretrained(BUNDLED)
    assert options_of(config, 1) == {"eos_ids": frozenset({0})}


@pytest.mark.parametrize(
    ("options", "gives_up"),
    [
        ({}, False),
        ({"draft_nodes": 8}, True),
        ({"draft_nodes": 8, "prune_rows": "off"}, False),
        ({"prune_rows": "on"}, True),
    ],
)
def test_rows_are_given_up_of_trees_or_where_one_says_so(
    options: dict[str, Any], gives_up: bool
) -> None:
    assert RunConfig.of("1GiB", **options).prunes_rows == gives_up


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        (16 << 30, 12544 << 20),  # 13,107 - 448 MiB, in steps of 256
        (1 << 30, 256 << 20),
    ],
)
def test_a_budget_that_nobody_gives_is_of_what_is_free(
    free: int, wanted: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("speq.host_memory.available_bytes", lambda: free)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert RunConfig.of().memory_budget == wanted
    assert f"{format_bytes(wanted)} of {format_bytes(free)} that are free" in caplog.text
    assert RunConfig.of("auto", draft_length=2).memory_budget == wanted


def test_a_budget_that_cannot_be_chosen_is_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("speq.host_memory.available_bytes", lambda: 800 << 20)
    with pytest.raises(SpeqError, match="800 MiB are free; give a memory_budget"):
        RunConfig.of()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SpeqError, match="there is a GPU; give what the run may take"):
        RunConfig.of("auto")
