"""Bodies that are too much: with a million faults, half-sent, or sent by very many at once."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from speq.server import api_error, body_route
from speq.server.api_error import ApiError
from speq.server.body_route import validate_body
from speq.server.fields import ChatBody, CompletionBody, TokenizeBody
from speq.server.gate import Access, AccessGate
from speq.server.incoming import AHEAD_BYTES, BYTE_S, PATIENCE_S
from speq.server.message_fields import MessagesBody
from speq.server.response_fields import ResponseBody
from tests.helpers.api_server import JSON, NAME, Rig, api_server
from tests.helpers.leaping_loop import leaping
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "a"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def message(**fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [CHAT["messages"][0] | fields]}


def called(*calls: Any) -> dict[str, Any]:
    return message(tool_calls=list(calls))


NONE, MANY = [0] * 3000, {str(at): [] for at in range(3000)}
# By the schema's names of where many wrong items may stand.
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "CompletionBody.prompt": (CompletionBody, COMPLETION | {"prompt": [-1] * 3000}),
    "CompletionBody.prompt[]": (CompletionBody, COMPLETION | {"prompt": [[-1] * 3000]}),
    "CompletionBody.guided_choice": (CompletionBody, COMPLETION | {"guided_choice": NONE}),
    "ChatBody.guided_choice": (ChatBody, CHAT | {"guided_choice": NONE}),
    "StructuredOutputs.choice": (ChatBody, CHAT | {"structured_outputs": {"choice": NONE}}),
    "CompletionBody.stop": (CompletionBody, COMPLETION | {"stop": NONE}),
    "CompletionBody.logit_bias": (CompletionBody, COMPLETION | {"logit_bias": MANY}),
    "CompletionBody.stop_token_ids": (CompletionBody, COMPLETION | {"stop_token_ids": [-1] * 60}),
    "ChatBody.stop_token_ids": (ChatBody, CHAT | {"stop_token_ids": [-1] * 60}),
    "ChatBody.messages": (ChatBody, CHAT | {"messages": NONE}),
    "ChatBody.stop": (ChatBody, CHAT | {"stop": NONE}),
    "ChatBody.logit_bias": (ChatBody, CHAT | {"logit_bias": MANY}),
    "ChatBody.tools": (ChatBody, CHAT | {"tools": NONE}),
    "ChatBody.modalities": (ChatBody, CHAT | {"modalities": NONE}),
    "ChatBody.metadata": (ChatBody, CHAT | {"metadata": MANY}),
    "ChatMessage.content": (ChatBody, message(content=NONE)),
    "ChatMessage.tool_calls": (ChatBody, called(*NONE)),
    "ChatMessage.annotations": (ChatBody, message(annotations=NONE)),
    "TokenizeBody.messages": (TokenizeBody, {"messages": NONE}),
    "TokenizeBody.tools": (TokenizeBody, {"prompt": "a", "tools": NONE}),
}
# The same of the two other APIs over chats.
MESSAGE: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}


def block(**fields: Any) -> dict[str, Any]:
    """A message with one block."""
    return MESSAGE | {"messages": [{"role": "user", "content": [fields]}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


WRONG |= {
    "MessagesBody.messages": (MessagesBody, MESSAGE | {"messages": NONE}),
    "MessagesBody.system": (MessagesBody, MESSAGE | {"system": NONE}),
    "MessagesBody.tools": (MessagesBody, MESSAGE | {"tools": NONE}),
    "MessagesBody.betas": (MessagesBody, MESSAGE | {"betas": NONE}),
    "MessagesBody.stop_sequences": (MessagesBody, MESSAGE | {"stop_sequences": NONE}),
    "Message.content": (
        MessagesBody,
        MESSAGE | {"messages": [{"role": "user", "content": NONE}]},
    ),
    "ToolResultBlock.content": (
        MessagesBody,
        block(type="tool_result", tool_use_id="a", content=NONE),
    ),
    "ResponseBody.input": (ResponseBody, {"input": NONE}),
    "ResponseBody.tools": (ResponseBody, {"input": "a", "tools": NONE}),
    "ResponseBody.include": (ResponseBody, {"input": "a", "include": NONE}),
    "ResponseBody.metadata": (ResponseBody, {"input": "a", "metadata": MANY}),
    "MessageItem.content": (ResponseBody, item(role="user", content=NONE)),
    "CallOutputItem.output": (
        ResponseBody,
        item(type="function_call_output", call_id="a", output=NONE),
    ),
    "ReasoningItem.summary": (ResponseBody, item(type="reasoning", summary=NONE)),
    "ReasoningItem.content": (ResponseBody, item(type="reasoning", content=NONE)),
}
# Objects of any JSON, which have no faults of their own.
ANY_JSON = {
    *("Function.parameters", "ChatBody.chat_template_kwargs", "JsonSchema.schema"),
    *("StructuredOutputs.json", "ChatBody.guided_json", "CompletionBody.guided_json"),
    *("MessageTool.input_schema", "ToolUseBlock.input", "ResponseTool.parameters"),
    *("MessagesBody.metadata", "MessagesBody.cache_control", "MessagesBody.context_management"),
    *("ResponseBody.client_metadata", "TextFormat.schema", "ChatBody.prediction"),
    *(f"{owner}.cache_control" for owner in ("TextContent", "ChatMessage", "Tool")),
}


def many(schema: dict[str, Any], name: str) -> Iterator[str]:
    """Where a schema lets many items stand."""
    if schema.get("type") == "array":
        yield name
        yield from many(schema["items"], f"{name}[]")
    elif schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
        yield name
    for part in schema.get("anyOf", []):
        yield from many(part, name)


def test_every_list_is_tried() -> None:
    found = set()
    for body in (ChatBody, CompletionBody, TokenizeBody, MessagesBody, ResponseBody):
        schema = body.model_json_schema()
        for owner in (schema, *schema.get("$defs", {}).values()):
            for name, field in owner.get("properties", {}).items():
                found |= set(many(field, f"{owner['title']}.{name}"))
    assert found == {*WRONG, *ANY_JSON}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many there were of each body that was refused."""
    counts: list[int] = []
    own = api_error.error_of_fields

    def counted(found: Any) -> ApiError:
        counts.append(len(found))
        return own(found)

    monkeypatch.setattr(api_error, "error_of_fields", counted)
    return counts


