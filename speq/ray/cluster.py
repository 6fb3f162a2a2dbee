"""A Ray cluster: one that runs, or one on this machine that ends with us."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from speq.control_groups import processors
from speq.errors import DependencyError, PeerError
from speq.ray.settings import RaySettings

# From 2.59 on a cluster of this machine's own asks whoever reaches its ports for a token.
LEAST = (2, 60)


def check_ray() -> None:
    """Raise SpeqError where Ray is not installed, or an older one than we know."""
    if importlib.util.find_spec("ray") is None:
        raise DependencyError("Ray is not installed here; pip install 'ray[serve]'")
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        wanted = ".".join(map(str, LEAST))
        raise DependencyError(
            f"Ray {version} is installed and {wanted} or newer is needed; "
            "pip install -U 'ray[serve]'"
        )


@contextmanager
def cluster(settings: RaySettings) -> Iterator[None]:
    """Be connected to the cluster as long as the block lasts. Raises SpeqError where none is."""
    import ray

    try:
        if settings.ray_address is None:
            # Not None, which would have Ray look for clusters by itself.
            ray.init(
                "local",
                num_cpus=max(processors(), settings.most * settings.cpus),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(settings.ray_address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's own, of a cluster that does not start, is no other
        where = settings.ray_address or "this machine"
        raise PeerError(
            f"there is no Ray cluster at {where}: {' '.join(str(error).split())}; start one with "
            "`ray start --head`, or leave --ray-address out"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
