"""`speq chat`: a conversation through the model's chat template."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt
from speq.config import DEFAULT_READER_THREADS

if TYPE_CHECKING:
    from speq.generator import Generator


def chat(
    model: opt.Model,
    memory_budget: opt.MemoryBudget,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    context_length: opt.ContextLength = None,
    draft: opt.DraftOption = "auto",
    draft_length: opt.DraftLength = "auto",
    tpot_slo: opt.TpotSlo = None,
    latency_slo: opt.LatencySlo = None,
    cache_policy: opt.CachePolicy = "lru",
    prefetch: opt.Prefetch = "none",
    codec: opt.Codec = "auto",
    profile: opt.Profile = "auto",
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    max_new_tokens: opt.MaxNewTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D or /quit the conversation."""
    from speq.config import SamplingParams
    from speq.errors import SpeqError

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    generator = opt.load_generator(
        model,
        memory_budget,
        device=device,
        dtype=dtype,
        context_length=context_length,
        draft=draft,
        draft_length=draft_length,
        tpot_slo_ms=tpot_slo,
        latency_slo_ms=latency_slo,
        cache_policy=cache_policy,
        prefetch=prefetch,
        codec=codec,
        profile=profile,
        reader_threads=reader_threads,
    )
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
            answer = say(generator, messages, min(max_new_tokens, room), sampling)
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
