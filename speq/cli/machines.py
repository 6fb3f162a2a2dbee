"""The machines of a command's model: this one, or several with a stage each."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.config import RunConfig
from speq.errors import OptionError
from speq.pipeline.settings import StagesSettings, stage_count
from speq.ray.settings import RayServeSettings, RaySettings

if TYPE_CHECKING:
    from speq.generator import Generator
    from speq.pipeline.rendezvous import Rendezvous
    from speq.text.prompts import Prompt

# Commands that run one model take no number of them.
ONE_MODEL = Exclude(without=("replicas", "replica_gpus"))
# Of a client of Ray, which is no machine of the cluster.
CLIENT = "ray://"


def check_machines(machines: StagesSettings, cluster: RaySettings, replicas: bool = True) -> None:
    """Raise SpeqError for options of stages and of a cluster that do not go together.

    replicas  whether the command may run several of a whole model
    """
    if machines.stages is None:
        if cluster.ray and not replicas:
            raise OptionError("ray is given and stages is not; this command takes both, or neither")
        return
    stage_count(machines.stages)
    if not cluster.ray:
        if machines.rendezvous is None:
            raise OptionError(
                "stages is given and rendezvous is not; give where the stages meet, or --ray"
            )
        return
    if machines.rendezvous is not None:
        raise OptionError(
            "rendezvous and ray are both given; stages that Ray places meet where it has put the "
            "first one: leave rendezvous out"
        )
    for name in ("replicas", "replica_gpus", "max_replicas"):
        if getattr(cluster, name, None) != getattr(RayServeSettings(), name):
            raise OptionError(f"{name} and stages are both given; a replica holds all layers")
    if (cluster.ray_address or "").startswith(CLIENT):
        raise OptionError(
            f"ray_address is {cluster.ray_address} and the model runs in stages, the first of them "
            "here; run the command on a machine of the cluster, with --ray-address auto"
        )


@contextmanager
def open_generator(
    model: str,
    run: RunConfig,
    machines: StagesSettings,
    cluster: RaySettings,
    first_request: "tuple[Prompt, int] | None" = None,
    quiet: bool = False,
) -> Iterator["Generator"]:
    """A generator of the model, wherever its layers run; they are given back with the block."""
    with ExitStack() as stack:
        rendezvous = None
        if machines.wanted and cluster.ray:
            rendezvous = stack.enter_context(place_stages(model, run, machines, cluster))
        made = opt.load_generator(model, run, first_request, quiet, machines, rendezvous)
        yield stack.enter_context(closing(made))


@contextmanager
def place_stages(
    model: str, run: RunConfig, machines: StagesSettings, cluster: RaySettings
) -> Iterator["Rendezvous"]:
    """Stages on a Ray cluster, and where they come to."""
    from speq.ray.cluster import check_ray
    from speq.ray.cluster import cluster as connected
    from speq.ray.stages import ray_stages

    check_ray()
    stages = str(machines.stages)
    settings = cluster.of_stages(stage_count(stages))
    with (
        connected(settings),
        ray_stages(model, run, stages, settings.cpus, machines.stage_wait_s) as rendezvous,
    ):
        yield rendezvous
