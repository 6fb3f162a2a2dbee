"""Keys of clients, of which the server keeps digests alone."""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from speq.errors import SpeqError
from speq.files.regular_file import read_text

# Shorter ones can be guessed.
LEAST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """digests: SHA-256 of each key."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, path: Path) -> "Keys":
        """Of a file with a key in each line. Raises SpeqError for any other file, and for one that
        others may read.
        """
        wanted = f"write a key of {LEAST_CHARACTERS} characters or more in each line"
        lines = [line.strip() for line in read_text(path, wanted).splitlines()]
        check_private(path)
        keys = [line for line in lines if line]
        if not keys:
            raise SpeqError(f"{path} holds no key; {wanted}")
        for number, line in enumerate(lines, start=1):
            if line and (len(line) < LEAST_CHARACTERS or not line.isascii() or " " in line):
                # Without the key: logs are no place for it.
                raise SpeqError(
                    f"{path}:{number} is no key of {LEAST_CHARACTERS} or more ASCII characters "
                    f"without spaces; {wanted}"
                )
        return cls(tuple(digest(key) for key in keys))

    def hold(self, given: str) -> bool:
        """Whether this is one of the keys. It takes as long whichever it is, or whether it is."""
        asked = digest(given)
        return sum([secrets.compare_digest(asked, known) for known in self.digests]) > 0


def check_private(path: Path) -> None:
    """Raise SpeqError for a file of whoever runs this that others may read or change.

    It is OpenSSH's rule for private keys. A file of another owner, as a system's secrets have, is
    as that owner wants it.
    """
    status = os.stat(path)
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        raise SpeqError(
            f"{path} may be read or changed by other users (its mode is "
            f"{stat.S_IMODE(status.st_mode):04o}), and it holds keys; run `chmod 600 {path}`"
        )


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
