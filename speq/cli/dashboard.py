"""`speq dashboard`: a page on this machine that shows a generation while it runs."""

import contextlib
import threading
import webbrowser
from dataclasses import dataclass
from typing import Annotated

from speq.cli import options as opt
from speq.config import Model, RunConfig
from speq.dashboard.live.guard import LOOPBACK
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, Switch, Whole


@dataclass(frozen=True, slots=True)
class DashboardSettings(Options):
    """Where the page is served."""

    host: Annotated[
        str,
        Option(
            "Address of this machine to listen on; no other machine can reach it.",
            Choice(LOOPBACK),
        ),
    ] = LOOPBACK[0]
    port: Annotated[int, Option("Port to listen on; 0: any that is free.", Whole(0, 65535))] = 0
    open: Annotated[bool, Option("Open the page in a browser.", Switch())] = False


def dashboard(
    model: Model,
    settings: DashboardSettings,
    run: RunConfig,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Serve a page that generates text and shows how; Ctrl-C ends it.

    It prints the page's address. Who has the address may use the page: keep it to yourself.
    """
    from speq.dashboard.live.needed import check_serve

    check_serve()
    from speq.dashboard.live.metrics import Metrics
    from speq.dashboard.live.server import LiveServer, bound
    from speq.dashboard.live.session import Session
    from speq.dashboard.recording import Recording
    from speq.dashboard.run_panels.run_page import panels_of

    metrics = Metrics(model)
    with (
        opt.log_of(output.quiet),
        # First: a port that is not to be had is refused before a model is loaded.
        contextlib.closing(bound(settings.host, settings.port)) as listening,
        contextlib.closing(opt.load_generator(model, run, quiet=output.quiet)) as generator,
        metrics.listening(generator.runtime.recorder),
        Recording(generator) as recording,
        contextlib.closing(Session(recording, panels_of, metrics)) as session,
        contextlib.suppress(KeyboardInterrupt),
    ):
        server = LiveServer(session, metrics, listening)
        print(server.url, flush=True)
        if settings.open:
            # Some browsers run in the terminal, and `open` returns when they have ended.
            arguments = server.url, output
            threading.Thread(target=open_browser, args=arguments, daemon=True).start()
        server.run()


def open_browser(url: str, output: opt.Output) -> None:
    if not webbrowser.open(url):
        output.note("no browser was found; open the address yourself")
