"""`speq chat`: a conversation through the model's chat template."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt
from speq.cli.conversation import Command, Conversation, Turn, help_text, parse
from speq.cli.from_dataclass import Exclude
from speq.cli.live import Live, check_live, text_writer
from speq.cli.machines import ONE_MODEL, check_machines, open_generator
from speq.cli.run_report import print_summary
from speq.cli.sampling import UNSET, AskedSampling, sampling_line
from speq.config import Model, RunConfig
from speq.errors import OptionError, SpeqError
from speq.measure.approximation import approximate
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, Text, Whole
from speq.pipeline.settings import StagesSettings
from speq.ray.settings import RaySettings
from speq.text.answer_parts import AnswerPart, parse_piece
from speq.units import format_bytes

if TYPE_CHECKING:
    from speq.engine.request import Constraint
    from speq.generator import Generator

# Variables of chat templates, by the option's value: families have one name or the other.
REASONING: dict[str, dict[str, Any]] = {
    "auto": {},
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
}
LEAVE = "Ctrl-D or /quit leaves"


@dataclass(frozen=True, slots=True)
class ChatSettings(Options):
    """How a conversation begins."""

    system: Annotated[str | None, Option("A system message to begin with.", Text(wanted=None))] = (
        None
    )
    reasoning: Annotated[
        str,
        Option(
            "Whether the model thinks before it answers, where its template can tell it: auto is "
            "as the template has it. Thoughts are printed to stderr.",
            Choice(tuple(REASONING)),
        ),
    ] = "auto"
    reasoning_budget: Annotated[
        int | None, Option("Tokens of a thought at most; then the answer follows.", Whole(0))
    ] = None
    live: Live = False


def chat(
    model: Model,
    settings: ChatSettings,
    run: Annotated[RunConfig, Exclude(defaults=(("prefix_cache", "auto"),))],
    sampling: Annotated[AskedSampling, Exclude(defaults=(*UNSET, ("max_new_tokens", 512)))],
    machines: StagesSettings,
    cluster: Annotated[RaySettings, ONE_MODEL],
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Talk to a model. /help lists commands; Ctrl-C ends an answer, Ctrl-D or /quit the talk."""
    check_machines(machines, cluster, replicas=False)
    live = check_live(settings.live, output.quiet)
    conversation = Conversation(settings.system)
    # Refused before it is loaded: a model without a template, a system message too long for it.
    first = conversation.messages("Hello"), 1
    with (
        opt.log_of(output.quiet),
        open_generator(model, run, machines, cluster, first, output.quiet) as generator,
    ):
        params = sampling.params(generator)
        drawing = asdict(params)
        max_new_tokens = drawing.pop("max_new_tokens")
        if not output.quiet:
            budget = format_bytes(run.memory_budget)
            tell(f"{model} within {budget}, context {generator.max_context} tokens")
            tell(sampling_line(params))
            tell(f"/help lists commands; Ctrl-C ends an answer; {LEAVE}")
        talk = Talk(
            generator,
            conversation,
            max_new_tokens,
            drawing,
            REASONING[settings.reasoning],
            quiet=output.quiet,
            live=live,
            reasoning_budget=settings.reasoning_budget,
        )
        talk.run(interactive=sys.stdin.isatty())
    # Nobody is there to ask again: what reads the output learns that answers are missing.
    if talk.refused and not sys.stdin.isatty():
        raise typer.Exit(1)


