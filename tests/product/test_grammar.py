"""Answers that follow a grammar, whoever drafts: what may follow, and what the exact model says."""

import json
import random
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
from speq.engine.request import Constraint, Request
from speq.engine.thought_budget import ThoughtBudget, ThoughtTokens
from speq.errors import OptionError, SpeqError, UnsupportedError
from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import join_parts
from speq.text.call_grammar import json_rule
from speq.text.call_syntax import SYNTAXES, calls_in
from speq.text.grammar import AnswerGrammar, choice_rule, regex_rule
from speq.text.thoughts import THINK, THOUGHTS
from speq.text.vocabulary import Vocabulary
from tests.helpers.often import often
from tests.helpers.paths import BUNDLED

BY_NAME = {each.name: each for each in SYNTAXES}
HERMES = BY_NAME["hermes"]
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
PLAIN, THINKS = AnswerForm(syntax=HERMES), AnswerForm(thoughts=THINK, syntax=HERMES)
TAGS, GLM = AnswerForm(syntax=BY_NAME["qwen-coder"]), AnswerForm(syntax=BY_NAME["glm"])
WRAPPED = AnswerForm(thoughts=THINK, syntax=HERMES, wrapper="answer")
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
        (
            text(OBJECT, WRAPPED),
            ['{"a": 5}', '<think>a</think>\n<answer>\n{"a": 5}\n</answer>'],
            ['<answer>{"a": 5}', '{"a": 5}</answer>', "<answer>no</answer>"],
        ),
        (
            text(OBJECT, AnswerForm(thoughts=THOUGHTS[1])),
            ['{"a": 5}', '<|channel>thought\na<channel|>{"a": 5}'],
            ["<|channel>a<channel|>no", "<channel|>"],
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


GIVEN = {"text": "a", "most": 1}
DS = [f"<\uff5ctool▁{each}\uff5c>" for each in ("calls▁begin", "calls▁end")]
DS += [f"<\uff5ctool▁{each}\uff5c>" for each in ("call▁begin", "sep", "call▁end")]
KIMI = [f"<|tool_call{each}|>" for each in ("s_section_begin", "s_section_end")]
KIMI += [f"<|tool_call_{each}|>" for each in ("begin", "argument_begin", "end")]
LISTED = (
    '[{"name": "find", "arguments": {"text": "a", "most": 1}}, {"name": "go", "arguments": {}}]'
)
# By the name of a form: calls of `find` and `go`, as families write them, and what is none of
# these.
WRITTEN = {
    "minimax": (
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="text">a</parameter>\n'
        '<parameter name="most">1</parameter>\n</invoke>\n<invoke name="go"></invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call><invoke name="find"></invoke></minimax:tool_call>',
    ),
    "deepseek-v3": (
        f'{DS[0]}{DS[2]}function{DS[3]}find\n```json\n{{"text": "a", "most": 1}}\n```{DS[4]}'
        f"{DS[2]}function{DS[3]}go\n```json\n{{}}\n```{DS[4]}{DS[1]}",
        f"{DS[0]}{DS[2]}find{DS[3]}{{}}{DS[4]}{DS[1]}",
    ),
    "deepseek": (
        f'{DS[0]}{DS[2]}find{DS[3]}{{"text": "a", "most": 1}}{DS[4]}{DS[2]}go{DS[3]}{{}}{DS[4]}'
        f"{DS[1]}",
        f"{DS[0]}{DS[2]}find{DS[3]}{{}}{DS[4]}{DS[1]}",
    ),
    "kimi": (
        f'{KIMI[0]}{KIMI[2]}functions.find:0{KIMI[3]}{{"text": "a", "most": 1}}{KIMI[4]}'
        f"{KIMI[2]}functions.go:1{KIMI[3]}{{}}{KIMI[4]}{KIMI[1]}",
        f"{KIMI[0]}{KIMI[2]}find{KIMI[3]}{{}}{KIMI[4]}{KIMI[1]}",
    ),
    "lfm2": (
        '<|tool_call_start|>[find(text="a", most=1), go()]<|tool_call_end|>',
        "<|tool_call_start|>[find(most=1)]<|tool_call_end|>",
    ),
    "gemma": (
        '<|tool_call>call:find{text:<|"|>a<|"|>,most:1}<tool_call|><|tool_call>call:go{}'
        "<tool_call|>",
        "<|tool_call>call:find{most:1}<tool_call|>",
    ),
    "mistral": (
        '[TOOL_CALLS]find[ARGS]{"text": "a", "most": 1}[TOOL_CALLS]go[ARGS]{}',
        "[TOOL_CALLS]find[ARGS]{}",
    ),
    "mistral-json": (f"[TOOL_CALLS] {LISTED}", '[TOOL_CALLS] [{"name": "find"}]'),
    "hunyuan": (f"<tool_calls>{LISTED}</tool_calls>", "<tool_calls>[]</tool_calls>"),
    "qwen-coder": (
        f"{TAG_CALL.replace(' < b', '')}<tool_call>\n<function=go></function>\n</tool_call>",
        "<tool_call><function=find></function></tool_call>",
    ),
    "glm": (f"{GLM_CALL}<tool_call>go</tool_call>", "<tool_call>find</tool_call>"),
    "hermes": (JSON_CALL + GO_CALL, "<tool_call>{}</tool_call>"),
}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", BY_NAME)
def test_each_form_of_calls(name: str, special: bool) -> None:
    """A grammar of a form has calls as families write them, which our parser finds, and no
    others. Marks are texts, or special tokens.
    """
    syntax, (written, wrong) = BY_NAME[name], WRITTEN[name]
    marked = AutoTokenizer.from_pretrained(BUNDLED)
    marks = [each for each in (syntax.begin, syntax.end, *syntax.inner) if each]
    if special:
        marked.add_special_tokens({"additional_special_tokens": marks})
    made = GrammarCompiler(marked, len(marked), frozenset({marked.eos_token_id}))
    writer = AnswerGrammar(
        AnswerForm(syntax=syntax), False, Vocabulary(marked).special, [FIND, SET, GO]
    )
    grammar = writer.calls()
    assert follows(made, marked, grammar, written)
    assert not follows(made, marked, grammar, wrong)
    assert not follows(made, marked, grammar, "find")
    parser = AnswerForm(syntax=syntax).parser("", [FIND, SET, GO])
    assert parser is not None
    read = join_parts([parser.feed(written), parser.finish()])
    found = [(call.name, json.loads(call.arguments)) for call in read.calls]
    assert found == [("find", GIVEN), ("go", {})]
    assert read.text == ""
    one = AnswerGrammar(writer.form, False, writer.special, [FIND], 1).calls()
    assert not follows(made, marked, one, written)


SET = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {
                "on": {"type": "boolean"},
                "way": {"enum": ["up", "down", 3]},
                "places": {"type": "array", "items": {"type": "string"}},
                "deep": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                    "required": ["y"],
                },
            },
        },
    },
}


