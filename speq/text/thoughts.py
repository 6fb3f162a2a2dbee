"""What a model thinks before it answers, between two marks.

The marks are text, or special tokens. Some templates write the first one at the end of a prompt.
"""

from dataclasses import dataclass, field

from speq.text.answer_parts import (
    AnswerParser,
    AnswerPart,
    SpaceBehindMark,
    join_parts,
    open_end,
)


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """heading: a word that follows the first mark and belongs to it"""

    begin: str
    end: str
    heading: str = ""


THINK = ThoughtMarks("<think>", "</think>")
# Of most families, of Gemma 4 and of Mistral.
THOUGHTS = (
    THINK,
    ThoughtMarks("<|channel>", "<channel|>", "thought"),
    ThoughtMarks("[THINK]", "[/THINK]"),
)


@dataclass(slots=True)
class ThoughtParser:
    """Tells thoughts from the answer behind them. White space at the marks belongs to them.

    answer   parses what comes behind; None: it is text
    thinking whether the prompt ends within a thought
    """

    answer: AnswerParser | None = None
    thinking: bool = False
    marks: ThoughtMarks = THINK
    # Whether something but white space came, which a thought can only begin with.
    _begun: bool = field(default=False, init=False)
    _space: SpaceBehindMark = field(default_factory=SpaceBehindMark, init=False)
    # What of the heading may still come.
    _heading: str = field(default="", init=False)
    _held: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._begun = self._space.due = self.thinking

    def mark(self, name: str) -> AnswerPart:
        if name == self.marks.begin and not self._begun:
            return self._open("")
        if name == self.marks.end and self.thinking:
            held, self._held = self._held, ""
            return self._close(self._headless(held), "")
        if self.thinking or self.answer is None:
            return AnswerPart()
        held, self._held = self._held, ""
        self._begun = True
        return join_parts([self.answer.feed(held), self.answer.mark(name)])

    def feed(self, text: str) -> AnswerPart:
        text, self._held = self._held + text, ""
        if self._begun:
            return self._think(text) if self.thinking else self._tell(text)
        spoken = text.lstrip()
        if spoken.startswith(self.marks.begin):
            return self._open(spoken.removeprefix(self.marks.begin))
        if self.marks.begin.startswith(spoken):
            self._held = text
            return AnswerPart()
        self._begun = True
        return self._tell(text)

    def finish(self) -> AnswerPart:
        held, self._held = self._held, ""
        if self.thinking:
            return AnswerPart(reasoning=self._headless(held.rstrip()))
        rest = AnswerPart() if self.answer is None else self.answer.finish()
        return join_parts([self._tell(held), rest])

    def _headless(self, held: str) -> str:
        """What is left of a text that was held back once all of the thought is there."""
        return "" if self._heading and held.strip() == self._heading else held

    def _open(self, text: str) -> AnswerPart:
        self._begun = self.thinking = self._space.due = True
        self._heading = self.marks.heading
        return self._think(text)

    def _close(self, thought: str, rest: str) -> AnswerPart:
        self.thinking, self._space.due = False, True
        return join_parts([AnswerPart(reasoning=thought.rstrip()), self._tell(rest)])

    def _think(self, text: str) -> AnswerPart:
        text = self._space.dropped(text)
        if self._heading:
            # A line of its own, or all of a thought.
            wanted = f"{self._heading}\n", self._heading + self.marks.end
            if any(each.startswith(text) for each in wanted):
                self._held = text
                return AnswerPart()
            if text.startswith(wanted):
                text = text.removeprefix(self._heading)
            self._heading, self._space.due = "", True
            text = self._space.dropped(text)
        thought, found, rest = text.partition(self.marks.end)
        if found:
            return self._close(thought, rest)
        certain = len(text) - open_end(text, self.marks.end)
        self._held = text[certain:]
        return AnswerPart(reasoning=text[:certain])

    def _tell(self, text: str) -> AnswerPart:
        text = self._space.dropped(text)
        return AnswerPart(text) if self.answer is None else self.answer.feed(text)
