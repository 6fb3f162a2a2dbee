"""An engine that generates what a script says, and the model that goes with it."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from speq.config import SamplingParams
from speq.engine.batch import PrefillProgress, StepOutput
from speq.engine.constraint import GrammarCompiler
from speq.engine.logprobs import Logprobs, TokenLogprobs
from speq.engine.request import Cancelled, Constraint, Request, RequestMetrics
from speq.engine.thought_budget import ThoughtBudget, ThoughtTokens
from speq.errors import SpeqError
from speq.generator import Token
from speq.options.kinds import Size
from speq.text.answer_parts import AnswerParser
from speq.text.grammar import AnswerGrammar
from speq.text.prompts import Prompt, PromptEncoder, Tools
from speq.text.stream import TextPiece, TextStream
from speq.text.vocabulary import Vocabulary
from tests.helpers.paths import BUNDLED

# What `Request.figures` has for a text of so little.
STATS: dict[str, Any] = {
    "accept_length_mean": 2.5,
    "draft_length_mean": 3.0,
    "moved_bytes": 1000,
    "prefill_moved_bytes": 24,
    "stall_s": 0.25,
    "prefill_stall_s": 0.5,
    "batch_mean": 1.5,
    "cached_tokens": 2,
}


@dataclass
class ScriptedModel:
    """Tokens and templates of the bundled model, without the model."""

    max_context: int = 200
    folder: Path = BUNDLED
    tokenizer: Any = field(init=False)
    wanted_budget: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self._encoder = PromptEncoder(self.tokenizer, len(self.tokenizer))
        ends = frozenset({self.tokenizer.eos_token_id})
        self._compiler = GrammarCompiler(self.tokenizer, len(self.tokenizer), ends)
        # Those that answers were asked to follow.
        self.grammars: list[str] = []

    @property
    def vocabulary(self) -> Vocabulary:
        return self._encoder.vocabulary

    @property
    def vocab_size(self) -> int:
        return self._encoder.vocab_size

    def resize(self, memory_budget: str | int) -> None:
        self.wanted_budget = Size().check("memory_budget", memory_budget)

    @property
    def facts(self) -> dict[str, Any]:
        return {"chat": self._encoder.chat_facts}

    def encode(
        self, prompt: Prompt, tools: Tools = (), variables: dict[str, Any] | None = None
    ) -> list[int]:
        return self._encoder.encode(prompt, tools, variables)

    def answer_parser(self, prompt_ids: list[int], tools: Tools = ()) -> AnswerParser | None:
        return self._encoder.answer_parser(prompt_ids, tools)

    def answer_grammar(
        self, prompt_ids: list[int], tools: Tools = (), most_calls: int | None = None
    ) -> AnswerGrammar:
        return self._encoder.answer_grammar(prompt_ids, tools, most_calls)

    def request(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        continues_text: bool = False,
        top_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        logprobs = None if top_logprobs is None else Logprobs(top_logprobs)
        return Request(prompt_token_ids, sampling, logprobs=logprobs, constraint=constraint)

    def constraint(self, grammar: str) -> Constraint:
        self.grammars.append(grammar)
        return self._compiler.constraint(grammar)

    def bound_thought(
        self, prompt_ids: list[int], most: int, tools: Tools = (), answer: Constraint | None = None
    ) -> Constraint | None:
        found = self._encoder.thought_tokens(prompt_ids, tools)
        if found is None:
            return None
        return ThoughtBudget(most, ThoughtTokens(*found), self.vocab_size, answer)


def with_template(
    folder: Path, template: str, max_context: int = 200, marks: Sequence[str] = ()
) -> ScriptedModel:
    """The same with a chat template of another model, written to a new folder.

    marks  special tokens, in place of the last ones of the vocabulary
    """
    folder.mkdir()
    (folder / "tokenizer_config.json").symlink_to(BUNDLED / "tokenizer_config.json")
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for mark in marks:
        left, right = merges.pop()
        token_id = vocabulary.pop(left + right)
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append(
            {"id": token_id, "content": mark, "special": True, **special}
        )
        vocabulary[mark] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return ScriptedModel(max_context, folder)


def pieces(*texts: str) -> list[Token]:
    """Tokens with these texts, and odds that only a script has."""
    return [
        Token(400 + at, text, TokenLogprobs(-0.5 * (at + 1), ())) for at, text in enumerate(texts)
    ]


class ScriptedText(TextStream):
    """Says what the script says."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._fresh, self.stopped = deque(tokens), 0, False

    def write(self, token_id: int, last: bool) -> bool:
        self._fresh += 1
        return False

    def take(self) -> list[TextPiece]:
        fresh, self._fresh = self._fresh, 0
        tokens = [self._tokens.popleft() for _ in range(fresh)]
        return [TextPiece(token.text, token.special) for token in tokens]


