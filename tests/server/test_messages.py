"""Anthropic's Messages API: its own client, on scripted answers and on the bundled model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from speq import Generator
from speq.server.access import Keys
from tests.helpers.api_server import NAME, Rig, api_server
from tests.helpers.chat_templates import THINKING_TEMPLATE, TOOLS_TEMPLATE
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces, with_template

PATH = "/v1/messages"
ASKED: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'


def client_of(rig: Rig) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=rig.url.removesuffix("/v1"), api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": NAME, "max_tokens": 20, "messages": ASKED} | fields)


@pytest.fixture
def scripted() -> Callable[..., Any]:
    def serve(*texts: str, model: ScriptedModel | None = None) -> Any:
        return api_server(ScriptedEngine(pieces(*texts)), model or ScriptedModel())

    return serve


def test_a_message(scripted: Callable[..., Any]) -> None:
    with scripted("Hel", "lo.") as rig:
        made = ask(client_of(rig), system="Be brief.", extra_body={"temperature": 0})
        assert [block.text for block in made.content] == ["Hello."]
        assert (made.stop_reason, made.role, made.model) == ("end_turn", "assistant", NAME)
        assert made.usage.output_tokens == 2
        counted = client_of(rig).messages.count_tokens(
            model=NAME, messages=ASKED, system="Be brief."
        )
        cached = made.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == made.usage.input_tokens + cached


def test_a_message_in_events(scripted: Callable[..., Any], tmp_path: Path) -> None:
    model = with_template(tmp_path / "thinks", THINKING_TEMPLATE)
    with scripted("<think>Why", "?</think>", "Hel", "lo.", model=model) as rig:
        with client_of(rig).messages.stream(
            model=NAME, max_tokens=20, messages=ASKED, thinking={"type": "disabled"}
        ) as stream:
            kinds = [event.type for event in stream]
            made = stream.get_final_message()
        assert [block.type for block in made.content] == ["thinking", "text"]
        assert (made.content[0].thinking, made.content[1].text) == ("Why?", "Hello.")
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert made.usage.output_tokens == 4


def test_tools(scripted: Callable[..., Any], tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    with scripted("Let me look. ", CALL, model=model) as rig:
        client = client_of(rig)
        search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
        made = ask(client, tools=[WEATHER, search])
        text, call = made.content
        assert (text.text, call.name, call.input) == ("Let me look.", "weather", {"place": "Oslo"})
        assert made.stop_reason == "tool_use"
        told = rig.post(PATH, {"max_tokens": 5, "messages": ASKED, "tools": [WEATHER]}).json
        assert told["content"][1]["input"] == {"place": "Oslo"}
        with client.messages.stream(
            model=NAME, max_tokens=20, messages=ASKED, tools=[WEATHER]
        ) as stream:
            assert stream.get_final_message().content[1].input == {"place": "Oslo"}
        # And the whole turn goes back, with what the tool said.
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        answered: Any = [
            *ASKED,
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        assert ask(client, messages=answered, tools=[WEATHER]).stop_reason == "tool_use"
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            assert ask(client, tools=[WEATHER], tool_choice=choice).stop_reason == "tool_use"
        assert len(model.grammars) == 2


def test_fields_of_claude_code_are_taken(scripted: Callable[..., Any]) -> None:
    """As it sends them; those that nothing here can do change nothing."""
    body = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32_000,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "system", "content": "A reminder."},
        ],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "somebody"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"effort": "high"},
        "stream": False,
    }
    with scripted("Hi.") as rig:
        told = rig.post(f"{PATH}?beta=true", body).json
        assert (told["model"], told["content"]) == (
            body["model"],
            [{"type": "text", "text": "Hi."}],
        )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages is []"),
        ({"container": "c"}, "container is not supported here"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"tool_choice": {"type": "any"}}, "no tools are given"),
        ({"tools": [WEATHER]}, "no place for them"),
    ],
    ids=str,
)
def test_what_is_refused(
    fields: dict[str, Any], sentence: str, scripted: Callable[..., Any]
) -> None:
    with scripted("a") as rig:
        reply = rig.post(PATH, {"max_tokens": 5, "messages": ASKED} | fields)
        assert (reply.status, reply.json["type"]) == (400, "error")
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert sentence in reply.json["error"]["message"]


def test_keys_in_the_header_of_anthropics_clients(tmp_path: Path) -> None:
    path, key = tmp_path / "keys", "a-key-of-sixteen-or-more"
    path.write_text(key)
    path.chmod(0o600)
    engine = ScriptedEngine(pieces("a"))
    with api_server(engine, ScriptedModel(), keys=Keys.read(path)) as rig:
        assert rig.get("/v1/models", **{"x-api-key": key}).status == 200
        assert rig.get("/v1/models", **{"x-api-key": "another-key-of-sixteen"}).status == 401
        both = {"x-api-key": key, "Authorization": "Bearer another-key-of-sixteen"}
        assert rig.get("/v1/models", **both).status == 401


def test_the_bundled_model_answers_to_its_client(served: Rig, generator: Generator) -> None:
    made = ask(client_of(served), extra_body={"temperature": 0}, max_tokens=12)
    ids = generator.encode(ASKED)
    wanted = generator.generate(ids, max_new_tokens=12)
    assert made.content[0].text == wanted.text
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == len(ids)
