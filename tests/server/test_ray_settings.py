"""Options of replicas, and a replica by itself, without Ray."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.options.declared import build
from speq.ray.cluster import check_ray
from speq.ray.replicas import ReplicaSpec, ServerReplica, deployment_options
from speq.ray.settings import RayServeSettings, RaySettings
from speq.server.access import Access
from speq.server.settings import ServerSettings
from tests.helpers.command import Command


@pytest.mark.parametrize(
    ("config", "given", "sentence"),
    [
        (RaySettings, {"replicas": 2}, "replicas is given and ray is not; give --ray too"),
        (RaySettings, {"ray_address": "auto"}, "ray_address is given and ray is not"),
        (RayServeSettings, {"max_replicas": 2}, "max_replicas is given and ray is not"),
        (
            RayServeSettings,
            {"ray": True, "replicas": 3, "max_replicas": 2},
            "max_replicas is 2 and replicas is 3",
        ),
        (RaySettings, {"ray": True, "replicas": 0}, "replicas is 0; it must be from 1"),
    ],
)
def test_settings_that_are_refused(config: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        build(config, given)


def test_where_ray_is_absent_a_sentence_says_what_to_install(
    command: Command, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else own(name, *a)
    )
    with pytest.raises(SpeqError, match=r"Ray is not installed here; pip install 'ray\[serve\]'"):
        check_ray()
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a"}')
    files = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    stages = "generate", bundled, "--prompt", "a", "--stages", 2
    for arguments in (("serve", bundled), ("batch", bundled, *files), stages):
        ended = command(*arguments, "--memory-budget", "64MiB", "--ray")
        assert ended.code == 1
        assert "error: Ray is not installed here" in ended.err


def test_cores_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speq.ray.settings.processors", lambda: 8)
    here, there = RaySettings(True), RaySettings(True, ray_address="auto")
    assert (here.of_stages(3).cpus, here.of_stages(3).most) == (2, 3)
    assert there.of_stages(3).cpus == 8
    assert RaySettings(True, replica_cpus=5).of_stages(3).cpus == 5


def test_what_ray_serve_is_told() -> None:
    run, serve = RunConfig.of("1GiB", max_batch=4), ServerSettings(shutdown_seconds=7)
    fixed = deployment_options(run, serve, RayServeSettings(True, replicas=3, replica_cpus=2))
    assert fixed["num_replicas"] == 3
    assert "autoscaling_config" not in fixed
    assert fixed["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    assert fixed["graceful_shutdown_timeout_s"] > 7
    settings = RayServeSettings(True, replicas=2, replica_gpus=1, max_replicas=5)
    scaled = deployment_options(run, serve, settings)
    assert "num_replicas" not in scaled
    assert scaled["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 4,
    }
    assert scaled["ray_actor_options"]["num_gpus"] == 1


def test_a_replica_answers_as_the_server_does(bundled: Path) -> None:
    run = RunConfig.of("64MiB", dtype="float32", context_length=128, reader_threads=2)
    settings = ServerSettings()
    address = "127.0.0.1:8000"
    spec = ReplicaSpec(str(bundled), "tiny", run, settings)
    replica = ServerReplica(spec, Access("127.0.0.1", 8000, None, settings.max_body))

    async def asked() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())  # type: ignore[arg-type]
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": 5, "temperature": 0}
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{address}") as client:
            made = await client.post("/v1/completions", json=body)
            health = await client.get("/health")
            other = await client.get("/health", headers={"host": "elsewhere"})
        return made, health, other

    try:
        made, health, other = asyncio.run(asked())
        assert made.status_code == 200 and health.status_code == 200
        assert made.json()["usage"]["completion_tokens"] == 5
        assert other.status_code == 421
        replica.check_health()
        replica._served.thread.failure = "the engine died"
        with pytest.raises(SpeqError, match="the engine died"):
            replica.check_health()
    finally:
        replica.__del__()
