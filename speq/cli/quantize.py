"""`speq quantize`: a GPTQ copy of a model's experts, and of its dense layers, to draft with."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli import options as opt
from speq.config import Model
from speq.quantizing.settings import ConversionSettings, QuantizeSettings
from speq.units import format_bytes

if TYPE_CHECKING:
    from speq.quantizing.report import QuantizeReport

# Tokens that an expert saw; experts that were rounded; the error of the experts' outputs on
# held-out text, and rounding's; experts better than rounded; the draft's routes against exact ones.
COLUMNS = (
    *("layer", "least", "median", "most", "rounded"),
    *("error", "rtn", "better", "recall", "same"),
)


def quantize(
    model: Model,
    settings: QuantizeSettings,
    conversion: ConversionSettings,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Quantise a model's experts by GPTQ, calibrated on the tokens routed to each.

    Experts are read one at a time, so the model may be several times the memory. Interrupted, it
    leaves a folder that no run opens; the same command goes on from there.
    """
    from speq.quantizing.models import quantize_with

    with output.progress() as progress:
        made = quantize_with(model, settings, conversion, progress)
    show(model, made.report)
    for line in findings(made.report):
        output.note(line)
    size = sum(file.stat().st_size for file in made.folder.glob("*.safetensors"))
    output.note(
        f"{made.folder}: {format_bytes(size)}; more in {made.folder / 'quantize_report.json'}"
    )


def show(model: str, report: "QuantizeReport") -> None:
    """The report as a table."""
    from rich.table import Table

    from speq.measure.console import console

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
    console().print(table)


def findings(report: "QuantizeReport") -> Iterator[str]:
    """What the report comes to."""
    yield (
        f"calibrated on {report.tokens} tokens, judged on {report.held_out_tokens} held out; "
        f"{report.rounded} experts rounded for lack of tokens"
    )
    residuals = report.residuals
    if residuals:
        draft, rounded = residuals["residual"], residuals["rounding_residual"]
        yield (
            f"residual {draft.bits_per_weight:.2f} bits a weight, {rounded.bits_per_weight:.2f} "
            f"over rounding; {draft.exceptions / draft.weights:.2%} of weights are exceptions, "
            f"{draft.zero_escapes / draft.weights:.2%} escapes of code 0"
        )
    for lane, text in report.text.items():
        name = "exact" if lane == "held out" else lane
        yield (
            f"{name}: perplexity {text.perplexity:.3f}, same token {text.same_token:.2%}, overlap "
            f"at temperature 1 {text.overlap:.2%}, divergence {text.divergence:.2e}"
        )


def share(value: Any) -> str:
    return "-" if value is None else f"{value:.1%}"
