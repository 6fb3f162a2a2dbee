"""Rendezvous of pipeline stages at an address of rank 0, which listens on no other.

Stages compare fingerprints before they load weights. Then gloo connects them; each listens on the
address by which it reached rank 0.
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

from speq.errors import DependencyError, PeerError, SpeqError
from speq.listening import listening_on
from speq.pipeline.fingerprint import ModelFingerprint, RunSettings
from speq.pipeline.settings import address_of
from speq.pipeline.stage_key import MessageSignatures, StageKey
from speq.pipeline.wire import GlooRing

# Between checks whether a stage has arrived: a wait of the store could not be interrupted.
LOOK_S = 0.1
# Key that rank 0 sets when all stages have arrived.
ALL_CAME = "all came"
UNSIGNED = StageKey()


def check_gloo() -> None:
    """Raise SpeqError if torch was built without gloo."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise DependencyError(
            "this torch has no gloo, which pipeline stages need; install one of PyTorch's builds"
        )


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which rank 0 waits for the other stages.

    rendezvous  HOST:PORT
    look        called while it waits; raises SpeqError if a stage will not come
    """

    rendezvous: str
    listening: socket.socket
    look: Callable[[], None] = lambda: None

    @classmethod
    def at(cls, rendezvous: str) -> "Rendezvous":
        """Listen at an address. Raises SpeqError if that fails."""
        remedy = "give an address of this machine, and a port that is free"
        what = f"rendezvous {rendezvous}"
        return cls(rendezvous, listening_on(*address_of(rendezvous), what, remedy))


def open_ring(
    meeting_point: Rendezvous,
    fingerprint: ModelFingerprint,
    shared: RunSettings,
    most_row_bytes: int,
    wait_s: float,
    key: StageKey = UNSIGNED,
) -> GlooRing:
    """Wait as rank 0 for the other stages. Raises SpeqError if one differs or does not come."""
    rendezvous, listening = meeting_point.rendezvous, meeting_point.listening
    count = len(fingerprint.counts)
    own, port = listening.getsockname()[:2]
    with translate_store_errors(rendezvous):
        store: Any = dist.TCPStore(
            own,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        store.set("shared", key.sign("shared", shared.to_json()))
        store.set("first", key.sign("first", fingerprint.to_json()))
    nonces, deadline_s = [key.nonce], time.monotonic() + wait_s
    for number in range(2, count + 1):
        while not store.check([arrival_key(number)]):
            meeting_point.look()
            if time.monotonic() > deadline_s:
                raise PeerError(
                    f"stage {number} of {count} did not come to {rendezvous} within {wait_s:g} s; "
                    f"start it there with `speq stage` and --stage {number}"
                )
            time.sleep(LOOK_S)
        who = f"stage {number} of {count}"
        arrival = arrival_key(number)
        told, nonce = key.verify(arrival, store.get(arrival), who)
        fingerprint.check(ModelFingerprint.of_json(told, who), who)
        nonces.append(nonce)
    store.set(ALL_CAME, "")
    signatures = MessageSignatures.of(key, nonces)
    return connect_ring(store, own, 1, count, most_row_bytes, wait_s, rendezvous, signatures)


def join_ring(
    rendezvous: str,
    number: int,
    fingerprint: ModelFingerprint,
    most_row_bytes: int,
    wait_s: float,
    key: StageKey = UNSIGNED,
) -> tuple[GlooRing, RunSettings]:
    """Join rank 0 as stage `number`.

    Raises SpeqError if rank 0 differs or is not there, or if another process is that stage.
    """
    check_gloo()
    host, port = address_of(rendezvous)
    count = len(fingerprint.counts)
    own = local_address(rendezvous, wait_s)
    with translate_store_errors(rendezvous):
        store: Any = dist.TCPStore(
            host, port, None, timeout=timedelta(seconds=wait_s), wait_for_workers=False
        )
        # Read everything before rank 0 learns of this stage: rank 0 ends if it refuses the stage.
        first, shared = store.get("first"), store.get("shared")
        taken = store.add(f"taken {number}", 1) > 1
        if not taken:
            arrival = arrival_key(number)
            store.set(arrival, key.sign(arrival, fingerprint.to_json()))
    if taken:
        raise PeerError(
            f"another process joined {rendezvous} as stage {number} before; give each its own "
            "number"
        )
    told, nonce = key.verify("first", first, "the first stage")
    fingerprint.check(ModelFingerprint.of_json(told, "the first stage"), "the first stage")
    settings, _ = key.verify("shared", shared, "the first stage")
    deadline_s = time.monotonic() + wait_s
    with translate_store_errors(rendezvous):
        while not store.check([ALL_CAME]) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        told_by = [(arrival_key(at), store.get(arrival_key(at))) for at in range(2, count + 1)]
    nonces = [nonce, *(key.verify(arrival, told, arrival)[1] for arrival, told in told_by)]
    signatures = MessageSignatures.of(key, nonces)
    ring = connect_ring(store, own, number, count, most_row_bytes, wait_s, rendezvous, signatures)
    return ring, RunSettings.of_json(settings)


def arrival_key(number: int) -> str:
    """Key of the store under which a stage puts its fingerprint."""
    return f"stage {number}"


def connect_ring(
    store: Any,
    own: str,
    number: int,
    count: int,
    most_row_bytes: int,
    wait_s: float,
    rendezvous: str,
    signatures: MessageSignatures,
) -> GlooRing:
    """Connect the stages with gloo. own: address at which this stage listens"""
    with translate_store_errors(rendezvous):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=wait_s)
        group = dist.ProcessGroupGloo(store, number - 1, count, options)
    return GlooRing(group, number, count, most_row_bytes, wait_s, signatures)


def local_address(rendezvous: str, wait_s: float) -> str:
    """Return the address from which this machine reaches rank 0, once that listens."""
    host, port = address_of(rendezvous)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(wait_s, 10)) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise PeerError(
                    f"nobody listens on rendezvous {rendezvous} ({error.strerror or error}) after "
                    f"{wait_s:g} s; start the first stage, with --rendezvous {rendezvous}"
                ) from error
        time.sleep(LOOK_S)


@contextmanager
def translate_store_errors(rendezvous: str) -> Iterator[None]:
    """Raise failures of torch's store and of gloo as a SpeqError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, SpeqError):
            raise
        reason = ""
        with contextlib.suppress(IndexError):
            reason = str(error).strip().splitlines()[0][:200]
        raise PeerError(
            f"the pipeline stages did not connect at {rendezvous}: {reason}; look at the output of "
            "the others"
        ) from error
