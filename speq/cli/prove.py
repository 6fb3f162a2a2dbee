"""`speq prove`: is the output exact in every setting, on this machine, for this checkpoint?"""

from dataclasses import asdict

import typer

from speq.cli.options import Output
from speq.config import Model
from speq.measure.settings import ProveSettings


def prove(model: Model, settings: ProveSettings, output: Output) -> None:
    """Compare tokens over budgets, drafts, batches and codecs, and with plain transformers.

    Fails where a setting gives another token than plain decoding does, or where the exact path and
    transformers disagree by more than rounding.
    """
    from speq.files.atomic_file import write_whole
    from speq.measure import prove as measure

    output.check(settings.page)
    with output.progress() as progress:
        proof = measure.prove(model, settings, progress)
    agreement = proof.agreement and asdict(proof.agreement)
    told = {"agreement": agreement, "sentence": proof.sentence, "weights": proof.weights}
    output.write(asdict(proof.report) | told)
    if settings.page is not None:
        write_whole(settings.page, measure.page_of(proof).encode())
    if not output.printed:
        proof.report.print(measure.COLUMNS)
        for note in proof.notes:
            output.note(note)
        typer.echo(f"{'passed' if proof.passed else 'FAILED'}: {proof.sentence}")
    if not proof.passed:
        raise typer.Exit(1)
