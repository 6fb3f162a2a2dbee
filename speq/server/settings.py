"""Options of `speq serve` beside those of a run. Nothing here needs what serves."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from speq.errors import OptionError
from speq.options.declared import Option, Options
from speq.options.kinds import File, ListOf, Number, Size, Switch, Text, Whole

LOOPBACK = "127.0.0.1"
ANY_PORT = Whole(0, 65535)


@dataclass(frozen=True, slots=True)
class ServerSettings(Options):
    """The address of the server, and how many and how large requests may be."""

    host: Annotated[
        str,
        Option(
            "Address to listen on. One that other machines reach needs --api-key-file.",
            Text("an address of this machine"),
        ),
    ] = LOOPBACK
    port: Annotated[int, Option("Port to listen on; 0: any that is free.", ANY_PORT)] = 8000
    api_key_file: Annotated[
        Path | None,
        Option(
            "File with a key in each line, of which requests must give one.",
            File("a file of keys", readable=True),
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        Option(
            "File with a key in each line, of which a request for another memory budget must give "
            "one; without it there are none.",
            File("a file of keys", readable=True),
        ),
    ] = None
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            "Another name by which clients reach the server, such as host.docker.internal.",
            ListOf(Text("a host's name"), repeated=True),
        ),
    ] = ()
    cors: Annotated[
        tuple[str, ...],
        Option(
            "Origin of a page that may ask from a browser, such as http://localhost:3000; *: any "
            "page may.",
            ListOf(Text("an origin, or *"), repeated=True),
        ),
    ] = ()
    served_model_name: Annotated[
        str | None,
        Option(
            "What clients call the model; default: the folder's name, or the hub id.",
            Text("a name"),
        ),
    ] = None
    default_max_tokens: Annotated[
        int,
        Option(
            "Tokens of an answer at most where a request of a chat says nothing; fewer where the "
            "context ends before.",
            Whole(1),
        ),
    ] = 512
    max_waiting: Annotated[
        int, Option("Requests that wait for their turn; more are refused.", Whole(0, 10_000))
    ] = 16
    max_body: Annotated[int, Option("Size of a request at most.", Size())] = 4 << 20
    shutdown_seconds: Annotated[
        float,
        Option("Time that running requests have to finish once the server ends.", Number(3600)),
    ] = 30.0
    dashboard: Annotated[
        bool,
        Option("Also serve a page on this machine that shows what is generated.", Switch()),
    ] = False
    dashboard_port: Annotated[int, Option("Port of that page; 0: any.", ANY_PORT)] = 0

    @property
    def loopback(self) -> bool:
        """True where no other machine reaches the server."""
        return address_of(self.host).is_loopback

    def check_together(self) -> None:
        """Raise SpeqError for an address that is none, and for an open one without keys."""
        if not self.loopback and self.api_key_file is None:
            raise OptionError(
                f"host is {self.host}, which other machines reach, and there is no key; give "
                f"--api-key-file, or leave --host out to listen on {LOOPBACK}"
            )
        if self.dashboard_port and not self.dashboard:
            raise OptionError("dashboard_port is given and dashboard is not; give --dashboard too")


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Raises SpeqError for what is no address."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise OptionError(
            f"host is {host!r}; it must be an address, such as {LOOPBACK}, ::1 or 0.0.0.0"
        ) from None
