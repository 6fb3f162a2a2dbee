"""The Generator: kinds of prompts, streams, ends, interruptions, threads and contexts.

Tokens are compared with those of plain transformers.
"""

import contextlib
import gc
import json
import logging
import re
import shutil
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from speq import Generator, SpeqError, Token
from speq.config import SamplingParams
from speq.engine.request import Request
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.slots import SlotExperts
from speq.layers.draft_experts import DraftExperts
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.packed_batch import SequenceTokens
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.read_queue import ReaderThreads
from speq.stats import RunStats
from speq.text.prompts import check_message
from speq.text.tokenizer import tokens_of
from tests.helpers.often import often
from tests.helpers.tiny_models import greedy_tokens, load_plain

Folder = Callable[[str], Path]

# Threads that should have ended long before are taken for hung.
PATIENCE_S = 60
PROMPT = "Once upon a time there was a little dog named"
# With a draft and a few slots only, so that experts are fetched all along.
SCARCE = 1040 << 10
ROOMY = 2 << 20


@dataclass(frozen=True)
class TrainedModel:
    """A generator and the plain model it must agree with."""

    generator: Generator
    plain: Any

    def wanted(self, prompt_token_ids: list[int], count: int) -> list[int]:
        return greedy_tokens(self.plain, prompt_token_ids, count)

    def check_ready(self, prompt_token_ids: list[int] | None = None, count: int = 10) -> None:
        """The next call gives the right tokens and no slot was lost."""
        ids = prompt_token_ids or [*b"ready?"]
        result = self.generator.generate(ids, max_new_tokens=count, ignore_eos=True)
        assert result.token_ids == self.wanted(ids, count)
        loader = self.generator.runtime.engine.offload.loader
        cache = loader.cache
        assert cache.free_slots + len(cache) + loader.under_way == cache.num_slots


@pytest.fixture(scope="module")
def trained(bundled: Path) -> Iterator[TrainedModel]:
    """The bundled model, whose drafts are mostly accepted, beside its oracle."""
    generator = Generator.from_pretrained(bundled, "48MiB", dtype="float32", draft_length=4)
    yield TrainedModel(generator, load_plain(bundled))
    generator.close()


@pytest.fixture(scope="module")
def plain_small(tiny: Folder) -> Any:
    return load_plain(tiny("qwen2_moe"))


@pytest.fixture(scope="module")
def small(tiny: Folder, plain_small: Any) -> Iterator[TrainedModel]:
    """A random model, whose drafts are accepted in part, short of slots."""
    generator = Generator.from_pretrained(tiny("qwen2_moe"), SCARCE, draft_length=4)
    plan = generator.runtime.plan
    assert plan.items["draft"] > 0
    assert 2 <= plan.slots < 8
    yield TrainedModel(generator, plain_small)
    generator.close()


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all to their end, and fail rather than hang where one has none."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,), daemon=True) for each in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


# Prompts.


