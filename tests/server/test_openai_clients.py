"""Clients that others wrote, on the bundled model: the text is the generator's, and the odds are
those of plain transformers.
"""

import json
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import torch
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from speq import Generator
from tests.helpers.api_server import NAME, Rig
from tests.helpers.tiny_models import load_plain

PROMPT = "Once upon a time there was a little dog named"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea."}]
TOKENS = 12
GREEDY: Any = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture
def client(served: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def plain(bundled: Path) -> Any:
    return load_plain(bundled)


def odds_of(plain: Any, prompt_token_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    """[len(answer), V] log-probabilities of what follows."""
    with torch.no_grad():
        logits = plain(torch.tensor([prompt_token_ids + answer_ids])).logits[0].float()
    return torch.log_softmax(logits[len(prompt_token_ids) - 1 : -1], -1)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "speq"


def test_a_completion_is_the_generators(client: openai.OpenAI, generator: Generator) -> None:
    wanted = generator.generate(PROMPT, max_new_tokens=TOKENS)
    answer = client.completions.create(model=NAME, prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(generator.encode(PROMPT))
    assert answer.usage.completion_tokens == TOKENS
    told = answer.usage.model_extra
    assert told is not None
    assert told["speq"]["accept_length"] == wanted.stats["accept_length_mean"]
    assert told["speq"]["moved_bytes"] >= 0
    stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted.text


def test_a_chat_is_the_generators(client: openai.OpenAI, generator: Generator) -> None:
    wanted = generator.generate(MESSAGES, max_new_tokens=TOKENS)
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == wanted.text
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_a_seed_gives_the_same_text(client: openai.OpenAI, generator: Generator) -> None:
    """Whatever is drafted, and as the generator has it without a server."""
    drawn: Any = {"max_tokens": TOKENS, "temperature": 0.9, "top_p": 0.9, "seed": 5}

    def text() -> str | None:
        answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **drawn)
        return answer.choices[0].message.content

    first = text()
    with generator.with_draft_length(0):
        assert text() == first
    wanted = generator.generate(MESSAGES, max_new_tokens=TOKENS, temperature=0.9, top_p=0.9, seed=5)
    assert first == wanted.text
    drawn["seed"] = 6
    assert text() != first


def test_stop_strings(client: openai.OpenAI, generator: Generator) -> None:
    text = generator.generate(PROMPT, max_new_tokens=TOKENS).text
    stop = text[len(text) // 2 :][:3]
    answer = client.completions.create(model=NAME, prompt=PROMPT, stop=[stop], **GREEDY)
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_odds_of_a_chat(client: openai.OpenAI, generator: Generator, plain: Any) -> None:
    ids = generator.generate(MESSAGES, max_new_tokens=TOKENS).token_ids
    wanted = odds_of(plain, generator.encode(MESSAGES), ids)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=4, **GREEDY
    )
    assert answer.choices[0].logprobs is not None
    told = answer.choices[0].logprobs.content
    assert told is not None and len(told) == TOKENS
    decode = generator.tokenizer.decode
    for at, (entry, token_id) in enumerate(zip(told, ids, strict=True)):
        assert entry.token == decode([token_id])
        assert entry.logprob == pytest.approx(float(wanted[at, token_id]), abs=1e-4)
        values, best = wanted[at].topk(4)
        assert [each.token for each in entry.top_logprobs] == [decode([i]) for i in best.tolist()]
        given = [each.logprob for each in entry.top_logprobs]
        assert given == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    chunks = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=4, stream=True, **GREEDY
    )
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in told]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in told], abs=1e-4
    )


def test_odds_of_drawn_tokens_are_the_models_own(
    client: openai.OpenAI, generator: Generator, plain: Any
) -> None:
    """Neither temperature nor what cuts off is in them."""
    ids = generator.generate(
        PROMPT, max_new_tokens=TOKENS, temperature=0.7, top_k=9, seed=3
    ).token_ids
    wanted = odds_of(plain, generator.encode(PROMPT), ids)
    answer = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0.7,
        seed=3,
        logprobs=2,
        extra_body={"top_k": 9},
    )
    lists = answer.choices[0].logprobs
    assert lists is not None and lists.token_logprobs is not None and lists.tokens is not None
    assert lists.tokens == [generator.tokenizer.decode([i]) for i in ids]
    assert lists.token_logprobs == pytest.approx(
        [float(wanted[at, i]) for at, i in enumerate(ids)], abs=1e-4
    )
    assert lists.text_offset is not None
    assert lists.text_offset[0] == 0 and lists.text_offset == sorted(lists.text_offset)


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 200") as refused:
        client.chat.completions.create(model=NAME, messages=MESSAGES, n=200)
    assert (refused.value.param, refused.value.code) == ("n", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="the context holds 512"):
        client.completions.create(model=NAME, prompt="a " * 600)


