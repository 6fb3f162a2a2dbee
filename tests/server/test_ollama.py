"""Ollama's API: what its clients send, and what they get."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.agent_engine import SAID, TEMPLATE, AgentEngine
from tests.helpers.api_server import NAME, Reply, Rig, api_server
from tests.helpers.scripted_engine import ScriptedModel, pieces, with_template

ASKED = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ScriptedModel:
    return with_template(tmp_path_factory.mktemp("ollama") / "model", TEMPLATE, 4000)


@pytest.fixture(scope="module")
def engine(model: ScriptedModel) -> AgentEngine:
    return AgentEngine(pieces("a"), model=model)


@pytest.fixture(scope="module")
def rig(engine: AgentEngine, model: ScriptedModel) -> Iterator[Rig]:
    with api_server(engine, model) as made:
        yield made


def lines_of(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().splitlines()]


def test_a_chat_is_streamed_unless_it_is_not(rig: Rig) -> None:
    *said, last = lines_of(rig.post("/api/chat", {"model": "any", "messages": ASKED}))
    assert "".join(line["message"]["content"] for line in said) == SAID
    assert {(line["model"], line["message"]["role"], line["done"]) for line in said} == {
        ("any", "assistant", False)
    }
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 3)
    whole = rig.post("/api/chat", {"messages": ASKED, "stream": False}).json
    assert (whole["model"], whole["message"]["content"]) == (NAME, SAID)
    assert (whole["done"], whole["prompt_eval_count"]) == (True, last["prompt_eval_count"])


def test_options_arrive(rig: Rig, engine: AgentEngine) -> None:
    options = {"temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["a"], "num_predict": 2}
    ignored = {"num_ctx": 8192, "num_gpu": 99, "repeat_penalty": 1.0}
    body = {"messages": ASKED, "options": options | ignored, "keep_alive": "5m"}
    *_, last = lines_of(rig.post("/api/chat", body))
    assert last["done_reason"] == "length"
    sampling = engine.asked[-1][1]
    assert {name: sampling[name] for name in ("temperature", "top_k", "seed", "stop")} == {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "stop": ("a",),
    }
    assert sampling["max_new_tokens"] == 2
    assert rig.post("/api/chat", {"messages": ASKED, "options": {"num_predict": -2}}).status == 200


def test_a_tool_and_its_result(rig: Rig) -> None:
    body = {"messages": ASKED, "tools": [WEATHER], "stream": False}
    called = rig.post("/api/chat", body).json["message"]
    assert called["tool_calls"] == [
        {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    ]
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    answer = rig.post("/api/chat", body | {"messages": [*ASKED, called, result]}).json
    assert answer["message"]["content"] == "It says: sunny"


@pytest.mark.parametrize(
    "form",
    ["json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}],
)
def test_forms(rig: Rig, form: Any) -> None:
    told = rig.post("/api/chat", {"messages": ASKED, "format": form, "stream": False}).json
    made = json.loads(told["message"]["content"])
    assert isinstance(made, dict) and (form == "json" or isinstance(made["a"], int))


def test_texts_are_generated_by_the_template_or_raw(
    rig: Rig, engine: AgentEngine, model: ScriptedModel
) -> None:
    body = {"prompt": "hi", "system": "Be brief.", "stream": False}
    told = rig.post("/api/generate", body).json
    assert (told["response"], told["done"]) == (SAID, True)
    chat = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert engine.asked[-1][0] == model.encode(chat)
    rig.post("/api/generate", body | {"raw": True})
    assert engine.asked[-1][0] == model.encode("hi")
    *_, last = lines_of(rig.post("/api/generate", {"prompt": "hi"}))
    assert (last["response"], last["done"]) == ("", True)


def test_what_is_asked_of_the_model(rig: Rig) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert [each["name"] for each in rig.get(path).json["models"]] == [NAME]
    shown = rig.post("/api/show", {"model": NAME}).json
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["moe.context_length"] == 4000
    assert rig.get("/api/version").json["version"]
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"model": NAME})):
        told = rig.post(path, body).json
        assert (told["done"], told["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images"),
        ({"options": {"mirostat": 1}}, "mirostat is not supported here"),
        ({"options": {"repeat_penalty": 1.1}}, "repeat_penalty is 1.1"),
        ({"options": {"temperature": -1.0}}, "temperature is -1"),
        ({"format": "xml"}, "format"),
        ({"more": 1}, "more is not supported here"),
    ],
)
def test_errors_are_ollamas(rig: Rig, fields: dict[str, Any], sentence: str) -> None:
    reply = rig.post("/api/chat", {"messages": ASKED} | fields)
    assert reply.status == 400
    assert set(reply.json) == {"error"} and sentence in reply.json["error"]
