"""Several texts for one request: how they are counted and told, and that each is its own."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speq import Generator
from tests.helpers.api_server import NAME, Reply, Rig, api_server
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces
from tests.helpers.tiny_models import load_plain

TEXTS = ("Once", " upon", " a", " time")
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def scripted() -> Iterator[Rig]:
    engine = ScriptedEngine(pieces(*TEXTS), max_batch=2)
    with api_server(engine, ScriptedModel(), max_waiting=1) as rig:
        yield rig


def said(reply: Reply) -> list[tuple[int, str]]:
    assert reply.status == 200, reply.body
    return [(each["index"], each["text"]) for each in reply.json["choices"]]


def test_choices_of_a_chat_are_numbered(scripted: Rig) -> None:
    answer = scripted.chat(n=3).json
    found = [(each["index"], each["message"]["content"]) for each in answer["choices"]]
    assert found == [(at, "Once upon a time") for at in range(3)]
    assert all(each["finish_reason"] == "stop" for each in answer["choices"])
    # The prompt counts once, and more texts than may wait are one request still.
    prompt_tokens = scripted.chat().json["usage"]["prompt_tokens"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 12)
    assert usage["speq"]["moved_bytes"] == 3 * 1024
    assert usage["speq"]["accept_length"] == 2.5


def test_choices_of_a_stream_come_side_by_side(scripted: Rig) -> None:
    reply = scripted.chat(n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage = reply.chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in own) == "Once upon a time"
        assert [each["finish_reason"] for each in own[-2:]] == [None, "stop"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)


def test_prompts_are_answered_in_order(scripted: Rig) -> None:
    reply = scripted.complete(prompt=["a", "b c"], n=2)
    assert said(reply) == [(at, "Once upon a time") for at in range(4)]
    by_ids = scripted.complete(prompt=[[5, 6], [7]])
    assert said(by_ids) == [(at, "Once upon a time") for at in range(2)]
    assert by_ids.json["usage"]["prompt_tokens"] == 3
    most = scripted.complete(prompt=["a"] * 65, n=2)
    assert most.status == 400 and "more than 128 texts" in most.error["message"]


def test_each_text_is_the_one_of_its_prompt_and_seed(served: Rig, generator: Generator) -> None:
    prompts = [PROMPT, "The sea", "def main(argv):"]
    wanted = [
        generator.generate(prompt, max_new_tokens=6, ignore_eos=True).text for prompt in prompts
    ]
    assert said(served.complete(prompt=prompts, **GREEDY)) == [*enumerate(wanted)]
    drawn = {"temperature": 0.9, "max_tokens": 6, "ignore_eos": True}
    wanted = [
        generator.generate(
            PROMPT, max_new_tokens=6, ignore_eos=True, temperature=0.9, seed=seed
        ).text
        for seed in (7, 8, 9)
    ]
    assert len({*wanted}) == 3
    assert said(served.complete(prompt=PROMPT, n=3, seed=7, **drawn)) == [*enumerate(wanted)]


def lists_of(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_the_odds_of_its_tokens(
    served: Rig, generator: Generator, bundled: Any, stream: bool
) -> None:
    """As lm-evaluation-harness asks for them: also where a part of the prompt is known already."""
    text = PROMPT + " a dog. " * 40
    ids = generator.encode(text)
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True, "ignore_eos": True}
    served.complete(prompt=text, max_tokens=1)
    reply = served.complete(prompt=ids, stream=stream, **asked)
    if stream:
        parts = [each["choices"][0] for each in reply.chunks]
        lists: dict[str, list[Any]] = {}
        for part in parts:
            for name, values in (part["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values)
        told = "".join(part["text"] for part in parts)
    else:
        lists, told = lists_of(reply), reply.json["choices"][0]["text"]
    with torch.no_grad():
        logits = load_plain(bundled)(torch.tensor([ids])).logits[0].float()
    odds = torch.log_softmax(logits, -1)
    answer = int(odds[-1].argmax())
    whole = [*ids, answer]
    assert told == text + generator.vocabulary.decode([answer])
    assert lists["tokens"] == [generator.vocabulary.name(each) for each in whole]
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    wanted = [float(odds[at, each]) for at, each in enumerate(whole[1:])]
    assert lists["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    for row, table in zip(odds, lists["top_logprobs"][1:], strict=True):
        assert max(table.values()) == pytest.approx(float(row.max()), abs=1e-3)
    assert lists["text_offset"][:2] == [0, len(generator.vocabulary.decode(ids[:1]))]


def test_an_echo_without_odds_is_the_prompt_as_given(served: Rig) -> None:
    told = served.complete(prompt=PROMPT, echo=True, **GREEDY).json["choices"][0]
    plain = served.complete(prompt=PROMPT, **GREEDY).json["choices"][0]
    assert told["text"] == PROMPT + plain["text"]
    assert told["logprobs"] is None


def test_biases_and_ends_arrive(served: Rig, generator: Generator) -> None:
    fields = GREEDY | {"prompt": PROMPT}
    free = generator.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
    first, fourth = free.token_ids[0], free.token_ids[3]
    told = served.complete(**fields, logprobs=0, logit_bias={str(first): -100})
    assert lists_of(told)["tokens"][0] != generator.vocabulary.name(first)
    stopped = served.complete(**fields, stop_token_ids=[fourth]).json["choices"][0]
    count = free.token_ids.index(fourth) + 1
    assert stopped["text"] == generator.vocabulary.decode(free.token_ids[:count])
    assert stopped["finish_reason"] == "stop"
    longer = served.complete(**fields, stop_token_ids=[fourth], min_tokens=6).json
    assert longer["usage"]["completion_tokens"] == 6


def test_a_failure_ends_all_texts_of_a_stream(scripted: Rig) -> None:
    """The engine fails at the second token of the first text."""
    engine = ScriptedEngine(pieces(*TEXTS), fault=RuntimeError("lost"), fault_at=1)
    with api_server(engine, ScriptedModel()) as rig:
        body = rig.chat(n=2, stream=True).body.decode()
    *_, last, done = [frame for frame in body.split("\n\n") if frame]
    assert done == "data: [DONE]"
    assert "error" in json.loads(last.removeprefix("data: "))
    assert scripted.chat(model=NAME).status == 200
