"""A server whose requests run side by side: each has the tokens that it has alone."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import openai
import pytest

from speq import Generation, Generator
from speq.server.access import Keys, digest
from speq.stats import StepStats
from tests.helpers.api_server import NAME, Rig, api_server
from tests.helpers.tiny_models import greedy_tokens, load_plain

TOKENS = 24
PROMPTS = (
    "Once upon a time there was a little dog named",
    "The sea",
    "def main(argv):",
    "### Instruction: Count to ten.",
)


def at_once(rig: Rig, *asked: dict[str, Any]) -> list[Any]:
    """Completions of requests that are sent together."""

    async def ask_all() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=rig.url, api_key="none", max_retries=0)

        def one(fields: dict[str, Any]) -> Coroutine[Any, Any, Any]:
            extra = {"ignore_eos": True} | fields.pop("extra_body", {})
            return client.completions.create(
                **{"model": NAME, "max_tokens": TOKENS, "temperature": 0} | fields,
                extra_body=extra,
            )

        async with client:
            return list(await asyncio.gather(*map(one, asked)))

    return asyncio.run(ask_all())


def alone(generator: Generator, prompt: Any, **options: Any) -> Generation:
    return generator.generate(prompt, **{"max_new_tokens": TOKENS, "ignore_eos": True} | options)


def test_four_requests_have_the_text_of_each_alone(
    side_by_side: Rig, batched: Generator, bundled: Any
) -> None:
    """Greedy, drawn with a seed, up to a stop string, with the odds of the tokens."""
    greedy, drawn, stopped, logprobs = PROMPTS
    wanted = [
        alone(batched, greedy),
        alone(batched, drawn, temperature=0.9, top_p=0.9, seed=5),
        alone(batched, stopped),
        alone(batched, logprobs),
    ]
    ids = batched.encode(greedy)
    assert wanted[0].token_ids == greedy_tokens(load_plain(bundled), ids, TOKENS)
    stop = wanted[2].text[8:11]
    told = at_once(
        side_by_side,
        {"prompt": greedy},
        {"prompt": drawn, "temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"prompt": stopped, "stop": [stop]},
        {"prompt": logprobs, "logprobs": 3},
    )
    assert [each.choices[0].text for each in told] == [
        wanted[0].text,
        wanted[1].text,
        wanted[2].text[: wanted[2].text.find(stop)],
        wanted[3].text,
    ]
    assert [each.choices[0].finish_reason for each in told] == [
        "length",
        "length",
        "stop",
        "length",
    ]
    (single,) = at_once(side_by_side, {"prompt": logprobs, "logprobs": 3})
    lists, by_itself = told[3].choices[0].logprobs, single.choices[0].logprobs
    assert lists.tokens == by_itself.tokens
    assert lists.token_logprobs == pytest.approx(by_itself.token_logprobs, abs=1e-4)
    assert [[*each] for each in lists.top_logprobs] == [[*each] for each in by_itself.top_logprobs]
    # They were side by side, and say so.
    assert max(each.usage.model_extra["speq"]["batch"] for each in told) > 1
    assert single.usage.model_extra["speq"]["batch"] == 1


def test_shares_of_a_batch_add_up(side_by_side: Rig, batched: Generator) -> None:
    """Bytes of all texts are those of the run."""
    of_steps: list[int] = []

    def heard(step: StepStats) -> None:
        of_steps.append(step.moved_bytes)

    listeners = batched.runtime.recorder.listeners
    listeners.append(heard)
    try:
        told = at_once(side_by_side, *({"prompt": [7 + at] * 9} for at in range(4)))
    finally:
        listeners.remove(heard)
    moved = sum(each.usage.model_extra["speq"]["moved_bytes"] for each in told)
    assert moved == pytest.approx(sum(of_steps), abs=4)  # halves of bytes are rounded
    assert moved > 0
    for each in told:
        accept = each.usage.model_extra["speq"]["accept_length"]
        assert 1 <= accept <= 1 + 3
        assert each.usage.completion_tokens == TOKENS


def test_who_comes_later_joins(side_by_side: Rig, batched: Generator) -> None:
    """Arrivals between steps of others, and a client that leaves in the midst."""
    wanted = [alone(batched, prompt, max_new_tokens=60).text for prompt in PROMPTS]
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "stream": True}

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=side_by_side.url, api_key="none", max_retries=0)

        async def begun(prompt: str, tokens: int = 60) -> tuple[Any, str]:
            """A stream, and its text up to its second chunk."""
            stream = await client.completions.create(
                prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}, **asked
            )
            chunks = [await anext(stream) for _ in range(2)]
            return stream, "".join(chunk.choices[0].text for chunk in chunks)

        async def rest(stream: Any) -> str:
            return "".join([chunk.choices[0].text async for chunk in stream])

        async with client:
            # It would go on for long.
            streams = [await begun(each, (60, 400)[at == 1]) for at, each in enumerate(PROMPTS)]
            gone, _ = streams.pop(1)
            await gone.close()
            again, text = await begun(PROMPTS[1])
            streams.insert(1, (again, text))
            rests = await asyncio.gather(*(rest(stream) for stream, _ in streams))
            pairs = zip(streams, rests, strict=True)
            return [text + following for (_, text), following in pairs]

    assert asyncio.run(ask_all()) == wanted
    while (stats := side_by_side.worker.queue_lengths).running or stats.waiting:
        side_by_side.get("/health")
    page = side_by_side.get("/metrics").body.decode()
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in page
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 4.0' in page
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 5.0' in page
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in page


def test_the_share_of_caches_is_that_of_entries(batched: Generator) -> None:
    """A text has entries of its prompt and of all its tokens but the last."""
    batched.forget()
    shares = []
    with batched.batch(64) as batch:
        room = sum(cache.capacity for cache in batched.runtime.engine.caches)
        requests = []
        for prompt, count in (([1, 2, 3, 4, 5], 3), ([6, 7, 8], 5)):
            sequence = batched.prepare(prompt, None, {"max_new_tokens": count, "ignore_eos": True})
            requests.append(batch.add(sequence))
        while not batch.idle:
            shares.append(batch.cached_share)
            begun = [
                each for each in requests if each.output_token_ids and each.finish_reason is None
            ]
            entries = [
                len(each.prompt_token_ids) + len(each.output_token_ids) - 1 for each in begun
            ]
            assert shares[-1] == sum(entries) / room
            batch.step(0)
        assert batch.cached_share == 0
    assert max(shares) > shares[0] == 0


def test_a_chat_that_goes_on_reuses_its_prompt(side_by_side: Rig, batched: Generator) -> None:
    """Whole chunks of it, which the usage and the metrics say; the text is that of a run anew."""
    chunk = batched.runtime.plan.chunk
    words = " ".join(f"word{number}" for number in range(chunk))
    messages = [{"role": "user", "content": words}]
    batched.forget()
    first = side_by_side.chat(messages=messages, max_tokens=8, temperature=0).json
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["usage"]["prompt_tokens"] > chunk
    answer = first["choices"][0]["message"]
    turn = [*messages, {"role": "assistant", "content": answer["content"]}]
    turn.append({"role": "user", "content": "And then?"})
    told = side_by_side.chat(messages=turn, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told.chunks)
    again = side_by_side.chat(messages=turn, max_tokens=8, temperature=0).json
    whole = first["usage"]["prompt_tokens"] // chunk * chunk
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= whole > 0 and cached % chunk == 0
    batched.forget()
    anew = batched.generate(turn, max_new_tokens=8).text
    assert text == again["choices"][0]["message"]["content"] == anew
    page = side_by_side.get("/metrics").body.decode()
    assert f'vllm:prefix_cache_hits_total{{model_name="tiny"}} {whole + cached:.1f}' in page


def test_a_full_batch_and_a_full_queue(side_by_side: Rig) -> None:
    """Four under way, as many waiting as may; the next is refused."""
    asked = json.dumps(
        {
            **{"model": NAME, "prompt": "Once", "max_tokens": 400, "temperature": 0},
            **{"stream": True, "ignore_eos": True},
        }
    )
    connections = []
    try:
        for at in range(6):
            connection = side_by_side.connect()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", asked, headers)
            connections.append(connection)
            while (stats := side_by_side.worker.queue_lengths).running + stats.waiting <= at:
                side_by_side.get("/health")
        reply = side_by_side.complete()
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
    finally:
        for connection in connections:
            connection.close()
    while (stats := side_by_side.worker.queue_lengths).running or stats.waiting:
        side_by_side.get("/health")
    assert side_by_side.complete(max_tokens=2).status == 200


@pytest.mark.parametrize("several", [True, False])
def test_holders_of_keys_learn_nothing_of_each_other(several: bool, batched: Generator) -> None:
    """Where there are several keys, a prompt takes over what was asked with the same one."""
    ours, theirs = "our-key-0123456789", "their-key-0123456789"
    keys = (ours, theirs) if several else (ours,)
    prompt = [*range(3, 363)]
    batched.forget()
    with api_server(batched, batched, Keys(tuple(map(digest, keys)))) as rig:

        def cached(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            usage = rig.post("/v1/completions", body, **headers).json["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached(key) > 255 for key in (ours, keys[-1], ours, keys[-1])] == [
            False,
            not several,
            True,
            True,
        ]