@pytest.mark.parametrize("name", WRONG)
def test_one_fault_of_many_is_told(name: str, faults: list[int]) -> None:
    kind, body = WRONG[name]
    with pytest.raises(ApiError) as refused:
        validate_body(kind, json.dumps(body).encode())
    # One of each kind that the field may be of.
    assert 1 <= faults[0] <= (16 if kind is ResponseBody else 4)
    assert refused.value.status == 400
    assert (refused.value.param or "").rpartition(".")[2].startswith(name.split(".")[1].strip("[]"))


@pytest.mark.parametrize("where", ["", "messages[0].", "stream_options."])
def test_one_unknown_field_of_many_is_told(where: str, faults: list[int]) -> None:
    unknown = {f"a{at}": 1 for at in range(3000)}
    body = CHAT | {"stream": True}
    if where == "stream_options.":
        body |= {"stream_options": unknown}
    else:
        body |= message(**unknown) if where else unknown
    with pytest.raises(ApiError) as refused:
        validate_body(ChatBody, json.dumps(body).encode())
    assert faults == [1]
    assert refused.value.param == f"{where}a0"


def test_tools_are_not_too_deep() -> None:
    def parameters(depth: int) -> bytes:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        function = TOOL["function"] | {"parameters": schema}
        return json.dumps(CHAT | {"tools": [TOOL | {"function": function}]}).encode()

    validate_body(ChatBody, parameters(64))
    for depth in (65, 900):
        with pytest.raises(ApiError, match=r"at most 64 objects and lists") as refused:
            validate_body(ChatBody, parameters(depth))
        assert refused.value.param == "tools[0].function.parameters"


