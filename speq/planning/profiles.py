"""Profiles that `speq tune` made: kept in the user's cache folder, one for each model, device,
budget and version, or in files that users name.
"""

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

from speq.errors import FileError, SpeqError
from speq.files.atomic_file import make_folder, write_whole
from speq.files.cache_folder import PROFILES, cache_folder
from speq.files.json_file import read_json
from speq.governor.draft_length import Governor
from speq.governor.learned import LearnedSteps
from speq.governor.profile import Profile, ProfileKey
from speq.machine import device_name
from speq.models.opened import Opened
from speq.units import format_bytes
from speq.version import __version__

logger = logging.getLogger("speq")


def key_of(opened: Opened, device: str, budget_bytes: int) -> ProfileKey:
    """What a profile of this model, machine, budget and version holds for.

    device  "cpu" or "cuda"
    """
    return ProfileKey(
        opened.checkpoint.fingerprint(), device_name(device), budget_bytes, __version__
    )


def profile_path(key: ProfileKey) -> Path | None:
    """Path of the profile of that key in the cache; None for a user without a home."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder(PROFILES)
    return None if folder is None else folder / f"{digest}.json"


def read(path: Path) -> Profile:
    """Raises SpeqError, naming the file, where it is no profile."""
    content = read_json(path, "measure it again with `speq tune`", "give a file of `speq tune`")
    return Profile.from_entries(content, f"profile {path}")


def write(profile: Profile, path: Path) -> None:
    """Whole or not at all. Raises SpeqError where that cannot be done."""
    write_whole(path, profile.to_json().encode())


def read_kept(key: ProfileKey) -> Profile | None:
    """The profile of that key, if there is one. Raises SpeqError where it is damaged."""
    path = profile_path(key)
    if path is None or not path.exists():
        return None
    profile = read(path)
    if profile.key != key:
        raise FileError(f"profile {path} is of {profile.key}, not of {key}; remove it")
    return profile


def read_learned(key: ProfileKey, run: str) -> LearnedSteps | None:
    """What the governor of an earlier run of that kind learned; None: nothing that can be used."""
    path = learned_path(key)
    if path is None or not path.exists():
        return None
    try:
        learned = LearnedSteps.from_entries(read_json(path, "remove it"), str(path))
    except SpeqError as error:
        logger.warning("the governor learns anew: %s", error)
        return None
    return learned if (learned.key, learned.run) == (key, run) else None


def keep_learned(key: ProfileKey, run: str, governor: Governor) -> None:
    """Keep what a run's governor learned, in place of what an earlier one did."""
    learned, path = LearnedSteps.of(key, run, governor), learned_path(key)
    if learned is None or path is None:
        return
    try:
        make_folder(path.parent)
        write_whole(path, learned.to_json().encode())
    except SpeqError as error:
        logger.debug("what the governor learned is not kept: %s", error)


def learned_path(key: ProfileKey) -> Path | None:
    """Beside the profile of that key, whether there is one or not."""
    path = profile_path(key)
    return None if path is None else path.with_suffix(".governor.json")


def find(option: str, opened: Opened, device: str, budget_bytes: int) -> Profile | None:
    """The profile that a run goes by.

    option  "auto": the one kept for this very run, if there is one; "none"; or a file, whose budget
            and version may be others. Raises SpeqError for another model's or device's.
    """
    if option == "none":
        return None
    key = key_of(opened, device, budget_bytes)
    if option == "auto":
        return read_kept(key)
    profile = read(Path(option))
    theirs = profile.key
    if theirs.model != key.model:
        raise FileError(
            f"profile {option} is of another model than {opened.checkpoint.path}, by the digest of "
            "its weights; run `speq tune` on this one, or give profile none"
        )
    if theirs.device != key.device:
        raise FileError(
            f"profile {option} was measured on {theirs.device} and this is {key.device}; run "
            "`speq tune` here, or give profile none"
        )
    if theirs.budget_bytes != budget_bytes:
        logger.info(
            "profile %s was measured within %s; its speeds are taken for %s too",
            option,
            format_bytes(theirs.budget_bytes),
            format_bytes(budget_bytes),
        )
    if theirs.version != key.version:
        logger.info("profile %s was measured by version %s of speq", option, theirs.version)
    return profile
