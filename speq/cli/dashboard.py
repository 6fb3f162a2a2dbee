"""`speq dashboard`: a server whose clients are pages on this machine."""

import contextlib
import threading
import webbrowser
from dataclasses import dataclass
from typing import Annotated

from speq.cli import options as opt
from speq.cli.serve import model_name
from speq.config import Model, RunConfig
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, Switch, Whole

LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class DashboardSettings(Options):
    """The address of the page."""

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
    """Serve a page that asks for text and shows how it is generated; Ctrl-C ends it.

    It prints the page's address. Who has the address may use the page: keep it to yourself.
    """
    from speq.server.needed import check_serve

    check_serve()
    from speq.server.server import ApiServer, listen, serve_model
    from speq.server.settings import ServerSettings

    with (
        opt.log_of(output.quiet),
        # First: a port that is not to be had is refused before a model is loaded.
        contextlib.closing(listen(settings.host, settings.port)) as listening,
        contextlib.closing(opt.load_generator(model, run, quiet=output.quiet)) as generator,
        serve_model(
            generator, model_name(model), ServerSettings(shutdown_seconds=0), watched=True
        ) as served,
        contextlib.suppress(KeyboardInterrupt),
    ):
        server = ApiServer(served, None, None, listening)
        print(server.page_url, flush=True)
        if settings.open:
            # Some browsers run in the terminal, and `open` returns when they have ended.
            arguments = server.page_url, output
            threading.Thread(target=open_browser, args=arguments, daemon=True).start()
        server.run()


def open_browser(url: str, output: opt.Output) -> None:
    if not webbrowser.open(url):
        output.note("no browser was found; open the address yourself")
