"""What texts begin with is run once: tokens are those of plain transformers, and entries those of a
run that reuses nothing.
"""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.config import RunConfig, SamplingParams
from speq.engine.batch import Batch
from speq.engine.drafters.head import HeadDrafter
from speq.engine.prefixes import Prefixes, chunk_end
from speq.engine.request import Request
from speq.errors import SpeqError
from speq.models.kv_cache import KVCache, KVLayer, common_prefix
from speq.models.packed_batch import SequenceTokens
from tests.helpers.heads import write_random_head
from tests.helpers.often import often
from tests.helpers.tiny_models import (
    INDEXED,
    SELECTING,
    WITH_STATES,
    greedy_tokens,
    load_plain,
    write_model,
)

CHUNK, CONTEXT = 16, 160
SAMPLING = SamplingParams(max_new_tokens=10, ignore_eos=True)
FIRST = [*range(20, 70)]


def made(folder: Path, kind: str, max_batch: int = 1, **options: Any) -> Generator:
    """Of chunks that are shorter than prompts are."""
    options = {"dtype": "float32", "draft_length": 2} | options
    generator = Generator.from_pretrained(
        folder,
        "64MiB",
        prefix_reuse=kind,
        max_batch=max_batch,
        context_length=CONTEXT,
        **options,
    )
    engine = generator.runtime.engine
    engine.chunk = engine.prefixes.chunk = CHUNK
    return generator


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Generator], list[int]]:
    """Have a generator write down the tokens of each pass over a prompt."""

    def of(generator: Generator) -> list[int]:
        counts: list[int] = []
        model = generator.runtime.model
        own = model.prefill

        def counted(backend: Any, tokens: SequenceTokens, *others: Any) -> Any:
            counts.append(len(tokens.token_ids))
            return own(backend, tokens, *others)

        monkeypatch.setattr(model, "prefill", counted)
        return counts

    return of


def entries(generator: Generator, row: int, count: int) -> list[Tensor]:
    """KV of the first tokens, of the layers that have any."""
    layers = generator.runtime.engine.caches[row].layers
    kept = [layer for layer in layers if isinstance(layer, KVLayer)]
    return [tensor[:, :, :count].clone() for layer in kept for tensor in layer.tensors]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", *SELECTING, *WITH_STATES])
def test_turns_of_a_chat(
    family: str, tiny: Callable[[str], Path], reads: Callable[[Generator], list[int]]
) -> None:
    """Whole chunks are reused, and all that came of them is bit for bit as without."""
    plain = load_plain(tiny(family))
    generator, anew = made(tiny(family), "chunks"), made(tiny(family), "none")
    counts, counts_anew = reads(generator), reads(anew)
    try:
        prompt, cached = FIRST, [0, 48, 48]
        for turn in range(3):
            answer = generator.generate(prompt, max_new_tokens=10, ignore_eos=True)
            assert answer.token_ids == greedy_tokens(plain, prompt, 10)
            assert answer.stats["cached_tokens"] == cached[turn]
            other = anew.generate(prompt, max_new_tokens=10, ignore_eos=True)
            assert other.token_ids == answer.token_ids
            assert other.stats["cached_tokens"] == 0
            count = len(prompt)
            assert alike(entries(generator, 0, count), entries(anew, 0, count))
            prompt = [*prompt, *answer.token_ids, 7, 8, 9]
        assert counts == [16, 16, 16, 2, 15, 16, 12]
        assert counts_anew == [*[16, 16, 16, 2], *[16, 16, 16, 15], *[16, 16, 16, 16, 12]]
        # As measurements want it.
        generator.forget()
        assert generator.generate(prompt, max_new_tokens=1).stats["cached_tokens"] == 0
    finally:
        generator.close()
        anew.close()


def asking(generator: Generator, plain: Any) -> Callable[[list[int]], tuple[list[int], int]]:
    """Give a function that compares an answer with that of plain transformers, and returns it with
    the number of tokens that were not run.
    """

    def asked(prompt: list[int]) -> tuple[list[int], int]:
        told = generator.generate(prompt, max_new_tokens=10, ignore_eos=True)
        assert told.token_ids == greedy_tokens(plain, prompt, 10)
        return told.token_ids, told.stats["cached_tokens"]

    return asked


