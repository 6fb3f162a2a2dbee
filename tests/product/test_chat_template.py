"""What chat templates are given, and what they may take: against transformers' own rendering."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from speq import Generator
from speq.errors import SpeqError
from speq.text.chat_template import ChatTemplate
from speq.text.prompts import PromptEncoder
from speq.text.render_process import RenderError, RenderProcess
from tests.helpers.paths import BUNDLED, METADATA

USER = {"role": "user", "content": "Where?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def calling(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>"})


HERMES = """
{%- if tools %}[{{ tools | tojson }}]{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""
# As DeepSeek-R1's: calls where the content is none, with arguments that are texts.
WHERE_NONE = """
{%- for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}
{%- for c in m['tool_calls'] %}{% set f = c['function'] %}
{{- '(' + f['name'] + ' ' + f['arguments'] + ')' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}{{ m['content'] + '$' }}
{%- else %}{{ m['content'] }}{% endif %}{% endfor %}"""
# As Qwen3's: contents are cut like texts, and both kinds of arguments are taken.
AS_TEXT = """
{%- for m in messages %}{{ m.content.strip() }}{% for c in m.tool_calls or [] %}
{%- set a = c.function.arguments %}({{ c.function.name }} {{ a if a is string else a | tojson }})
{%- endfor %}{% endfor %}"""
# As Qwen3-Coder's: names and values of arguments one by one.
ONE_BY_ONE = """
{%- for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{%- for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}
{%- endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            HERMES,
            "<user>Where?<assistant><tool_call>"
            '{"name": "look", "arguments": {"a": "é"}}</tool_call>',
        ),
        (WHERE_NONE, 'Where?(look {"a": "é"})'),
        (AS_TEXT, 'Where?(look {"a": "é"})'),
        (ONE_BY_ONE, "Where?<a>é"),
    ],
    ids=["hermes", "where none", "as text", "one by one"],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}], ids=["JSON", "object"])
def test_calls_are_given_as_the_template_takes_them(
    text: str, written: str, arguments: Any
) -> None:
    assert template(text).render([USER, calling(arguments)], []) == written


def test_calls_beside_a_text_keep_it() -> None:
    assert template(AS_TEXT).render([USER, calling("{}", "So.")], []) == "Where?So.(look {})"


def test_calls_that_a_template_would_drop_are_refused() -> None:
    dropping = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert dropping.render([USER], []) == "Where?"
    with pytest.raises(SpeqError, match="calls of tools, which the model's chat template drops"):
        dropping.render([USER, calling("{}")], [])


PARTS = """
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"""


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (PARTS, "AB;CD;"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "A\nB;C\nD;"),
        ("{% for m in messages %}{{ m.content | trim }};{% endfor %}", "A\nB;C\nD;"),
        ("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", "A\nB;C\nD;"),
        (PARTS.replace("is string", "is string or m.role == 'system'"), "A\nB;CD;"),
    ],
    ids=["parts", "text", "trimmed", "added", "parts but for the system"],
)
def test_parts_are_given_as_the_template_takes_them(text: str, written: str) -> None:
    def parts(first: str, second: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": first}, {"type": "text", "text": second}]

    messages = [
        {"role": "system", "content": parts("A", "B")},
        {"role": "user", "content": parts("C", "D")},
    ]
    assert template(text).render(messages, []) == written


@pytest.mark.parametrize(
    "text",
    [
        HERMES,
        HERMES.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
        HERMES.replace("{% endfor %}", "{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}"),
        "{% if not tools is defined %}{% set tools = none %}{% endif %}" + HERMES,
        "{% set tools = tools or [] %}" + HERMES,
        "{% macro m(tools) %}{{ tools | tojson }}{% endmacro %}{{ m(tools) }}",
    ],
    ids=["plain", "generation", "break", "defined", "set", "macro"],
)
def test_templates_with_a_place_for_tools(text: str) -> None:
    assert '"name": "look"' in template(text).render([USER], [TOOL])


def test_tools_without_a_place_are_refused() -> None:
    with pytest.raises(SpeqError, match="tools are given and the model's chat template has no pl"):
        template("{% if tools %}tools{% endif %}{{ messages }}").render([USER], [TOOL])


def test_chats_are_those_of_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    messages = [{"role": "system", "content": "Be brief."}, USER]
    messages += [{"role": "assistant", "content": "Here\u2028 é\n"}, USER]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoder.encode(messages) == wanted


# As Qwen3.5's: a thought is begun in the prompt, or ended there.
THINKS = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant><think>
{%- if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}{% endif %}"""
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    calling({"place": "sea", "deep": 7}, ""),
    {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "blue \u2028 é"},
    {"role": "assistant", "content": "It is blue."},
    USER,
]


