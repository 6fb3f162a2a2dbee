"""Disks without room: told beforehand, or as files are flushed."""

import errno
import os
import shutil

import pytest


def room_is(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Every disk has so much room from now on."""
    usage = shutil.disk_usage("/")._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def full_at_flush(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The disk is full at the fsync of that number, and then no more."""
    calls, fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
