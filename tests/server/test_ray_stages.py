"""Stages that Ray places: on this machine, and on a cluster of several nodes that it stands for."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speq.config import RunConfig
from speq.errors import EngineLost, SpeqError
from speq.generator import Generator
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings, current_versions
from speq.pipeline.rendezvous import open_ring
from speq.pipeline.settings import StagesSettings
from speq.ray.cluster import cluster
from speq.ray.settings import RaySettings
from speq.ray.stages import PlacementGroup, ray_stages
from tests.helpers.command import Command
from tests.helpers.ray_needed import need_ray, processes_of
from tests.helpers.stages import MOST_BYTES, PATIENCE_S
from tests.helpers.tiny_models import greedy_tokens, load_plain

pytestmark = pytest.mark.full
TOKENS = 16


@pytest.fixture(autouse=True)
def ray_is_there(pytestconfig: pytest.Config) -> None:
    need_ray(pytestconfig)


def test_a_command_whose_stages_ray_places(command: Command, bundled: Path, tmp_path: Path) -> None:
    """It has the tokens of plain transformers, and leaves no stage behind."""
    path = tmp_path / "answer.json"
    ended = command(
        "generate", bundled, "--memory-budget", "24MiB", "--dtype", "float32", "--prompt",
        "Once upon a time", "--max-new-tokens", TOKENS, "--ignore-eos", "--json", path,
        "--stages", 2, "--ray", "--replica-cpus", 1,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    answer = json.loads(path.read_text())
    from speq.text.tokenizer import load_tokenizer

    ids = load_tokenizer(bundled)("Once upon a time")["input_ids"]
    assert answer["token_ids"] == greedy_tokens(load_plain(bundled), ids, TOKENS)
    assert processes_of("StageActor") == []


def test_a_killed_stage_ends_the_run(bundled: Path) -> None:
    run = RunConfig.of("24MiB", dtype="float32")
    settings = StagesSettings(stages="2", stage_wait_s=PATIENCE_S)
    with (
        cluster(RaySettings(True).of_stages(2)),
        ray_stages(str(bundled), run, "2", 1, PATIENCE_S) as rendezvous,
    ):
        generator = Generator.load(bundled, run, stages=settings, rendezvous=rendezvous)
        try:
            stream = generator.stream("a", max_new_tokens=100, ignore_eos=True)
            next(stream)
            (stage,) = processes_of("StageActor")
            os.kill(stage, signal.SIGKILL)
            with pytest.raises(EngineLost, match="stage 2 of 2 has ended"):
                list(stream)
            with pytest.raises(EngineLost, match="stage 2 of 2 has ended"):
                generator.check_alive()
        finally:
            generator.close()
    assert processes_of("StageActor") == []


def test_a_stage_that_cannot_begin_is_not_waited_for() -> None:
    run = RunConfig.of("24MiB")
    agreed, shared = ModelFingerprint("f" * 64, current_versions(), [1, 1]), RunSettings.of(run)
    with (
        cluster(RaySettings(True).of_stages(2)),
        ray_stages("/no/such/model", run, "2", 1, PATIENCE_S) as rendezvous,
        pytest.raises(SpeqError, match=r"^stage 2 of 2 has ended on Ray: .*'/no/such/model'"),
    ):
        open_ring(rendezvous, agreed, shared, MOST_BYTES, PATIENCE_S)


@pytest.fixture
def three_nodes() -> Iterator[str]:
    """The address of a cluster with a first machine of no cores, and two of one core."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        yield str(made.address)
    finally:
        made.shutdown()


def test_each_stage_has_a_machine_where_there_are_enough(
    three_nodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    with cluster(RaySettings(True, ray_address=three_nodes)):
        room = PlacementGroup.of(3, 1, PATIENCE_S)
        told: dict[str, Any] = placement_group_table(room.group)
        nodes = told["bundles_to_node_id"]
        assert (told["strategy"], len(set(nodes.values()))) == ("STRICT_SPREAD", 3)
        assert nodes[0] == ray.get_runtime_context().get_node_id()
        assert "share one" not in caplog.text
        room.close()
        with pytest.raises(SpeqError, match="no room for 3 stages of 1 cores within 1 s"):
            PlacementGroup.of(4, 1, 1.0)
        assert "beside this one the Ray cluster has 2 with 1 cores" in caplog.text
