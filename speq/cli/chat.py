"""`speq chat`: a conversation through the model's chat template."""

import contextlib
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli import options as opt
from speq.cli.from_dataclass import But
from speq.config import Model, RunConfig, SamplingParams
from speq.options.declared import Option, Options
from speq.options.kinds import Text

if TYPE_CHECKING:
    from speq.generator import Generator


@dataclass(frozen=True, slots=True)
class ChatSettings(Options):
    """How a conversation begins."""

    system: Annotated[str | None, Option("A system message to begin with.", Text(wanted=None))] = (
        None
    )


def chat(
    model: Model,
    settings: ChatSettings,
    run: RunConfig,
    sampling: Annotated[SamplingParams, But(defaults=(("max_new_tokens", 512),))],
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D or /quit the conversation."""
    from speq.errors import SpeqError

    system, drawing = settings.system, asdict(sampling)
    max_new_tokens = drawing.pop("max_new_tokens")
    generator = opt.load_generator(model, run)
    messages: list[dict[str, str]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    try:
        if not generator.tokenizer.chat_template:
            raise SpeqError(f"model {model} has no chat template; use speq generate")
        while (line := read_line()) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            room = generator.max_context - len(generator.encode(messages))
            if room < 1:
                raise SpeqError("the conversation fills the model's context; start a new one")
            answer = say(generator, messages, min(max_new_tokens, room), drawing)
            messages.append({"role": "assistant", "content": answer})
    finally:
        generator.close()


def read_line() -> str | None:
    """What the user says next; None at the end."""
    try:
        line = input("> ")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return None
    return None if line.strip() == "/quit" else line


def say(
    generator: "Generator",
    messages: list[dict[str, str]],
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> str:
    """Stream one answer to stdout and return it, as far as it came."""
    pieces: list[str] = []
    figures: dict[str, Any] = {}
    stream = generator.stream(
        messages,
        max_new_tokens=max_new_tokens,
        on_finish=lambda reason, stats: figures.update(stats),
        **sampling,
    )
    with contextlib.closing(stream), contextlib.suppress(KeyboardInterrupt):
        for token in stream:
            pieces.append(token.text)
            sys.stdout.write(token.text)
            sys.stdout.flush()
    print()
    if figures.get("tpot_ms"):
        print(
            f"[{figures['new_tokens']} tokens, {figures['tpot_ms']:.1f} ms each]", file=sys.stderr
        )
    return "".join(pieces)