def test_all_tokens_of_a_chat(
    tiny: Callable[[str], Path], reads: Callable[[Generator], list[int]]
) -> None:
    """The answer's too, but the last one, which nobody asked what comes behind."""
    generator = made(tiny("olmoe"), "tokens")
    asked, counts = asking(generator, load_plain(tiny("olmoe"))), reads(generator)
    try:
        answer, cached = asked(FIRST)
        assert cached == 0
        turn = [*FIRST, *answer, 7, 8, 9]
        assert asked(turn)[1] == 50 + 9
        assert asked(turn)[1] == 62  # the last one is scored again
        assert asked([1, 2, 3])[1] == 0
        assert asked(FIRST[:12])[1] == 0
        assert asked([*FIRST[:12], 1])[1] == 12
        assert counts == [16, 16, 16, 2, 4, 1, 3, 12, 1]
        # A stream that is given up leaves what it has made.
        stream = generator.stream(FIRST, max_new_tokens=30, ignore_eos=True)
        answer = [next(stream).id for _ in range(8)]
        stream.close()
        assert asked([*FIRST, *answer[:6]])[1] == 55
    finally:
        generator.close()


@pytest.mark.parametrize("family", WITH_STATES)
def test_states_that_a_chat_goes_on_from(
    family: str, tiny: Callable[[str], Path], reads: Callable[[Generator], list[int]]
) -> None:
    """After an answer and after its prompt; a prompt that parts from these earlier begins anew."""
    generator = made(tiny(family), "tokens")
    asked, counts = asking(generator, load_plain(tiny(family))), reads(generator)
    try:
        answer, cached = asked(FIRST)
        assert cached == 0
        turn = [*FIRST, *answer, 7, 8, 9]
        assert asked(turn)[1] == 50 + 9
        # The answer is left out.
        assert asked([*turn, 11, 12])[1] == 63
        assert asked(FIRST)[1] == 0
        assert counts == [16, 16, 16, 2, 4, 2, 16, 16, 16, 2]
    finally:
        generator.close()


def run_to_end(batch: Batch, prompt: list[int]) -> Request:
    request = batch.add(Request(prompt, SAMPLING))
    while request.finish_reason is None:
        batch.step()
    return request


@pytest.mark.wide
@pytest.mark.parametrize("family", ["olmoe", "qwen3_next", "lfm2_moe"])
def test_texts_side_by_side(family: str, tiny: Callable[[str], Path]) -> None:
    """What one text has is copied to others that begin so, also while it is under way."""
    plain = load_plain(tiny(family))
    generator, anew = made(tiny(family), "chunks", 3), made(tiny(family), "none", 3)
    try:
        with generator.batch() as batch, anew.batch() as other:
            prompts = [FIRST, [*FIRST[:40], 1, 2], [*FIRST, 3, 4]]
            requests = [batch.add(Request(prompt, SAMPLING)) for prompt in prompts]
            while not batch.idle:
                batch.step()
            assert [each.figures["cached_tokens"] for each in requests] == [0, 32, 48]
            assert sorted(each.kv_slot for each in requests) == [0, 1, 2]
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.output_token_ids == greedy_tokens(plain, prompt, 10)
                row = run_to_end(other, prompt).kv_slot
                count = len(prompt)
                assert alike(entries(generator, request.kv_slot, count), entries(anew, row, count))
            # Where it stands already, and where least is lost.
            again = run_to_end(batch, [*FIRST, 3, 4, 5])
            assert (again.metrics.cached_tokens, again.kv_slot) == (48, requests[0].kv_slot)
            strange = run_to_end(batch, [200] * 40)
            assert (strange.metrics.cached_tokens, strange.kv_slot) == (0, requests[1].kv_slot)
            # A prompt that is given up leaves the chunks that were run.
            given_up = batch.add(Request([9] * 60, SAMPLING))
            batch.step()
            batch.step()
            batch.drop(given_up)
            after = run_to_end(batch, [9] * 61)
            assert after.metrics.cached_tokens == 32
            assert after.output_token_ids == greedy_tokens(plain, [9] * 61, 10)
        run = generator.last_run
        assert run is not None
        assert run.summary()["cached_tokens"] == 32 + 48 + 48 + 32
    finally:
        generator.close()
        anew.close()


