"""Replicas where Ray Serve runs already: what others have there stays, and theirs is not taken.

By a stand-in for Ray, and with Ray itself among the long products.
"""

import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.ray.cluster import check_ray, cluster
from speq.ray.replicas import replicas_on_ray
from speq.ray.settings import RayServeSettings
from speq.server.settings import ServerSettings
from tests.helpers.ray_needed import need_ray

RUN = RunConfig.of("64MiB", dtype="float32", context_length=128, reader_threads=2)
REPLICAS = RayServeSettings(True, replicas=1, replica_cpus=1)


@dataclass
class Stand:
    """What `ray.serve` does with applications. routes: of those that there are; None: no Serve."""

    routes: dict[str, str] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    did: list[Any] = field(default_factory=list)
    fails: bool = False

    def module(self) -> ModuleType:
        made = ModuleType("ray.serve")
        made.start = self.start  # type: ignore[attr-defined]
        made.run = self.run  # type: ignore[attr-defined]
        made.delete = self.delete  # type: ignore[attr-defined]
        made.shutdown = self.shutdown  # type: ignore[attr-defined]
        made.status = lambda: SimpleNamespace(applications=self.routes or {})  # type: ignore[attr-defined]
        made.ingress = lambda: lambda kind: kind  # type: ignore[attr-defined]
        made.deployment = lambda kind: self  # type: ignore[attr-defined]
        return made

    def options(self, *_: Any, **__: Any) -> "Stand":
        return self

    bind = options

    def start(self, proxy_location: str, http_options: dict[str, Any]) -> None:
        self.routes, self.host, self.port = {}, http_options["host"], http_options["port"]
        self.did.append("start")

    def run(self, _: Any, name: str, route_prefix: str) -> None:
        if self.fails:
            raise RuntimeError("a fault")
        assert self.routes is not None
        self.routes[name] = route_prefix
        self.did.append("run")

    def delete(self, name: str) -> None:
        assert self.routes is not None
        self.routes.pop(name, None)
        self.did.append("delete")

    def shutdown(self) -> None:
        self.routes = None
        self.did.append("shutdown")

    def client(self, raise_if_no_controller_running: bool) -> Any:
        if self.routes is None:
            return None
        found = {name: {"route_prefix": route} for name, route in self.routes.items()}
        return SimpleNamespace(
            http_config=SimpleNamespace(host=self.host, port=self.port),
            get_serve_details=lambda: {"applications": found},
        )


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    serve, context, ray = made.module(), ModuleType("ray.serve.context"), ModuleType("ray")
    context._get_global_client = made.client  # type: ignore[attr-defined]
    ray.serve = serve  # type: ignore[attr-defined]
    for name, module in (("ray", ray), ("ray.serve", serve), ("ray.serve.context", context)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        "speq.ray.replicas.ServerReplica.__init__", lambda *_: None
    )  # no model is loaded
    return made


def served(**settings: Any) -> Any:
    chosen = ServerSettings(**settings)
    return replicas_on_ray("folder", "tiny", RUN, chosen, REPLICAS, None)


def test_a_serve_of_our_own_ends_with_us(stand: Stand) -> None:
    with served(port=0) as url:
        assert url == f"http://127.0.0.1:{stand.port}/v1" and stand.port
        assert stand.routes == {"speq": "/"}
    assert stand.did == ["start", "run", "shutdown"]


def test_applications_of_others_stay(stand: Stand) -> None:
    stand.routes = {"other": "/other"}
    with served() as url:
        assert url == "http://127.0.0.1:8000/v1"
    assert (stand.routes, stand.did) == ({"other": "/other"}, ["run", "delete"])
    # Also those that came to a Serve of ours.
    stand.routes, stand.did = None, []
    with served(port=0):
        stand.routes = {"speq": "/", "late": "/late"}
    assert (stand.routes, stand.did) == ({"late": "/late"}, ["start", "run", "delete"])
    stand.fails = True
    with pytest.raises(SpeqError, match="no replica could be made"), served(port=stand.port):
        raise AssertionError("there is none")
    assert stand.routes == {"late": "/late"}


@pytest.mark.parametrize(
    ("routes", "host", "sentence"),
    [
        ({}, "0.0.0.0", "listens on 0.0.0.0 port 8000, and host and port say 127.0.0.1 and 8000"),
        ({"other": "/"}, "127.0.0.1", "application 'other' of Ray Serve is at / already"),
        ({"speq": "/"}, "127.0.0.1", "application 'speq' of Ray Serve is at / already"),
    ],
)
def test_places_that_others_have(
    stand: Stand, routes: dict[str, str], host: str, sentence: str
) -> None:
    stand.routes, stand.host = dict(routes), host
    with pytest.raises(SpeqError, match=sentence), served():
        raise AssertionError("it was taken")
    assert (stand.routes, stand.did) == (routes, [])


def test_an_older_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for version, refused in (("2.9.3", True), ("2.59.0", True), ("2.60.0", False), ("3.0", False)):
        monkeypatch.setattr("importlib.metadata.version", lambda _, given=version: given)
        if refused:
            with pytest.raises(SpeqError, match=rf"Ray {version} is installed and 2\.60 or newer"):
                check_ray()
        else:
            check_ray()


@pytest.mark.full
def test_beside_others_on_ray(bundled: Path, pytestconfig: pytest.Config) -> None:
    need_ray(pytestconfig)
    from ray import serve
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    class Other:
        def __call__(self, request: Any) -> str:
            return "theirs"

    def asked(url: str) -> bytes:
        with urllib.request.urlopen(url) as reply:
            return bytes(reply.read())

    def at(port: int) -> Any:
        chosen = ServerSettings(port=port, shutdown_seconds=1)
        return replicas_on_ray(str(bundled), "tiny", RUN, chosen, REPLICAS, None)

    theirs = serve.deployment(Other)
    with cluster(REPLICAS):
        assert is_token_auth_enabled()
        with at(0) as url:
            port = int(url.rpartition(":")[2].removesuffix("/v1"))
            serve.run(theirs.bind(), name="other", route_prefix="/other")
            assert b'"tiny"' in asked(f"{url}/models")
        assert set(serve.status().applications) == {"other"}
        with at(port):
            assert b'"tiny"' in asked(f"{url}/models")
        assert asked(f"http://127.0.0.1:{port}/other") == b"theirs"
        with pytest.raises(SpeqError, match=f"listens on 127.0.0.1 port {port}"), at(port + 1):
            raise AssertionError("the port is another one")
        serve.delete("other")
        serve.run(theirs.bind(), name="other", route_prefix="/")
        with pytest.raises(SpeqError, match="application 'other' of Ray Serve is at /"), at(port):
            raise AssertionError("it was taken")
        assert asked(f"http://127.0.0.1:{port}/") == b"theirs"
        serve.shutdown()
