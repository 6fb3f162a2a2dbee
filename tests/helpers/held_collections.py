"""Interrupts of tests that no finalizer swallows."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_collections() -> Iterator[None]:
    """Collect now, and not before the end: an interrupt in a finalizer is lost."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
