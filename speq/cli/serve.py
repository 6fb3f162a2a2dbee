"""`speq serve`: a server for clients of OpenAI's API."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from speq.cli import options as opt
from speq.cli.from_dataclass import Exclude
from speq.cli.machines import check_machines, open_generator
from speq.config import Model, RunConfig
from speq.pipeline.settings import StagesSettings
from speq.ray.settings import RayServeSettings
from speq.server.settings import LOOPBACK, ServerSettings

if TYPE_CHECKING:
    from speq.server.access import Keys

# Clients ask for other things between the turns of a long conversation.
KEEPS_PREFIXES = Exclude(defaults=(("prefix_cache", "auto"),))


def serve(
    model: Model,
    settings: ServerSettings,
    run: Annotated[RunConfig, KEEPS_PREFIXES],
    replicas: RayServeSettings,
    machines: StagesSettings,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Serve chats and completions as OpenAI's API has them; Ctrl-C ends it.

    It prints the base URL for clients, then the address of the page that shows what is generated,
    if there is one. At most --max-batch requests run at a time, in each replica with --ray; others
    wait.
    """
    from speq.server.needed import check_serve

    check_serve()
    check_machines(machines, replicas)
    from speq.server.access import Keys
    from speq.server.server import ApiServer, listen, serve_model

    name = settings.served_model_name or model_name(model)
    keys, admin_keys = (
        None if path is None else Keys.read(path)
        for path in (settings.api_key_file, settings.admin_key_file)
    )
    if replicas.ray and not machines.wanted:
        serve_on_ray(model, name, settings, run, replicas, keys, output)
        return
    with ExitStack() as stack:
        stack.enter_context(opt.log_of(output.quiet))
        stack.enter_context(sigterm_as_interrupt())
        # First: a port that is not to be had is refused before a model is loaded.
        listening = stack.enter_context(closing(listen(settings.host, settings.port)))
        page = None
        if settings.dashboard:
            page = stack.enter_context(closing(listen(LOOPBACK, settings.dashboard_port)))
        opened = open_generator(model, run, machines, replicas, quiet=output.quiet)
        generator = stack.enter_context(opened)
        served = stack.enter_context(
            serve_model(generator, name, settings, watched=settings.dashboard)
        )
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        server = ApiServer(served, keys, listening, page, admin_keys)
        urls = [server.url] if page is None else [server.url, server.page_url]
        print(*urls, sep="\n", flush=True)
        if not output.quiet:
            say_next(server.url, keyed=keys is not None)
        server.run()


def say_next(url: str, keyed: bool) -> None:
    """Say on stderr what a person does next. keyed: clients give a key"""
    headers = "-H 'Content-Type: application/json'"
    if keyed:
        headers += " -H 'Authorization: Bearer KEY'"
    asked = '{"messages": [{"role": "user", "content": "Hello"}]}'
    print(
        f"Chat in a browser: {url.removesuffix('v1')}",
        f"Or ask: curl {url}/chat/completions {headers} -d '{asked}'",
        "Ctrl-C ends the server.",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )


def serve_on_ray(
    model: str,
    name: str,
    settings: ServerSettings,
    run: RunConfig,
    replicas: RayServeSettings,
    keys: "Keys | None",
    output: opt.Output,
) -> None:
    """The same by replicas on a Ray cluster; it prints the base URL once they can answer."""
    from speq.errors import OptionError
    from speq.ray.cluster import check_ray, cluster

    check_ray()
    if settings.dashboard:
        raise OptionError("dashboard and ray are both given; the page shows a single generator")
    if settings.admin_key_file is not None:
        raise OptionError(
            "admin_key_file and ray are both given; the budget of replicas stays as it is: leave "
            "admin_key_file out"
        )
    from speq.ray.replicas import replicas_on_ray

    with (
        contextlib.suppress(KeyboardInterrupt),
        opt.log_of(output.quiet),
        sigterm_as_interrupt(),
        cluster(replicas),
        replicas_on_ray(model, name, run, settings, replicas, keys) as url,
    ):
        print(url, flush=True)
        threading.Event().wait()


def model_name(model: str) -> str:
    """What clients call a model: a folder's name, or a hub id as it is."""
    return Path(model).resolve().name if Path(model).exists() else model


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """What ends services (SIGTERM) ends the block as Ctrl-C does: with all that it closes."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
