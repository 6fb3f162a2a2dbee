"""Stages as actors of a Ray cluster: Ray says on which machine each of them runs.

Actors come to the first stage as `speq stage` does, and the ring goes past Ray: no row and no
option of a pass is sent by it.
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
from speq.errors import SpeqError
from speq.listening import listening_on
from speq.pipeline.later_stage import run_stage
from speq.pipeline.rendezvous import Rendezvous
from speq.pipeline.settings import StageSettings, stage_count

logger = logging.getLogger("speq")

# Between looks whether Ray has room.
LOOK_S = 1.0
# That stages have to end, once the first one has closed the run.
ENDING_S = 10.0
# Ray says so of a node: a resource of its own, of which anything may take as little as it likes.
OWN_SHARE = 0.001
# What Ray labels a node with.
NODE_ID = "ray.io/node-id"


class StageActor:
    """A stage in a process of Ray's."""

    def run(self, model: str, config: RunConfig, settings: StageSettings) -> str | None:
        """Until the run is over; a sentence where the stage cannot go on."""
        try:
            run_stage(model, config, settings, logger.info)
        except SpeqError as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """The places where Ray puts stages.

    address  of this machine in the cluster
    group    a placement group, with this machine's place first and that of stage N at N - 1
    """

    address: str
    group: Any

    @classmethod
    def of(cls, count: int, cpus: int, wait_s: float) -> "PlacementGroup":
        """Reserve so many stages, the first one among them, on a cluster that this process is
        connected to; each on a machine of its own where there are as many.

        cpus  cores of each. Raises SpeqError where there is no room within `wait_s`
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
                "%d stages want a machine each, and beside this one the Ray cluster has %d with "
                "%d cores: some of them share one, and its memory",
                count,
                len(roomy),
                cpus,
            )
        bundles = [{f"node:{address}": OWN_SHARE}, *({"CPU": float(cpus)},) * (count - 1)]
        # Nodes that a machine has beside one another share its address.
        labels = [{NODE_ID: here}, *({},) * (count - 1)]
        strategy = "STRICT_SPREAD" if apart else "SPREAD"
        group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
        deadline_s = time.monotonic() + wait_s
        try:
            while not group.wait(LOOK_S):
                if time.monotonic() > deadline_s:
                    raise SpeqError(
                        f"the Ray cluster had no room for {count - 1} stages of {cpus} cores "
                        f"within {wait_s:g} s; give a smaller --replica-cpus, or add machines"
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        return cls(address, group)

    def close(self) -> None:
        """Give it back; what runs there ends."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


@contextmanager
def ray_stages(
    model: str, config: RunConfig, stages: str, cpus: int, wait_s: float
) -> Iterator[Rendezvous]:
    """Stages behind the first on the cluster that this process is connected to, and where they come
    to; they end with the block.

    model   a hub id, or a folder that is at the same path on every machine
    config  as of the first stage, with a memory budget that each of them has to itself
    stages  as the option says
    cpus    cores of each

    Raises SpeqError where Ray has no room for them.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    count = stage_count(stages)
    with closing(PlacementGroup.of(count, cpus, wait_s)) as room:
        what = f"{room.address}, this machine's address in the Ray cluster,"
        remedy = "start Ray on it with an address of its own (--node-ip-address)"
        with closing(listening_on(room.address, 0, what, remedy)) as listening:
            rendezvous = f"{url_host(room.address)}:{listening.getsockname()[1]}"
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
                    raise SpeqError(
                        f"stage {number} of {count} has ended on Ray: {end_reason(ref)}"
                    )

            try:
                yield Rendezvous(rendezvous, listening, look)
                ray.wait(running, num_returns=len(running), timeout=ENDING_S)
            finally:
                for actor in actors:
                    ray.kill(actor)


def end_reason(ended: Any) -> str:
    """What a stage that has ended says of it, or Ray."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(ended) or "the run is over"
    except RayTaskError:
        raise  # a fault of ours
    except RayError as error:
        return str(error).strip().partition("\n")[0].rstrip(".")


def same_path(model: str) -> str:
    """What another machine finds the model by, which has another working directory."""
    path = Path(os.path.expanduser(model))
    return str(path.resolve()) if path.exists() else model


def url_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