@pytest.mark.parametrize(
    ("name", "inside", "arguments"),
    [
        ("gemma", "call:set{}", {}),
        ("gemma", 'call:set{on:true,way:<|"|>up<|"|>}', {"on": True, "way": "up"}),
        ("gemma", "call:set{way:3}", {"way": 3}),
        (
            "gemma",
            'call:set{places:[<|"|>a<|"|>,<|"|>b, ]<|"|>],deep:{y:1.5}}',
            {"places": ["a", "b, ]"], "deep": {"y": 1.5}},
        ),
        ("gemma", "call:set{on:yes}", None),
        ("gemma", "call:set{deep:{x:1}}", None),
        ("gemma", "call:set{way:4}", None),
        ("lfm2", "[set()]", {}),
        ("lfm2", '[set(on=True, places=["a"])]', {"on": True, "places": ["a"]}),
        ("lfm2", '[set(way="down", deep={"y": 1})]', {"way": "down", "deep": {"y": 1}}),
        ("lfm2", "[set(on=true)]", None),
        ("lfm2", "[set(, on=True)]", None),
    ],
)
def test_arguments_of_all_kinds(
    name: str, inside: str, arguments: Any, compiler: GrammarCompiler, tokenizer: Any
) -> None:
    syntax = BY_NAME[name]
    grammar = calls(AnswerForm(syntax=syntax), SET)
    whole = f"{syntax.begin}{inside}{syntax.end}"
    assert follows(compiler, tokenizer, grammar, whole) == (arguments is not None)
    if arguments is not None:
        ((_, found),) = calls_in(syntax.parse, inside, [SET])
        assert json.loads(found) == arguments


def test_an_unknown_form_of_calls_has_no_grammar() -> None:
    with pytest.raises(UnsupportedError, match=r"give tool_choice auto"):
        AnswerGrammar(AnswerForm(), False, {}, [GO]).calls()


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


def request_of(generator: Generator, constraint: Constraint | None, **sampling: Any) -> Request:
    prompt = generator.encode("Once upon a time there was ")
    options = SamplingParams(**({"max_new_tokens": 40} | sampling))
    return generator.request(prompt, options, constraint=constraint)


def run_together(generator: Generator, requests: list[Request]) -> None:
    with generator.batch(max(each.context for each in requests)) as batch:
        for each in requests:
            batch.add(each)
        while not batch.idle:
            batch.step()


