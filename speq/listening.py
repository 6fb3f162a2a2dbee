"""A socket that listens on one address, or a sentence on why it cannot be had."""

import socket

from speq.errors import FileError


def listening_on(host: str, port: int, what: str, remedy: str) -> socket.socket:
    """Listen by IPv4 or IPv6, as the host is; by IPv4 for a name of both. Port 0: any that is free.

    what    cannot be listened on, as users know it
    remedy  what they can do then

    Raises SpeqError for an address that is not this machine's, or is taken.
    """
    try:
        return _bound(host, port)
    except OSError as error:
        raise FileError(
            f"{what} cannot be listened on: {error.strerror or error}; {remedy}"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError:
        made.close()
        raise
    return made
