"""How stages find each other: at an address of the first one, which listens on no other.

Each says what it has before anyone loads a weight. Then gloo connects them, each listening on the
address by which it reached the first.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from speq.errors import SpeqError
from speq.listening import listening_on
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings
from speq.pipeline.settings import address_of
from speq.pipeline.wire import GlooRing

# Between looks whether a stage has come: waiting itself could not be interrupted.
LOOK_S = 0.1
# Said by the first stage.
ALL_CAME = "all came"


def check_gloo() -> None:
    """Raise SpeqError where torch was built without what stages talk over."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise SpeqError(
            "this torch has no gloo, over which stages talk; install one of PyTorch's own builds"
        )


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the first stage listens for the others.

    rendezvous  HOST:PORT, as they are told
    look        called while it waits; raises SpeqError where one of the others will not come
    """

    rendezvous: str
    listening: socket.socket
    look: Callable[[], None] = lambda: None

    @classmethod
    def at(cls, rendezvous: str) -> "Rendezvous":
        """Raises SpeqError for an address that cannot be listened on."""
        remedy = "give an address of this machine, and a port that is free"
        what = f"rendezvous {rendezvous}"
        return cls(rendezvous, listening_on(*address_of(rendezvous), what, remedy))


def open_ring(
    meeting_point: Rendezvous,
    agreement: ModelFingerprint,
    shared: RunSettings,
    most_row_bytes: int,
    wait_s: float,
) -> GlooRing:
    """Of the first stage: wait for the others. Raises SpeqError where one differs or stays away."""
    rendezvous, listening = meeting_point.rendezvous, meeting_point.listening
    count = len(agreement.counts)
    own, port = listening.getsockname()[:2]
    with saying_where(rendezvous):
        store: Any = dist.TCPStore(
            own,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        store.set("shared", shared.to_json())
        store.set("first", agreement.to_json())
    deadline_s = time.monotonic() + wait_s
    for number in range(2, count + 1):
        while not store.check([came(number)]):
            meeting_point.look()
            if time.monotonic() > deadline_s:
                raise SpeqError(
                    f"stage {number} of {count} did not come to {rendezvous} within {wait_s:g} s; "
                    f"start it there with `speq stage` and --stage {number}"
                )
            time.sleep(LOOK_S)
        who = f"stage {number} of {count}"
        agreement.check(ModelFingerprint.of_json(store.get(came(number)), who), who)
    store.set(ALL_CAME, "")
    return ring_over(store, own, 1, count, most_row_bytes, wait_s, rendezvous)


def join_ring(
    rendezvous: str, number: int, agreement: ModelFingerprint, most_row_bytes: int, wait_s: float
) -> tuple[GlooRing, RunSettings]:
    """Of a stage behind the first: come to it. Raises SpeqError where it differs or is not there,
    and where another process is that stage already.
    """
    check_gloo()
    host, port = address_of(rendezvous)
    count = len(agreement.counts)
    own = reached_from(rendezvous, wait_s)
    with saying_where(rendezvous):
        store: Any = dist.TCPStore(
            host, port, None, timeout=timedelta(seconds=wait_s), wait_for_workers=False
        )
        # All is read before the first stage hears of this one: it leaves where it refuses that.
        first, shared = store.get("first"), store.get("shared")
        taken = store.add(f"taken {number}", 1) > 1
        if not taken:
            store.set(came(number), agreement.to_json())
    if taken:
        raise SpeqError(
            f"another process came to {rendezvous} as stage {number} before; give each its own "
            "number"
        )
    agreement.check(ModelFingerprint.of_json(first, "the first stage"), "the first stage")
    deadline_s = time.monotonic() + wait_s
    with saying_where(rendezvous):
        while not store.check([ALL_CAME]) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
    ring = ring_over(store, own, number, count, most_row_bytes, wait_s, rendezvous)
    return ring, RunSettings.of_json(shared)


def came(number: int) -> str:
    """Where a stage says what it has."""
    return f"stage {number}"


def ring_over(
    store: Any,
    own: str,
    number: int,
    count: int,
    most_row_bytes: int,
    wait_s: float,
    rendezvous: str,
) -> GlooRing:
    """own: the address that this stage listens on for the others"""
    with saying_where(rendezvous):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=wait_s)
        group = dist.ProcessGroupGloo(store, number - 1, count, options)
    return GlooRing(group, number, count, most_row_bytes, wait_s)


def reached_from(rendezvous: str, wait_s: float) -> str:
    """The address by which this machine reaches the first one, once that listens."""
    host, port = address_of(rendezvous)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(wait_s, 10)) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise SpeqError(
                    f"nobody listens on rendezvous {rendezvous} ({error.strerror or error}) after "
                    f"{wait_s:g} s; start the first stage, with --rendezvous {rendezvous}"
                ) from error
        time.sleep(LOOK_S)


@contextmanager
def saying_where(rendezvous: str) -> Iterator[None]:
    """Failures of torch's store and of gloo as one sentence."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, SpeqError):
            raise
        reason = ""
        with contextlib.suppress(IndexError):
            reason = str(error).strip().splitlines()[0][:200]
        raise SpeqError(
            f"the stages did not meet at {rendezvous}: {reason}; look at the output of the others"
        ) from error
