"""Texts side by side: each has the tokens that it has alone, whoever joins and leaves meanwhile."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from speq import Generator
from speq.config import RunConfig, SamplingParams
from speq.engine.batch import Batch
from speq.engine.request import Cancelled, Request
from speq.errors import SpeqError
from speq.stats import RunStats, StepStats
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.often import often
from tests.helpers.tiny_models import BY_FAMILY, drawn_tokens, greedy_tokens, load_plain

ROOMY = "64MiB"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Plan:
    """A text that is asked for, when, and what it must become.

    arrives   at that step; dropped: after so many tokens, or never
    """

    prompt: list[int]
    sampling: SamplingParams
    expected: list[int]
    arrives: int
    dropped: int | None = None
    made: list[int] = field(default_factory=list)


def plans_of(plain: Any, rng: random.Random, count: int, most: int = 24) -> list[Plan]:
    """Texts of random lengths that arrive at random: most greedy, some drawn, some given up."""
    plans = []
    for number in range(count):
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, 40))]
        tokens = rng.randint(1, most)
        if number % 3 == 2:
            options = SamplingParams(
                max_new_tokens=tokens, temperature=0.9, top_k=50, seed=number, ignore_eos=True
            )
            expected = drawn_tokens(plain, prompt, tokens, options)
        else:
            options = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            expected = greedy_tokens(plain, prompt, tokens)
        dropped = rng.randint(0, tokens) if number % 4 == 3 else None
        plans.append(Plan(prompt, options, expected, rng.randint(0, 12), dropped))
    return plans


def run(batch: Batch, plans: list[Plan], draft_length: int | None = None) -> int:
    """Run texts as they arrive, and give up those that are to be; most texts of a step."""
    requests: dict[Request, Plan] = {}
    at = most = 0
    while at <= 12 or not batch.idle:
        for plan in plans:
            if plan.arrives == at:
                requests[batch.add(Request(plan.prompt, plan.sampling))] = plan
        for request, plan in requests.items():
            if plan.dropped is not None and len(plan.made) >= plan.dropped:
                batch.drop(request)
        most = max(most, len(batch.running))
        for emitted in batch.step(draft_length):
            assert emitted.error is None
            plan = requests[emitted.request]
            plan.made += [token.id for token in emitted.tokens]
        at += 1
    for request, plan in requests.items():
        assert plan.made == request.output_token_ids
    return most


def check(plans: list[Plan]) -> None:
    for plan in plans:
        if plan.dropped is None:
            assert plan.made == plan.expected
        else:
            assert plan.made == plan.expected[: len(plan.made)]
            assert len(plan.made) >= min(plan.dropped, len(plan.expected)) or not plan.made


CELLS = (
    Cell(3, "half", "own", prefetch="three-phase", cache_policy="lookahead"),
    Cell(3, "two slots", "poor", cache_policy="entropy", prefetch="three-phase"),
    Cell(0, "two slots", "own", cache_policy="lfu"),
    Cell(5, "half", "poor", prefetch="three-phase", trees="small"),
    Cell(5, "half", "poor", prefetch="three-phase", trees="pruned"),
    Cell(3, "half", "own", "packed", codec="lossless"),
    Cell(2, "half", "gptq", "packed", codec="residual", prefetch="three-phase"),
    Cell(4, "all", "own", drafter="ngram"),
    Cell(4, "half", "own", drafter="head", prefetch="three-phase"),
    Cell(5, "two slots", "own", drafter="head", trees="small"),
    Cell(3, "half", "own", drafter="cached", prefetch="three-phase", cache_policy="lookahead"),
    Cell(4, "two slots", "own", drafter="cached", trees="small"),
    Cell(3, "half", "own", drafter="head", trees="small", head="eagle"),
)
CONTEXT = 96


def check_cell(cell: Cell, family: str, folders: Folders, dtype: str, seed: int) -> RunStats:
    model, draft = folders.of(family, cell)
    plain = load_plain(folders.published(family, cell), DTYPES[dtype])
    plans = plans_of(plain, random.Random(seed), 7)
    generator, _ = loaded(cell, model, draft, dtype, CONTEXT, max_batch=3)
    try:
        with generator.batch() as batch:
            assert run(batch, plans) >= 2
        check(plans)
        assert generator.last_run is not None
        return generator.last_run
    finally:
        generator.close()


@pytest.mark.parametrize("family", BY_FAMILY)
def test_tokens_are_those_of_each_text_alone(family: str, folders: Folders) -> None:
    at = sum(map(ord, family))
    stats = check_cell(CELLS[0], family, folders, "float32", seed=at)
    assert max(step.sequences for step in stats.decode) >= 2
    # A row that stands for nothing would be scored, and ask for experts.
    for step in stats.decode:
        assert step.rows == step.sequences + step.draft_length + step.branches
    check_cell(CELLS[1 + at % (len(CELLS) - 1)], family, folders, "float32", seed=at + 1)


@pytest.mark.parametrize(
    "cell", often(CELLS, quick=5, wide=4), ids=lambda cell: f"{cell.draft_length}-{cell.trees}"
)
def test_tokens_in_every_cell(cell: Cell, folders: Folders) -> None:
    check_cell(cell, "qwen2_moe", folders, "float32", seed=5)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_tokens_in_float64(family: str, folders: Folders) -> None:
    for cell in CELLS[::4]:
        check_cell(cell, family, folders, "float64", seed=9)


def test_a_batch_is_generated_as_its_texts_are(tiny: Callable[[str], Path]) -> None:
    """Prompts, ends of text, stop strings, and figures of each."""
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft_length=3, max_batch=2, context_length=96
    )
    try:
        prompts = ["one", "and another one", "a third, which is longer than they are", "x"]
        wanted = [generator.generate(prompt, max_new_tokens=20) for prompt in prompts]
        stop = next(text for made in wanted for text in [made.text[5:7]] if len(text) == 2)
        wanted = [generator.generate(each, max_new_tokens=20, stop=stop) for each in prompts]
        made = generator.generate_batch(prompts, max_new_tokens=20, stop=stop)
        for got, alone in zip(made, wanted, strict=True):
            assert (got.text, got.token_ids) == (alone.text, alone.token_ids)
            assert got.finish_reason == alone.finish_reason
            assert got.stats["new_tokens"] == len(alone.token_ids)
            assert got.stats["ttft_ms"] > 0
        assert {each.finish_reason for each in made} >= {"stop"}
        assert generator.last_run is not None
        assert generator.last_run.summary()["batch_mean"] > 1
        assert generator.generate_batch([]) == []
    finally:
        generator.close()


def test_drafts_of_texts_share_their_passes(tiny: Callable[[str], Path]) -> None:
    """So many passes of the INT4 copy as the longest draft has tokens, and one verification."""
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft_length=3, max_batch=4, context_length=96
    )
    passes: list[int] = []
    model = generator.runtime.model
    own = model.forward

    def counted(backend: Any, texts: Any, prefill: bool = False) -> Any:
        passes.append(sum(len(text.token_ids) for text in texts))
        return own(backend, texts, prefill)

    model.forward = counted  # type: ignore[method-assign]
    try:
        generator.generate_batch(["ab", "cd", "ef", "gh"], max_new_tokens=60, ignore_eos=True)
        assert generator.last_run is not None
        step = next(each for each in generator.last_run.decode if each.sequences == 4)
        assert step.passes == 3
        assert step.draft_length == 12
        assert step.rows == 16
        assert [each.draft_length for each in step.drafts] == [3] * 4
        at = passes.index(16)
        assert passes[at - 3 : at] == [4, 4, 4]
    finally:
        generator.close()


def test_what_can_never_fit_is_refused_at_once(tiny: Callable[[str], Path]) -> None:
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, draft="none", max_batch=2, context_length=32
    )
    try:
        with generator.batch() as batch:
            with pytest.raises(SpeqError, match="need a context of 40 tokens and context_length"):
                batch.add(Request([1] * 20, SamplingParams(max_new_tokens=20)))
            assert batch.idle
    finally:
        generator.close()


def test_expert_budgets_are_for_single_texts() -> None:
    with pytest.raises(SpeqError, match="max_batch is 2 and an expert budget is given"):
        RunConfig.of("1GiB", max_batch=2, expert_budget=8)
    with pytest.raises(SpeqError, match="max_batch is 65"):
        RunConfig.of("1GiB", max_batch=65)


def test_contexts_of_all_texts_are_planned(tiny: Callable[[str], Path]) -> None:
    """And the budget that would do is one that does."""
    options: dict[str, Any] = {"draft": "none", "context_length": 512, "dtype": "float32"}
    alone = Generator.from_pretrained(tiny("olmoe"), ROOMY, **options)
    one = alone.runtime.plan.items["kv_cache"]
    assert one == alone.runtime.engine.caches[0].nbytes
    alone.close()
    side_by_side = Generator.from_pretrained(tiny("olmoe"), ROOMY, max_batch=5, **options)
    assert side_by_side.runtime.plan.items["kv_cache"] == 5 * one
    assert sum(cache.nbytes for cache in side_by_side.runtime.engine.caches) == 5 * one
    side_by_side.close()
    small = 5 * one
    with pytest.raises(SpeqError, match="too small for 5 contexts of 512 tokens") as refused:
        Generator.from_pretrained(tiny("olmoe"), small, max_batch=5, **options)
    assert "a shorter context or a smaller max_batch" in str(refused.value)
    needed = refused.value.needed_bytes  # type: ignore[attr-defined]
    Generator.from_pretrained(tiny("olmoe"), needed, max_batch=5, **options).close()


def test_who_needs_more_room_waits_until_it_can_be_made(tiny: Callable[[str], Path]) -> None:
    """Entries of texts under way are not thrown away, and nobody overtakes."""
    plain = load_plain(tiny("olmoe"))
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft="none", max_batch=3
    )
    try:
        with generator.batch(64) as batch:
            assert generator.runtime.plan.context == 64
            prompts = {6: [5] * 6, 7: [9] * 60, 8: [3] * 4}
            sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
            requests = {n: batch.add(Request(ids, sampling)) for n, ids in prompts.items()}
            order = []
            while not batch.idle:
                for emitted in batch.step():
                    if emitted.request not in order:
                        order.append(emitted.request)
                        contexts = generator.runtime.plan.context
                        assert contexts >= emitted.request.context
            assert order == list(requests.values())
            for number, request in requests.items():
                expected = greedy_tokens(plain, prompts[number], 20)
                assert request.output_token_ids == expected
    finally:
        generator.close()


def damaged(generator: Generator, row: int) -> None:
    """Make the entries of one text no numbers, from its first token on."""
    generator.runtime.engine.caches[row].layers[0].values[:, :, :1] = float("nan")


def test_a_damaged_text_ends_alone(tiny: Callable[[str], Path]) -> None:
    plain = load_plain(tiny("olmoe"))
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft_length=2, max_batch=3, context_length=64
    )
    try:
        with generator.batch() as batch:
            sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
            prompts = [[number + 3] * (number + 2) for number in range(3)]
            requests = [batch.add(Request(prompt, sampling)) for prompt in prompts]
            while len(batch.running) < 3:
                batch.step()
            damaged(generator, requests[1].kv_slot)
            ended = batch.step()
            assert [each.request for each in ended if each.error] == [requests[1]]
            assert "not numbers" in str(next(each.error for each in ended if each.error))
            while not batch.idle:
                assert not any(each.error for each in batch.step())
        for request, prompt in zip(requests, prompts, strict=True):
            wanted = greedy_tokens(plain, prompt, 24)
            got = request.output_token_ids
            assert got == (wanted if request is not requests[1] else wanted[: len(got)])
    finally:
        generator.close()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "qwen3_next", "lfm2_moe"])
def test_a_chunk_that_is_cancelled_takes_no_other_text_with_it(
    family: str, layer: int, tiny: Callable[[str], Path]
) -> None:
    """It ends between two layers; the others' KV and states, and its own before it, are whole."""
    plain, sampling = load_plain(tiny(family)), SamplingParams(max_new_tokens=12, ignore_eos=True)
    generator = Generator.from_pretrained(
        *(tiny(family), ROOMY),
        **{"dtype": "float32", "draft_length": 2, "max_batch": 2, "context_length": 400},
    )
    short, long = [5, 6, 7], [(3 * at * at + at) % 250 for at in range(300)]
    told: list[int] = []

    def cancel(request: Request, done: int, total: int) -> None:
        told.append(done)
        if request is not first and len(told) > 1 + layer:
            raise Cancelled

    try:
        with generator.batch() as batch:
            first = batch.add(Request(short, sampling))
            batch.step()
            for _ in range(2):  # the second time it goes on from what is whole
                second = batch.add(Request(long, sampling))
                told.clear()
                while second not in batch.running and len(told) <= 1 + layer:
                    batch.step(progress=cancel)
                assert batch.prefilling is second
                batch.drop(second)
            third = batch.add(Request(long, sampling))
            while not batch.idle:
                batch.step()
        assert first.output_token_ids == greedy_tokens(plain, short, 12)
        assert third.output_token_ids == greedy_tokens(plain, long, 12)
    finally:
        generator.close()


