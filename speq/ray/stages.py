"""Pipeline stages as actors of a Ray cluster, which places them on machines.

Actors join rank 0 as `speq stage` does. Hidden states go around the ring and not through Ray.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.config import RunConfig
from speq.errors import NoRoom, PeerError, SpeqError
from speq.listening import listening_on
from speq.pipeline.later_stage import run_stage
from speq.pipeline.rendezvous import Rendezvous
from speq.pipeline.settings import StageSettings, stage_count

logger = logging.getLogger("speq")

# Between checks whether Ray has room.
LOOK_S = 1.0
# Longest wait for stages to end after rank 0 has closed the run.
ENDING_S = 10.0
# Share of a node's own resource: any small number will do.
OWN_SHARE = 0.001
# Ray's label of a node.
NODE_ID = "ray.io/node-id"


class StageActor:
    """A pipeline stage in a Ray actor."""

    def run(self, model: str, config: RunConfig, settings: StageSettings) -> str | None:
        """Run a stage to the end; return a sentence if it cannot continue."""
        try:
            run_stage(model, config, settings, logger.info)
        except SpeqError as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Places for pipeline stages in a Ray cluster.

    address  of this machine in the cluster
    group    Ray's placement group; the bundle of stage N has index N - 1
    """

    address: str
    group: Any

    @classmethod
    def of(cls, count: int, cpus: int, wait_s: float) -> "PlacementGroup":
        """Reserve places for `count` stages, with the first one here.

        Each stage has its own machine if there are enough. Raises SpeqError if the cluster has no
        room within `wait_s`.

        cpus  cores of each stage
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = [node for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        (address,) = (node["NodeManagerAddress"] for node in nodes if node["NodeID"] == here)
        roomy = [
            node
            for node in nodes
            if node["NodeID"] != here and node["Resources"].get("CPU", 0) >= cpus
        ]
        apart = len(roomy) >= count - 1
        if not apart:
            logger.warning(
                "%d pipeline stages need a machine each, and besides this one the Ray cluster has "
                "%d with %d cores: some stages share a machine and its memory",
                count,
                len(roomy),
                cpus,
            )
        bundles = [{f"node:{address}": OWN_SHARE}, *({"CPU": float(cpus)},) * (count - 1)]
        # Several nodes of one machine share its address.
        labels = [{NODE_ID: here}, *({},) * (count - 1)]
        strategy = "STRICT_SPREAD" if apart else "SPREAD"
        group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
        deadline_s = time.monotonic() + wait_s
        try:
            while not group.wait(LOOK_S):
                if time.monotonic() > deadline_s:
                    raise NoRoom(
                        f"the Ray cluster had no room for {count - 1} stages of {cpus} cores "
                        f"within {wait_s:g} s; give a smaller --replica-cpus, or add machines"
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        return cls(address, group)

    def close(self) -> None:
        """Remove the placement group, which ends its actors."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


@contextmanager
def ray_stages(
    model: str, config: RunConfig, stages: str, cpus: int, wait_s: float
) -> Iterator[Rendezvous]:
    """Start the later pipeline stages on the Ray cluster for the block; yield their rendezvous.

    model   a hub id, or a folder at the same path on every machine
    config  of rank 0; each stage has the whole memory budget to itself
    stages  value of the option
    cpus    cores of each stage

    Raises SpeqError if Ray has no room for them.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    count = stage_count(stages)
    with closing(PlacementGroup.of(count, cpus, wait_s)) as room:
        what = f"{room.address}, this machine's address in the Ray cluster,"
        remedy = "start Ray on it with an address of its own (--node-ip-address)"
        with closing(listening_on(room.address, 0, what, remedy)) as listening:
            rendezvous = f"{bracket_ipv6(room.address)}:{listening.getsockname()[1]}"
            actors, running = [], []
            for number in range(2, count + 1):
                place = PlacementGroupSchedulingStrategy(
                    room.group, placement_group_bundle_index=number - 1
                )
                actor = ray.remote(num_cpus=cpus, scheduling_strategy=place)(StageActor).remote()
                settings = StageSettings(number, stages, rendezvous, wait_s)
                actors.append(actor)
                running.append(actor.run.remote(same_path(model), config, settings))

            def look() -> None:
                ended, _ = ray.wait(running, num_returns=len(running), timeout=0)
                for ref in ended:
                    number = running.index(ref) + 2
                    raise PeerError(
                        f"stage {number} of {count} has ended on Ray: {end_reason(ref)}"
                    )

            try:
                yield Rendezvous(rendezvous, listening, look)
                ray.wait(running, num_returns=len(running), timeout=ENDING_S)
            finally:
                for actor in actors:
                    ray.kill(actor)


def end_reason(ended: Any) -> str:
    """Return the reason that a stage or Ray gives for its end."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(ended) or "the run is over"
    except RayTaskError:
        raise  # a defect of speq
    except RayError as error:
        return str(error).strip().partition("\n")[0].rstrip(".")


def same_path(model: str) -> str:
    """Return a model's absolute path or hub id, for a machine with another working directory."""
    path = Path(os.path.expanduser(model))
    return str(path.resolve()) if path.exists() else model


def bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address