def published() -> dict[str, str]:
    """Templates of published models, by their folders."""
    found = {}
    for path in METADATA.glob("indexes/*/tokenizer_config.json"):
        text = json.loads(path.read_text()).get("chat_template")
        if text is not None:
            found[path.parent.name] = text
    return found


TEMPLATES = {"hermes": HERMES, "one by one": ONE_BY_ONE, "thinks": THINKS} | published()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_renderings_are_those_of_transformers(name: str, thinking: bool | None) -> None:
    """A system's message, tools, calls with their results, and thinking on and off."""
    text, tokenizer = TEMPLATES[name], AutoTokenizer.from_pretrained(BUNDLED)
    more = {} if thinking is None else {"enable_thinking": thinking}
    made = ChatTemplate(text, tokenizer.special_tokens_map)
    tools = [TOOL] if made.takes_tools else []
    turns = TURNS if made.calls is not None else TURNS[:2]
    for messages, given in ((TURNS[:2], []), (TURNS[:2], tools), (turns, tools)):
        wanted = tokenizer.apply_chat_template(
            messages,
            tools=given or None,
            chat_template=text,
            tokenize=False,
            add_generation_prompt=True,
            **more,
        )
        assert made.render(messages, given, more) == wanted


def test_templates_that_take_too_much_are_ended() -> None:
    """Time, memory and text, and what comes next is rendered."""
    process = RenderProcess(max_cpu_s=1, max_memory_bytes=128 << 20, max_characters=1000)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for text, sentence in (
        ("{{ 'a' * 300000000 }}", "it takes more than 128 MiB"),
        (
            "{% set n = namespace(a='a') %}{% for i in range(99) %}"
            "{% set n.a = n.a * 2 %}{% endfor %}",
            "MiB",
        ),
        ("{{ 'a' * 1001 }}", "it writes 1001 characters of at most 1000"),
        ("{{ raise_exception('no') }}", "^no$"),
        ("{% nothing %}", "unknown tag 'nothing'"),
        (endless, "it takes more than 1 s of processor time"),
    ):
        with pytest.raises(RenderError, match=sentence):
            process.render(text, [USER], None, {})
        assert process.render("{{ messages[0].content }}", [USER], None, {}) == "Where?"
    process.close()


def test_several_threads_have_what_they_asked_for() -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with ThreadPoolExecutor(4) as threads:
        asked = [[USER | {"content": f"{number} " * 500}] for number in range(40)]
        written = [*threads.map(lambda messages: template(text).render(messages, []), asked)]
    assert written == [messages[0]["content"] for messages in asked]


def test_messages_that_are_no_json() -> None:
    with pytest.raises(SpeqError, match="not JSON"):
        template(HERMES).render([USER | {"more": object()}], [])


def test_a_tokenizer_and_a_template_of_ones_own(tmp_path: Path) -> None:
    """In place of a model's, which here has none."""
    bare, other = tmp_path / "bare", tmp_path / "template.jinja"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(BUNDLED / name)
    other.write_text("{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}")
    options: dict[str, Any] = {"draft_length": 0, "profile": "none"}
    given = {"tokenizer": BUNDLED, "chat_template": other}
    with closing(Generator.from_pretrained(bare, "40MiB", **options, **given)) as generator:
        expected = AutoTokenizer.from_pretrained(BUNDLED).encode("(user) Where?")
        assert generator.encode([USER]) == expected
        assert generator.generate([USER], max_new_tokens=3).text
    refused = {
        "no_tokenizer": {"chat_template": other},
        "bad_file": {"tokenizer": BUNDLED, "chat_template": tmp_path / "none"},
    }
    for code, wrong in refused.items():
        with pytest.raises(SpeqError) as error:
            Generator.from_pretrained(bare, "40MiB", **options, **wrong)
        assert error.value.code == code
    with pytest.raises(SpeqError, match="tokenizer"):
        Generator.from_pretrained(bare, "40MiB", **options, tokenizer=tmp_path / "none")
