"""Answers that a model puts between two marks, as Hunyuan and ERNIE do."""

from dataclasses import dataclass, field

from speq.text.answer_parts import (
    AnswerParser,
    AnswerPart,
    SpaceBehindMark,
    join_parts,
    open_end,
)


@dataclass(slots=True)
class WrappedParser:
    """Drops the marks around an answer, with white space at them.

    answer  parses what is between them; None: it is text
    """

    begin: str
    end: str
    answer: AnswerParser | None = None
    # Whether something but white space came: only before it an answer can be opened.
    _begun: bool = field(default=False, init=False)
    _open: bool = field(default=False, init=False)
    _space: SpaceBehindMark = field(default_factory=SpaceBehindMark, init=False)
    _held: str = field(default="", init=False)

    def mark(self, name: str) -> AnswerPart:
        held, self._held = self._held, ""
        if name == self.begin and not self._begun:
            self._begun = self._open = self._space.due = True
            return AnswerPart()
        if name == self.end and self._open:
            return self._close(held, "")
        self._begun = True
        told = self._tell(held)
        return told if self.answer is None else join_parts([told, self.answer.mark(name)])

    def feed(self, text: str) -> AnswerPart:
        text, self._held = self._held + text, ""
        if not self._begun:
            spoken = text.lstrip()
            if self.begin.startswith(spoken):
                self._held = text
                return AnswerPart()
            self._begun = True
            self._open = self._space.due = spoken.startswith(self.begin)
            text = spoken.removeprefix(self.begin) if self._open else text
        text = self._space.dropped(text)
        if not self._open:
            return self._tell(text)
        before, found, rest = text.partition(self.end)
        if found:
            return self._close(before, rest)
        certain = len(text) - open_end(text, self.end)
        self._held = text[certain:]
        return self._tell(text[:certain])

    def finish(self) -> AnswerPart:
        held, self._held = self._held, ""
        rest = AnswerPart() if self.answer is None else self.answer.finish()
        return join_parts([self._tell(held), rest])

    def _close(self, text: str, rest: str) -> AnswerPart:
        self._open, self._space.due = False, True
        return join_parts([self._tell(text.rstrip()), self._tell(self._space.dropped(rest))])

    def _tell(self, text: str) -> AnswerPart:
        return AnswerPart(text) if self.answer is None else self.answer.feed(text)
