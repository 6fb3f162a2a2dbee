"""Kinds of refusals, which programs tell apart by their codes."""

import pytest

from speq.engine import token_stream
from speq.errors import DeviceError, OptionError, SpeqError, checked_int
from speq.files import alone
from speq.offline import openai_format
from speq.planning import memory
from speq.text import tokenizer

# Modules with kinds of their own, which must be loaded for them to be found.
HOMES = (alone, memory, openai_format, token_stream, tokenizer)
CODES = {
    "SpeqError": "invalid",
    "BudgetTooSmall": "no_room",
    "CheckpointError": "bad_checkpoint",
    "DependencyError": "missing_dependency",
    "DeviceError": "device_failed",
    "EngineFailed": "engine_failed",
    "EngineLost": "engine_lost",
    "FileError": "bad_file",
    "FolderTaken": "folder_taken",
    "NoRoom": "no_room",
    "NoTokenizer": "no_tokenizer",
    "OptionError": "bad_option",
    "PeerError": "peer_failed",
    "QueueFull": "queue_full",
    "Refused": "invalid",
    "TemplateRefused": "template_refused",
    "Unavailable": "unavailable",
    "UnsupportedError": "unsupported",
}


def kinds(base: type[SpeqError]) -> dict[str, str]:
    found = {base.__name__: base.code} if base.__module__.startswith("speq.") else {}
    for each in base.__subclasses__():
        found |= kinds(each)
    return found


def test_each_kind_has_its_code() -> None:
    assert kinds(SpeqError) == CODES


def test_a_program_tells_them_apart() -> None:
    with pytest.raises(SpeqError) as refused:
        checked_int("draft_length", -1, 0)
    assert (type(refused.value), refused.value.code) == (OptionError, "bad_option")
    assert not issubclass(DeviceError, OptionError)
