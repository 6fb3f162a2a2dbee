"""`speq prove`: is the output exact in every setting, on this machine, for this checkpoint?"""

from dataclasses import asdict

import typer

from speq.cli.options import Output
from speq.config import Model
from speq.measure.settings import ProveSettings


def prove(model: Model, settings: ProveSettings, output: Output) -> None:
    """Compare tokens over budgets, drafts, batches and codecs, and with plain transformers.

    Fails where a setting gives another token than plain decoding does, or where the exact path,
    teacher-forced, and transformers disagree by more than rounding. Where memory cannot hold the
    whole model, transformers' experts are read a layer at a time. A packed model is compared with
    its checksums, all of it.
    """
    from speq.files.atomic_file import write_whole
    from speq.measure import prove as measure
    from speq.measure.report import print_table

    output.check(settings.page)
    with output.progress() as progress:
        proof = measure.prove(model, settings, progress)
    agreement = proof.agreement and asdict(proof.agreement)
    told = {"agreement": agreement, "sentence": proof.sentence, "weights": proof.weights}
    output.write(asdict(proof.report) | told)
    if settings.page is not None:
        write_whole(settings.page, measure.page_of(proof).encode())
    if not output.printed:
        for columns, rows in proof.tables:
            print_table(f"prove: {model}", columns, rows)
        for note in proof.notes:
            output.note(note)
        typer.echo(f"{'passed' if proof.passed else 'FAILED'}: {proof.sentence}")
    if not proof.passed:
        raise typer.Exit(1)
