"""What clients may ask for, and how what they may not is refused: over HTTP, without a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speq.engine.logprobs import TokenLogprobs
from speq.generator import Token
from tests.helpers.api_server import NAME, QUESTION, Rig, api_server
from tests.helpers.chat_templates import THINKING_TEMPLATE, TOOLS_TEMPLATE, WEATHER
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces, with_template

TEXTS = ("Once", " upon", " a", " time")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(pieces(*TEXTS))


@pytest.fixture(scope="module")
def rig(model: ScriptedModel, engine: ScriptedEngine) -> Iterator[Rig]:
    with api_server(engine, model) as made:
        yield made


@pytest.fixture
def asked(engine: ScriptedEngine) -> list[Any]:
    engine.asked.clear()
    return engine.asked


def test_a_chat(rig: Rig, model: ScriptedModel, asked: list[Any]) -> None:
    reply = rig.chat(max_tokens=9)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    answer = reply.json
    prompt_tokens = len(model.encode(QUESTION))
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": NAME,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Once upon a time",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 2},
            "speq": answer["usage"]["speq"],
        },
    }
    told = answer["usage"]["speq"]
    assert told.pop("queued_ms") >= 0
    assert told == {
        "accept_length": 2.5,
        "draft_length": 3.0,
        "batch": 1.5,
        "moved_bytes": 1024,
        "waited_ms": 750.0,
    }
    ((prompt, options),) = asked
    assert prompt == model.encode(QUESTION)
    assert options["max_new_tokens"] == 9
    assert (options["temperature"], options["top_p"], options["top_k"]) == (1.0, 1.0, 0)
    assert options["top_logprobs"] is None


def test_a_chat_in_chunks(rig: Rig) -> None:
    reply = rig.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = reply.chunks
    assert len({chunk["id"] for chunk in reply.chunks}) == 1
    assert {chunk["object"] for chunk in reply.chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in TEXTS),
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["speq"]["accept_length"] == 2.5
    # Nobody asked for it here.
    assert all(chunk["usage"] is None for chunk in rig.chat(stream=True).chunks)


def test_a_completion(rig: Rig, model: ScriptedModel, asked: list[Any]) -> None:
    answer = rig.complete(max_tokens=3).json
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "Once upon a", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"]["completion_tokens"] == 3
    # As OpenAI has it where a request says nothing.
    rig.complete()
    assert [(prompt, options["max_new_tokens"]) for prompt, options in asked] == [
        (model.encode("Hello there"), 3),
        (model.encode("Hello there"), 16),
    ]
    chunks = rig.complete(stream=True).chunks
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [*TEXTS, ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_prompts_of_a_completion(rig: Rig, model: ScriptedModel, asked: list[Any]) -> None:
    for prompt in ([5, 6, 7], [[5, 6, 7]], ["Hello"], "Hello"):
        assert rig.complete(prompt=prompt).status == 200
    hello = model.encode("Hello")
    assert [prompt for prompt, _ in asked] == [[5, 6, 7], [5, 6, 7], hello, hello]
    for prompt in (["a", ""], [[1], []], [], [[]], "", [1.5], [-1], [4096], [True], {}, None):
        assert rig.complete(prompt=prompt).error["param"] in ("prompt", "prompt[0]", None)
    assert len(asked) == 4


def test_odds(rig: Rig) -> None:
    told = rig.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in told] == [-0.5, -1.0, -1.5, -2.0]
    assert set(told[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert bytes(told[0]["bytes"]).decode() == told[0]["token"]
    lists = rig.complete(logprobs=0).json["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [-0.5, -1.0, -1.5, -2.0]
    assert lists["text_offset"] == [0, 4, 9, 11]
    chunks = rig.complete(logprobs=0, stream=True).chunks[:-1]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [4], [9], [11]]
    assert rig.chat().json["choices"][0]["logprobs"] is None


def test_options_arrive(rig: Rig, asked: list[Any]) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 1,
        "ignore_eos": True,
    }
    assert rig.chat(**options, stop=["a", "b"], max_completion_tokens=5).status == 200
    assert rig.complete(**options, stop="a").status == 200
    (_, first), (_, second) = asked
    assert {name: first[name] for name in options} == options
    assert (first["stop"], second["stop"]) == (("a", "b"), ("a",))
    assert first["max_new_tokens"] == 5
    assert second["seed"] == 11


def test_the_makers_defaults_stand_behind_a_request(
    model: ScriptedModel, engine: ScriptedEngine, asked: list[Any]
) -> None:
    with api_server(engine, model, defaults={"temperature": 0.5, "top_k": 20}) as rig:
        rig.chat()
        rig.chat(temperature=0)
    assert [(each["temperature"], each["top_k"]) for _, each in asked] == [(0.5, 20), (0, 20)]


def test_fields_that_ask_for_nothing_are_taken(rig: Rig) -> None:
    harmless = {
        "n": 1,
        "user": "somebody",
        "logit_bias": {},
        "parallel_tool_calls": True,
        "cache_prompt": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": False,
        "use_beam_search": False,
        "include_reasoning": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "a"},
        "verbosity": "low",
        "store": True,
        "service_tier": "flex",
        "tools": [],
        "tool_choice": "none",
        "stop": None,
        "seed": None,
        "stream": None,
    }
    assert rig.chat(**harmless).status == 200
    assert rig.complete(best_of=1, echo=False, suffix=None, n=1).status == 200


def test_values_that_clients_write_for_none(rig: Rig, asked: list[Any]) -> None:
    assert rig.chat(max_tokens=-1, seed=-1, top_k=-1, stop="").status == 200
    assert rig.chat(max_completion_tokens=-1, stop=["", "a"], top_k=5.0).status == 200
    (_, first), (_, second) = asked
    assert (first["top_k"], first["stop"]) == (0, ())
    assert first["max_new_tokens"] == second["max_new_tokens"] > 100
    assert (second["stop"], second["top_k"]) == (("a",), 5)
    assert rig.complete(max_tokens=8.0).status == 200
    assert asked[-1][1]["max_new_tokens"] == 8


def test_more_tokens_than_the_context_has_room_for_are_cut(rig: Rig, asked: list[Any]) -> None:
    assert rig.chat(max_tokens=32_000).status == 200
    ids, sampling = asked[0]
    assert sampling["max_new_tokens"] == 200 - len(ids)


def test_messages_as_agents_send_them_back(
    rig: Rig, model: ScriptedModel, asked: list[Any]
) -> None:
    parts = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    messages = [
        {"role": "user", "content": parts, "id": "m1"},
        {"role": "assistant", "content": None, "reasoning_content": "They greet."},
        {"role": "user", "content": "And?", "cache_control": {"type": "ephemeral"}},
    ]
    assert rig.chat(messages=messages).status == 200
    said = [("user", "Hello"), ("assistant", ""), ("user", "And?")]
    assert asked[0][0] == model.encode([{"role": role, "content": text} for role, text in said])


def test_contents_in_parts(rig: Rig, model: ScriptedModel, asked: list[Any]) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []},
        {"role": "user", "content": "And?", "name": "Ann"},
    ]
    assert rig.chat(messages=messages).status == 200
    wanted = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "And?"},
    ]
    assert asked[0][0] == model.encode(wanted)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"n": 0}, "n", "n is 0"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"best_of": 2}, "best_of", "best_of is not supported here"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
        ({"guided_json": {}, "min_tokens": 3}, "min_tokens", "give one"),
        ({"stop_token_ids": [1 << 30]}, "logit_bias", "stop_token_ids names token 1073741824"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "temperature is True"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -2}, "seed", "seed is -2"),
        ({"seed": 1 << 63}, "seed", "seed is"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens", "both given"),
        ({"max_tokens": 8.5}, "max_tokens", "max_tokens is 8.5"),
        ({"stop": [1]}, "stop[0]", "stop[0] is 1"),
        ({"stop": ["a"] * 17}, "stop", "stop is"),
        ({"logprobs": 1}, "logprobs", "logprobs is 1"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"logit_bias": {"5": 101.0}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias", "five"),
        ({"logit_bias": {"999999999": 1.0}}, "logit_bias", "names token 999999999"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "no grammar that can be compiled",
        ),
        ({"guided_regex": "("}, "guided_regex", "no grammar that can be compiled"),
        ({"guided_json": "{"}, "guided_json", "give a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "guided_choice is []"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "both given; give one"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "give one"),
        ({"structured_outputs": {"yaml": ""}}, "structured_outputs.yaml", "not supported here"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "tool_choice names 'f'",
        ),
        ({"functions": []}, "functions", "functions is not supported here"),
        ({"chat_template_kwargs": {"tools": []}}, "tools", "no variable of a chat template"),
        ({"use_beam_search": True}, "use_beam_search", "use_beam_search is True"),
        ({"str": 1}, "str", "str is not supported here"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported here"),
        ({"messages": []}, "messages", "messages is []"),
        ({"messages": "hello"}, "messages", "messages is 'hello'"),
        ({"messages": [{"role": "user"}]}, None, "messages[0].content is null"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "'function'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "is 'image_url', which is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            None,
            "which is not Unicode text",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, None, "Unknown role tool"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'web'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no place"),
        ({"model": 5}, "model", "model is 5"),
    ],
    ids=lambda given: json.dumps(given)[:40] if isinstance(given, dict) else "",
)
def test_bad_fields(
    rig: Rig, asked: list[Any], fields: dict[str, Any], param: str | None, sentence: str
) -> None:
    reply = rig.chat(**fields)
    assert reply.status == 400
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]
    assert error["param"] == param
    assert asked == []


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize"])
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "no object"),
        (b"{", "no JSON"),
        (b"\xff", "body"),
        (b"[]", "no object"),
        (b"5", "no object"),
        (b'"a"', "no object"),
        (b"null", "body"),
        (b"[" * 100_000, "body"),
        (b'{"a": ' * 100_000, "body"),
        (b'{"model": ' + b"1" * 5000 + b"}", "body"),
    ],
    ids=lambda given: repr(given)[:20],
)
def test_bodies_that_are_no_object(rig: Rig, path: str, body: bytes, sentence: str) -> None:
    reply = rig.post(path, body)
    assert reply.status == 400
    assert sentence in reply.error["message"]


def test_numbers_that_json_has_not(rig: Rig) -> None:
    body = json.dumps({"model": NAME, "prompt": "a", "temperature": float("nan")}).encode()
    assert rig.post(COMPLETION, body).error["param"] == "temperature"


def test_missing_fields(rig: Rig) -> None:
    error = rig.post(CHAT, {"model": NAME}).error
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    error = rig.post(COMPLETION, {"model": NAME}).error
    assert error["message"] == "prompt is missing; give it"


def test_the_only_model_answers_to_any_name(rig: Rig) -> None:
    assert rig.chat(model="gpt-4").json["model"] == "gpt-4"
    assert rig.post(CHAT, {"messages": QUESTION, "model": None}).json["model"] == NAME
    assert rig.post(COMPLETION, {"prompt": "a"}).json["model"] == NAME
    assert rig.post("/tokenize", {"model": "gpt-4", "prompt": "a"}).status == 200
    reply = rig.get("/v1/models/gpt-4")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_models(rig: Rig) -> None:
    one = {
        "id": NAME,
        "object": "model",
        "created": 0,
        "owned_by": "speq",
        "max_model_len": 200,
    }
    assert rig.get("/v1/models").json == {"object": "list", "data": [one]}
    assert rig.get(f"/v1/models/{NAME}").json == one


def test_tokens_of_a_text(rig: Rig, model: ScriptedModel) -> None:
    ids = model.encode("Hello there")
    told = {"count": len(ids), "max_model_len": 200, "tokens": ids}
    assert rig.post("/tokenize", {"prompt": "Hello there"}).json == told
    told = rig.post("/tokenize", {"model": NAME, "messages": QUESTION}).json
    assert told["tokens"] == model.encode(QUESTION)
    for body in (
        {},
        {"prompt": "a", "messages": QUESTION},
        {"prompt": ""},
        {"prompt": "a", "b": 1},
    ):
        assert rig.post("/tokenize", body).status == 400


def test_a_prompt_beyond_the_context(rig: Rig, asked: list[Any]) -> None:
    error = rig.complete(prompt=[5] * 200).error
    assert error["code"] == "context_length_exceeded"
    assert "the context holds 200" in error["message"]
    # What is left is what a chat gets that does not say.
    assert rig.complete(prompt=[5] * 195).status == 200
    assert asked[0][1]["max_new_tokens"] == 5


def test_routes_that_are_not_there(rig: Rig) -> None:
    for path in ("/v1", "/docs", "/v1/chat/completions/"):
        assert (rig.get(path).status, rig.get(path).error["message"]) == (404, "Not Found")
    reply = rig.get(CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def test_the_page_that_describes_the_routes(rig: Rig) -> None:
    page = rig.get("/openapi.json").json
    assert {CHAT, COMPLETION, "/v1/models", "/tokenize", "/health", "/metrics"} <= set(
        page["paths"]
    )
    chat = page["components"]["schemas"]["ChatBody"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]


CALL_TEXTS = ("Let me", " look.", "\n<tool", '_call>{"name": "weather", "arg', 'uments": {"place"')
CALL_TEXTS += (': "Oslo"}}', "</tool_call>", "\n")


def streamed_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of the pieces in a stream, as the API's clients put them together."""
    calls: list[dict[str, Any]] = []
    for piece in (each for delta in deltas for each in delta.get("tool_calls", ())):
        if piece["index"] == len(calls):
            calls.append(piece)
        else:
            assert piece.keys() == {"index", "function"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def test_tools(tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    engine = ScriptedEngine(pieces(*CALL_TEXTS))
    with api_server(engine, model) as rig:
        choice = rig.chat(tools=[WEATHER]).json["choices"][0]
        (call,) = choice["message"].pop("tool_calls")
        assert choice["message"]["content"] == "Let me look."
        assert choice["finish_reason"] == "tool_calls"
        assert call.pop("id").startswith("call_")
        function = {"name": "weather", "arguments": '{"place": "Oslo"}'}
        assert call == {"type": "function", "function": function}
        assert engine.asked[0][0] == model.encode(QUESTION, [WEATHER])
        assert "Tells the weather." in model.tokenizer.decode(engine.asked[0][0])

        chunks = rig.chat(tools=[WEATHER], stream=True, logprobs=True).chunks
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
        (told,) = streamed_calls(deltas)
        assert (told["index"], told["function"]) == (0, function)
        assert told["id"].startswith("call_")
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert sum(len(each["content"]) for each in logprobs if each) == len(CALL_TEXTS)

        # Without tools the text is what it is.
        plain = rig.chat(tools=[WEATHER], tool_choice="none").json["choices"][0]
        assert plain["message"]["content"] == "".join(CALL_TEXTS)
        assert "tool_calls" not in plain["message"]
        assert engine.asked[-1][0] == model.encode(QUESTION)


def test_tools_whose_marks_are_special_tokens(tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    body, logprobs = '{"name": "weather", "arguments": {"place": "Oslo"}}', TokenLogprobs(-0.5, ())
    tokens = [
        Token(400, "Let me", logprobs),
        Token(401, " look.\n", logprobs, ((7, "<tool_call>"),)),
        Token(402, body, logprobs),
        Token(403, "", logprobs, ((0, "</tool_call>"), (0, "<|im_end|>"))),
    ]
    function = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    with api_server(ScriptedEngine(tokens), model) as rig:
        choice = rig.chat(tools=[WEATHER]).json["choices"][0]
        assert choice["message"]["content"] == "Let me look."
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [function]
        assert choice["finish_reason"] == "tool_calls"
        chunks = rig.chat(tools=[WEATHER], stream=True, logprobs=True).chunks
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
        (told,) = streamed_calls(deltas)
        assert told["function"] == function
        plain = rig.chat().json["choices"][0]["message"]["content"]
        assert plain == f"Let me look.\n{body}"


def test_calls_and_their_results_in_messages(tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    engine = ScriptedEngine(pieces("Rain."))
    function = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    with api_server(engine, model) as rig:
        assert rig.chat(messages=messages, tools=[WEATHER]).status == 200
        text = model.tokenizer.decode(engine.asked[0][0])
        assert 'assistant: <tool_call>{"place": "Oslo"}' in text
        function["arguments"] = ""
        assert rig.chat(messages=messages).status == 200
        assert "assistant: <tool_call>{}" in model.tokenizer.decode(engine.asked[-1][0])
        for arguments in ("5", "{", '"a"'):
            function["arguments"] = arguments
            error = rig.chat(messages=messages).error
            assert "messages[1].tool_calls[0].function.arguments is" in error["message"]


@pytest.mark.parametrize("form", ["<|python_tag|>", "<function_call>", ""])
def test_other_forms_of_calls_are_refused(tmp_path: Path, form: str) -> None:
    template = TOOLS_TEMPLATE.replace("<tool_call>{...}</tool_call>", form)
    template = template.replace("<tool_call>", "")
    model = with_template(tmp_path / "tools", template)
    with api_server(ScriptedEngine(pieces("a")), model) as rig:
        error = rig.chat(tools=[WEATHER]).error
        assert error["param"] == "tools"
        assert "in a form that speq does not parse" in error["message"]


def test_what_an_answer_must_follow(rig: Rig, model: ScriptedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for fields, wanted in (
        ({"response_format": {"type": "json_object"}}, '"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            json.dumps(schema)[1:],
        ),
        ({"guided_json": json.dumps(schema)}, json.dumps(schema)[1:]),
        ({"structured_outputs": {"json": schema}}, json.dumps(schema)[1:]),
        ({"structured_outputs": {"json_object": True}}, '"type": "object"}'),
        ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
        ({"guided_regex": "[a-z/]+"}, r"/[a-z\/]+/"),
        ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
    ):
        assert rig.chat(**fields).status == 200
        assert wanted in model.grammars[-1]
    count = len(model.grammars)
    assert rig.complete(guided_choice=["yes"]).status == 200
    assert rig.chat(response_format={"type": "text"}).status == 200
    assert len(model.grammars) == count + 1


def test_a_tool_that_must_be_called(tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    clock = {"type": "function", "function": {"name": "clock"}}
    chosen = {"type": "function", "function": {"name": "clock"}}
    with api_server(ScriptedEngine(pieces("a")), model) as rig:
        assert rig.chat(tools=[WEATHER, clock], tool_choice="required").status == 200
        assert rig.chat(tools=[WEATHER, clock], tool_choice=chosen).status == 200
        assert ["weather" in grammar for grammar in model.grammars] == [True, False]
        assert [grammar.startswith("start: ") for grammar in model.grammars] == [True, True]
        both = {"tool_choice": "required", "response_format": {"type": "json_object"}}
        assert "give one" in rig.chat(tools=[clock], **both).error["message"]


ONE_SYSTEM = """
{%- for message in messages %}
{%- if message.role == "system" and (SYSTEM or not loop.first) %}{{ raise_exception("no") }}
{%- endif %}{{ message.role }}: {{ message.content }}|{% endfor %}
"""


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ("false", "system: Be brief.\n\nBe kind.|user: Hello|"),
        ("true", "user: Be brief.\n\nBe kind.\n\nHello|"),
    ],
)
def test_system_messages_that_a_template_refuses(tmp_path: Path, allowed: str, wanted: str) -> None:
    model = with_template(tmp_path / "one", ONE_SYSTEM.replace("SYSTEM", allowed))
    engine = ScriptedEngine(pieces("a"))
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    ]
    with api_server(engine, model) as rig:
        assert rig.chat(messages=messages).status == 200
        assert model.tokenizer.decode(engine.asked[0][0]) == wanted


QWEN_CODER = "<function=weather><parameter=place>\nOslo\n</parameter></function>"


def test_one_call_where_more_are_not_wanted(tmp_path: Path) -> None:
    model = with_template(tmp_path / "tools", TOOLS_TEMPLATE)
    texts = (f"<tool_call>{QWEN_CODER}</tool_call>" * 3, "Done.")
    with api_server(ScriptedEngine(pieces(*texts)), model) as rig:
        for fields, count in (({}, 3), ({"parallel_tool_calls": False}, 1)):
            strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
            message = rig.chat(tools=[strict], **fields).json["choices"][0]["message"]
            found = [call["function"]["arguments"] for call in message["tool_calls"]]
            assert found == ['{"place": "Oslo"}'] * count


def test_thoughts_come_apart_from_the_answer(tmp_path: Path) -> None:
    model = with_template(tmp_path / "thinks", THINKING_TEMPLATE)
    engine = ScriptedEngine(pieces("They", " greet.\n</th", "ink>\n\nHel", "lo."))
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    with api_server(engine, model) as rig:
        message = rig.chat(**on).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("They greet.", "Hello.")
        deltas = [each["choices"][0]["delta"] for each in rig.chat(**on, stream=True).chunks]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        assert thoughts == ["They", " greet."]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello."
        # The prompt does not open a thought, so that the text is an answer.
        message = rig.chat(reasoning_effort="low").json["choices"][0]["message"]
        assert "reasoning_content" not in message
        assert model.tokenizer.decode(engine.asked[-1][0]).endswith("assistant: effort low")


def test_thoughts_of_so_many_tokens(tmp_path: Path) -> None:
    marks = "<think>", "</think>"
    model = with_template(tmp_path / "thinks", THINKING_TEMPLATE, marks=marks)
    engine = ScriptedEngine(pieces("Hello."))
    end_id = model.tokenizer.convert_tokens_to_ids(marks[1])
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    with api_server(engine, model) as rig:
        rig.chat(**on, thinking_token_budget=2)
        constraint = engine.requests[-1].constraint
        assert constraint is not None
        free, full = constraint.allowed([], [5]), constraint.allowed([], [5, 6])
        assert free is not None
        assert free.all()
        assert full is not None
        assert full.nonzero().flatten().tolist() == [end_id]
        # Beside what the answer must follow.
        rig.chat(**on, thinking_token_budget=0, response_format={"type": "json_object"})
        constraint = engine.requests[-1].constraint
        assert constraint is not None
        assert constraint.forced([]) == [end_id]
        behind = constraint.allowed([end_id], [])
        assert behind is not None
        assert not behind.all()
        rig.chat(**on, thinking_token_budget=-1)
        assert engine.requests[-1].constraint is None
        # Agents say a number with each message, whatever the model is.
        path, asked = (
            "/v1/messages",
            {"max_tokens": 20, "messages": [{"role": "user", "content": "a"}]},
        )
        thinking = {"type": "enabled", "budget_tokens": 1}
        assert rig.post(path, asked | {"thinking": thinking}).status == 200
        constraint = engine.requests[-1].constraint
        assert constraint is not None
        assert constraint.forced([5]) == [end_id]


def test_thoughts_that_have_no_bound(tmp_path: Path) -> None:
    asked = {"max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1}
    for template, sentence in (
        (THINKING_TEMPLATE, "<think> is 4 for this model; leave the bound out"),
        (TOOLS_TEMPLATE, "answers have no thought whose length can be bounded; leave it out"),
    ):
        model = with_template(tmp_path / sentence[:5].strip(), template)
        engine = ScriptedEngine(pieces("Hello."))
        with api_server(engine, model) as rig:
            assert sentence in rig.chat(thinking_token_budget=2).error["message"]
            assert rig.post("/v1/messages", asked).status == 200
            assert engine.requests[-1].constraint is None


def test_what_a_stream_took_in_each_chunk(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = rig.chat(stream=True, stream_options=options).chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert chunks[-1]["usage"]["total_tokens"] > counts[-1]


def test_a_model_without_a_template(tmp_path: Path) -> None:
    model = with_template(tmp_path / "none", "")
    with api_server(ScriptedEngine(pieces("a")), model) as rig:
        assert "no chat template" in rig.chat().error["message"]
        assert rig.complete().status == 200
