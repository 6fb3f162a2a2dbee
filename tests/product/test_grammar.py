"""Answers that follow a grammar, whoever drafts: what may follow, and what the exact model says."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from speq import Generator
from speq.config import SamplingParams
from speq.engine.constraint import GrammarCompiler
from speq.errors import OptionError, SpeqError, UnsupportedError
from speq.text.answer_form import AnswerForm
from speq.text.call_syntax import SYNTAXES
from speq.text.grammar import AnswerGrammar, choice_rule, json_rule, regex_rule
from speq.text.vocabulary import Vocabulary
from tests.helpers.paths import BUNDLED

HERMES = SYNTAXES[-1]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
GO = {"type": "function", "function": {"name": "go"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


def follows(compiler: GrammarCompiler, tokenizer: Any, grammar: str, text: str) -> bool:
    """Whether a text is a whole answer: each token may follow those before it, and its end them."""
    constraint = compiler.constraint(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for at, token_id in enumerate([*ids, tokenizer.eos_token_id]):
        allowed = constraint.allowed(ids[:at], [])
        assert allowed is not None
        if not allowed[token_id]:
            return False
    return True


JSON_CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "a", "most": 1}}\n</tool_call>'
GO_CALL = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
TAG_CALL = (
    "<tool_call>\n<function=find>\n<parameter=text>\na < b\n</parameter>\n"
    "<parameter=most>\n1\n</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n"
    "<arg_key>most</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)
PLAIN, THINKS = AnswerForm(syntax=HERMES), AnswerForm(thinks=True, syntax=HERMES)
TAGS = AnswerForm(syntax=HERMES, call_style="tags")
GLM = AnswerForm(syntax=HERMES, call_style="glm")
HARMONY = AnswerForm(is_harmony=True)


def text(rule: str, form: AnswerForm = PLAIN, thinking: bool = False, tools: Any = ()) -> str:
    return AnswerGrammar(form, thinking, {}, tools).text(rule)


def calls(form: AnswerForm, *tools: Any, most: int | None = None, thinking: bool = False) -> str:
    return AnswerGrammar(form, thinking, {}, tools, most).calls()


OBJECT = json_rule(SCHEMA)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            text(OBJECT),
            ['{"a": 5}', '{"a": -1, "b": "x"}'],
            ["{}", '{"a": "5"}', "no", "", ' {"a": 5}'],
        ),
        (
            text(json_rule({"type": "object"})),
            ["{}", '{"c": [1, null]}', '{\n  "c": [\n    1\n  ]\n}', '{"c":1}'],
            ["[]", "{", '{"c":  1}', "{\n\n}", "     {}"],
        ),
        (text(regex_rule("[a-c]+/\n?")), ["abc/", "a/\n"], ["d/", "abc"]),
        (text(choice_rule(['say "a"', "no"])), ['say "a"', "no"], ["say", "nono"]),
        (
            text(OBJECT, THINKS),
            ['{"a": 5}', '<think>\n{"b"?\n</think>\n\n{"a": 5}'],
            ["<think>", "<think></think>no", 'hm</think>{"a": 5}'],
        ),
        (
            text(OBJECT, THINKS, thinking=True),
            ['why?\n</think>\n{"a": 5}', '</think>{"a": 5}'],
            ['{"a": 5}', "why?</think>no"],
        ),
        (
            text(OBJECT, PLAIN, tools=[FIND, GO]),
            ['{"a": 5}', JSON_CALL, JSON_CALL + GO_CALL],
            ['{"a": 5}' + GO_CALL, "<tool_call>{}</tool_call>"],
        ),
        (
            calls(PLAIN, FIND, GO),
            [JSON_CALL, GO_CALL, f"{GO_CALL}\n{GO_CALL}"],
            ["", "no", '<tool_call>{"name": "go"}</tool_call>', f"{GO_CALL} no"],
        ),
        (calls(PLAIN, FIND, most=1), [JSON_CALL], [GO_CALL, JSON_CALL + JSON_CALL]),
        (calls(THINKS, GO), [GO_CALL, f"<think>a</think>{GO_CALL}"], ["<think>a</think>no"]),
        (
            calls(TAGS, FIND),
            [TAG_CALL, TAG_CALL.replace("<parameter=most>\n1\n</parameter>\n", "")],
            [JSON_CALL, TAG_CALL.replace("\n1\n", "\nmany\n"), TAG_CALL.replace("text>", "at>")],
        ),
        (calls(TAGS, GO), ["<tool_call><function=go></function></tool_call>"], [GO_CALL]),
        (calls(GLM, FIND), [GLM_CALL], [JSON_CALL, GLM_CALL.replace(">1<", ">one<")]),
    ],
)
def test_what_follows_a_grammar(
    grammar: str, right: list[str], wrong: list[str], compiler: GrammarCompiler, tokenizer: Any
) -> None:
    assert [each for each in right if not follows(compiler, tokenizer, grammar, each)] == []
    assert [each for each in wrong if follows(compiler, tokenizer, grammar, each)] == []


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
MARKS = [
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
]


@pytest.mark.parametrize(
    ("form", "wants_call", "right", "wrong"),
    [
        (
            HARMONY,
            False,
            [
                f'{FINAL}{{"a": 5}}',
                f'{ANALYSIS}<|channel|>final <|constrain|>json<|message|>{{"a": 5}}',
                f'{ANALYSIS}{ANALYSIS}{FINAL}{{"a": 5}}',
            ],
            ['{"a": 5}', f"{FINAL}no", ANALYSIS, f'{ANALYSIS}{{"a": 5}}'],
        ),
        (
            HARMONY,
            True,
            [
                '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "a"}',
                f'{ANALYSIS}<|channel|>commentary to=functions.go<|message|>{{"text": "a"}}',
            ],
            [
                f'{FINAL}{{"text": "a"}}',
                '<|channel|>commentary to=functions.find<|message|>{"at": "a"}',
                '<|channel|>commentary to=functions.other<|message|>{"text": "a"}',
            ],
        ),
        (
            THINKS,
            True,
            [JSON_CALL, f"<think>\na < b</think>\n{GO_CALL}{JSON_CALL}"],
            ["<think>\na", "<think>a</think>", f"{GO_CALL} no"],
        ),
        (
            THINKS,
            False,
            ['{"a": 5}', '<think>a</think>{"a": 5}'],
            ["<think>a", f"<think>a</think>{GO_CALL}"],
        ),
    ],
)
def test_marks_that_are_special_tokens(
    form: AnswerForm, wants_call: bool, right: list[str], wrong: list[str]
) -> None:
    marked = AutoTokenizer.from_pretrained(BUNDLED)
    marked.add_special_tokens({"additional_special_tokens": MARKS})
    special = Vocabulary(marked).special
    assert set(MARKS) <= set(special.values())
    tools = [FIND, GO] if wants_call else []
    writer = AnswerGrammar(form, False, special, tools)
    grammar = writer.calls() if wants_call else writer.text(OBJECT)
    assert not any(f'"{mark}"' in grammar for mark in MARKS)
    made = GrammarCompiler(marked, len(marked), frozenset({marked.eos_token_id}))
    assert [each for each in right if not follows(made, marked, grammar, each)] == []
    assert [each for each in wrong if follows(made, marked, grammar, each)] == []


@pytest.mark.parametrize("syntax", SYNTAXES[:-1])
def test_forms_of_calls_without_a_grammar(syntax: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"give tool_choice auto"):
        AnswerGrammar(AnswerForm(syntax=syntax), False, {}, [GO]).calls()


@pytest.mark.parametrize(
    "grammar",
    [
        *("no grammar", "start: other", 'start: %json {"type": "hiccup"}', "start: /(/"),
        "start: <[99999]>",
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(OptionError, match=r"^it is no grammar that can be compiled: "):
        compiler.constraint(grammar)


def test_drafted_tokens_are_read_and_taken_back(compiler: GrammarCompiler, tokenizer: Any) -> None:
    ids = tokenizer.encode('{"a": 5, "b": "x"}', add_special_tokens=False)
    grammar = text(OBJECT)
    constraint, fresh = compiler.constraint(grammar), compiler.constraint(grammar)
    for at in range(len(ids)):
        for end in range(at, len(ids) + 1):
            drafted, alone = constraint.allowed(ids[:at], ids[at:end]), fresh.allowed(ids[:at], [])
            assert drafted is not None
            assert alone is not None
            assert end == len(ids) or drafted[ids[end]]
        # A draft that no answer begins with says nothing of what follows, and does no harm.
        assert constraint.allowed(ids[:at], [ids[at], *tokenizer.encode("{{{")]) is None
        assert torch.equal(constraint.allowed(ids[:at], []), alone)


def test_answers_that_left_their_grammar_end_with_a_sentence(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    constraint = compiler.constraint(text(OBJECT))
    with pytest.raises(SpeqError, match=r"^the answer cannot follow its grammar: "):
        constraint.allowed(tokenizer.encode("no"), [])


def test_compiled_grammars_are_kept(compiler: GrammarCompiler) -> None:
    first, second = (compiler.constraint(text(OBJECT)) for _ in range(2))
    assert first is not second
    assert first.matcher is not second.matcher


def said(generator: Generator, grammar: str, **sampling: Any) -> list[int]:
    prompt = generator.encode("Once upon a time there was ")
    options = SamplingParams(max_new_tokens=40, **sampling)
    request = generator.request(prompt, options, constraint=generator.constraint(grammar))
    with generator.batch(request.context) as batch:
        batch.add(request)
        while not batch.idle:
            batch.step()
    return request.output_token_ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}], ids=str)
def test_drafts_do_not_change_what_is_said(sampling: dict[str, Any]) -> None:
    """Greedy tokens are those of plain decoding by the mask, computed here from logits; every
    drafter, draft length and budget gives the same.
    """
    answers = []
    for budget, options in (
        ("64MiB", {"draft_length": 0}),
        ("64MiB", {"drafter": "int4", "draft_length": 4}),
        ("40MiB", {"drafter": "ngram", "draft_length": 3}),
        ("48MiB", {"drafter": "int4", "draft_length": 3, "draft_nodes": 9}),
    ):
        made = Generator.from_pretrained(BUNDLED, budget, dtype="float32", **options)
        with closing(made) as generator:
            answers.append(said(generator, text(OBJECT), **sampling))
            whole = generator.tokenizer.decode(answers[-1], skip_special_tokens=True)
        if answers[-1][-1] == generator.tokenizer.eos_token_id:
            assert isinstance(json.loads(whole)["a"], int)
    assert all(answer == answers[0] for answer in answers)


def test_greedy_answers_are_the_likeliest_that_may_follow(tiny: Callable[[str], Path]) -> None:
    """Beside plain transformers, with a mask of our own: digits, as many as one likes."""
    made = Generator.from_pretrained(BUNDLED, "64MiB", dtype="float32", draft_length=2)
    with closing(made) as generator:
        tokens = said(generator, "start: /[0-9]{12}/")
        tokenizer, prompt = generator.tokenizer, generator.encode("Once upon a time there was ")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    decoded = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
    wanted: list[int] = []
    while sum(len(decoded[each]) for each in wanted) < 12:
        left = 12 - sum(len(decoded[each]) for each in wanted)
        logits = model(torch.tensor([[*prompt, *wanted]])).logits[0, -1]
        for token_id, name in enumerate(decoded):
            if not (name.isascii() and name.isdigit() and len(name) <= left):
                logits[token_id] = -torch.inf
        wanted.append(int(logits.argmax()))
    assert tokens == [*wanted, tokenizer.eos_token_id]
