"""`speq batch`: a file of requests, answered as a whole."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.cli.machines import check_machines, open_generator
from speq.cli.serve import model_name, sigterm_as_interrupt
from speq.config import Model, RunConfig, SamplingParams
from speq.offline.settings import BatchFileSettings
from speq.pipeline.settings import StagesSettings
from speq.ray.settings import RaySettings

if TYPE_CHECKING:
    from speq.offline.batch_run import Answerer, BatchSummary
    from speq.offline.request_file import RequestFile

# Nobody waits for a single request.
SIDE_BY_SIDE = Exclude(defaults=(("max_batch", 8),))


def batch(
    model: Model,
    settings: BatchFileSettings,
    run: Annotated[RunConfig, SIDE_BY_SIDE],
    sampling: SamplingParams,
    replicas: RaySettings,
    machines: StagesSettings,
    output: opt.Output,
) -> None:
    """Answer a file of requests, at most --max-batch of them at a time.

    A request is {"prompt": text} or {"messages": [...]}, with options of sampling of its own, or
    one of OpenAI's Batch API. Interrupted, it leaves a folder with what is done; the same command
    continues from there. It fails if a request has failed. The JSON object has what was done.
    """
    from speq.errors import SpeqError
    from speq.offline.answer_folder import JOURNAL
    from speq.offline.request_file import RequestFile
    from speq.ray.cluster import check_ray

    check_machines(machines, replicas)
    output.check()
    if not (settings.unfinished / JOURNAL).exists():  # or else they were checked as it began
        output.check(settings.answers, settings.failed)
    if replicas.ray:
        check_ray()
    with opt.log_of(output.quiet), sigterm_as_interrupt():
        job = BatchJob(model, settings, run, sampling, replicas, machines, output)
        summary = answer_file(job, RequestFile.of(settings.requests))
    output.write(as_json(summary))
    if not output.printed:
        output.note(sentence_of(summary, settings))
    if summary.failed:
        raise SpeqError(
            f"{summary.failed} of {summary.requests} requests failed; {settings.failed} says why"
        )


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What the command was given."""

    model: str
    settings: BatchFileSettings
    run: RunConfig
    sampling: SamplingParams
    replicas: RaySettings
    machines: StagesSettings
    output: opt.Output

    @property
    def name(self) -> str:
        """What requests in OpenAI's form call the model."""
        return self.settings.served_model_name or model_name(self.model)


def answer_file(job: BatchJob, requests: "RequestFile") -> "BatchSummary":
    """Answer what has no answer yet, and write the files."""
    from speq.offline.answer_folder import open_answers
    from speq.offline.batch_run import BatchSummary, answer_all, header_of

    settings = job.settings
    header = header_of(requests, digest_of(job), job.run, job.sampling, settings)
    with open_answers(settings.unfinished, header) as folder:
        summary = BatchSummary.of(requests, folder)
        if len(folder.kept) < len(requests):
            replicas = job.replicas.ray and not job.machines.wanted
            answerer = answer_on_ray(job) if replicas else answer_here(job)
            with answerer as made, opt.progress_bar(job.output.quiet) as progress:
                summary = answer_all(requests, folder, made, progress)
        folder.write(requests, settings.answers, settings.failed)
    return summary


@contextmanager
def answer_here(job: BatchJob) -> "Iterator[Answerer]":
    """One generator, in this process; other machines may hold some of its layers."""
    from speq.offline.batch_answerer import BatchAnswerer
    from speq.offline.line_reader import LineReader

    quiet = job.output.quiet
    with open_generator(job.model, job.run, job.machines, job.replicas, quiet=quiet) as generator:
        yield BatchAnswerer(LineReader(generator, job.sampling, job.name))


@contextmanager
def answer_on_ray(job: BatchJob) -> "Iterator[Answerer]":
    """Answer with replicas on the machines of a Ray cluster."""
    from speq.ray.batch import QUEUE_DEPTH, answerer_on_ray
    from speq.ray.cluster import cluster
    from speq.ray.replicas import ReplicaSpec
    from speq.server.needed import check_serve
    from speq.server.settings import ServerSettings

    check_serve()
    settings = ServerSettings(max_waiting=QUEUE_DEPTH * job.run.max_batch)
    spec = ReplicaSpec(job.model, job.name, job.run, settings)
    with cluster(job.replicas), answerer_on_ray(spec, job.sampling, job.replicas) as answerer:
        yield answerer


def digest_of(job: BatchJob) -> str:
    """What tells a model from others: answers of two are not mixed. It is read once for it."""
    from speq.files.checkpoint import Checkpoint, locate
    from speq.files.contents import content_digest

    with closing(Checkpoint(locate(job.model))) as checkpoint, job.output.progress() as progress:
        return content_digest(checkpoint, partial(progress, "reading the model"))


def as_json(summary: "BatchSummary") -> dict[str, Any]:
    return asdict(summary) | {"tokens_per_s": summary.tokens_per_s}


def sentence_of(summary: "BatchSummary", settings: BatchFileSettings) -> str:
    """What a run came to."""
    before = f" ({summary.kept} of an earlier run)" if summary.kept else ""
    text = f"{settings.answers}: {summary.requests} requests{before}, {summary.failed} failed"
    if summary.tokens_per_s is None:
        return text
    return (
        f"{text}; {summary.prompt_tokens} tokens read and {summary.new_tokens} generated in "
        f"{summary.seconds:.1f} s, {summary.tokens_per_s:.1f} tokens a second"
    )
