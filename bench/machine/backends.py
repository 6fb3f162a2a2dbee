"""What runs kernels that are timed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from speq.bench.settings import KernelSettings as Settings
from speq.devices.named import find_device
from speq.errors import DependencyError, OptionError, checked_choice
from speq.kernels import library


def backends_of(ops: Mapping[str, str | None], settings: Settings) -> dict[str, str]:
    """What runs each kernel, by name, and the read beside them; `ops` are those they run on.

    Raises SpeqError for the reference, unless it is asked for.
    """
    device = find_device(settings.device).torch
    backends = {}
    for kernel, op in {**ops, "read": "read_sum"}.items():
        backend = (
            library.Backend("torch", "") if op is None else library.backend_of(op, device.type)
        )
        if backend.name == "reference" and not settings.reference:
            raise OptionError(
                f"{op} would run on the slow reference on {device.type}: {backend.reason}; build "
                "the native kernels with `make setup`, or add --reference to time it anyway"
            )
        backends[kernel] = backend.name
    return backends


@contextmanager
def limited_isa(name: str | None, device: torch.device) -> Iterator[str | None]:
    """CPU kernels use no better instructions than `name` for a while; gives what they use.

    Raises SpeqError where these cannot be had.
    """
    native = device.type == "cpu" and library.MISSING["cpu"] is None
    if name is None:
        yield library.isa() if native else None
        return
    if device.type != "cpu":
        raise OptionError(f"isa is {name!r}, which is for kernels on cpu; leave it out on cuda")
    if library.MISSING["cpu"] is not None:
        raise DependencyError(
            f"isa is {name!r}, but there are no native kernels: {library.MISSING['cpu']}"
        )
    before = library.isa()
    checked_choice("isa", name, library.supported_isas())
    library.limit_isa(name)
    try:
        yield name
    finally:
        library.limit_isa(before)