def test_a_string_and_its_token_ids_give_the_same(trained: TrainedModel, bundled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    ids = tokenizer(PROMPT)["input_ids"]
    wanted = trained.wanted(ids, 16)
    for prompt in (PROMPT, ids, tuple(ids)):
        result = trained.generator.generate(prompt, max_new_tokens=16, ignore_eos=True)
        assert result.token_ids == wanted
        assert result.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert result.finish_reason == "length"
        assert result.stats["new_tokens"] == 16


def test_chat_messages_go_through_the_template(trained: TrainedModel, bundled: Path) -> None:
    messages = [
        {"role": "user", "content": "Name a tree."},
        {"role": "assistant", "content": "Oak."},
        {"role": "user", "content": "And a bird?"},
    ]
    text = (
        "### Instruction: Name a tree.\n### Response: Oak.\n\n"
        "### Instruction: And a bird?\n### Response:"
    )
    ids = AutoTokenizer.from_pretrained(bundled)(text)["input_ids"]
    result = trained.generator.generate(messages, max_new_tokens=8, ignore_eos=True)
    assert result.token_ids == trained.wanted(ids, 8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        ([], "the prompt is empty"),
        ([1, 264], "the prompt holds 264; token ids are whole numbers from 0 to 263"),
        ([-1], "the prompt holds -1"),
        ([1, 2.0], r"the prompt holds 2\.0"),
        ([True], "the prompt holds True"),
        (["hello"], "the prompt holds 'hello'"),
        ([None], "the prompt holds None"),
        ([{"role": "user", "content": "hello"}, 3], "the prompt holds {'content'"),
        ([{"role": "user", "content": "hello"}], "the model has no chat template"),
        (b"hello", "prompt is a bytes; give a string, token ids or chat messages"),
        (bytearray(b"hello"), "prompt is a bytearray"),
        pytest.param(memoryview(b"hello"), "prompt is a memoryview; give a string", id="view"),
        ({"role": "user"}, "prompt is a dict"),
        ({1, 2}, "prompt is a set"),
        (np.array([1, 2]), "prompt is a ndarray"),
        (array("d", [1.0, 2.0]), r"the prompt holds 1\.0"),
        ([np.int64(1)], "the prompt holds "),
        ([[1, 2]] * 3, r"the prompt holds \[1, 2\]"),
        (["a" * 10_000], "the prompt holds 'aaaaaaaa.{0,40}; token ids"),
        pytest.param([10**5000], "the prompt holds an int too long to show; token", id="digits"),
        (7, "prompt is a int"),
        (None, "prompt is a NoneType"),
        (torch.tensor([1, 2]), "prompt is a Tensor"),
        ("a\udcffb", r"the prompt holds '\\udcff' at character 1, which is not Unicode text"),
    ],
    ids=repr,
)
def test_bad_prompts_are_refused(small: TrainedModel, prompt: Any, message: str) -> None:
    with pytest.raises(SpeqError, match=message) as refused:
        small.generator.generate(prompt, max_new_tokens=4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": None}, "a message has the content None; give a text"),
        ({"role": "user"}, "a message has the content None; give a text"),
        ({"role": "user", "content": {}}, r"a message has the content \{\}; give a text"),
        ({"role": "user", "content": ["hi"]}, r"a message has the content \['hi'\]; give a text"),
        ({"role": [], "content": "hi"}, r"a message has the role \[\]; give a text such as 'user'"),
        ({"role": "", "content": "hi"}, "a message has the role ''; give a text such as 'user'"),
        ({"content": "hi"}, "a message has the role None; give a text such as 'user'"),
    ],
)
def test_messages_that_say_nothing_are_refused(message: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        check_message(message)


def test_messages_may_have_parts_or_tool_calls() -> None:
    check_message({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    check_message({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]})


def test_a_first_request_is_checked_before_weights_are_loaded(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before a budget is blamed that holds no model at all."""
    monkeypatch.setattr("speq.models.moe_model.load", None)
    for prompt, new_tokens, message in (
        ("", 8, "the prompt is empty"),
        ([1, 264], 8, "the prompt holds 264"),
        ("a" * 600, 8, "a context of 608 tokens and the model's limit is 512; shorten"),
        ("a" * 500, 13, "a context of 513 tokens and the model's limit is 512; shorten"),
        (memoryview(b"hello"), 8, "prompt is a memoryview"),
        ("a" * 500, 12, "memory budget"),
    ):
        with pytest.raises(SpeqError, match=message):
            Generator.from_pretrained(tiny("qwen2_moe"), "1KiB", first_request=(prompt, new_tokens))
    with pytest.raises(SpeqError, match="513 tokens and context_length is 64; shorten"):
        Generator.from_pretrained(
            tiny("qwen2_moe"), "1KiB", first_request=("a" * 500, 13), context_length=64
        )


def test_a_first_prompt_is_tokenised_once(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(tokenizer: Any, text: str, **options: Any) -> list[int]:
        asked.append(text)
        return tokens_of(tokenizer, text, **options)

    monkeypatch.setattr("speq.text.prompts.tokens_of", counted)
    generator = Generator.from_pretrained(tiny("qwen2_moe"), "2MiB", first_request=("hello", 4))
    first = generator.generate("hello", max_new_tokens=4).token_ids
    assert asked == ["hello"]
    generator.generate("hellos", max_new_tokens=4)
    assert generator.generate("hello", max_new_tokens=4).token_ids == first
    assert asked == ["hello", "hellos", "hello"]
    generator.close()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "robot", "content": "hello"}],
        [{"role": "user", "content": "hello"}, {"role": "system", "content": "late"}],
    ],
    ids=repr,
)
def test_messages_the_template_refuses(
    trained: TrainedModel, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(SpeqError, match="chat template refuses these messages") as refused:
        trained.generator.generate(messages, max_new_tokens=4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3}, "unknown option max_tokens; the options are .*max_new_tokens"),
        ({"eos_ids": [3]}, "unknown option eos_ids"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3; it must be at least 1"),
        ({"max_new_tokens": 3.5}, r"max_new_tokens is 3\.5; it must be a whole number"),
        ({"stop": 5}, "stop is .*5.*non-empty strings"),
        ({"stop": ""}, "stop is .*non-empty strings"),
        ({"stop": ["a", ""]}, "stop is .*non-empty strings"),
        ({"generation_config": {"num_beams": 4}}, "generation_config is a dict"),
        ({"generation_config": GenerationConfig(num_beams=4)}, "sets num_beams, which speq does"),
        (
            {"generation_config": GenerationConfig(eos_token_id="x")},
            "eos_token_id is 'x'; it must be a token id or a list of them",
        ),
        ({"generation_config": GenerationConfig(stop_strings=5)}, "stop is .*non-empty strings"),
        ({"generation_config": GenerationConfig(max_length="x")}, "max_length is 'x'"),
        ({"generation_config": GenerationConfig(max_length=2)}, "it must be at least 1"),
    ],
    ids=repr,
)
def test_bad_options_are_refused(
    small: TrainedModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpeqError, match=message):
        small.generator.generate([1, 2, 3], **options)
    with pytest.raises(SpeqError, match=message):
        next(small.generator.stream([1, 2, 3], **options))


# Streams and ends.


def test_a_stream_adds_up_to_what_generate_gives(trained: TrainedModel) -> None:
    whole = trained.generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    finished: list[tuple[str, dict[str, Any]]] = []
    tokens = list(
        trained.generator.stream(
            PROMPT,
            max_new_tokens=24,
            ignore_eos=True,
            on_finish=lambda reason, stats: finished.append((reason, stats)),
        )
    )
    assert all(isinstance(token, Token) for token in tokens)
    assert [token.id for token in tokens] == whole.token_ids
    assert "".join(token.text for token in tokens) == whole.text
    ((reason, stats),) = finished
    assert reason == "length"
    assert stats["new_tokens"] == 24


def test_seeds_reproduce(small: TrainedModel) -> None:
    def sample(seed: int | None) -> tuple[int, ...]:
        options = {"max_new_tokens": 12, "temperature": 2.0, "ignore_eos": True}
        return tuple(small.generator.generate([5, 6, 7], seed=seed, **options).token_ids)

    first = {seed: sample(seed) for seed in range(3)}
    assert len(set(first.values())) == 3
    small.check_ready()
    assert {seed: sample(seed) for seed in reversed(range(3))} == first
    assert sample(None) != sample(None)


def test_a_stop_string_ends_within_an_accepted_run(trained: TrainedModel, bundled: Path) -> None:
    generator = trained.generator
    ids = generator.encode(PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    wanted = trained.wanted(ids, 24)
    text = tokenizer.decode(wanted)
    ends = [len(tokenizer.decode(wanted[: n + 1])) for n in range(24)]
    generator.generate(ids, max_new_tokens=24, ignore_eos=True)
    runs = [1, *(step.emitted for step in generator.last_run.decode)]
    last_of_runs = {end - 1 for end in accumulate(runs)}
    cases = []
    for at in range(1, 23):
        for length in (2, ends[at] - ends[at - 1] + 2):  # within one token, and over two
            stop = text[ends[at] - length : ends[at]]
            completed = text.find(stop) + len(stop)
            if at not in last_of_runs and ends[at - 1] < completed <= ends[at]:
                cases.append((at, stop))
    assert {len(stop) > ends[at] - ends[at - 1] for at, stop in cases} == {True, False}
    for at, stop in cases[:3] + cases[-3:]:
        result = generator.generate(ids, max_new_tokens=24, ignore_eos=True, stop=["@@", stop])
        assert result.text == text[: text.find(stop)]
        assert result.token_ids == wanted[: at + 1]
        assert result.finish_reason == "stop"
        assert result.stats["new_tokens"] == at + 1
    trained.check_ready(ids)


def test_a_stop_string_may_be_a_special_token(tiny: Folder, tmp_path: Path) -> None:
    """Whole, streamed and side by side; in a model that writes one by itself."""
    prompt = [*b"ready?"]
    ids = greedy_tokens(load_plain(tiny("qwen2_moe")), prompt, 12)
    at = next(n for n in range(3, 12) if ids[n] not in ids[:n] and ids[n] < 256)
    folder = tmp_path / "marked"
    shutil.copytree(tiny("qwen2_moe"), folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {
        "<|mark|>" if number == ids[at] else token: number for token, number in vocabulary.items()
    }
    marked = Tokenizer.from_str(json.dumps(written))
    marked.add_special_tokens(["<|mark|>"])
    marked.save(str(folder / "tokenizer.json"))
    before = marked.decode(ids[:at])
    with contextlib.closing(Generator.from_pretrained(folder, SCARCE)) as generator:
        asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
        tokens = [*generator.stream(prompt, **asked)]
        assert [name for token in tokens for _, name in token.special].count("<|mark|>") >= 1
        assert "".join(token.text for token in tokens) == marked.decode(ids)
        for stop, wanted in (("<|mark|>", before), (f"{before[-1]}<|mark|>", before[:-1])):
            options = asked | {"stop": ["@@@@", stop]}
            tokens = [*generator.stream(prompt, **options)]
            assert "".join(token.text for token in tokens) == wanted
            assert [token.id for token in tokens] == ids[: at + 1]
            (beside,) = generator.generate_batch([prompt], **options)
            for result in (generator.generate(prompt, **options), beside):
                assert (result.text, result.finish_reason) == (wanted, "stop")
                assert result.token_ids == ids[: at + 1]


def test_a_stop_string_is_seen_before_the_step_is_recorded(trained: TrainedModel) -> None:
    """The record of the step, the tokens that were given out and the governor agree."""
    generator = trained.generator
    ids = generator.encode(PROMPT)
    whole = generator.generate(ids, max_new_tokens=24, ignore_eos=True)
    ends = accumulate(step.emitted for step in generator.last_run.steps)
    # The first token of a step that emits several is the last that a stop string leaves.
    at = next(end for end, step in zip(ends, generator.last_run.decode, strict=False)
              if step.emitted > 2)  # fmt: skip
    tokenizer = generator.tokenizer
    before = tokenizer.decode(whole.token_ids[:at])
    stop = tokenizer.decode(whole.token_ids[: at + 1])[len(before) - 3 :]
    assert whole.text.find(stop) == len(before) - 3
    result = generator.generate(ids, max_new_tokens=24, ignore_eos=True, stop=stop)
    assert result.token_ids == whole.token_ids[: at + 1]
    assert sum(step.emitted for step in generator.last_run.steps) == at + 1
    last = generator.last_run.steps[-1]
    assert (last.emitted, last.accepted > 1) == (1, True)
    assert generator.runtime.recorder.step is last
    trained.check_ready(ids)


def test_steps_return_the_tokens_they_emitted(trained: TrainedModel) -> None:
    generator = trained.generator
    ids = generator.encode(PROMPT)
    engine = generator.runtime.reserve(len(ids) + 20)
    request = Request(ids, SamplingParams(max_new_tokens=20, ignore_eos=True))
    run = engine.recorder.begin_run(RunStats(0.0, {}))
    emitted = [engine.prefill(request)]
    while request.finish_reason is None:
        emitted += engine.step([request])
    tokens = [token for each in emitted for token in each]
    assert tokens == request.output_token_ids == trained.wanted(ids, 20)
    assert [len(each) for each in emitted] == [step.emitted for step in run.steps]
    assert max(map(len, emitted)) > 1


def test_a_draft_length_for_a_while(tiny: Folder, plain_small: Any) -> None:
    generator = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY, draft_length=3)
    wanted = greedy_tokens(plain_small, [1, 2, 3], 12)

    def lengths() -> set[int]:
        result = generator.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True)
        assert result.token_ids == wanted
        return {step.draft_length for step in generator.last_run.decode}

    try:
        with generator.with_draft_length(0):
            assert lengths() == {0}
            with generator.with_draft_length(2):
                assert 2 in lengths()
            # Also where memory is laid out anew.
            generator.reserve(generator.runtime.plan.context + 64)
            assert lengths() == {0}
        assert generator.runtime.plan.items["draft"] > 0
        assert 3 in lengths()
        with pytest.raises(SpeqError, match="draft_length is -1"), generator.with_draft_length(-1):
            pytest.fail("nonsense was accepted")
    finally:
        generator.close()
    plain = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY, draft="none")
    try:
        with pytest.raises(SpeqError, match="this run has no draft"), plain.with_draft_length(1):
            pytest.fail("there is nobody to draft")
    finally:
        plain.close()


def test_an_end_of_text_ends(small: TrainedModel) -> None:
    ids = [10, 20, 30]
    wanted = small.wanted(ids, 24)
    # A token that first comes late, so that it is not the first to be emitted.
    at = next(n for n in range(6, 24) if wanted[n] not in wanted[:n])
    other = next(token for token in range(264) if token not in wanted)
    for eos in (wanted[at], [other, wanted[at]]):
        theirs = small.plain.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=eos
        )
        config = GenerationConfig(eos_token_id=eos)
        result = small.generator.generate(ids, max_new_tokens=24, generation_config=config)
        assert result.token_ids == theirs[0, 3:].tolist() == wanted[: at + 1]
        assert result.finish_reason == "eos"
        assert result.stats["new_tokens"] == at + 1
    result = small.generator.generate(
        ids, max_new_tokens=24, generation_config=config, ignore_eos=True
    )
    assert result.token_ids == wanted
    assert result.finish_reason == "length"


def test_a_generation_config_is_honoured_and_overridden(small: TrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=5, eos_token_id=263)
    ids = [10, 20, 30]
    ours = small.generator.generate(ids, generation_config=config)
    assert ours.token_ids == small.wanted(ids, 5)
    longer = small.generator.generate(ids, generation_config=config, max_new_tokens=7)
    assert longer.token_ids == small.wanted(ids, 7)


def test_the_number_of_tokens_is_exact(trained: TrainedModel) -> None:
    ids = trained.generator.encode(PROMPT)
    wanted = trained.wanted(ids, 10)
    trained.generator.generate(ids, max_new_tokens=10, ignore_eos=True)
    assert max(step.emitted for step in trained.generator.last_run.decode) > 3
    for count in range(1, 10):
        result = trained.generator.generate(ids, max_new_tokens=count, ignore_eos=True)
        assert result.token_ids == wanted[:count]
        assert result.finish_reason == "length"
        assert result.stats["new_tokens"] == count


# Interruptions.


def test_a_stream_that_is_closed_or_dropped(small: TrainedModel) -> None:
    for end in ("close", "del"):
        for count in (0, 1, 3):
            stream = small.generator.stream([1, 2, 3], max_new_tokens=20, ignore_eos=True)
            got = [next(stream).id for _ in range(count)]
            assert got == small.wanted([1, 2, 3], 20)[:count]
            if end == "close":
                stream.close()
            del stream
            small.check_ready()


def test_an_exception_in_the_loop(small: TrainedModel) -> None:
    def read() -> None:
        for token in small.generator.stream([1, 2, 3], max_new_tokens=20):
            raise LookupError(token)

    with pytest.raises(LookupError):
        read()
    small.check_ready()


def test_an_exception_in_a_callback(small: TrainedModel) -> None:
    def fail(*args: object) -> None:
        raise LookupError(args)

    for options in ({"progress": fail}, {"on_finish": fail}):
        with pytest.raises(LookupError):
            list(small.generator.stream([1, 2, 3], max_new_tokens=4, **options))
        small.check_ready()


class Interrupt:
    """Counts calls of a function, by the phase they fall in, and interrupts one of them."""

    def __init__(self, original: Callable[..., Any], phase: Callable[..., str]) -> None:
        self._original = original
        self._phase = phase
        self.calls: Counter[str] = Counter()
        self.at: tuple[str, int] | None = None
        self.after = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        phase = self._phase(*args, **kwargs)
        fires = (phase, self.calls[phase]) == self.at
        self.calls[phase] += 1
        result = self._original(*args, **kwargs) if self.after or not fires else None
        if fires:
            raise KeyboardInterrupt
        return result


def phase_of_pass(
    model: MoEModel, backend: object, batch: Sequence[SequenceTokens], prefill: bool = False
) -> str:
    if isinstance(backend, DraftExperts):
        return "draft"
    return "prefill" if prefill else "verify"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "phases"),
    often(
        [
            (MoEModel, "forward", {"prefill", "draft", "verify"}),
            (ReaderThreads, "wait", {"prefill", "decode"}),
            (ExpertCache, "publish", {"prefill", "decode"}),
            (ReaderThreads, "submit", {"prefill", "decode"}),
            (SlotExperts, "run", {"prefill", "decode"}),
            (DraftExperts, "__call__", {"decode"}),
            (ExpertCache, "claim", {"prefill", "decode"}),
        ],
        quick=3,
        wide=4,
    ),
    ids=["pass", "wait", "publish", "fetch", "exact experts", "draft experts", "claim"],
)
def test_an_interrupt_leaves_it_ready(
    small: TrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    phases: set[str],
    after: bool,
) -> None:
    def phase_of_step(*args: object, **kwargs: object) -> str:
        return small.generator.runtime.recorder.step.phase

    function = Interrupt(
        getattr(owner, name), phase_of_pass if owner is MoEModel else phase_of_step
    )

    def run() -> None:
        function.calls.clear()
        small.generator.forget()  # or the prompt would not be run again
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **kwargs: function(*args, **kwargs))
            small.generator.generate([*range(100, 120)], max_new_tokens=12, ignore_eos=True)

    run()
    calls = dict(function.calls)
    assert set(calls) == phases
    function.after = after
    for phase, count in calls.items():
        # How often a run waits is up to the readers.
        for at in sorted({0, 0 if name == "wait" else count // 2}):
            function.at = (phase, at)
            with pytest.raises(KeyboardInterrupt) as held:
                run()
            # As in an interactive session, where the last traceback stays alive.
            assert held.tb is not None
            small.check_ready()


def test_an_interrupt_while_memory_is_laid_out(
    tiny: Folder, plain_small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model_spec = TrainedModel(Generator.from_pretrained(tiny("qwen2_moe"), ROOMY), plain_small)
    monkeypatch.setattr(KVCache, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model_spec.generator.generate([1, 2, 3], max_new_tokens=80)
    model_spec.check_ready()
    model_spec.check_ready([4] * 60, 20)
    model_spec.generator.close()


def test_memory_that_is_not_to_be_had(
    tiny: Folder, plain_small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer context that cannot be allocated leaves the shorter one in use."""
    allocate = KVCache.__init__

    def limited(cache: KVCache, *args: Any, **kwargs: Any) -> None:
        if args[2] > 64:
            raise MemoryError
        allocate(cache, *args, **kwargs)

    model_spec = TrainedModel(Generator.from_pretrained(tiny("qwen2_moe"), ROOMY), plain_small)
    monkeypatch.setattr(KVCache, "__init__", limited)
    for _ in range(2):
        with pytest.raises(SpeqError, match="the host has no memory left"):
            model_spec.generator.generate([1, 2, 3], max_new_tokens=80)
        model_spec.check_ready()
    monkeypatch.undo()
    model_spec.check_ready([4] * 60, 20)
    model_spec.generator.close()


def test_a_damaged_read_leaves_it_ready(
    small: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise SpeqError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsExpertStore, "read", fail)
        with pytest.raises(SpeqError, match="the disk is gone"):
            small.generator.generate([*range(50)], max_new_tokens=4)
    small.check_ready()


# Threads.


def test_two_threads_queue(small: TrainedModel) -> None:
    prompts = [[1, 2, 3], [200, 100, 50, 25]]
    wanted = [small.wanted(ids, 12) for ids in prompts]
    together = threading.Barrier(2)
    results: dict[int, list[list[int]]] = {0: [], 1: []}

    def work(which: int) -> None:
        together.wait(PATIENCE_S)
        for _ in range(3):
            result = small.generator.generate(prompts[which], max_new_tokens=12, ignore_eos=True)
            results[which].append(result.token_ids)

    run_threads(lambda: work(0), lambda: work(1))
    assert results == {0: [wanted[0]] * 3, 1: [wanted[1]] * 3}
    small.check_ready()


def test_a_thread_does_not_wait_for_itself(tiny: Folder, plain_small: Any) -> None:
    model_spec = TrainedModel(Generator.from_pretrained(tiny("qwen2_moe"), SCARCE), plain_small)
    generator = model_spec.generator

    def work() -> None:
        stream = generator.stream([1, 2, 3], max_new_tokens=12, ignore_eos=True)
        got = [next(stream).id for _ in range(4)]
        for attempt in (
            lambda: generator.generate([4, 5], max_new_tokens=2),
            lambda: next(generator.stream([4, 5], max_new_tokens=2)),
            lambda: generator.reserve(100),
            lambda: generator.close(),
        ):
            with pytest.raises(SpeqError, match="still reading an earlier stream"):
                attempt()
        # The open stream took no harm.
        assert got + [token.id for token in stream] == model_spec.wanted([1, 2, 3], 12)
        model_spec.check_ready()

    run_threads(work)
    generator.close()


def test_others_wait_for_an_open_stream(small: TrainedModel) -> None:
    stream = small.generator.stream([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    next(stream)
    begun, result = threading.Event(), []

    def work() -> None:
        begun.set()
        ids = small.generator.generate([7, 8], max_new_tokens=6, ignore_eos=True).token_ids
        result.append(ids)

    other = threading.Thread(target=work, daemon=True)
    other.start()
    assert begun.wait(PATIENCE_S)
    rest = [next(stream).id for _ in range(8)]
    assert rest == small.wanted([1, 2, 3], 12)[1:9]
    assert result == []
    stream.close()
    other.join(PATIENCE_S)
    assert result == [small.wanted([7, 8], 6)]


def test_a_stream_whose_thread_is_gone(small: TrainedModel) -> None:
    left = []

    def leave() -> None:
        left.append(small.generator.stream([1, 2, 3], max_new_tokens=12))
        next(left[0])

    run_threads(leave)
    left.pop().close()
    run_threads(small.check_ready)
    small.check_ready()


def test_a_stream_handed_to_another_thread(tiny: Folder, plain_small: Any) -> None:
    model_spec = TrainedModel(Generator.from_pretrained(tiny("qwen2_moe"), SCARCE), plain_small)
    stream = model_spec.generator.stream([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    got = [next(stream).id]

    def read_on() -> None:
        got.append(next(stream).id)
        with pytest.raises(SpeqError, match="still reading an earlier stream"):
            model_spec.generator.generate([4, 5], max_new_tokens=2)
        got.extend(token.id for token in stream)

    run_threads(read_on)
    assert got == model_spec.wanted([1, 2, 3], 12)
    model_spec.check_ready()
    model_spec.generator.close()


def test_a_closed_generator_says_so(tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY)
    generator.generate([1], max_new_tokens=1)
    generator.close()
    generator.close()
    for attempt in (
        lambda: generator.generate([1], max_new_tokens=1),
        lambda: next(generator.stream([1], max_new_tokens=1)),
        lambda: generator.reserve(100),
    ):
        with pytest.raises(SpeqError, match="this generator was closed; make a new one"):
            attempt()


# Contexts, budgets and drafts.


def test_the_context_grows(tiny: Folder, plain_small: Any) -> None:
    generator = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY)
    model_spec = TrainedModel(generator, plain_small)
    contexts = []
    for length in (5, 100, 5, 230):
        model_spec.check_ready([(3 * i) % 250 for i in range(length)])
        contexts.append(generator.runtime.plan.context)
        memory = generator.generate([1], max_new_tokens=1).stats["memory"]
        assert memory["budget"] == ROOMY == sum(memory.values()) - memory["budget"]
        assert memory["unused"] >= 0
    assert contexts[0] < 110 <= contexts[1] == contexts[2] < 240 <= contexts[3]
    limit = generator.max_context
    assert limit == 512
    message = rf"need a context of 513 tokens and the model's limit is {limit}; shorten one"
    with pytest.raises(SpeqError, match=message):
        generator.generate([1] * 500, max_new_tokens=13)
    model_spec.check_ready()
    generator.close()


def test_a_context_too_long_for_the_budget(tiny: Folder, plain_small: Any) -> None:
    """What is refused leaves the memory as it was laid out before."""
    model = tiny("qwen2_moe")
    with pytest.raises(SpeqError, match="too small for a context of 64 tokens") as refused:
        Generator.from_pretrained(model, 1)
    smallest = smallest_budget(refused.value)
    model_spec = TrainedModel(Generator.from_pretrained(model, smallest), plain_small)
    model_spec.check_ready()
    with pytest.raises(SpeqError, match="too small for a context of") as refused:
        model_spec.generator.generate([1] * 300, max_new_tokens=4)
    assert smallest_budget(refused.value) > smallest
    model_spec.check_ready()
    model_spec.generator.close()


def test_a_fixed_context(tiny: Folder, plain_small: Any) -> None:
    generator = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY, context_length=40)
    model_spec = TrainedModel(generator, plain_small)
    assert generator.max_context == generator.runtime.plan.context == 40
    model_spec.check_ready([1] * 25, 15)
    with pytest.raises(SpeqError, match="need a context of 41 tokens and context_length is 40"):
        generator.generate([1] * 25, max_new_tokens=16)
    model_spec.check_ready([1] * 39, 1)
    assert generator.runtime.plan.context == 40
    generator.close()


def smallest_budget(error: BaseException) -> int:
    match = re.search(r"the smallest workable budget is (\d+) bytes", str(error))
    assert match is not None
    return int(match[1])


def test_a_budget_without_room_for_the_draft(
    tiny: Folder, plain_small: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("qwen2_moe")
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(model, 1)
    with caplog.at_level(logging.WARNING, logger="speq"):
        budget = smallest_budget(refused.value)
        generator = Generator.from_pretrained(model, budget, drafter="int4")
    assert "does not fit the budget: running without one" in caplog.text
    result = generator.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    assert result.token_ids == greedy_tokens(plain_small, [1, 2, 3], 12)
    assert result.stats["draft_length_mean"] == 0
    assert result.stats["acceptance_rate"] is None
    assert result.stats["memory"]["draft"] == 0
    reasons = {step.reason for step in generator.last_run.decode}
    assert "the draft does not fit the budget" in reasons
    generator.close()


def test_a_draft_that_a_longer_context_drives_out(
    tiny: Folder, plain_small: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("qwen2_moe")
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(model, 1, context_length=384)
    budget = smallest_budget(refused.value)
    generator = Generator.from_pretrained(model, budget, drafter="int4")
    model_spec = TrainedModel(generator, plain_small)
    assert generator.runtime.plan.items["draft"] > 0
    model_spec.check_ready()
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, logger="speq"):
        model_spec.check_ready([1] * 374)
    assert "the draft leaves no room for a context of 384 tokens" in caplog.text
    assert generator.runtime.plan.items["draft"] == 0
    model_spec.check_ready()
    generator.close()


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_growth_that_fails_behind_a_dropped_draft(
    codec: str, tiny_bfloat16: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's memory is given back before slots are laid out, and plain decoding goes on."""
    model = tiny_bfloat16("qwen2_moe")
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(model, 1, context_length=384, codec=codec, dtype="float32")
    budget = smallest_budget(refused.value)
    given = {"codec": codec, "dtype": "float32", "drafter": "int4"}
    generator = Generator.from_pretrained(model, budget, **given)
    wanted = generator.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True).token_ids
    assert generator.runtime.plan.items["draft"] > 0
    backend = weakref.ref(generator.runtime.draft_backend)
    arenas = []

    def interrupt(*args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        gc.collect()
        arenas.append(backend())
        raise KeyboardInterrupt

    monkeypatch.setattr(KVCache, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generator.reserve(384)
    assert arenas == [None]
    assert generator.runtime.residency_plan.drafter == "none"
    for _ in range(2):
        again = generator.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
        assert again.token_ids == wanted
    generator.close()


@pytest.mark.parametrize("options", [{"draft": "none"}, {"draft_length": 0}], ids=repr)
def test_no_draft_asked_for(
    tiny: Folder, plain_small: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, logger="speq"):
        generator = Generator.from_pretrained(tiny("qwen2_moe"), ROOMY, **options)
    assert caplog.text == ""
    result = generator.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    assert result.token_ids == greedy_tokens(plain_small, [1, 2, 3], 12)
    assert result.stats["draft_length_mean"] == 0
    assert result.stats["steps"] == 11
    assert result.stats["memory"]["draft"] == 0
    generator.close()