@pytest.mark.parametrize(
    ("family", "kind"),
    often(
        [
            ("qwen2_moe", "tokens"),
            ("qwen3_5_moe", "chunks"),
            ("qwen3_next", "tokens"),
            ("lfm2_moe", "tokens"),
            ("qwen2_moe", "chunks"),
        ],
        quick=2,
        wide=1,
    ),
)
def test_texts_at_random(family: str, kind: str, tiny: Callable[[str], Path]) -> None:
    """Conversations that go on, begin alike, are given up and come back, under drawn tokens too."""
    dice = random.Random(3)
    plain = load_plain(tiny(family))
    generator = made(tiny(family), kind, 2)
    try:
        told = [[5] * 20, [5] * 40, FIRST]
        with generator.batch() as batch:
            for _ in range(14):
                prompts = [
                    [*dice.choice(told)[: dice.randrange(8, 90)], dice.randrange(250)]
                    for _ in range(dice.randint(1, 3))
                ]
                requests = [batch.add(Request(prompt, SAMPLING)) for prompt in prompts]
                dropped = requests[0] if dice.random() < 0.3 else None
                for _ in range(dice.randrange(5)):
                    batch.step()
                if dropped is not None:
                    batch.drop(dropped)
                while not batch.idle:
                    batch.step()
                for request, prompt in zip(requests, prompts, strict=True):
                    wanted = greedy_tokens(plain, prompt, 10)
                    got = request.output_token_ids
                    assert got == wanted[: len(got)]
                    assert len(got) == 10 or request is dropped
                    told.append([*prompt, *got])
        assert generator.last_run is not None
        least = 50 if family in WITH_STATES else 100
        assert generator.last_run.summary()["cached_tokens"] > least
    finally:
        generator.close()


