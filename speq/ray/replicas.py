"""Replicas under Ray Serve: each has a generator of its own, and those of a server its routes.

Ray's proxy listens and hands requests on. A replica that dies, or whose engine does, is made anew;
what it was answering fails with a 5xx, which clients retry.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from speq.config import RunConfig
from speq.errors import OptionError, PeerError
from speq.generator import Generator
from speq.ray.settings import RayServeSettings, RaySettings
from speq.server.access import Access, Keys
from speq.server.server import EXTRA_REQUESTS, listen, serve_model
from speq.server.settings import ServerSettings

APP_NAME, ROUTE = "speq", "/"
# Requests with the same `x-session-id` go to the same replica, which has what they began with.
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HEALTH_CHECK_S = 2.0
# Beside the time that requests have to finish.
PATIENCE_S = 5.0
CONSTRUCTOR_TRIES = 2


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica is made of. name: clients call the model so"""

    model: str
    name: str
    run: RunConfig
    settings: ServerSettings


class Replica:
    """One generator with an engine thread, in a process of Ray's."""

    def __init__(self, spec: ReplicaSpec) -> None:
        """Load the model. Raises SpeqError as `Generator.load`."""
        with ExitStack() as stack:
            self._generator = stack.enter_context(closing(Generator.load(spec.model, spec.run)))
            served = serve_model(self._generator, spec.name, spec.settings)
            self._served = stack.enter_context(served)
            self._stack = stack.pop_all()

    def check_health(self) -> None:
        """Raise SpeqError where the engine has died: `GET /health` would say 503."""
        if self._served.thread.failure is not None:
            raise PeerError(self._served.thread.failure)

    def __del__(self) -> None:
        # Not there where the model could not be loaded.
        stack = getattr(self, "_stack", None)
        if stack is not None:
            stack.close()


class ServerReplica(Replica):
    """A replica behind the routes of `speq serve`. access: the rules of Ray's proxy"""

    def __init__(self, spec: ReplicaSpec, access: Access) -> None:
        super().__init__(spec)
        self._app = self._served.gated_app(access)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def replica_options(settings: RaySettings) -> dict[str, Any]:
    """What any replica takes of a cluster, by the names of Ray Serve's options."""
    return {
        "ray_actor_options": {"num_cpus": settings.cpus, "num_gpus": settings.replica_gpus},
        "health_check_period_s": HEALTH_CHECK_S,
        "max_constructor_retry_count": CONSTRUCTOR_TRIES,
    }


def deployment_options(
    run: RunConfig, settings: ServerSettings, replicas: RayServeSettings
) -> dict[str, Any]:
    """How Ray Serve holds replicas of a server."""
    options = replica_options(replicas) | {
        # A replica refuses what is too much itself, with 429.
        "max_ongoing_requests": settings.max_waiting + run.max_batch + EXTRA_REQUESTS,
        "graceful_shutdown_timeout_s": settings.shutdown_seconds + PATIENCE_S,
        "request_router_config": {"request_router_class": STICKY_ROUTER},
    }
    if replicas.max_replicas is None:
        return options | {"num_replicas": replicas.replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": replicas.replicas,
            "max_replicas": replicas.max_replicas,
            # As many as run: the next replica is for those that wait.
            "target_ongoing_requests": run.max_batch,
        }
    }


@contextmanager
def replicas_on_ray(
    model: str,
    name: str,
    run: RunConfig,
    settings: ServerSettings,
    replicas: RayServeSettings,
    keys: Keys | None,
) -> Iterator[str]:
    """Serve as long as the block lasts, on a cluster that we are connected to; the base URL.

    A Serve that runs already stays, with all that others have there. Raises SpeqError where it
    listens elsewhere or has another application in our place, where the port is not to be had, and
    where no replica can be made.
    """
    from ray import serve

    runs = running_serve()
    if runs is None:
        with closing(listen(settings.host, settings.port)) as listening:
            host, port = listening.getsockname()[:2]
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    else:
        host, port = settings.host, settings.port
        runs.check(host, port)
    access = Access(host, port, keys, settings.max_body)
    made = serve.deployment(serve.ingress()(ServerReplica))
    options = deployment_options(run, settings, replicas)
    bound = made.options(**options).bind(ReplicaSpec(model, name, run, settings), access)
    with run_application(bound, APP_NAME, ROUTE, ends_serve=runs is None):
        yield f"http://{access.authority}/v1"


@contextmanager
def run_application(bound: Any, name: str, route: str | None, ends_serve: bool) -> Iterator[Any]:
    """Run an application of Ray Serve as long as the block lasts; its handle.

    ends_serve  end Serve too, which was started for it

    Raises SpeqError where no replica can be made.
    """
    from ray import serve

    try:
        try:
            handle = serve.run(bound, name=name, route_prefix=route)
        except RuntimeError as error:
            raise PeerError(f"no replica could be made: {startup_error(name)}") from error
        yield handle
    finally:
        # It would end all applications, and Serve may have got others meanwhile.
        if ends_serve and not set(serve.status().applications) - {name}:
            serve.shutdown()
        else:
            serve.delete(name)


def startup_error(name: str) -> str:
    """Why an application's replicas did not start: a sentence of ours, if Ray has one."""
    from ray import serve

    application = serve.status().applications.get(name)
    deployments = [] if application is None else application.deployments.values()
    told = "\n".join(each.message for each in deployments)
    found = re.search(r"^speq\.[\w.]+: (.+)", told, re.MULTILINE)
    return "Ray's logs in /tmp/ray/session_latest/logs/serve say why" if found is None else found[1]


@dataclass(frozen=True, slots=True)
class RunningServe:
    """What Ray Serve does on a cluster already. routes: where each application is reached."""

    host: str | None
    port: int
    routes: dict[str, str | None]

    def check(self, host: str, port: int) -> None:
        """Raise SpeqError unless its proxy listens there, and has room for our application."""
        if (self.host, self.port) != (host, port):
            raise OptionError(
                f"Ray Serve runs on this cluster already and listens on {self.host} port "
                f"{self.port}, and host and port say {host} and {port}; give --host and --port of "
                "that, with --api-key-file where other machines reach it, or end it by `serve "
                "shutdown`"
            )
        for name, route in self.routes.items():
            if name == APP_NAME or route == ROUTE:
                raise PeerError(
                    f"application {name!r} of Ray Serve is at {route} already, and speq would take "
                    "its place; end it, or give another cluster"
                )


def running_serve() -> RunningServe | None:
    """The Serve of the cluster that we are connected to; None where there is none."""
    # Ray tells nobody else whether there is one, and where it listens.
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    options, found = client.http_config, client.get_serve_details()["applications"]
    routes = {name: each.get("route_prefix") for name, each in found.items()}
    return RunningServe(options.host, options.port, routes)
