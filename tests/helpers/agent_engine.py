"""An engine that does what a good model would: calls a tool, reads its result, writes JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any

from speq.engine.request import Request
from speq.generator import Token
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces

# Qwen3's, as far as a test needs it.
TEMPLATE = """
{%- if tools %}<|system|># Tools
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
<tools>{% for t in tools %}{{ "\\n" ~ (t | tojson) }}{% endfor %}{{ "\\n" }}</tools>
Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% else %}
{%- for m in messages if m.role == 'system' %}<|system|>{{ m.content }}{% endfor %}{% endif %}
{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>
{%- if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}{{ m.content or '' }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
""".strip()
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
RESULT = re.compile(r"<\|tool\|><tool_response>(.*?)</tool_response>", re.DOTALL)
SAID = "Hello from speq."
# What answers under a grammar prefer, so that they end.
ENDINGS = ('"', "}", "]", ",", ":", "1")
MOST_TOKENS = 2000


@dataclass
class AgentEngine(ScriptedEngine):
    """wanted: the tool that it calls where it has the choice; None: the first

    model  whose tokens it writes under a grammar
    """

    wanted: str | None = None
    model: ScriptedModel | None = None

    def script(self, request: Request) -> None:
        assert self.model is not None
        text = self.model.tokenizer.decode(request.prompt_token_ids)
        if request.constraint is not None:
            self.tokens = self.under_grammar(request)
        else:
            self.tokens = pieces(*re.findall(r"\s*\S+|\s+", self.answer(text)))
        super().script(request)

    def answer(self, text: str) -> str:
        turn = text[text.rfind("<|user|>") :]
        results = RESULT.findall(turn)
        if results:
            return f"It says: {results[-1].strip()[:200]}"
        tools = TOOLS.search(text)
        if tools is None:
            return SAID
        offered = [json.loads(line)["function"] for line in tools[1].splitlines() if line.strip()]
        named = [each for each in offered if each["name"] == self.wanted]
        call = (named or offered)[0]
        made = {"name": call["name"], "arguments": arguments_of(call.get("parameters") or {})}
        return f"<tool_call>\n{json.dumps(made)}\n</tool_call>"

    def under_grammar(self, request: Request) -> list[Token]:
        """The shortest answer that it finds."""
        assert self.model is not None and request.constraint is not None
        tokenizer, ids = self.model.tokenizer, list[int]()
        preferred = [tokenizer.convert_tokens_to_ids(each) for each in ENDINGS]
        order = [tokenizer.eos_token_id, *preferred]
        while len(ids) < MOST_TOKENS:
            allowed = request.constraint.allowed(ids, [])
            assert allowed is not None
            known = [each for each in order if each is not None and allowed[each]]
            ids.append(known[0] if known else int(allowed.int().argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        return [Token(each, tokenizer.decode([each], skip_special_tokens=True)) for each in ids]


def arguments_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a schema asks for."""
    fields = schema.get("properties", {})
    return {name: value_of(name, fields.get(name, {})) for name in schema.get("required", fields)}


def value_of(name: str, schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if name in ("command", "cmd"):
        return "echo hello" if kind == "string" else ["echo", "hello"]
    if name == "code":
        return "final_answer('42')"
    plain = {"integer": 5, "number": 5, "boolean": True, "array": [], "object": {}}
    return plain.get(kind if isinstance(kind, str) else kind[0], "Paris")