def test_what_failed_is_forgotten(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_plain(tiny("olmoe"))
    generator = made(tiny("olmoe"), "tokens")
    engine = generator.runtime.engine
    try:
        stream = generator.stream(FIRST, max_new_tokens=30, ignore_eos=True)
        next(stream)
        engine.caches[0].layers[0].values[:, :, :1] = float("nan")
        with pytest.raises(SpeqError, match="not numbers"):
            list(stream)
        told = generator.generate(FIRST, max_new_tokens=10, ignore_eos=True)
        assert told.token_ids == greedy_tokens(plain, FIRST, 10)
        assert told.stats["cached_tokens"] == 0

        def interrupt(*args: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(engine.verification, "score", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generator.generate(FIRST, max_new_tokens=10)
        assert generator.generate(FIRST, max_new_tokens=2).stats["cached_tokens"] == 0
    finally:
        generator.close()


@pytest.fixture
def headed(tmp_path: Path) -> Iterator[Path]:
    folder = write_model(tmp_path / "headed", "olmoe")
    write_random_head(folder)
    yield folder


@pytest.mark.parametrize(("kind", "cached"), [("tokens", [0, 49, 58]), ("chunks", [0, 48, 48])])
def test_a_head_takes_its_entries_over(kind: str, cached: list[int], headed: Path) -> None:
    """The head's own entry of a token needs the one behind it, so the last one in common does not
    count.
    """
    generator = made(headed, kind, drafter="head", draft_length=3)
    plain = load_plain(headed)
    head = generator.runtime.engine.drafters[0]
    assert isinstance(head, HeadDrafter)
    try:
        answer = greedy_tokens(plain, FIRST, 10)
        for prompt, count in zip((FIRST, FIRST, [*FIRST, *answer, 7, 8]), cached, strict=True):
            told = generator.generate(prompt, max_new_tokens=10, ignore_eos=True)
            assert told.token_ids == greedy_tokens(plain, prompt, 10)
            assert told.stats["cached_tokens"] == count
            assert told.stats["draft_length_mean"] > 0
            # As if it had heard all of the text.
            found = [each[:, :, : len(prompt)].clone() for each in head._context.cache.tensors()]
            generator.forget()
            generator.generate(prompt, max_new_tokens=10, ignore_eos=True)
            for part, whole in zip(found, head._context.cache.tensors(), strict=True):
                torch.testing.assert_close(part, whole[:, :, : len(prompt)])
    finally:
        generator.close()


def test_heads_of_texts_side_by_side(headed: Path) -> None:
    """What another text's head has is copied with its entries, while that text is under way."""
    plain = load_plain(headed)
    generator = made(headed, "chunks", 3, drafter="head", draft_length=3)
    try:
        with generator.batch() as batch:
            # The second parts from the first behind a whole chunk, the third one token further on.
            prompts = [FIRST, [*FIRST[:32], 1, 2], [*FIRST[:33], 3, 4]]
            requests = [batch.add(Request(prompt, SAMPLING)) for prompt in prompts]
            while not batch.idle:
                batch.step()
            assert [each.figures["cached_tokens"] for each in requests] == [0, 16, 32]
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.output_token_ids == greedy_tokens(plain, prompt, 10)
    finally:
        generator.close()


def cache(number: int, known: list[int]) -> KVCache:
    made = KVCache(1, ((1, 2), (1, 2)), 64, torch.float32, torch.device("cpu"), number)
    for layer in made.layers:
        for tensor in layer.row:
            tensor += torch.arange(64.0)[:, None] + 100 * number
    made.advance(len(known))
    made.known, made.ends = [*known], [*range(2, len(known) + 1, 2)]
    return made


def test_rows_by_hand() -> None:
    caches = [cache(0, [1, 2, 3, 4, 5, 6]), cache(1, []), cache(2, [1, 2, 3, 9])]
    prefixes = Prefixes(caches, 2, "chunks")
    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert [prefixes.common(row, prompt) for row in range(3)] == [6, 0, 2]
    # The last token is asked about, so a chunk that it is in is run.
    assert prefixes.common(0, prompt[:6]) == 4
    assert prefixes.kv_slot_for(prompt, [0, 1, 2]) == 0
    assert prefixes.kv_slot_for(prompt, [1, 2]) == 1  # where nothing is lost
    assert prefixes.kv_slot_for([1, 2, 8], [0, 2]) == 2  # two tokens lost, and not four
    assert prefixes.begin(1, prompt) == 6
    assert (caches[1].length, caches[1].known) == (6, prompt[:6])
    assert caches[1].layers[0].row[0][0, :, 0].tolist()[:7] == [0, 1, 2, 3, 4, 5, 106]
    prefixes.read(1, [7])
    assert (caches[1].known, caches[1].ends) == (prompt[:6], [2, 4, 6])  # no whole chunk
    caches[1].advance(2)
    prefixes.read(1, [7, 8])
    assert (caches[1].known, caches[1].ends) == ([*prompt, 8], [2, 4, 6, 8])
    caches[1].rewind(3)
    assert (caches[1].known, caches[1].ends) == (prompt[:5], [2, 4])
    assert prefixes.common(1, prompt) == 4
    caches[1].erase()
    assert (caches[1].known, caches[1].ends) == ([], [])
    nothing = Prefixes(caches, 2)
    assert nothing.begin(0, prompt) == 0
    assert (caches[0].length, caches[0].known) == (0, [])


def test_ends_of_chunks() -> None:
    def ends(length: int, chunk: int) -> list[int]:
        found = [0]
        while found[-1] < length:
            found.append(chunk_end(found[-1], length, chunk))
        return found[1:]

    wanted = {
        (1, 4096): [1],
        (255, 4096): [255],
        (256, 4096): [256],
        (257, 4096): [256, 257],
        (511, 4096): [256, 511],
        (512, 4096): [512],
        (819, 4096): [512, 819],
        (877, 4096): [512, 877],
        (4095, 4096): [2048, 4095],
        (4096, 4096): [4096],
        (4097, 4096): [4096, 4097],
        (9000, 4096): [4096, 8192, 8704, 9000],
        (819, 512): [512, 768, 819],
        (1024, 512): [512, 1024],
        (600, 256): [256, 512, 600],
        (40, 16): [16, 32, 40],
    }
    assert {key: ends(*key) for key in wanted} == wanted
    for length in range(1, 3000):
        found = ends(length, 1024)
        # Each place but the last follows from those before it: whoever begins there goes on alike.
        assert found[-1] == length
        assert all(b - a <= 1024 for a, b in pairwise([0, *found]))
        assert len(found) <= -(-length // 1024) + 1


def test_owners_share_nothing() -> None:
    caches = [cache(0, [1, 2, 3, 4]), cache(1, [])]
    caches[0].owner = "one"
    prefixes, prompt = Prefixes(caches, 2, "chunks"), [1, 2, 3, 4, 5]
    assert [prefixes.common(0, prompt, owner) for owner in ("", "one", "two")] == [0, 4, 0]
    assert prefixes.begin(1, prompt, "two") == 0
    caches[1].advance(2)
    prefixes.read(1, [1, 2])
    assert [prefixes.common(row, prompt, "two") for row in (0, 1)] == [0, 2]
    assert prefixes.begin(1, prompt, "one") == 4
    assert (caches[1].known, caches[1].owner) == ([1, 2, 3, 4], "one")


# Tokens of the prompts of a chat, and how many of them are there from the turn before.
TURNS = {300: 0, 320: 256, 819: 0, 848: 512, 877: 512, 1100: 0, 1101: 1024}
BOTH = ["float32", "bfloat16"]
FAMILY_DTYPES = [(family, BOTH[at % 2]) for at, family in enumerate(("gpt_oss", "deepseek_v3"))]
FAMILY_DTYPES += [("olmoe", dtype) for dtype in BOTH]
FAMILY_DTYPES += [("qwen3_next", "bfloat16"), ("lfm2_moe", "float32")]
OTHER_FAMILIES = [
    (family, dtype)
    for family in (
        "gpt_oss",
        "deepseek_v3",
        "gemma4",
        "qwen3_moe",
        "glm4_moe",
        *WITH_STATES,
        *INDEXED,
    )
    for dtype in BOTH
    if (family, dtype) not in FAMILY_DTYPES
]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*FAMILY_DTYPES, *(pytest.param(*each, marks=pytest.mark.wide) for each in OTHER_FAMILIES)],
)
def test_turns_shorter_than_a_chunk(
    family: str, dtype: str, tmp_path: Path, long_prompt: list[int]
) -> None:
    """What is taken over is bit for bit what the prompt has alone: entries, logits and text."""
    folder = write_model(tmp_path / "long", family, max_position_embeddings=2048)
    generator = Generator.from_pretrained(
        folder, "256MiB", dtype=dtype, draft_length=0, context_length=1200
    )
    engine = generator.runtime.engine
    scored: list[Tensor] = []
    own = engine.model.score_last
    engine.model.score_last = lambda last: scored.append(own(last)) or scored[-1]  # type: ignore
    try:
        assert engine.chunk > max(TURNS)

        def asked(prompt: list[int]) -> tuple[int, list[int], Tensor, list[Tensor]]:
            told = generator.generate(prompt, max_new_tokens=3, ignore_eos=True)
            found = entries(generator, 0, len(prompt) + 2)
            return told.stats["cached_tokens"], told.token_ids, scored[-1].logits, found

        for length, wanted in TURNS.items():
            cached, text, logits, found = asked(long_prompt[:length])
            assert cached == wanted, length
            if cached:
                kept = engine.caches[0].known, engine.caches[0].ends
                generator.forget()
                count, alone, alone_logits, alone_entries = asked(long_prompt[:length])
                assert (count, alone) == (0, text)
                assert torch.equal(alone_logits, logits)
                assert alike(alone_entries, found)
                assert (engine.caches[0].known, engine.caches[0].ends) == kept
    finally:
        generator.close()


@pytest.fixture(scope="module")
def long_prompt() -> list[int]:
    dice = random.Random(5)
    return [dice.randrange(3, 250) for _ in range(max(TURNS))]


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([3], [1]) == 0


def test_answers_within_a_budget_are_no_prefixes() -> None:
    with pytest.raises(SpeqError, match="prefix_reuse is tokens and an expert budget is given"):
        RunConfig.of("1GiB", prefix_reuse="tokens", expert_budget=8)
