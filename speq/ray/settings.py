"""Options of commands that run on a Ray cluster. Nothing here needs Ray."""

from dataclasses import dataclass
from typing import Annotated

from speq.control_groups import processors
from speq.errors import OptionError
from speq.options.declared import Option, Options
from speq.options.kinds import Switch, Text, Whole

MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class RaySettings(Options):
    """How many generators there are, and where. Each has the memory budget to itself."""

    panel = "Several machines"
    ray: Annotated[
        bool,
        Option(
            "Run replicas of the model on a Ray cluster or, with --stages, its layers.", Switch()
        ),
    ] = False
    replicas: Annotated[
        int, Option("Replicas; where Ray may add some, at least.", Whole(1, MOST_REPLICAS))
    ] = 1
    replica_cpus: Annotated[
        int | None,
        Option(
            "Cores of a replica, or of a stage; default: those of this machine, shared by all that "
            "run on it.",
            Whole(1, 1024),
        ),
    ] = None
    replica_gpus: Annotated[int, Option("GPUs of a replica.", Whole(0, 64))] = 0
    ray_address: Annotated[
        str | None,
        Option(
            "Address of a Ray cluster that runs, or auto; default: one is started on this machine.",
            Text("an address, or auto"),
        ),
    ] = None

    @property
    def cpus(self) -> int:
        """Cores of a replica."""
        return self.replica_cpus or max(processors() // self.replicas, 1)

    @property
    def most(self) -> int:
        """Replicas at a time, at most."""
        return self.replicas

    def of_stages(self, count: int) -> "RaySettings":
        """The same for the stages of one model, in the place of replicas: on a cluster that runs a
        stage has all cores of a machine, and on this machine a share of them.
        """
        shared = count if self.ray_address is None else 1
        cpus = self.replica_cpus or max(processors() // shared, 1)
        return RaySettings(True, count, cpus, 0, self.ray_address)

    def check_together(self) -> None:
        """Raise SpeqError for options of a cluster where there is none."""
        for name in ("replicas", "replica_cpus", "replica_gpus", "ray_address"):
            if not self.ray and getattr(self, name) != getattr(RaySettings(), name):
                raise OptionError(f"{name} is given and ray is not; give --ray too")


@dataclass(frozen=True, slots=True)
class RayServeSettings(RaySettings):
    """The same, of a server."""

    max_replicas: Annotated[
        int | None,
        Option(
            "Let Ray add replicas, up to so many, as requests wait, and take them away again.",
            Whole(1, MOST_REPLICAS),
        ),
    ] = None

    @property
    def most(self) -> int:
        """With those that Ray adds."""
        return self.max_replicas or self.replicas

    def check_together(self) -> None:
        """Raise SpeqError for fewer replicas at most than at least, too."""
        RaySettings.check_together(self)
        if self.max_replicas is None:
            return
        if not self.ray:
            raise OptionError("max_replicas is given and ray is not; give --ray too")
        if self.max_replicas < self.replicas:
            raise OptionError(
                f"max_replicas is {self.max_replicas} and replicas is {self.replicas}; give as "
                "many at most as at least, or more"
            )
