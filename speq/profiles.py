"""Profiles that `speq tune` made, kept in the user's cache folder: one for each model, device,
budget and version.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from speq.errors import SpeqError
from speq.governor.profile import Profile, ProfileKey
from speq.store.atomic_file import replacing


def kept_path(key: ProfileKey) -> Path | None:
    """Where a profile of that key is kept; None for a user without a home."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    try:
        return Path.home() / ".cache" / "speq" / "profiles" / f"{digest}.json"
    except RuntimeError:
        return None


def read(path: Path) -> Profile:
    """Raises SpeqError, naming the file, where it is no profile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpeqError(f"profile {path} cannot be read: {error}") from error
    return Profile.from_json(text, f"profile {path}")


def write(profile: Profile, path: Path) -> None:
    """Whole or not at all. Raises SpeqError where that cannot be done."""
    try:
        with replacing(path) as file:
            file.write(profile.to_json().encode())
    except OSError as error:
        raise SpeqError(f"{path} cannot be written: {error.strerror}") from error


def kept(key: ProfileKey) -> Profile | None:
    """The profile of that key, if there is one."""
    path = kept_path(key)
    if path is None or not path.exists():
        return None
    profile = read(path)
    if profile.key != key:
        raise SpeqError(f"profile {path} is of {profile.key}, not of {key}; remove it")
    return profile
