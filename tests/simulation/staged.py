"""Pipeline stages of a world in threads of this process, over a simulated network."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.generator import Generator
from speq.load import load
from speq.pipeline.fingerprint import RunSettings
from speq.pipeline.first_stage import RingStages, most_row_bytes
from speq.pipeline.later_stage import Stage, with_run_settings
from speq.pipeline.settings import with_stages
from speq.pipeline.stage_key import MessageSignatures, StageKey
from speq.pipeline.wire import GlooRing
from speq.runtime import Runtime
from tests.helpers.stages import closing_opened
from tests.simulation.network import HANG_S, SimulatedNetwork
from tests.simulation.world import World

# Of each later stage: some of its experts have no slot.
BUDGET = "3MiB"
# Longest wait of a stage for another one, by the simulated clocks.
WAIT_S = 60.0


@contextmanager
def staged(
    world: World, network: SimulatedNetwork, struck: Callable[[], int]
) -> Iterator[Generator]:
    """A generator over the first of a world's stages. Another one may end by a SpeqError, or by
    Ctrl-C.

    struck  faults so far, of which there must be one then
    """
    first_config = with_stages(RunConfig.of(world.budget, **world.options))
    config = with_run_settings(
        with_stages(RunConfig.of(BUDGET, **world.options)), RunSettings.of(first_config)
    )
    key = StageKey(b"key of a simulation") if world.keyed else StageKey()
    count, layers = network.count, ",".join(map(str, world.stages))
    ended: list[BaseException] = []
    with ExitStack() as stack:

        def ring(number: int) -> GlooRing:
            signatures = MessageSignatures.of(key, [b"nonce"] * count)
            group = network.group(number - 1)
            return GlooRing(group, number, count, row_bytes, WAIT_S, signatures)

        def serve(stage: Stage) -> None:
            try:
                stage.serve()
            except BaseException as error:
                ended.append(error)
            finally:
                network.end(stage.ring.number - 1)

        first, *others = [
            stack.enter_context(closing_opened(world.folder, layers, number, False))
            for number in range(1, count + 1)
        ]
        row_bytes = most_row_bytes(first)
        threads = []
        for number, opened in enumerate(others, start=2):
            runtime = Runtime(load(opened, config))
            stack.callback(runtime.engine.close)
            stage = Stage(runtime, ring(number))
            threads.append(threading.Thread(target=serve, args=[stage], daemon=True))
            threads[-1].start()
        generator = Generator.of_opened(first, first_config, remote=RingStages(ring(1), WAIT_S))
        try:
            yield generator
        finally:
            generator.close()
            network.end(0)
            for thread in threads:
                thread.join(HANG_S)
        assert not any(thread.is_alive() for thread in threads), "a stage outlives the run"
    for error in ended:
        assert isinstance(error, SpeqError | KeyboardInterrupt), repr(error)
        assert struck(), f"a stage ended: {error}"
