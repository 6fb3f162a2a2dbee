"""`speq serve`: a server for clients of OpenAI's API."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from speq.cli import options as opt
from speq.cli.machines import check_machines, open_generator
from speq.config import Model, RunConfig
from speq.pipeline.settings import StagesSettings
from speq.server.ray_settings import RayServeSettings
from speq.server.settings import ServeSettings

if TYPE_CHECKING:
    from speq.dashboard.live.metrics import Metrics
    from speq.generator import Generator
    from speq.server.keys import Keys
    from speq.server.watched import Watched


def serve(
    model: Model,
    settings: ServeSettings,
    run: RunConfig,
    replicas: RayServeSettings,
    machines: StagesSettings,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Serve chats and completions as OpenAI's API has them; Ctrl-C ends it.

    It prints the base URL for clients, then the address of the page that shows what is generated,
    if there is one. So many requests run side by side as --max-batch says, by each replica with
    --ray; others wait.
    """
    from speq.dashboard.live.needed import check_serve

    check_serve()
    check_machines(machines, replicas)
    from speq.dashboard.live.metrics import Metrics
    from speq.dashboard.live.server import port_of
    from speq.engine.engine_thread import EngineThread
    from speq.server.defaults import sampling_defaults
    from speq.server.keys import Keys
    from speq.server.server import ApiServer
    from speq.server.service import Service

    name = settings.served_model_name or name_of(model)
    keys = None if settings.api_key_file is None else Keys.of(settings.api_key_file)
    if replicas.ray and not machines.wanted:
        serve_on_ray(model, name, settings, run, replicas, keys, output)
        return
    metrics = Metrics(name)
    with ExitStack() as stack:
        stack.enter_context(opt.log_of(output.quiet))
        stack.enter_context(terminated_as_interrupted())
        # First: a port that is not to be had is refused before a model is loaded.
        listening = stack.enter_context(closing(port_of(settings.host, settings.port)))
        generator = stack.enter_context(
            open_generator(model, run, machines, replicas, quiet=output.quiet)
        )
        stack.enter_context(metrics.listening(generator.runtime.recorder))
        viewers: list[Watched] = []
        addresses: list[str] = []
        if settings.dashboard:
            port = settings.dashboard_port
            watched, address = stack.enter_context(page_of(generator, metrics, port))
            viewers.append(watched)
            addresses.append(address)
        folder = generator.runtime.opened.checkpoint.path
        service = Service(generator, name, settings.default_max_tokens, sampling_defaults(folder))
        worker = EngineThread(generator, metrics, settings.max_waiting, viewers)
        stack.enter_context(closing(worker))
        server = ApiServer(service, worker, metrics, settings, keys, listening)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        print(server.url, *addresses, sep="\n", flush=True)
        server.run()


def serve_on_ray(
    model: str,
    name: str,
    settings: ServeSettings,
    run: RunConfig,
    replicas: RayServeSettings,
    keys: "Keys | None",
    output: opt.Output,
) -> None:
    """The same by replicas on a Ray cluster; it prints the base URL once they can answer."""
    from speq.errors import SpeqError
    from speq.server.ray_cluster import check_ray, cluster

    check_ray()
    if settings.dashboard:
        raise SpeqError("dashboard and ray are both given; the page shows a single generator")
    from speq.server.ray_app import replicas_on_ray

    with (
        contextlib.suppress(KeyboardInterrupt),
        opt.log_of(output.quiet),
        terminated_as_interrupted(),
        cluster(replicas),
        replicas_on_ray(model, name, run, settings, replicas, keys) as url,
    ):
        print(url, flush=True)
        threading.Event().wait()


def name_of(model: str) -> str:
    """A folder's name, or a hub id as it is."""
    return Path(model).resolve().name if Path(model).exists() else model


@contextmanager
def page_of(
    generator: "Generator", metrics: "Metrics", port: int
) -> "Iterator[tuple[Watched, str]]":
    """What a live page shows of a generator, and its address; it is served meanwhile."""
    from speq.dashboard.live.server import LiveServer, bound
    from speq.dashboard.recording import Recording
    from speq.dashboard.run_panels.run_page import panels_of
    from speq.server.watched import Watched

    with (
        closing(bound(port=port)) as listening,
        Recording(generator) as recording,
        closing(Watched(generator, recording, panels_of)) as watched,
    ):
        page = LiveServer(watched, metrics, listening)
        thread = threading.Thread(target=page.run, name="speq-live-page")
        thread.start()
        try:
            yield watched, page.url
        finally:
            page.stop()
            thread.join()


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """What ends services (SIGTERM) ends the block as Ctrl-C does: with all that it closes."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