class ScriptedOdds(Logprobs):
    """Of the tokens of a script."""

    def __init__(self, tokens: list[Token]) -> None:
        self._odds = deque(token.logprobs for token in tokens)

    def take(self, count: int) -> list[TokenLogprobs]:
        taken = [self._odds.popleft() for _ in range(count)]
        return [logprobs for logprobs in taken if logprobs is not None]


class ScriptedMetrics(RequestMetrics):
    def summary(self, tokens: int) -> dict[str, Any]:
        return STATS | {"new_tokens": tokens}


@dataclass
class ScriptedEngine:
    """Yields these tokens for every request, as many as it asks for at most, one in each step.

    before         called by the engine's thread before each token, with its place
    before_prompt  called with 1 and 2 as the prompt is run
    fault          raised in place of the token at `fault_at`; -1: as the request is laid out
    lost           raised where it is looked whether the engine is alive
    asked          (prompt token ids, options) of each request; closed: how many texts were left
    requests       themselves
    """

    tokens: list[Token]
    before: Callable[[int], None] = lambda at: None
    before_prompt: Callable[[int], None] = lambda done: None
    fault: BaseException | None = None
    fault_at: int = 0
    lost: SpeqError | None = None
    max_batch: int = 1
    fixed_draft_length: int | None = None
    asked: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    closed: int = 0
    requests: list[Request] = field(default_factory=list)

    def script(self, request: Request) -> None:
        """Have a request say what the script says."""
        logprobs = request.logprobs
        asked: dict[str, Any] = asdict(request.sampling)
        asked["top_logprobs"] = logprobs.count if isinstance(logprobs, Logprobs) else None
        self.asked.append((request.prompt_token_ids, asked))
        self.requests.append(request)
        request.sampling = replace(request.sampling, ignore_eos=False)  # the script has an end
        request.eos_token_ids = frozenset([self.tokens[-1].id])
        request.detokenizer = ScriptedText(self.tokens)
        request.logprobs = None if logprobs is None else ScriptedOdds(self.tokens)
        request.metrics = ScriptedMetrics()

    def check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    @contextmanager
    def batch(self) -> Iterator["ScriptedBatch"]:
        yield ScriptedBatch(self)


@dataclass
class ScriptedBatch:
    """Does as `Batch` does, where prompts are run at once."""

    engine: ScriptedEngine
    running: list[Request] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.running

    @property
    def cached_share(self) -> float:
        return len(self.running) / self.engine.max_batch

    def has_room(self, context: int) -> bool:
        return len(self.running) < self.engine.max_batch

    def add(self, request: Request, arrival_s: float | None = None) -> Request:
        if self.engine.fault is not None and self.engine.fault_at < 0:
            raise self.engine.fault
        self.engine.script(request)
        request.metrics.arrival_s = arrival_s or 0.0
        self.running.append(request)
        return request

    def drop(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.engine.closed += 1

    def step(
        self, draft_length: int | None = None, progress: PrefillProgress | None = None
    ) -> list[StepOutput]:
        try:
            return [self._token(request, progress) for request in [*self.running]]
        except BaseException:
            for request in [*self.running]:
                self.drop(request)
            raise

    def _token(self, request: Request, progress: PrefillProgress | None) -> StepOutput:
        engine, at = self.engine, request.position
        for done in (1, 2) if at == 0 else ():
            engine.before_prompt(done)
            if progress is not None:
                try:
                    progress(request, done, 2)
                except Cancelled:
                    return StepOutput(request, [])
        engine.before(at)
        if at == engine.fault_at and isinstance(engine.fault, SpeqError):
            self.drop(request)
            return StepOutput(request, [], error=engine.fault)
        if at == engine.fault_at and engine.fault is not None:
            raise engine.fault
        token_ids = request.extend([engine.tokens[at].id])
        if request.finish_reason is not None:
            self.drop(request)
        return StepOutput(request, request.take(token_ids), ["exact" if at else "prompt"])


def no_room() -> SpeqError:
    return SpeqError("the prompt and max_new_tokens need more memory than there is; shorten one")
