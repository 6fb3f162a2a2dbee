"""`speq quantize`: a GPTQ copy of a model's experts, to draft with."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speq.cli import options as opt

if TYPE_CHECKING:
    from speq.quantizing.report import QuantizeReport

# Of the machine's free memory, where no budget is given.
DEFAULT_SHARE = 3 / 4
# Tokens that an expert saw; experts that were rounded; the error of the experts' outputs on
# held-out text, and rounding's; experts better than rounded; the draft's routes against exact ones.
COLUMNS = (
    *("layer", "least", "median", "most", "rounded"),
    *("error", "rtn", "better", "recall", "same"),
)


def quantize(
    model: opt.ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder to write: a GPTQ checkpoint; default: .speq/gptq in the model's own, "
            "where the draft auto finds it.",
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="4, and no other.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale: 16, 32, 64, 128, or -1 for all.")
    ] = 128,
    method: Annotated[
        str, typer.Option(help="gptq, or rtn: rounding to nearest, as the draft auto does.")
    ] = "gptq",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines with a `prompt` or `text` in each row, or a text file; default: the "
            "prompts of the benches, which are few."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Windows of that text, at most.")] = 512,
    sequence_length: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    damp: Annotated[
        float, typer.Option(help="Added to a Hessian's diagonal, as a share of its mean.")
    ] = 0.01,
    act_order: Annotated[
        bool,
        typer.Option(
            "--act-order",
            help="Let groups follow the order in which columns are quantised (desc_act), which "
            "loaders must undo.",
        ),
    ] = False,
    codes: Annotated[
        str | None,
        typer.Option(
            help="free, or decodable: only those that tell all of the exact bfloat16 word but its "
            "low byte; default: decodable for a model in bfloat16, free for others."
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(help="Memory for all of it, such as 8GiB; default: 3/4 of what is free."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses windows of the text.")] = 0,
) -> None:
    """Quantise a model's experts by GPTQ, calibrated on the tokens routed to each.

    Experts are read one at a time, so the model may be several times the memory. Interrupted, it
    leaves a folder that no run opens; the same command goes on from there.
    """
    from speq import __version__
    from speq.drafts.draft_source import gptq_beside
    from speq.errors import SpeqError
    from speq.machine import available_bytes
    from speq.models.opened import open_model
    from speq.quantizing.calibration import calibration_of, read_texts, tokenised
    from speq.quantizing.quantizer import Source
    from speq.quantizing.quantizer import quantize as write
    from speq.quantizing.settings import QuantizeSettings, codes_for
    from speq.text import load_tokenizer, tokens_of
    from speq.units import format_bytes, parse_bytes

    settings = QuantizeSettings(
        bits=bits,
        group_size=group_size,
        method=method,
        column_order="activation" if act_order else "static",
        codes="free" if codes is None else codes,
        damp=damp,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
    )
    budget = int(DEFAULT_SHARE * available_bytes())
    if memory_budget is not None:
        budget = parse_bytes(memory_budget)
    opened = open_model(model)
    try:
        if opened.store.codec.needs_draft:
            raise SpeqError(
                f"model {model!r} is packed as residuals of a draft; give the one it was packed "
                "from"
            )
        if codes is None:
            settings = replace(settings, codes=codes_for(opened.store.codec.shape.dtype))
        tokenizer = load_tokenizer(opened.checkpoint.path)
        paths = default_texts() if calibration is None else [calibration]
        tokens = tokenised(
            [text for path in paths for text in read_texts(path)],
            lambda text: tokens_of(tokenizer, text),
            opened.shape.vocab_size,
            tokenizer.eos_token_id,
        )
        out = out or gptq_beside(opened.checkpoint.path)
        source = Source(opened.checkpoint, opened.family, opened.shape, opened.store)
        with opt.progress_bar() as progress:
            report = write(
                source,
                calibration_of(tokens, settings),
                settings,
                out,
                budget,
                __version__,
                progress,
            )
    finally:
        opened.close()
    show(model, report)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    typer.echo(f"{out}: {format_bytes(size)}; more in {out / 'quantize_report.json'}")


def default_texts() -> list[Path]:
    """The prompts of the benches."""
    from speq.measure import report

    folder = Path(report.__file__).parent / "prompts"
    return [folder / "mixed.jsonl", folder / "long.jsonl"]


def show(model: str, report: "QuantizeReport") -> None:
    """The report as a table, and what it comes to."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"quantize: {model}", box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for row in report.rows:
        table.add_row(
            *(str(row[name]) for name in ("layer", "tokens_min")),
            f"{row['tokens_median']:.0f}",
            *(str(row[name]) for name in ("tokens_max", "rounded")),
            *(share(row[name]) for name in ("error", "rounding_error")),
            f"{row['better']}/{row['judged']}",
            *(share(row[name]) for name in ("route_recall", "same_routes")),
        )
    Console().print(table)
    typer.echo(
        f"calibrated on {report.tokens} tokens, judged on {report.held_out_tokens} held out; "
        f"{report.rounded} experts rounded for lack of tokens"
    )
    residuals = report.residuals
    if residuals:
        draft, rounded = residuals["residual"], residuals["rounding_residual"]
        typer.echo(
            f"residual {draft.bits_per_weight:.2f} bits a weight, {rounded.bits_per_weight:.2f} "
            f"over rounding; {draft.exceptions / draft.weights:.2%} of weights are exceptions, "
            f"{draft.zero_escapes / draft.weights:.2%} escapes of code 0"
        )
    for lane, text in report.text.items():
        name = "exact" if lane == "held out" else lane
        typer.echo(
            f"{name}: perplexity {text.perplexity:.3f}, same token {text.same_token:.2%}, overlap "
            f"at temperature 1 {text.overlap:.2%}, divergence {text.divergence:.2e}"
        )


def share(value: Any) -> str:
    return "-" if value is None else f"{value:.1%}"
