"""Faults to find, each planted in the product for as long as a block lasts."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from starlette.types import Scope
from torch import Tensor

from speq.engine.offload import Offload
from speq.engine.prefixes import Prefixes
from speq.experts.copied_store import CopySource
from speq.experts.packed_copy import PackedCopy
from speq.experts.packed_store import PackedExpertStore
from speq.files.alignment import release_pages
from speq.files.checkpoint import EXPERTS_JOURNAL
from speq.files.range_file import RangeFile
from speq.models.kv_cache import KVCache
from speq.models.recurrent_cache import RecurrentLayer, RecurrentParts, RecurrentRows
from speq.pipeline.first_stage import RingStages
from speq.pipeline.stage_key import MessageSignatures
from speq.runtime import Runtime
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_loader import ExpertLoader
from speq.server.gate import AccessGate, refuse

Planted = AbstractContextManager[Any]


def evicts_nothing(cache: ExpertCache, num_slots: int, policy: Any = None) -> None:
    """Slots that are given back keep their experts."""
    cache._free = [slot for slot in cache._free if slot < num_slots]
    cache.num_slots = num_slots


def gives_back_one_too_many(offload: Offload, num_slots: int) -> None:
    limit(offload, num_slots)
    release_pages(offload.slots[num_slots - 1 :])


def limits_without_waiting(loader: ExpertLoader, num_slots: int, policy: Any = None) -> None:
    loader.cache.limit(num_slots, policy)


def forgets_without_waiting(loader: ExpertLoader) -> None:
    loader._under_way.clear()
    loader.cache.clear()
    loader._unsettled = False


def publishes_what_failed(loader: ExpertLoader, key: Any, ticket: Any) -> None:
    del loader._under_way[key]
    loader.cache.publish(key, ticket.slot, ticket.ahead)


def takes_short_reads(file: RangeFile, descriptor: int, offset: int, views: Any, n: int) -> int:
    with mock.patch.object(os, "preadv", once(os.preadv, sum(map(len, views)))):
        return fill(file, descriptor, offset, views, n)


def once(read: Callable[..., int], whole: int) -> Callable[..., int]:
    """A read that is taken for whole, however little it brought."""

    def taken(descriptor: int, views: Any, offset: int) -> int:
        return whole if read(descriptor, views, offset) else 0

    return taken


def evicts_what_is_pinned(cache: ExpertCache, keys: Any) -> None:
    pass


def keeps_a_chain(cache: KVCache, path: list[int]) -> None:
    keep_path(cache, list(range(len(path))))


def keeps_one_less(cache: KVCache, path: list[int]) -> None:
    keep_path(cache, path[:-1] or path)


def takes_any_prefix(prefixes: Prefixes, kv_slot: int, ids: list[int], owner: str = "") -> int:
    return min(prefixes.caches[kv_slot].length, max(len(ids) - 1, 0))


def follows_no_budget(runtime: Runtime, idle: bool = False) -> None:
    """The budget is said, and slots stay."""
    runtime.plan = runtime.plan.with_slots(runtime.wanted_budget, runtime.plan.slots)


def leaves_files_open(file: RangeFile) -> None:
    pass


def tells_stages_nothing(stages: RingStages, hidden_states: Tensor) -> Tensor:
    """KV caches of later stages do not follow those of the first."""
    stages.changes.clear()
    return run_stages(stages, hidden_states)


def takes_a_draft_for_a_prompt(
    states: RecurrentLayer, rows: RecurrentRows, parts: RecurrentParts
) -> Tensor:
    """What is not accepted stays in the state."""
    if len(rows.inputs) <= MAX_PLAIN_ROWS:
        return run_states(states, rows, parts)
    states._parts = parts
    states._begin(parts)
    return states._read(rows, parts)


def asks_for_all_its_room(copy: PackedCopy) -> bool:
    return copy.usual_bytes <= shutil.disk_usage(copy.folder).free


def holds_whatever_files(source: CopySource, stamp: str) -> bool:
    return bool(source.words_crc32s)


def copies_all(source: Path, out: Path) -> None:
    """Files that no run reads, each of them whole in memory."""
    for each in sorted(source.iterdir(), key=lambda each: each.name == "config.json"):
        if each.suffix != ".safetensors":
            (out / each.name).write_bytes(each.read_bytes())
    (out / EXPERTS_JOURNAL).unlink(missing_ok=True)


async def counts_from_headers_on(gate: AccessGate, scope: Scope, receive: Any, send: Any) -> None:
    """Half-sent bodies are requests that are answered."""
    if (busy := gate._busy()) is not None:
        await refuse(busy, send)
        return
    gate._requests += 1
    try:
        await let_in(gate, scope, receive, send)
    finally:
        gate._requests -= 1


# Rows that no step has but one of a long draft.
MAX_PLAIN_ROWS = 40
let_in = AccessGate.__call__
run_stages, run_states = RingStages.run, RecurrentLayer.run
limit, keep_path, fill = Offload.limit, KVCache.keep_path, RangeFile._fill


def patched(kind: type, name: str, by: Callable[..., Any]) -> Callable[[], Planted]:
    return lambda: mock.patch.object(kind, name, by)


# World in which a fault is to be found, and what plants it.
PLANTED: dict[str, tuple[str, Callable[[], Planted]]] = {
    "experts stay in slots given back": ("plain", patched(ExpertCache, "limit", evicts_nothing)),
    "a used slot is given back": ("plain", patched(Offload, "limit", gives_back_one_too_many)),
    "slots are taken from under transfers": (
        "batch",
        patched(ExpertLoader, "limit", limits_without_waiting),
    ),
    "an interrupt leaves transfers": (
        "batch",
        patched(ExpertLoader, "forget", forgets_without_waiting),
    ),
    "failed reads are published": ("plain", patched(ExpertLoader, "_close", publishes_what_failed)),
    "short reads are taken for whole": ("plain", patched(RangeFile, "_fill", takes_short_reads)),
    "checksums are not compared": ("pack", patched(PackedExpertStore, "_verify", lambda *_: None)),
    "pins hold nothing": ("batch", patched(ExpertCache, "pin", evicts_what_is_pinned)),
    "a tree's path is kept as a chain": (
        "tree",
        patched(KVCache, "keep_path", keeps_a_chain),
    ),
    "a token of a draft is lost": ("int4", patched(KVCache, "keep_path", keeps_one_less)),
    "another prompt's prefix is reused": ("plain", patched(Prefixes, "begin", takes_any_prefix)),
    "states are not those of the prefix": ("states", patched(KVCache, "_restore", lambda *_: None)),
    "a budget is said and not followed": (
        "plain",
        patched(Runtime, "follow_budget", follows_no_budget),
    ),
    "stages do not follow one another": (
        "stages",
        patched(RingStages, "run", tells_stages_nothing),
    ),
    "signatures are not compared": (
        "signed",
        patched(MessageSignatures, "check_received", lambda *_: None),
    ),
    "a long draft is taken for a prompt": (
        "long",
        patched(RecurrentLayer, "run", takes_a_draft_for_a_prompt),
    ),
    "a copy is of other weights": ("copy", patched(CopySource, "holds", holds_whatever_files)),
    "a copy is not verified": ("copy", patched(PackedExpertStore, "_verify", lambda *_: None)),
    "a copy is never gone on with": (
        "copy",
        patched(PackedCopy, "_has_room", asks_for_all_its_room),
    ),
    "a pack has all there is": (
        "pack",
        lambda: mock.patch("speq.experts.pack.copy_rest", copies_all),
    ),
    "half-sent bodies refuse everybody": (
        "served",
        patched(AccessGate, "__call__", counts_from_headers_on),
    ),
    "files stay open": ("pack", patched(RangeFile, "close", leaves_files_open)),
}
