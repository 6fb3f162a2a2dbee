"""A conversation: what was said, and what its commands do. Knows no terminal and no model."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from speq.errors import FileError, OptionError
from speq.files.atomic_file import check_target, replacing

# What a user may type besides questions.
COMMANDS = {
    "/help": "show these commands",
    "/new": "begin anew; the system message stays (also /reset)",
    "/undo": "take back the last question and its answer",
    "/drop": "forget the oldest question and its answer",
    "/system TEXT": "set the system message; without TEXT, leave it out",
    "/save FILE": "write the conversation as a JSON list of messages",
    "/stats": "show what the last answer took",
    "/quit": "leave (also Ctrl-D)",
    "//TEXT": "ask what begins with a slash",
}
# Other names of some.
ALIASES = {"/reset": "/new"}


@dataclass(slots=True)
class Turn:
    """A question, and its answer as far as it came."""

    question: str
    answer: str = ""


@dataclass(slots=True)
class Conversation:
    """A system message, if any, and the turns so far. What a command does is said in a sentence.

    quit  set where the user asks to leave
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    quit: bool = False

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """What was said, and a question that is not a turn yet, as chat templates take it."""
        said = [] if self.system is None else [("system", self.system)]
        for turn in self.turns:
            said += [("user", turn.question), ("assistant", turn.answer)]
        if question is not None:
            said.append(("user", question))
        return [{"role": role, "content": content} for role, content in said]

    def new(self) -> str:
        self.turns.clear()
        return "a new conversation"

    def undo(self) -> str:
        if not self.turns:
            return "nothing was asked yet"
        return f"taken back: {shorten(self.turns.pop().question)}"

    def drop(self) -> str:
        if not self.turns:
            return "nothing was asked yet"
        return f"forgotten: {shorten(self.turns.pop(0).question)}"

    def instruct(self, text: str) -> str:
        self.system = text or None
        return "the system message is set" if text else "no system message"

    def save(self, name: str) -> str:
        """Raises SpeqError where there is no name, or the file exists or cannot be written."""
        if not name:
            raise OptionError("/save needs the name of a file, such as /save talk.json")
        path = Path(name)
        if os.path.exists(path):
            raise FileError(f"{path} exists already; choose another name")
        check_target(path, force=False)
        text = json.dumps(self.messages(), indent=1)
        try:
            with replacing(path) as file:
                file.write(text.encode() + b"\n")
        except (OSError, ValueError) as error:
            raise FileError(f"{path} cannot be written: {error}; choose another name") from error
        return f"saved in {path}"


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass(frozen=True, slots=True)
class Command:
    """name: with its slash, aliases undone; argument: the rest of the line."""

    name: str
    argument: str


def parse(line: str) -> Command | str:
    """What a line asks for: a command, or a question, which may be empty."""
    stripped = line.strip()
    if not stripped.startswith("/"):
        return line.rstrip("\r\n") if stripped else ""
    if stripped.startswith("//"):
        return stripped[1:]
    name, _, argument = stripped.partition(" ")
    return Command(ALIASES.get(name, name), argument.strip())


def help_text() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"{name:{width}}  {purpose}" for name, purpose in COMMANDS.items())