def said(generator: Generator, grammar: str, **sampling: Any) -> list[int]:
    request = request_of(generator, generator.constraint(grammar), **sampling)
    run_together(generator, [request])
    return request.output_token_ids


@pytest.mark.parametrize(
    "sampling",
    often([{"temperature": 0.9, "top_p": 0.95, "seed": 5}, {}], quick=1, wide=1),
    ids=str,
)
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


LONG_NAMES = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer"},
        "wind_in_metres_per_second": {"type": "integer"},
    },
    "required": ["temperature_in_celsius", "wind_in_metres_per_second"],
    "additionalProperties": False,
}


@pytest.mark.wide
@pytest.mark.parametrize(
    "sampling",
    [{}, pytest.param({"temperature": 0.9, "seed": 5}, marks=pytest.mark.wide)],
    ids=str,
)
def test_forced_tokens_are_drafts(sampling: dict[str, Any]) -> None:
    """Alone, and beside a request of the same form and one of no form: the same tokens as plainly,
    in fewer steps than without.
    """
    grammar, wanted = text(json_rule(LONG_NAMES)), []
    for options in (
        {"draft_length": 0},
        {"drafter": "ngram", "draft_length": 2},
        {"drafter": "int4", "draft_length": 3},
        {"drafter": "int4"},
    ):
        made = Generator.from_pretrained(
            BUNDLED, "64MiB", dtype="float32", max_batch=3, profile="none", **options
        )
        with closing(made) as generator:

            def form(of: Generator = generator) -> Request:
                return request_of(of, of.constraint(grammar), max_new_tokens=60, **sampling)

            alone, free = form(), request_of(generator, None, **sampling)
            run_together(generator, [alone])
            run_together(generator, [free])
            batch = [form(), request_of(generator, None, **sampling), form()]
            run_together(generator, batch)
        wanted = wanted or [alone.output_token_ids, free.output_token_ids]
        assert [alone.output_token_ids, free.output_token_ids] == wanted
        assert [each.output_token_ids for each in batch] == [wanted[0], wanted[1], wanted[0]]
        count = len(wanted[0])
        if options.get("draft_length") == 0:
            assert alone.metrics.steps == count - 1
        else:
            assert max(each.metrics.steps for each in (alone, batch[0], batch[2])) < count - 8


def allowed_by_hand(budget: ThoughtBudget, tokens: list[int]) -> list[int] | None:
    """Which of the tokens 0 to 9 may follow, by the definition; None: none of these was allowed."""
    thinking, thought = budget.marks.is_thinking, 0
    for at, token_id in enumerate([*tokens, -1]):
        full = thinking and thought >= budget.most
        if token_id == -1:
            return [budget.marks.end_id] if full else [*range(10)]
        if full and token_id != budget.marks.end_id:
            return None
        thought += thinking
        if thinking:
            thinking = token_id != budget.marks.end_id
        else:
            thinking = at < 4 and token_id == budget.marks.begin_id
    raise AssertionError


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_thoughts_end_in_time(most: int, thinking: bool) -> None:
    """Whatever is drafted meanwhile."""
    draws = random.Random(most)
    for _ in range(200):
        budget = ThoughtBudget(most, ThoughtTokens(1, 2, thinking), 10)
        output: list[int] = []
        for _ in range(12):
            ahead = draws.choices(range(4), k=draws.randrange(5))
            found = budget.allowed(output, ahead)
            wanted = allowed_by_hand(budget, output + ahead)
            assert (None if found is None else found.nonzero().flatten().tolist()) == wanted
            may = budget.allowed(output, [])
            assert may is not None
            choices = may.nonzero().flatten().tolist()
            assert budget.forced(output) == (choices if choices == [2] else [])
            output.append(draws.choice([each for each in choices if each < 4]))


def test_answers_with_a_bounded_thought(tokenizer: Any) -> None:
    """The same tokens whoever drafts: a thought of 5 tokens, and then an object."""
    end = tokenizer.encode("#")[-1]
    answers = []
    for options in ({"draft_length": 0}, {"drafter": "int4", "draft_length": 4}):
        made = Generator.from_pretrained(BUNDLED, "64MiB", dtype="float32", **options)
        with closing(made) as generator:
            grammar = generator.constraint('start: /[^#]*/ "#" ' + json_rule(SCHEMA))
            size = generator.vocab_size
            budget = ThoughtBudget(5, ThoughtTokens(end, end, True), size, grammar)
            request = request_of(generator, budget)
            run_together(generator, [request])
            answers.append(request.output_token_ids)
    assert answers[0] == answers[1]
    assert answers[0].index(end) <= 5
    whole = tokenizer.decode(answers[0][answers[0].index(end) + 1 :], skip_special_tokens=True)
    assert isinstance(json.loads(whole)["a"], int)
