"""`speq generate`: one prompt, its text as it comes, and what the run measured."""

import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from speq.cli import options as opt
from speq.config import DEFAULT_READER_THREADS, format_bytes


def generate(
    model: opt.Model,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    memory_budget: opt.MemoryBudget,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    context_length: opt.ContextLength = None,
    draft: opt.DraftOption = "auto",
    draft_length: opt.DraftLength = "auto",
    cache_policy: opt.CachePolicy = "lru",
    prefetch: opt.Prefetch = "none",
    draft_kernel: opt.DraftKernel = "fused",
    verify_reads: opt.VerifyReads = False,
    reader_threads: opt.ReaderThreads = DEFAULT_READER_THREADS,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, token_ids, stats.")
    ] = False,
) -> None:
    """Generate text from a prompt."""
    from speq.config import SamplingParams

    # Options are checked before a model takes minutes to load.
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
    }
    SamplingParams(**sampling)
    generator = opt.load_generator(
        model,
        memory_budget,
        first_request=(prompt, max_new_tokens),
        device=device,
        dtype=dtype,
        context_length=context_length,
        draft=draft,
        draft_length=draft_length,
        cache_policy=cache_policy,
        prefetch=prefetch,
        draft_kernel=draft_kernel,
        verify_reads=verify_reads,
        reader_threads=reader_threads,
    )
    try:
        if as_json:
            result = generator.generate(prompt, **sampling)
            answer = {
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "stats": result.stats,
            }
            print(json.dumps(answer))
            return
        finished: dict[str, Any] = {}
        with (
            opt.progress_bar() as progress,
            contextlib.closing(
                generator.stream(
                    prompt,
                    progress=progress,
                    on_finish=lambda reason, stats: finished.update(stats),
                    **sampling,
                )
            ) as tokens,
        ):
            # Nothing is written before it is known that the prompt can be run.
            text = prompt
            for token in tokens:
                sys.stdout.write(text + token.text)
                sys.stdout.flush()
                text = ""
        sys.stdout.write("\n")
        sys.stdout.flush()
        print_stats(finished)
    finally:
        generator.close()


def print_stats(stats: dict[str, Any]) -> None:
    """A short table of a run's figures, on stderr."""
    from rich.console import Console
    from rich.table import Table

    def number(name: str, form: str) -> str:
        value = stats[name]
        return "-" if value is None else form.format(value)

    moved = stats["moved_bytes_per_token"]
    memory = stats["memory"]
    experts = f"{memory['slots'] and format_bytes(memory['slots'])} of slots"
    rows = [
        ("tokens", number("new_tokens", "{}")),
        ("time per output token (TPOT)", number("tpot_ms", "{:.1f} ms")),
        ("time to first token (TTFT)", number("ttft_ms", "{:.0f} ms")),
        ("draft length, mean", number("draft_length_mean", "{:.2f}")),
        ("accept length, mean", number("accept_length_mean", "{:.2f}")),
        ("acceptance rate", number("acceptance_rate", "{:.1%}")),
        ("route recall", number("route_recall", "{:.1%}")),
        ("expert hit rate", number("hit_rate", "{:.1%}")),
        ("moved per token", "-" if moved is None else format_bytes(moved)),
        ("stall", number("stall_s", "{:.2f} s")),
        ("memory budget", f"{format_bytes(memory['budget'])}, {experts}"),
    ]
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