class Place(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]
    size: Literal["small", "large"]


def test_answers_in_a_form(client: openai.OpenAI) -> None:
    """As `parse` asks for them: whatever the model writes, it is one."""
    for temperature in (0, 1):
        made = client.chat.completions.parse(
            model=NAME,
            messages=MESSAGES,
            response_format=Place,
            temperature=temperature,
            seed=3,
            max_tokens=120,
        )
        place = made.choices[0].message.parsed
        assert place is not None
        assert place.size in ("small", "large")
    answer = client.completions.create(
        model=NAME, prompt="Is it?", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


def test_many_clients_at_once(served: Rig, generator: Generator) -> None:
    """Each gets its own text, whoever is before it."""
    import asyncio

    prompts = [f"{PROMPT} {name}" for name in ("Max", "Ada", "Kit")]
    wanted = [generator.generate(prompt, max_new_tokens=8).text for prompt in prompts]

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0)

        async def ask(prompt: str) -> str:
            answer = await client.completions.create(
                model=NAME, prompt=prompt, max_tokens=8, temperature=0
            )
            return answer.choices[0].text

        async with client:
            return list(await asyncio.gather(*map(ask, prompts)))

    assert asyncio.run(ask_all()) == wanted


def test_langchain(served: Rig, generator: Generator) -> None:
    chat = ChatOpenAI(
        base_url=served.url,
        api_key="none",  # type: ignore[arg-type]
        model=NAME,
        temperature=0,
        max_tokens=TOKENS,  # type: ignore[call-arg]
        max_retries=0,
    )
    wanted = generator.generate(MESSAGES, max_new_tokens=TOKENS).text
    question = [HumanMessage("Tell me of the sea.")]
    answer = chat.invoke(question)
    assert answer.text == wanted
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == TOKENS
    assert "".join(chunk.text for chunk in chat.stream(question)) == wanted
    parts = [HumanMessage([{"type": "text", "text": "Tell me of the sea."}])]
    assert chat.invoke(parts).text == wanted
    logprobs = chat.bind(logprobs=True).invoke(question).response_metadata["logprobs"]
    assert len(logprobs["content"]) == TOKENS


def weather(place: str) -> str:
    """Tell the weather of a place."""
    return place


def test_langchain_is_told_that_there_are_no_tools(served: Rig) -> None:
    chat = ChatOpenAI(
        base_url=served.url,
        api_key="none",  # type: ignore[arg-type]
        model=NAME,
        max_retries=0,
    )
    with pytest.raises(openai.BadRequestError, match="has no place for them"):
        chat.bind_tools([weather]).invoke("What is the weather in Oslo?")


def test_langchain_calls_tools(tmp_path: Path) -> None:
    from tests.helpers.api_server import api_server
    from tests.helpers.scripted_engine import ScriptedEngine, pieces, with_template

    template = "{% if tools %}{{ tools }} <tool_call>{% endif %}{{ messages[-1].content }}"
    said = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
    engine = ScriptedEngine(pieces(*said))
    model = with_template(tmp_path / "tools", template, max_context=2000)
    with api_server(engine, model) as rig:
        chat = ChatOpenAI(
            base_url=rig.url,
            api_key="none",  # type: ignore[arg-type]
            model=NAME,
            max_retries=0,
        ).bind_tools([weather])
        answer = chat.invoke("What is the weather in Oslo?")
        (call,) = answer.tool_calls  # type: ignore[attr-defined]
        assert (call["name"], call["args"]) == ("weather", {"place": "Oslo"})
        told = list(chat.stream("What is the weather in Oslo?"))
        streamed = [each for chunk in told for each in chunk.tool_call_chunks]  # type: ignore[attr-defined]
        assert {each["index"] for each in streamed} == {0}
        assert json.loads("".join(each["args"] or "" for each in streamed)) == {"place": "Oslo"}