def test_millions_of_faults(faults: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long bodies are validated beside the loop, where only a few faults are made of them."""
    threads = []
    own = body_route.validate_body

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return own(*given)

    monkeypatch.setattr(body_route, "validate_body", seen)
    long = b'{"model": "tiny", "prompt": [%s]}' % b",".join([b"-1"] * 1_300_000)
    counted = b'{"model": "tiny", "prompt": [%s]}' % b",".join([b"1"] * 100_000)
    with api_server(ScriptedEngine(pieces("a")), ScriptedModel()) as rig:
        assert rig.post("/v1/completions", long).error["param"] == "prompt[0]"
        # Ids are counted before they are looked at.
        refused = rig.post("/v1/completions", counted).error
        assert refused["code"] == "context_length_exceeded"
        assert "the prompt has 100000 tokens" in refused["message"]
        assert rig.complete(prompt=[-1]).status == 400
        assert [each is rig.thread for each in threads] == [False, False, True]
    assert faults == [4, 4]


class Sent:
    """What a gate's client sends and gets."""

    def __init__(self, gate: AccessGate, length: int | None = None, path: str = "/a") -> None:
        self.told: list[Any] = []
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        headers = [(b"host", b"here:1"), (b"content-type", JSON.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        method = "GET" if length is None else "POST"
        scope = {"type": "http", "method": method, "path": path, "headers": headers}

        async def send(told: Any) -> None:
            self.told.append(told)

        self.task = asyncio.ensure_future(gate(scope, self.messages.get, send))

    def part(self, body: bytes, more: bool) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.told[0]["status"] if self.told else None


async def settled() -> None:
    """Everybody has done what can be done without time."""
    for _ in range(20):
        await asyncio.sleep(0)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body, and then waits for its client to leave."""
    body = (await receive())["body"] if scope["method"] == "POST" else b"got"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})
    if scope["path"] == "/held":
        assert (await receive())["type"] == "http.disconnect"


def gate_of(most: int, body: int = 1000) -> AccessGate:
    return AccessGate(echo, Access("here", 1, None, body), most)


def test_half_sent_bodies_hold_up_nobody() -> None:
    async def run() -> None:
        gate = gate_of(most=2)
        half = [Sent(gate, 100) for _ in range(90)]
        for each in half:
            each.part(b"{", more=True)
        await settled()
        whole = Sent(gate, 6)
        whole.part(b"abc", more=True)
        whole.part(b"def", more=False)
        await asyncio.gather(whole.task, Sent(gate).task)
        assert (whole.status, whole.told[1]["body"]) == (200, b"abcdef")
        clock = asyncio.get_running_loop()
        assert clock.time() == 0
        assert not any(each.told for each in half)
        await half[0].task
        assert clock.time() == pytest.approx(PATIENCE_S + 100 * BYTE_S)
        await asyncio.gather(*(each.task for each in half))
        assert {each.status for each in half} == {408}
        assert (b"connection", b"close") in half[0].told[0]["headers"]

    leaping(run())


def test_bodies_that_take_long_have_their_time() -> None:
    """100 kB in a second, and ten seconds beside."""

    async def run() -> None:
        gate = gate_of(most=2, body=4 << 20)
        for late_s, status in ((50.0, 200), (51.95, 408)):  # of 4 MiB: 51.94 s
            sent = Sent(gate, 4 << 20)
            sent.part(b"a" * (1 << 20), more=True)
            await asyncio.sleep(late_s)
            sent.part(b"a" * (3 << 20), more=False)
            await sent.task
            assert sent.status == status

    leaping(run())


def test_the_oldest_body_gives_way() -> None:
    async def run() -> None:
        gate = gate_of(most=9)
        room = (1000 * 4 + (16 << 20)) // (1000 + AHEAD_BYTES)
        half = [Sent(gate, 1000) for _ in range(room)]
        await settled()
        assert not any(each.told for each in half)
        after = [Sent(gate, 1000) for _ in range(3)]
        await settled()
        assert [each.status for each in half] == [408] * 3 + [None] * (room - 3)
        for each in (*half[3:], *after):
            each.part(b"a" * 1000, more=False)
        await asyncio.gather(*(each.task for each in (*half, *after)))
        assert {each.status for each in (*half[3:], *after)} == {200}

    leaping(run())


def test_who_leaves_before_the_body_is_whole_gets_nothing() -> None:
    async def run() -> None:
        sent = Sent(gate_of(most=1), 10)
        sent.part(b"a", more=True)
        sent.leave()
        await sent.task
        assert sent.told == []

    leaping(run())


def test_health_is_told_however_much_there_is_to_do() -> None:
    async def run() -> None:
        gate = gate_of(most=1)
        held, coming = Sent(gate, 1, path="/held"), Sent(gate, 2)
        held.part(b"a", more=False)
        await settled()
        assert held.status == 200
        full, health = Sent(gate), Sent(gate, path="/health")
        await asyncio.gather(full.task, health.task)
        assert (full.status, health.status) == (429, 200)
        # Nor is there room for one whose body comes in meanwhile.
        coming.part(b"ab", more=False)
        await coming.task
        assert coming.status == 429
        held.leave()
        after = Sent(gate)
        await asyncio.gather(held.task, after.task)
        assert after.status == 200

    leaping(run())


def test_bodies_in_pieces_over_http() -> None:
    def ask(rig: Rig, half: bool) -> int:
        body = json.dumps(COMPLETION).encode()
        connection = rig.connect()
        connection.putrequest("POST", "/v1/completions")
        for name, value in (("Content-Type", JSON), ("Content-Length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body[:5])
        if half:
            connection.close()
            return 0
        connection.send(body[5:])
        status = connection.getresponse().status
        connection.close()
        return status

    with api_server(ScriptedEngine(pieces("a")), ScriptedModel()) as rig:
        assert [ask(rig, half) for half in (True, False)] == [0, 200]
