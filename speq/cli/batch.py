"""`speq batch`: a file of requests, answered as a whole."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.cli.machines import check_machines, open_generator
from speq.cli.serve import name_of, terminated_as_interrupted
from speq.config import Model, RunConfig, SamplingParams
from speq.offline.settings import BatchSettings
from speq.pipeline.settings import StagesSettings
from speq.server.ray_settings import RaySettings

if TYPE_CHECKING:
    from speq.offline.batch_run import Answerer, BatchSummary
    from speq.offline.request_file import RequestFile

# Nobody waits for a single text.
SIDE_BY_SIDE = Exclude(defaults=(("max_batch", 8),))


def batch(
    model: Model,
    settings: BatchSettings,
    run: Annotated[RunConfig, SIDE_BY_SIDE],
    sampling: SamplingParams,
    replicas: RaySettings,
    machines: StagesSettings,
    output: opt.Output,
) -> None:
    """Answer a file of requests, as many side by side as --max-batch says.

    A request is {"prompt": text} or {"messages": [...]}, with options of sampling of its own, or
    one of OpenAI's Batch API. Interrupted, it leaves a folder with what is done; the same command
    goes on from there. It fails where a request has failed. The JSON object has what was done.
    """
    from speq.errors import SpeqError
    from speq.offline.answer_folder import JOURNAL
    from speq.offline.request_file import RequestFile
    from speq.server.ray_cluster import check_ray

    check_machines(machines, replicas)
    output.check()
    if not (settings.unfinished / JOURNAL).exists():  # or else they were checked as it began
        output.check(settings.answers, settings.failed)
    if replicas.ray:
        check_ray()
    with opt.log_of(output.quiet), terminated_as_interrupted():
        job = Job(model, settings, run, sampling, replicas, machines, output)
        summary = answered(job, RequestFile.of(settings.requests))
    output.write(as_json(summary))
    if not output.printed:
        output.note(sentence_of(summary, settings))
    if summary.failed:
        raise SpeqError(
            f"{summary.failed} of {summary.requests} requests failed; {settings.failed} says why"
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What the command was given."""

    model: str
    settings: BatchSettings
    run: RunConfig
    sampling: SamplingParams
    replicas: RaySettings
    machines: StagesSettings
    output: opt.Output

    @property
    def name(self) -> str:
        """What requests in OpenAI's form call the model."""
        return self.settings.served_model_name or name_of(self.model)


def answered(job: Job, requests: "RequestFile") -> "BatchSummary":
    """Answer what has no answer yet, and write the files."""
    from speq.offline.answer_folder import taken_up
    from speq.offline.batch_run import BatchSummary, answer_all, header_of

    settings = job.settings
    header = header_of(requests, digest_of(job), job.run, job.sampling, settings)
    with taken_up(settings.unfinished, header) as folder:
        summary = BatchSummary.of(requests, folder)
        left = len(requests) - len(folder.kept)
        if left:
            replicas = job.replicas.ray and not job.machines.wanted
            answerer = on_ray(job, left) if replicas else here(job)
            with answerer as made, opt.progress_bar(job.output.quiet) as progress:
                summary = answer_all(requests, folder, made, progress)
        folder.write(requests, settings.answers, settings.failed)
    return summary


@contextmanager
def here(job: Job) -> "Iterator[Answerer]":
    """One generator, in this process; other machines may hold some of its layers."""
    from speq.offline.batch_answerer import BatchAnswerer

    quiet = job.output.quiet
    with open_generator(job.model, job.run, job.machines, job.replicas, quiet=quiet) as generator:
        yield BatchAnswerer(generator, job.sampling, job.name)


@contextmanager
def on_ray(job: Job, left: int) -> "Iterator[Answerer]":
    """Several, on the machines of a Ray cluster. left: requests that have no answer."""
    from speq.offline.in_blocks import InBlocks, block_requests
    from speq.offline.ray_workers import RayWorkers, WorkerSpec
    from speq.server.ray_cluster import cluster

    spec = WorkerSpec(job.model, job.name, job.run, job.sampling)
    with cluster(job.replicas):
        workers = RayWorkers(spec, job.replicas)
        yield InBlocks(workers, block_requests(left, job.replicas.replicas, job.run.max_batch))


def digest_of(job: Job) -> str:
    """What tells a model from others: answers of two are not mixed. It is read once for it."""
    from speq.files.checkpoint import Checkpoint, locate
    from speq.files.contents import content_digest

    with closing(Checkpoint(locate(job.model))) as checkpoint, job.output.progress() as progress:
        return content_digest(checkpoint, partial(progress, "reading the model"))


def as_json(summary: "BatchSummary") -> dict[str, Any]:
    return asdict(summary) | {"tokens_per_s": summary.tokens_per_s}


def sentence_of(summary: "BatchSummary", settings: BatchSettings) -> str:
    """What a run came to."""
    before = f" ({summary.kept} of an earlier run)" if summary.kept else ""
    text = f"{settings.answers}: {summary.requests} requests{before}, {summary.failed} failed"
    if summary.tokens_per_s is None:
        return text
    return (
        f"{text}; {summary.prompt_tokens} tokens read and {summary.new_tokens} generated in "
        f"{summary.seconds:.1f} s, {summary.tokens_per_s:.1f} tokens a second"
    )
