"""The public generator: a model under a memory budget that continues prompts."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Coroutine
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from transformers import GenerationConfig

from speq.config import RunConfig, SamplingParams, TokenizerOptions
from speq.devices.failures import translate_errors
from speq.engine.batch import Batch, StepOutput
from speq.engine.constraint import GrammarCompiler
from speq.engine.generation_config import options_of
from speq.engine.logprobs import Logprobs
from speq.engine.request import Constraint, Request, Token
from speq.engine.thought_budget import ThoughtBudget, ThoughtTokens
from speq.errors import OptionError, SpeqError, checked_int, present
from speq.load import load
from speq.models.layer_range import RemoteStages
from speq.models.opened import Opened, open_model
from speq.options.declared import build
from speq.options.kinds import Size
from speq.options.typed import RunOptions, SamplingOptions
from speq.pipeline.first_stage import open_first
from speq.pipeline.rendezvous import Rendezvous
from speq.pipeline.settings import StagesSettings
from speq.planning.run_budget import check_context
from speq.runtime import Runtime
from speq.stats import RunStats
from speq.text.answer_parts import AnswerParser
from speq.text.endings import end_ids
from speq.text.grammar import AnswerGrammar
from speq.text.prompts import Prompt, PromptEncoder, Tools
from speq.text.stream import TextStream
from speq.text.tokenizer import NoTokenizer, TokenIdsOnly, load_tokenizer, read_template
from speq.text.vocabulary import Vocabulary
from speq.units import Progress

logger = logging.getLogger("speq")

CLOSED = "this generator was closed; make a new one with from_pretrained"


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated text and token_ids, without the prompt.

    finish_reason  "eos", "length" or "stop"
    stats          figures by name; docs/statistics.md defines each
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: dict[str, Any]


def tokenizer_of(folder: Path, options: TokenizerOptions, say: bool) -> Any:
    """Load the tokenizer of a model in a folder, or the one that options name; without one, return
    TokenIdsOnly, so that prompts must be ids.

    say  log the reason, since no prompt has been refused with it yet
    """
    template = options.chat_template
    if options.tokenizer is not None and not options.tokenizer.is_dir():
        raise OptionError(
            f"tokenizer is {str(options.tokenizer)!r}, which is no folder; give one with the files "
            "of a tokenizer"
        )
    try:
        tokenizer = load_tokenizer(options.tokenizer or folder)
    except NoTokenizer as reason:
        if options.tokenizer is not None or template is not None:
            raise
        if say:
            logger.warning("%s", reason)
        return TokenIdsOnly(str(reason))
    if template is not None:
        tokenizer.chat_template = read_template(template)
    return tokenizer


class Generator:
    """Generates text with exactly the output of the full model.

    Safe to call from several threads: calls queue. A stream that is abandoned, closed or
    interrupted leaves it ready for the next call.
    """

    def __init__(
        self, runtime: Runtime, encoder: PromptEncoder, eos_token_ids: frozenset[int]
    ) -> None:
        """eos_token_ids: tokens that end a sequence, unless a request names others"""
        self._runtime = runtime
        self._encoder = encoder
        self._eos_token_ids = eos_token_ids
        self.tokenizer = encoder.tokenizer
        self._turn = threading.Lock()
        self._streaming_thread: int | None = None
        self._closed = False
        self._draft_length: int | None = None
        self._grammars = GrammarCompiler(encoder.tokenizer, encoder.vocab_size, eos_token_ids)
        # Statistics of the current or last run.
        self.last_run: RunStats | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        memory_budget: str | int = "auto",
        *,
        progress: Progress | None = None,
        first_request: tuple[Prompt, int] | None = None,
        **options: Unpack[RunOptions],
    ) -> "Generator":
        """Load a model folder or hub id.

        memory_budget  for everything on the device, such as "8GiB", or "auto"
        options        see RunConfig, or docs/options.md
        progress       called with (what, done, total) during long work
        first_request  (prompt, max_new_tokens), if known: it is checked before weights are loaded,
                       and memory is planned for it at once

        Raises SpeqError for anything that is missing, damaged, unknown or too large.
        """
        config = RunConfig.of(memory_budget, **options)
        return cls.load(model, config, progress=progress, first_request=first_request)

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        first_request: tuple[Prompt, int] | None = None,
        stages: StagesSettings | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> "Generator":
        """Load as `from_pretrained` does, with the options in one object.

        stages      pipeline stages, of which this process is rank 0; it waits for the others.
                    None: this process runs all layers
        rendezvous  to wait at; None: the one that `stages` names
        """
        if stages is not None and stages.wanted:
            opened, config, remote = open_first(str(model), config, stages, rendezvous, progress)
            return cls.of_opened(
                opened, config, progress=progress, first_request=first_request, remote=remote
            )
        with translate_errors():
            opened = open_model(model, config.verify_reads)
        return cls.of_opened(opened, config, progress=progress, first_request=first_request)

    @classmethod
    def of_opened(
        cls,
        opened: Opened,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        first_request: tuple[Prompt, int] | None = None,
        remote: RemoteStages | None = None,
    ) -> "Generator":
        """Load a model that is open already, perhaps with another store of its experts.

        The generator closes it. It is closed at once if loading fails.
        """
        with contextlib.ExitStack() as undo, translate_errors():
            undo.callback(opened.close)
            if remote is not None:
                undo.callback(remote.close)
            checkpoint = opened.checkpoint
            options = config.group(TokenizerOptions)
            tokenizer = tokenizer_of(checkpoint.path, options, first_request is None)
            encoder = PromptEncoder(tokenizer, opened.shape.vocab_size, options.tool_syntax)
            eos_token_ids = end_ids(checkpoint.path, checkpoint.config, tokenizer)
            context = 0
            if first_request is not None:
                prompt, max_new_tokens = first_request
                context = len(encoder.encode(prompt)) + max_new_tokens
                check_context(context, config.context_length, opened.shape.max_context)
            loaded = load(opened, config, progress, context, remote)
            undo.callback(loaded.close)
            generator = cls(Runtime(loaded), encoder, eos_token_ids)
            undo.pop_all()
        return generator

    @property
    def runtime(self) -> Runtime:
        """The loaded model, for benchmarks and checks."""
        return self._runtime

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary: text and bytes of single tokens."""
        return self._encoder.vocabulary

    @property
    def vocab_size(self) -> int:
        """Logits of the model, which may be more than its tokenizer has tokens."""
        return self._encoder.vocab_size

    @property
    def facts(self) -> dict[str, Any]:
        """How the model is held, and what its chat template knows, in JSON's types."""
        runtime = self._runtime
        plan = runtime.residency_plan
        return {
            "memory_bytes": runtime.plan.report(),
            "codec": plan.codec,
            "drafter": plan.drafter if plan.drafts else None,
            "max_batch": self.max_batch,
            "chat": self._encoder.chat_facts,
        }

    def generate(
        self,
        prompt: Prompt,
        *,
        generation_config: GenerationConfig | None = None,
        progress: Progress | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Generate to the end; see `stream` for the options."""
        request = self.prepare(prompt, generation_config, options)
        pieces: list[str] = []
        with self.batch(request.context) as batch:
            batch.add(request)
            for output in self._run(batch, progress):
                pieces += [token.text for token in output.tokens]
            run = self.last_run
        return self._generation(request, pieces, present(run, "a run has no record").summary())

    def generate_batch(
        self,
        prompts: list[Prompt],
        *,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Generation]:
        """Generate from several prompts as a batch, `max_batch` at a time.

        Each output is the same as that of the prompt alone.

        options  for all of them, see `stream`. `stats` has each request's figures; `last_run` has
                 those of the batch
        """
        requests = [self.prepare(prompt, generation_config, options) for prompt in prompts]
        pieces: dict[Request, list[str]] = {request: [] for request in requests}
        with self.batch(max((each.context for each in requests), default=1)) as batch:
            for request in requests:
                batch.add(request)
            for output in self._run(batch):
                pieces[output.request] += [token.text for token in output.tokens]
        return [self._generation(each, pieces[each], each.figures) for each in requests]

    def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        generation_config: GenerationConfig | None = None,
        progress: Progress | None = None,
        top_logprobs: int | None = None,
        constraint: Constraint | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Coroutine[Token, None, None]:
        """Yield tokens as they are generated. Work and checks begin with the first one.

        on_finish          called with (finish_reason, stats) at the end
        generation_config  defaults of the options
        progress           called with (what, done, total) during prefill
        top_logprobs       give the log-probability of each token, and of this number of likeliest
                           ones
        constraint         which tokens may follow, see `constraint`; None: all may
        options            see SamplingParams, or docs/options.md
        """
        request = self.prepare(prompt, generation_config, options, top_logprobs, constraint)
        with self.batch(request.context) as batch:
            batch.add(request)
            for output in self._run(batch, progress):
                for token in output.tokens:
                    yield token
                    self._streaming_thread = threading.get_ident()  # another may go on with it
            run = self.last_run
        if on_finish is not None:
            stats = present(run, "a run has no record").summary()
            on_finish(request.finish_reason or "", stats)

    @staticmethod
    def _generation(request: Request, pieces: list[str], stats: dict[str, Any]) -> Generation:
        reason = request.finish_reason or ""
        return Generation("".join(pieces), request.output_token_ids, reason, stats)

    def _run(self, batch: Batch, progress: Progress | None = None) -> Iterator[StepOutput]:
        """Run a batch to its end. Raises the error of any of its requests."""

        def report(request: Request, done: int, total: int) -> None:
            if progress is not None:
                progress("running the prompt", done, total)

        while not batch.idle:
            for output in batch.step(self._draft_length, report):
                if output.error is not None:
                    raise output.error
                yield output

    @contextmanager
    def batch(self, context: int = 1) -> Iterator[Batch]:
        """Yield a batch for the block; calls of other threads wait for its end.

        Requests that have not finished by then are dropped.

        context  tokens that memory is reserved for in advance
        """
        with self._own_turn(), translate_errors():
            self._streaming_thread = threading.get_ident()
            try:
                start_s = time.perf_counter()
                self._runtime.follow_budget(idle=True)
                self._runtime.reserve(context)
                with ExitStack() as record:

                    def begin_record(start_s: float) -> None:
                        record.close()
                        record.enter_context(self._recorded(start_s))

                    begin_record(start_s)
                    batch = Batch(self._runtime, begin_record)
                    try:
                        yield batch
                    finally:
                        batch.clear()
            finally:
                self._streaming_thread = None

    @contextmanager
    def _recorded(self, start_s: float) -> Iterator[RunStats]:
        """Record the steps of the block as a run that began at `start_s`."""
        stats = self._runtime.recorder.begin_run(self._runtime.begin_stats(start_s))
        self.last_run = stats
        with self._runtime.watched(stats):
            yield stats

    def encode(
        self, prompt: Prompt, tools: Tools = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Encode a prompt to token ids. Raises SpeqError for no tokens, and for foreign ids.

        tools      that chat messages may call, as JSON schemas
        variables  of the chat template, such as enable_thinking
        """
        return self._encoder.encode(prompt, tools, variables)

    def answer_parser(self, prompt_ids: Sequence[int], tools: Tools = ()) -> AnswerParser | None:
        """See `speq.text.prompts.PromptEncoder.answer_parser`."""
        return self._encoder.answer_parser(prompt_ids, tools)

    def answer_grammar(
        self, prompt_ids: Sequence[int], tools: Tools = (), most_calls: int | None = None
    ) -> AnswerGrammar:
        """See `speq.text.prompts.PromptEncoder.answer_grammar`."""
        return self._encoder.answer_grammar(prompt_ids, tools, most_calls)

    def constraint(self, grammar: str) -> Constraint:
        """Compile a grammar that one request's answer follows, in the Lark syntax of llguidance.
        Raises SpeqError for what is none.
        """
        return self._grammars.constraint(grammar)

    def bound_thought(
        self,
        prompt_ids: Sequence[int],
        most: int,
        tools: Tools = (),
        answer: Constraint | None = None,
    ) -> Constraint | None:
        """Make the constraint of a chat's answer that thinks no more than so many tokens; None if
        the model's answers have no thoughts.

        answer  what all of it must follow besides

        Raises SpeqError if the marks of thoughts are no single tokens.
        """
        found = self._encoder.thought_tokens(prompt_ids, tools)
        if found is None:
            return None
        return ThoughtBudget(most, ThoughtTokens(*found), self.vocab_size, answer)

    def prepare(
        self,
        prompt: Prompt,
        config: GenerationConfig | None,
        options: SamplingOptions,
        top_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Make a request for a batch. Raises SpeqError if its options are not valid.

        top_logprobs, constraint  see `stream`
        """
        ids = self.encode(prompt)
        eos_token_ids = self._eos_token_ids
        given: dict[str, Any] = dict(options)
        if config is not None:
            if not isinstance(config, GenerationConfig):
                raise OptionError(
                    f"generation_config is a {type(config).__name__}; give transformers' own"
                )
            from_config = options_of(config, len(ids))
            eos_token_ids = from_config.pop("eos_ids", eos_token_ids)
            given = from_config | given
        others = "generation_config", "progress", "top_logprobs", "constraint"
        sampling = build(SamplingParams, given, others)
        if top_logprobs is not None:
            checked_int("top_logprobs", top_logprobs, 0)
        continues_text = isinstance(prompt, str)
        return self.request(
            *(ids, sampling, continues_text, top_logprobs, eos_token_ids, constraint)
        )

    def request(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        continues_text: bool = False,
        top_logprobs: int | None = None,
        eos_token_ids: frozenset[int] | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Make a request for a batch from a prompt's token ids.

        continues_text  True if its text continues the prompt's; an answer in a chat does not
        eos_token_ids   None: the model's
        constraint      which tokens may follow; None: all may
        """
        if sampling.stop and isinstance(self.tokenizer, TokenIdsOnly):
            raise OptionError(
                "stop is given, and the model has no tokenizer to find it by; leave it out"
            )
        context = prompt_token_ids if continues_text else []
        return Request(
            prompt_token_ids,
            sampling,
            self._eos_token_ids if eos_token_ids is None else eos_token_ids,
            TextStream(self.vocabulary, sampling.stop, context),
            None if top_logprobs is None else Logprobs(top_logprobs),
            constraint,
        )

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Wait for other threads' calls. A thread with an open stream is refused."""
        if self._streaming_thread == threading.get_ident():
            raise SpeqError(
                "this thread is still reading an earlier stream of this generator; finish or "
                "close it first"
            )
        with self._turn:
            if self._closed:
                raise SpeqError(CLOSED)
            yield

    @contextmanager
    def with_draft_length(self, draft_length: int) -> Iterator[None]:
        """Draft `draft_length` tokens in every step of this block, without the governor.

        0 decodes plainly and keeps the draft in memory. Raises SpeqError if there is no drafter,
        and for more tokens than memory is planned for.
        """
        checked_int("draft_length", draft_length, 0, self._runtime.longest_draft)
        if draft_length and not self._runtime.residency_plan.drafts:
            raise OptionError(
                f"draft_length is {draft_length} and this run has no draft; load the model with a "
                "budget that holds one, or give draft_length 0"
            )
        before, self._draft_length = self._draft_length, draft_length
        try:
            yield
        finally:
            self._draft_length = before

    @property
    def fixed_draft_length(self) -> int | None:
        """Draft length of `with_draft_length`, inside its block."""
        return self._draft_length

    @property
    def max_batch(self) -> int:
        """Most requests of a batch."""
        return self._runtime.config.max_batch

    @property
    def max_context(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._runtime.config.context_length or self._runtime.shape.max_context

    def reserve(self, context: int) -> None:
        """Reserve memory for a context now, instead of at the first request that needs it."""
        with self._own_turn(), translate_errors():
            self._runtime.reserve(context)

    def resize(self, memory_budget: str | int) -> None:
        """Change the memory budget: experts get more slots, or fewer. Output stays the same.

        A request that runs follows with its next step. Where more slots are asked for than were
        laid out, the others come when no request runs.

        Raises SpeqError where what is loaded does not fit, where the machine has less memory, and
        on a GPU.
        """
        if self._closed:
            raise SpeqError(CLOSED)
        self._runtime.resize(Size().check("memory_budget", memory_budget))
        if self._turn.acquire(blocking=False):
            try:
                if not self._closed:
                    with translate_errors():
                        self._runtime.follow_budget(idle=True)
            finally:
                self._turn.release()

    @property
    def wanted_budget(self) -> int:
        """The memory budget in bytes that the next step follows."""
        return self._runtime.wanted_budget

    def check_alive(self) -> None:
        """Raise EngineLost if nothing more can be generated because a pipeline stage is gone."""
        remote = self._runtime.others
        if remote is not None:
            with self._own_turn():
                remote.check()

    def forget(self) -> None:
        """Clear the KV cache, so that the next prompt runs from its first token."""
        with self._own_turn():
            self._runtime.forget()

    def close(self) -> None:
        """Release files and transfers. Later calls are refused."""
        if self._closed:
            return
        with self._own_turn():
            self._closed = True
            self._runtime.close()
