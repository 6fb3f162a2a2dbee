"""An agent's loop on the bundled model for agents: real weights, a long context, forced calls."""

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from openai import OpenAI

from speq import Generator
from tests.helpers.api_server import NAME, Rig, api_server
from tests.helpers.often import often
from tests.helpers.paths import BUNDLED

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how the weather is.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Oslo", "Rome"]},
                "days_to_look_ahead": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days_to_look_ahead"],
            "additionalProperties": False,
        },
    },
}
LONG = "It rains in the hills, and the river is high. " * 300


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    agent = BUNDLED.parent / "tiny-agent"
    model = Generator.from_pretrained(agent, "200MiB", context_length=6000, profile="none")
    with closing(model), api_server(model, model) as made:
        yield made


@pytest.mark.parametrize(
    "choice",
    often(["required", {"type": "function", "function": {"name": "weather"}}], quick=1, wide=1),
)
def test_a_loop_of_two_turns(rig: Rig, choice: object) -> None:
    client = OpenAI(base_url=f"{rig.server.url}", api_key="none", max_retries=0)
    messages: list[object] = [
        {"role": "system", "content": f"You are a forecaster. {LONG}"},
        {"role": "user", "content": "How is the weather?"},
    ]
    asked = {"model": NAME, "tools": [WEATHER], "temperature": 0, "max_tokens": 160}
    first = client.chat.completions.create(  # type: ignore[call-overload]
        messages=messages, tool_choice=choice, parallel_tool_calls=False, **asked
    )
    assert first.usage.prompt_tokens > 2048
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["place"] in ("Oslo", "Rome")
    assert 1 <= arguments["days_to_look_ahead"] <= 9
    messages += [
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    second = client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    assert second.choices[0].message.content
    # The first turn's prompt was not run again.
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.prompt_tokens - 512


def test_what_is_served_is_told(rig: Rig) -> None:
    told = rig.get("/v1/speq").json
    assert told["chat"] == {"tools": "hermes", "thoughts": None}
    assert (told["model"], told["max_model_len"], told["max_batch"]) == (NAME, 6000, 1)
    assert told["memory_bytes"]["slots"] > 0
    assert told["sampling"]["temperature"] == 1.0