@dataclass(slots=True)
class Talk:
    """A conversation, which outlives a turn that fails.

    variables  of the chat template
    stats      of the last answer
    refused    lines that could not be obeyed: turns that did not fit, files that exist
    quiet      no progress, no thoughts and no figures behind answers
    live       a line below each answer while it comes
    reasoning_budget  tokens of a thought at most; None: any number
    thinking   whether the last that was printed is a thought
    """

    generator: "Generator"
    conversation: Conversation
    max_new_tokens: int
    sampling: dict[str, Any]
    variables: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    refused: int = 0
    quiet: bool = False
    live: bool = False
    reasoning_budget: int | None = None
    thinking: bool = field(default=False, init=False)

    def run(self, interactive: bool) -> None:
        """Take lines to the end. Where nobody types, an interrupt ends it, as it ends any program.

        Raises KeyboardInterrupt there.
        """
        while not self.conversation.quit:
            try:
                line = read_line(interactive)
                if line is None:
                    return
                self.take(line)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                tell(f"\n{LEAVE}")

    def take(self, line: str) -> None:
        asked = parse(line)
        try:
            if isinstance(asked, Command):
                tell(self.obey(asked))
            elif asked:
                self.ask(asked)
        except SpeqError as error:
            self.refused += 1
            tell(f"error: {error}")

    def obey(self, command: Command) -> str:
        """What a command did. Raises SpeqError where it cannot be done, or there is none."""
        match command.name:
            case "/help":
                return help_text()
            case "/new":
                return self.conversation.new()
            case "/undo":
                return self.conversation.undo()
            case "/drop":
                return self.conversation.drop()
            case "/system":
                return self.conversation.instruct(command.argument)
            case "/save":
                return self.conversation.save(command.argument)
            case "/stats":
                return self.show_stats()
            case "/quit":
                self.conversation.quit = True
                return ""
        return f"there is no command {command.name}; these are there:\n{help_text()}"

    def show_stats(self) -> str:
        if not self.stats:
            return "nothing was answered to the end yet"
        print_summary(self.stats)
        return ""

    def ask(self, question: str) -> None:
        """Answer a question. One that is refused leaves the conversation as it was."""
        turns = len(self.conversation.turns)
        try:
            self.answer(question)
        except SpeqError as error:
            if self.conversation.turns[turns:]:
                print()  # ends the line of what came
            del self.conversation.turns[turns:]
            advice = "; /drop forgets the oldest one, /new begins anew" if turns else ""
            raise SpeqError(f"{error}. The question was taken back{advice}") from error

    def answer(self, question: str) -> None:
        """Stream an answer to stdout. An interrupt ends it; what came of it is kept."""
        messages = self.conversation.messages(question)
        prompt_token_ids = self.generator.encode(messages, variables=self.variables)
        parser = self.generator.answer_parser(prompt_token_ids)
        room = self.generator.max_context - len(prompt_token_ids)
        if room < 1:
            raise OptionError(
                f"the conversation takes {len(prompt_token_ids)} tokens and the model's context "
                f"has {self.generator.max_context}"
            )
        finished: dict[str, Any] = {}
        turn: Turn | None = None
        with (
            opt.progress_bar(self.quiet) as progress,
            text_writer(self.generator, self.live) as write,
        ):
            stream = self.generator.stream(
                prompt_token_ids,
                max_new_tokens=min(self.max_new_tokens, room),
                progress=progress,
                constraint=self.constraint(prompt_token_ids),
                on_finish=lambda reason, stats: finished.update(stats, finish_reason=reason),
                **self.sampling,
            )
            with contextlib.closing(stream), contextlib.suppress(KeyboardInterrupt):
                for token in stream:
                    if turn is None:
                        turn = Turn(question)
                        self.conversation.turns.append(turn)
                    self.tell(parse_piece(parser, token), turn, write)
            if turn is not None and parser is not None:
                self.tell(parser.finish(), turn, write)
        if turn is None:
            tell("\nstopped before the answer began; the question was taken back")
        else:
            print()
        if finished:
            self.stats = finished
            if not self.quiet:
                tell(figures(finished))
            if finished.get("budget") is not None:
                tell(approximate(finished["budget"]))

    def constraint(self, prompt_token_ids: list[int]) -> "Constraint | None":
        """What bounds the thought of an answer. Raises SpeqError where there is none."""
        if self.reasoning_budget is None:
            return None
        bounded = self.generator.bound_thought(prompt_token_ids, self.reasoning_budget)
        if bounded is None:
            raise OptionError(
                "reasoning_budget is given and the model's answers have no thought whose length "
                "can be bounded; leave it out"
            )
        return bounded

    def tell(self, part: AnswerPart, turn: Turn, write: Callable[[str], None]) -> None:
        """Print a part of an answer; thoughts to stderr. They are no part of the conversation."""
        if part.reasoning and not self.quiet:
            sys.stderr.write(part.reasoning)
            sys.stderr.flush()
            self.thinking = True
        if part.text:
            if self.thinking:
                tell("\n")
            self.thinking = False
            turn.answer += part.text
            write(part.text)


def figures(stats: dict[str, Any]) -> str:
    """An answer's length and pace, in a line."""
    parts = [f"{stats['new_tokens']} tokens"]
    if stats["tpot_ms"]:
        parts.append(f"{stats['tpot_ms']:.1f} ms each")
    if stats["finish_reason"] == "length":
        parts.append("cut off there: --max-new-tokens or the context allow no more")
    return f"[{', '.join(parts)}]"


def read_line(interactive: bool) -> str | None:
    """What comes next; None at the end."""
    if not interactive:
        return sys.stdin.readline() or None
    prompt = "> "
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    else:
        # Lends `input` its history and keys. It writes to stdout, so it waits for a terminal.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None


def tell(sentence: str) -> None:
    if sentence:
        print(sentence, file=sys.stderr)
