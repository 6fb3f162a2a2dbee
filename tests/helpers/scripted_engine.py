"""An engine that generates what a script says, and the model that goes with it."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from speq.decode.logprobs import TokenOdds
from speq.errors import SpeqError
from speq.generator import Token
from speq.text.prompts import Prompt, PromptEncoder, Tools
from speq.units import Progress
from tests.helpers.paths import BUNDLED

# What `RunStats.summary` has for a run of so little.
STATS: dict[str, Any] = {
    "accept_length_mean": 2.5,
    "draft_length_mean": 3.0,
    "moved_bytes": 1000,
    "prefill_moved_bytes": 24,
    "stall_s": 0.25,
    "prefill_stall_s": 0.5,
}


@dataclass
class ScriptedModel:
    """Tokens and templates of the bundled model, without the model."""

    max_context: int = 200
    folder: Path = BUNDLED
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self._encoder = PromptEncoder(self.tokenizer, len(self.tokenizer))

    def encode(self, prompt: Prompt, tools: Tools = ()) -> list[int]:
        return self._encoder.encode(prompt, tools)


def with_template(folder: Path, template: str, max_context: int = 200) -> ScriptedModel:
    """The same with a chat template of another model, written to a new folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(BUNDLED / name)
    (folder / "chat_template.jinja").write_text(template)
    return ScriptedModel(max_context, folder)


def pieces(*texts: str) -> list[Token]:
    """Tokens with these texts, and odds that only a script has."""
    return [Token(400 + at, text, TokenOdds(-0.5 * (at + 1), ())) for at, text in enumerate(texts)]


@dataclass
class ScriptedEngine:
    """Yields these tokens for every request, as many as it asks for at most.

    before         called by the engine's thread before each token, with its place
    before_prompt  called with 1 and 2 as the prompt is run
    fault          raised in place of the token at `fault_at`; -1: as the request is laid out
    asked          (prompt, options) of each request; closed: how many streams were closed
    """

    tokens: list[Token]
    reason: str = "eos"
    before: Callable[[int], None] = lambda at: None
    before_prompt: Callable[[int], None] = lambda done: None
    fault: BaseException | None = None
    fault_at: int = 0
    asked: list[tuple[Prompt, dict[str, Any]]] = field(default_factory=list)
    closed: int = 0

    def reserve(self, context: int) -> None:
        if self.fault is not None and self.fault_at < 0:
            raise self.fault

    def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        top_logprobs: int | None = None,
        asked_s: float | None = None,
        **options: Any,
    ) -> Generator[Token, None, None]:
        assert on_finish is not None and progress is not None
        self.asked.append((prompt, options | {"top_logprobs": top_logprobs}))
        tokens = self.tokens[: options["max_new_tokens"]]
        try:
            for done in (1, 2):
                self.before_prompt(done)
                progress("running the prompt", done, 2)
            for at, token in enumerate(tokens):
                self.before(at)
                if self.fault is not None and at == self.fault_at:
                    raise self.fault
                yield token if top_logprobs is not None else Token(token.id, token.text)
            reason = self.reason if len(tokens) == len(self.tokens) else "length"
            on_finish(reason, STATS | {"new_tokens": len(tokens)})
        finally:
            self.closed += 1


def no_room() -> SpeqError:
    return SpeqError("the prompt and max_new_tokens need more memory than there is; shorten one")
