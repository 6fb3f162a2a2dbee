"""Cached files of runs, in the cache folder and beside models: listing, removal, and a size limit.

The cache folder has copies of experts, drafts of models whose folder cannot be written, profiles,
expert counts and digests. limit.json in it has its limit in bytes.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.errors import FileError, SpeqError
from speq.files.alone import FolderTaken, lock_folder
from speq.files.atomic_file import PARTIAL_NAME, write_whole
from speq.files.cache_folder import (
    BESIDE,
    COPIES,
    COUNTS,
    DIGESTS,
    DRAFTS,
    PROFILES,
    cache_folder,
)
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint
from speq.files.json_file import read_json
from speq.files.safetensors_file import SafetensorsFile

LIMIT_FILE = "limit.json"
# File of a copy that names its model.
COPY_SOURCE = "source.json"
NAMED = {
    **{COPIES: "packed copy", DRAFTS: "draft", PROFILES: "profile"},
    **{COUNTS: "expert counts", DIGESTS: "digests"},
}
# Files that runs write beside a model on their own; heads and quantised drafts there were
# requested.
BESIDE_A_MODEL = {DRAFTS: "draft-int4-rtn-*.safetensors", COUNTS: "expert-counts-*.json"}


@dataclass(frozen=True, slots=True)
class CachedItem:
    """A cached item: a file, or the folder of a copy.

    kind       see NAMED
    model      folder of its model; None: unknown
    last_read  time of the last read or write, in seconds since 1970
    beside     whether it is in the model's folder, where the limit does not apply
    """

    kind: str
    path: Path
    model: str | None
    nbytes: int
    last_read: float
    beside: bool = False

    @property
    def files(self) -> list[Path]:
        return files_in(self.path)

    def is_of(self, model: str) -> bool:
        """True if it is of this model: a folder, which may be gone, or a hub id."""
        if self.model is None:
            return False
        repository = "models--" + model.partition("@")[0].replace("/", "--")
        return self.model == os.path.realpath(model) or repository in Path(self.model).parts


def cached_items(models: Iterable[Path] = ()) -> list[CachedItem]:
    """List cached items in the cache folder, beside the models that it names, and beside others.

    models  folders of the others
    """
    given = [os.path.realpath(model) for model in models]
    found = list(in_cache({print_: model for model in given for print_ in fingerprints(model)}))
    named = {each.model for each in found if each.model is not None} | set(given)
    for model in sorted(named):
        for kind, pattern in BESIDE_A_MODEL.items():
            for path in sorted((Path(model) / BESIDE).glob(pattern)):
                found += item_at(kind, path, model, beside=True)
    return found


def in_cache(models: dict[str, str] | None = None) -> Iterator[CachedItem]:
    """Yield items in the cache folder. models: folders of models by fingerprint."""
    known = dict(models or {})
    for kind in NAMED:
        folder = cache_folder(kind)
        if folder is None or not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if PARTIAL_NAME.fullmatch(path.name):
                continue  # another process is writing it
            content = content_of(kind, path)
            model = content.get("model")
            if kind == COPIES and model is not None:
                known[str(content.get("fingerprint"))] = model
            if kind == PROFILES:  # profiles name fingerprints
                key = content.get("key")
                model = known.get(str(key.get("model"))) if isinstance(key, dict) else None
            yield from item_at(kind, path, model if isinstance(model, str) else None)


def content_of(kind: str, path: Path) -> dict[str, Any]:
    """Read the description in an item; empty if it is damaged."""
    with suppress(SpeqError):
        if kind == DRAFTS:
            with SafetensorsFile(path) as file:
                return dict(file.metadata)
        return read_json(path / COPY_SOURCE if kind == COPIES else path)
    return {}


def fingerprints(model: str) -> Iterator[str]:
    """Yield the fingerprint of a model's folder; nothing if it cannot be opened."""
    with suppress(SpeqError, OSError), closing(Checkpoint(Path(model))) as checkpoint:
        yield checkpoint.fingerprint()


def item_at(kind: str, path: Path, model: str | None, beside: bool = False) -> Iterator[CachedItem]:
    """Yield the item at a path; nothing if it is gone."""
    with suppress(OSError):
        stats = [each.stat() for each in files_in(path)]
        read = [max(each.st_mtime, 0 if kind == COPIES else each.st_atime) for each in stats]
        nbytes = sum(each.st_size for each in stats)
        yield CachedItem(NAMED[kind], path, model, nbytes, max(read, default=0.0), beside)


def files_in(path: Path) -> list[Path]:
    """List a file, or the files of a folder, the one that marks it complete first, to be removed
    first.
    """
    if path.is_symlink() or not path.is_dir():
        return [path]
    return sorted(path.iterdir(), key=lambda each: (each.name != EXPERTS_MANIFEST, each.name))


def remove(thing: CachedItem) -> None:
    """Remove an item. Readers continue with their open files. Raises Taken if a run is writing it,
    OSError if it cannot be removed.
    """
    if thing.files == [thing.path]:
        thing.path.unlink(missing_ok=True)
        return
    with lock_folder(thing.path, f"a run writes to {thing.path}; end it, and try again"):
        for each in thing.files:
            each.unlink(missing_ok=True)
        thing.path.rmdir()


def remove_others(folder: Path, model: str) -> None:
    """Remove copies of a model folder's earlier contents; `folder` is the present copy."""
    for each in in_cache():
        if each.kind == NAMED[COPIES] and each.model == model and each.path != folder:
            with suppress(FolderTaken, OSError):
                remove(each)


def limit_bytes() -> int | None:
    """Limit of the cache folder in bytes; None: no limit."""
    folder = cache_folder()
    if folder is None or not (folder / LIMIT_FILE).exists():
        return None
    remedy = "set it again with `speq cache limit`"
    limit = read_json(folder / LIMIT_FILE, remedy, remedy).get("limit_bytes")
    if type(limit) is not int or not 0 <= limit < 1 << 63:
        raise FileError(f"{folder / LIMIT_FILE} has no number of bytes; {remedy}")
    return limit


def set_limit(nbytes: int | None) -> None:
    """Set the limit of the cache folder; None: no limit. Raises SpeqError."""
    folder = cache_folder()
    if folder is None:
        raise FileError("there is no home folder, and so no cache folder; set HOME")
    if nbytes is None:
        (folder / LIMIT_FILE).unlink(missing_ok=True)
        return
    about = "what speq may keep in this folder; what was read least recently goes first"
    write_whole(
        folder / LIMIT_FILE,
        (json.dumps({"about": about, "limit_bytes": nbytes}, indent=1) + "\n").encode(),
    )


def keep_within(limit: int, needed: int = 0, but: Path | None = None) -> bool:
    """Remove the least recently read items until the cache folder, with `needed` more bytes, is
    within `limit`. Return False if that is impossible.

    but  is never removed. If no removal makes enough room, nothing is removed
    """
    things = sorted(in_cache(), key=lambda each: each.last_read)
    total = needed + sum(each.nbytes for each in things)
    others = [each for each in things if each.path != but]
    if total - sum(each.nbytes for each in others) > limit:
        return False
    for each in others:
        if total <= limit:
            break
        with suppress(FolderTaken, OSError):
            remove(each)
            total -= each.nbytes
    return total <= limit
