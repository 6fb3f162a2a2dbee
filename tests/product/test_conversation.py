"""Chat without a terminal and without a model: what is kept, what is taken back, what is said."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from speq.cli.chat import Talk
from speq.cli.conversation import COMMANDS, Command, Conversation, Turn, parse
from speq.errors import SpeqError
from speq.generator import Token
from speq.text.thoughts import ThoughtParser

Take = Callable[[str], tuple[str, str]]


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@dataclass
class Parrot:
    """Answers with the last question, a word a token. A prompt has as many tokens as words.

    fails   what is raised instead of the token of this number, counted from 0
    thinks  whether its answers may begin with a thought
    """

    max_context: int = 20
    fails: dict[int, BaseException] = field(default_factory=dict)
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    variables: list[dict[str, Any] | None] = field(default_factory=list)
    thinks: bool = False
    constraints: list[int | None] = field(default_factory=list)

    def bound_thought(self, prompt_ids: list[int], most: int) -> int | None:
        return most if self.thinks else None

    def encode(
        self, messages: list[dict[str, str]], variables: dict[str, Any] | None = None
    ) -> list[int]:
        self.asked.append(messages)
        self.variables.append(variables)
        return list(range(sum(len(message["content"].split()) for message in messages)))

    def answer_parser(self, prompt_ids: list[int]) -> ThoughtParser | None:
        return ThoughtParser() if self.thinks else None

    def stream(
        self,
        prompt_token_ids: list[int],
        max_new_tokens: int,
        progress: Callable[[str, int, int], None],
        on_finish: Callable[[str, dict[str, Any]], None],
        constraint: int | None = None,
    ) -> Iterator[Token]:
        self.constraints.append(constraint)
        assert len(prompt_token_ids) + max_new_tokens <= self.max_context
        self.limits.append(max_new_tokens)
        words = self.asked[-1][-1]["content"].split()[:max_new_tokens]
        for at, word in enumerate(words):
            if at in self.fails:
                raise self.fails[at]
            yield Token(at, f" {word}" if at else word)
        reason = "length" if len(words) == max_new_tokens else "eos"
        on_finish(reason, {"new_tokens": len(words), "tpot_ms": 3.25})


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def talk(parrot: Parrot) -> Talk:
    return Talk(parrot, Conversation(), 8, {})  # type: ignore[arg-type]


@pytest.fixture
def take(talk: Talk, capsys: pytest.CaptureFixture[str]) -> Take:
    """Takes a line; what it wrote to stdout and to stderr."""

    def taken(line: str) -> tuple[str, str]:
        talk.take(line)
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    return taken


def test_lines_are_commands_or_questions() -> None:
    assert parse(" a question \n") == " a question "
    assert parse("  \n") == ""
    assert parse("/help") == Command("/help", "")
    assert parse(" /system  be brief \n") == Command("/system", "be brief")
    assert parse("/reset") == Command("/new", "")
    assert parse("//etc holds what?") == "/etc holds what?"
    assert parse("/") == Command("/", "")


def test_questions_and_answers_add_up(talk: Talk, take: Take, parrot: Parrot) -> None:
    assert take("one two") == ("one two\n", "[2 tokens, 3.2 ms each]\n")
    assert take("three") == ("three\n", "[1 tokens, 3.2 ms each]\n")
    said = [question("one two"), answer("one two"), question("three"), answer("three")]
    assert parrot.asked == [said[:1], said[:3]]
    assert talk.conversation.messages() == said
    assert take("   ") == ("", "")
    assert talk.conversation.messages() == said
    assert not talk.refused


def test_thoughts_are_printed_and_not_kept(talk: Talk, take: Take, parrot: Parrot) -> None:
    parrot.thinks, talk.variables = True, {"enable_thinking": True}
    out, err = take("<think> why? </think> so it is")
    assert out == "so it is\n"
    assert err == "why?\n\n[6 tokens, 3.2 ms each]\n"
    assert talk.conversation.messages()[-1] == answer("so it is")
    assert parrot.variables == [{"enable_thinking": True}]
    talk.quiet = True
    assert take("<think> why? </think> so") == ("so\n", "")
    # Thoughts that an answer has no room to end are no answer.
    parrot.thinks = False
    assert take("<think> why?")[0] == "<think> why?\n"


def test_thoughts_are_bounded(talk: Talk, take: Take, parrot: Parrot) -> None:
    take("one")
    parrot.thinks, talk.reasoning_budget = True, 5
    take("two")
    assert parrot.constraints == [None, 5]
    parrot.thinks = False
    assert "reasoning_budget is given and" in take("three")[1]


def test_an_answer_that_was_cut_off_says_so(take: Take) -> None:
    out, err = take("a b c d e f g h i")
    assert out == "a b c d e f g h\n"
    assert err == (
        "[8 tokens, 3.2 ms each, cut off there: --max-new-tokens or the context allow no more]\n"
    )


def test_an_answer_has_the_room_that_the_context_leaves(take: Take, parrot: Parrot) -> None:
    take(" ".join("abcdefghijklm"))  # 13 tokens of 20
    assert parrot.limits == [7]


def test_a_turn_that_does_not_fit_is_taken_back(talk: Talk, take: Take) -> None:
    take("one")
    before = talk.conversation.messages()
    assert take(" ".join(["two"] * 18)) == (
        "",
        "error: the conversation takes 20 tokens and the model's context has 20. The question was "
        "taken back; /drop forgets the oldest one, /new begins anew\n",
    )
    assert talk.conversation.messages() == before
    assert talk.refused == 1
    assert take("three")[0] == "three\n"
    assert talk.conversation.messages() == [*before, question("three"), answer("three")]


def test_a_first_question_that_does_not_fit_has_nothing_to_forget(take: Take) -> None:
    _, err = take(" ".join(["two"] * 20))
    assert err.endswith("The question was taken back\n")


@pytest.mark.parametrize("at", [0, 1])
def test_a_turn_that_fails_is_taken_back(at: int, talk: Talk, take: Take, parrot: Parrot) -> None:
    """Before its first token (the budget has no room for it), or within its answer."""
    parrot.fails = {at: SpeqError("the memory budget has no room")}
    out, err = take("one two")
    assert out == ("" if at == 0 else "one\n")
    assert err == "error: the memory budget has no room. The question was taken back\n"
    assert talk.conversation.messages() == []


def test_an_interrupt_ends_an_answer_and_keeps_it(talk: Talk, take: Take, parrot: Parrot) -> None:
    parrot.fails = {2: KeyboardInterrupt()}
    assert take("one two three") == ("one two\n", "")
    assert talk.conversation.messages() == [question("one two three"), answer("one two")]


def test_an_interrupt_before_the_answer_takes_the_question_back(
    talk: Talk, take: Take, parrot: Parrot
) -> None:
    parrot.fails = {0: KeyboardInterrupt()}
    out, err = take("one two three")
    assert (out, talk.conversation.messages()) == ("", [])
    assert "stopped before the answer began; the question was taken back" in err


def test_commands_change_what_is_said_next(talk: Talk, take: Take, parrot: Parrot) -> None:
    for text in ("one", "two", "three"):
        take(text)
    assert take("/undo") == ("", "taken back: three\n")
    assert take("/drop") == ("", "forgotten: one\n")
    assert take("/system be brief") == ("", "the system message is set\n")
    take("four")
    brief = {"role": "system", "content": "be brief"}
    assert parrot.asked[-1] == [brief, question("two"), answer("two"), question("four")]
    assert take("/new") == ("", "a new conversation\n")
    take("five")
    assert parrot.asked[-1] == [brief, question("five")]
    take("/reset")
    assert take("/system") == ("", "no system message\n")
    take("six")
    assert parrot.asked[-1] == [question("six")]
    take("/undo")
    for command in ("/undo", "/drop"):
        assert take(command) == ("", "nothing was asked yet\n")
    assert not talk.refused


def test_help_and_unknown_commands_show_all_commands(take: Take, parrot: Parrot) -> None:
    _, shown = take("/help")
    for name, purpose in COMMANDS.items():
        assert f"{name} " in shown
        assert purpose in shown
    assert take("/nonsense please") == (
        "",
        f"there is no command /nonsense; these are there:\n{shown}",
    )
    assert parrot.asked == []
    take("//nonsense please")
    assert parrot.asked == [[question("/nonsense please")]]


def test_every_command_that_is_shown_is_there(take: Take) -> None:
    for name in COMMANDS:
        if not name.startswith("//"):
            assert "there is no command" not in take(name.partition(" ")[0])[1]


def test_stats_are_those_of_the_last_answer(
    talk: Talk, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(sys.modules[Talk.__module__], "print_summary", shown.append)
    assert take("/stats") == ("", "nothing was answered to the end yet\n")
    take("one two")
    assert take("/stats") == ("", "")
    assert shown == [{"new_tokens": 2, "tpot_ms": 3.25, "finish_reason": "eos"}]


def test_a_conversation_is_saved_and_nothing_replaced(
    talk: Talk, take: Take, tmp_path: Path
) -> None:
    talk.conversation.system = "é"
    take("one two")
    target = tmp_path / "my talk.json"
    assert take(f"/save {target}") == ("", f"saved in {target}\n")
    assert json.loads(target.read_text()) == talk.conversation.messages()
    assert take(f"/save {target}") == (
        "",
        f"error: {target} exists already; choose another name\n",
    )
    for name, sentence in (
        ("", "/save needs the name of a file"),
        (str(target / "x"), "cannot be written; choose a file in a folder of yours"),
        (f"{tmp_path}/a\0b", "cannot be written"),
        (f"{tmp_path}/{'a' * 300}", "cannot be written"),
    ):
        out, err = take(f"/save {name}")
        assert out == ""
        assert err.startswith("error: ")
        assert sentence in err
    assert [path.name for path in tmp_path.iterdir()] == ["my talk.json"]
    assert talk.refused == 5


# The prompt.


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str | type[BaseException]]:
    """What a user types at a terminal: lines, and keys that raise."""
    lines: list[str | type[BaseException]] = []
    prompts: list[str] = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    return lines


def test_an_interrupt_at_the_prompt_says_how_to_leave(
    talk: Talk,
    typed: list[str | type[BaseException]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed += ["one", KeyboardInterrupt, KeyboardInterrupt, "two", EOFError, "three"]
    talk.run(interactive=True)
    assert talk.conversation.turns == [Turn("one", "one"), Turn("two", "two")]
    assert typed == ["three"]
    out, err = capsys.readouterr()
    assert out == "one\ntwo\n"
    assert err.count("Ctrl-D or /quit leaves") == 2


def test_quit_leaves(talk: Talk, typed: list[str | type[BaseException]]) -> None:
    typed += ["one", "/quit", "two"]
    talk.run(interactive=True)
    assert typed == ["two"]


def test_an_interrupt_ends_what_nobody_types(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdin, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        talk.run(interactive=False)