def test_a_lost_pass_ends_all_and_no_more(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the midst of a step takes the entries of all texts; who waits goes on."""
    plain = load_plain(tiny("olmoe"))
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft="none", max_batch=2, context_length=64
    )
    try:
        with generator.batch() as batch:
            sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
            requests = [batch.add(Request([at + 1] * 5, sampling)) for at in range(3)]
            while len(batch.running) < 2:
                batch.step()
            with monkeypatch.context() as broken:
                lost = SpeqError("the disk is gone")

                def fail(*args: Any) -> Any:
                    raise lost

                broken.setattr(generator.runtime.engine.verification, "score", fail)
                ended = batch.step()
            assert {each.request for each in ended if each.error is lost} == {*requests[:2]}
            while not batch.idle:
                assert not any(each.error for each in batch.step())
            assert requests[2].output_token_ids == greedy_tokens(plain, [3] * 5, 12)
            with monkeypatch.context() as broken:
                again = batch.add(Request([9] * 5, sampling))
                batch.step()

                def interrupt(*args: Any) -> Any:
                    raise KeyboardInterrupt

                broken.setattr(generator.runtime.engine.verification, "score", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    batch.step()
            assert batch.idle
            assert again.finish_reason is None
        made = generator.generate([7] * 4, max_new_tokens=12, ignore_eos=True)
        assert made.token_ids == greedy_tokens(plain, [7] * 4, 12)
    finally:
        generator.close()


def test_first_tokens_do_not_wait_for_a_round(tiny: Callable[[str], Path]) -> None:
    """Chunks of prompts and rounds take turns, and say where tokens are from."""
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft_length=2, max_batch=3, context_length=64
    )
    try:
        sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
        with generator.batch() as batch:
            assert batch.has_room(64)
            first, second = (batch.add(Request([at + 1] * 5, sampling)) for at in range(2))
            assert not batch.has_room(5)  # one waits for its cache already
            (told,) = batch.step()
            assert (told.request, told.origins, len(told.tokens)) == (first, ["prompt"], 1)
            (told,) = batch.step()
            assert told.request is first and told.origins[-1] == "exact"
            assert set(told.origins[:-1]) <= {"accepted"}
            assert len(told.origins) == len(told.tokens)
            (told,) = batch.step()
            assert (told.request, told.origins) == (second, ["prompt"])
            assert {each.request for each in batch.step()} == {first, second}
            assert batch.has_room(64)
            batch.add(Request([3] * 5, sampling))
            while not batch.idle:
                batch.step()
    finally:
        generator.close()


def test_figures_of_each_text_are_its_share(tiny: Callable[[str], Path]) -> None:
    """Bytes of steps add up to those of the run; of waits each text has the whole."""
    generator = Generator.from_pretrained(
        tiny("olmoe"), "1MiB", dtype="float32", draft="none", max_batch=3, context_length=32
    )
    steps: list[StepStats] = []
    generator.runtime.recorder.listeners.append(steps.append)
    try:
        sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
        prompts = [[at + 1] * (at + 3) for at in range(3)]
        with generator.batch() as batch:
            requests = [batch.add(Request(prompt, sampling)) for prompt in prompts]
            while not batch.idle:
                batch.step()
        figures = [request.figures for request in requests]
        rounds = [step for step in steps if step.phase == "decode"]
        chunks = [step for step in steps if step.phase == "prefill"]
        moved = sum(step.moved_bytes for step in rounds)
        assert moved > 0
        assert sum(each["moved_bytes"] for each in figures) == pytest.approx(moved, abs=2)
        assert [each["prefill_moved_bytes"] for each in figures] == [
            step.moved_bytes for step in chunks
        ]
        # The first text took part in the first eight rounds, and so on.
        for at, each in enumerate(figures):
            own = rounds[at : at + 8]
            assert each["stall_s"] == pytest.approx(sum(step.stall_s for step in own))
            assert each["batch_mean"] == sum(step.sequences for step in own) / 8
    finally:
        generator.close()


def test_records_of_texts_without_end_have_an_end(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speq.engine.batch.RECORDED_STEPS", 5)
    generator = Generator.from_pretrained(
        tiny("olmoe"), ROOMY, dtype="float32", draft="none", max_batch=2, context_length=32
    )
    try:
        with generator.batch() as batch:
            batch.add(Request([1, 2, 3], SamplingParams(max_new_tokens=13, ignore_eos=True)))
            lengths, runs = [], []
            while not batch.idle:
                batch.step()
                assert generator.last_run is not None
                lengths.append(len(generator.last_run.steps))
                runs.append(generator.last_run)
            assert lengths == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
            assert len(set(map(id, runs))) == 3
            assert generator.runtime.recorder.run is generator.last_run
    finally:
        generator.close()
