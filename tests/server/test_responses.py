"""OpenAI's Responses API: its own client, on scripted answers and on the bundled model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from speq import Generator
from tests.helpers.api_server import NAME, QUESTION, Rig, api_server
from tests.helpers.chat_templates import THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces, with_template

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "strict": True} | WEATHER["function"]
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
ARGUMENTS = '{"place": "Oslo"}'


def client_of(rig: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=rig.url, api_key="none", max_retries=0)


def ask(rig: Rig, **fields: Any) -> Any:
    return client_of(rig).responses.create(**{"model": NAME, "input": "Hello"} | fields)


@pytest.fixture
def scripted() -> Callable[..., Any]:
    def serve(*texts: str, model: ScriptedModel | None = None) -> Any:
        return api_server(ScriptedEngine(pieces(*texts)), model or ScriptedModel())

    return serve


def test_a_response(scripted: Callable[..., Any]) -> None:
    with scripted("Hel", "lo.") as rig:
        made = ask(rig, instructions="Be brief.", temperature=0)
        assert (made.output_text, made.status, made.model) == ("Hello.", "completed", NAME)
        assert made.usage.output_tokens == 2
        assert made.usage.total_tokens == made.usage.input_tokens + 2


def test_a_response_in_events(scripted: Callable[..., Any], tmp_path: Path) -> None:
    model = with_template(tmp_path / "thinks", THINKING_TEMPLATE)
    with scripted("<think>Why", "?</think>", "Hel", "lo.", model=model) as rig:
        events = [*ask(rig, stream=True, reasoning={"effort": "low", "summary": "auto"})]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert deltas == ["Hel", "lo."]
        thought = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
        assert "".join(thought) == "Why?"
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        made = events[-1].response
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert made.output[0].content[0].text == "Why?"
        assert made.output_text == "Hello."
        with client_of(rig).responses.stream(model=NAME, input="Hello") as stream:
            assert stream.get_final_response().output_text == "Hello."


def test_tools(scripted: Callable[..., Any], tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    with scripted("Let me look. ", CALL, model=model) as rig:
        others: Any = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
        made = ask(rig, tools=[TOOL, *others])
        said, call = made.output
        assert (said.content[0].text, call.name) == ("Let me look.", "weather")
        assert call.arguments == ARGUMENTS
        events = [*ask(rig, tools=[TOOL], stream=True)]
        done = [each for each in events if each.type == "response.function_call_arguments.done"]
        assert [each.arguments for each in done] == [ARGUMENTS]
        # The whole turn goes back, with what the tool said.
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items: Any = [*QUESTION, *(item.model_dump() for item in made.output), result]
        assert ask(rig, input=items, tools=[TOOL]).status == "completed"
        for choice in ("required", {"type": "function", "name": "weather"}):
            assert ask(rig, tools=[TOOL], tool_choice=choice).status == "completed"
        assert len(model.grammars) == 2


def text(said: str, kind: str = "input_text") -> dict[str, str]:
    return {"type": kind, "text": said}


def test_items_become_messages(tmp_path: Path) -> None:
    """As Codex writes them."""
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    engine = ScriptedEngine(pieces("Done."))
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [text("Be kind.")]},
        {"type": "message", "role": "user", "content": [text("Rain?")]},
        {"type": "reasoning", "summary": [text("They ask.", "summary_text")], "content": None},
        {"role": "assistant", "content": [text("I look.", "output_text")], "id": "m1"},
        call | {"id": "fc1", "status": "completed"},
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [text("no")]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Still?"},
    ]
    body: dict[str, Any] = {"input": items, "instructions": "Be brief.", "store": False}
    body |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "tools": [TOOL]}
    body |= {"text": {"verbosity": "low"}, "parallel_tool_calls": False, "stream": False}
    with api_server(engine, model) as rig:
        assert rig.post(PATH, body).status == 200
        function = {"name": "weather", "arguments": ARGUMENTS}
        calls = [{"id": each, "type": "function", "function": function} for each in ("c1", "c2")]
        wanted = [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "no"},
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "Still?"},
        ]
        assert engine.asked[0][0] == model.encode(wanted, [WEATHER])


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"input": []}, "input", "input is []"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is 'resp_1'"),
        ({"background": True}, "background", "background is True"),
        ({"max_tool_calls": 3}, "max_tool_calls", "not supported here"),
        ({"tools": [TOOL]}, "tools", "no place for them"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ],
    ids=str,
)
def test_what_is_refused(
    fields: dict[str, Any], param: str, sentence: str, scripted: Callable[..., Any]
) -> None:
    with scripted("a") as rig:
        reply = rig.post(PATH, {"input": "Hello"} | fields)
        assert reply.status == 400
        error = reply.json["error"]
        assert (sentence in error["message"], error["param"]) == (True, param)


class Place(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]


def test_the_bundled_model_answers_to_its_client(served: Rig, generator: Generator) -> None:
    made = ask(served, temperature=0, max_output_tokens=12)
    ids = generator.encode([{"role": "user", "content": "Hello"}])
    assert made.output_text == generator.generate(ids, max_new_tokens=12).text
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parsed = client_of(served).responses.parse(model=NAME, input="Where?", text_format=Place)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.name in ("Oslo", "Rome")
