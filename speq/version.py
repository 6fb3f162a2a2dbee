"""The version of this code, which is in a file that the build reads too, and those of transformers
that it was tested on.
"""

import platform
import re
from importlib import metadata, resources

__version__ = resources.files("speq").joinpath("VERSION").read_text().strip()

# The oldest that is supported, the one that developers have, and the newest, on which all families
# were tested. pyproject.toml and the Makefile name them as well.
TESTED_TRANSFORMERS = ("5.17.0", "5.23.0", "5.24.0")
# What to install, for errors.
TESTED = f"transformers {TESTED_TRANSFORMERS[0]} to {TESTED_TRANSFORMERS[-1]}"


def transformers_version() -> str:
    """Version of the installed transformers."""
    return metadata.version("transformers")


def installed() -> str:
    """This version, what it runs on, and the libraries of kernels that were built for it."""
    folder = resources.files("speq")
    built = [name for name in ("cpu", "cuda") if folder.joinpath(f"libspeq_{name}.so").is_file()]
    return (
        f"speq {__version__} (Python {platform.python_version()}, torch "
        f"{metadata.version('torch')}, transformers {transformers_version()}; kernels: "
        f"{' and '.join(built) or 'none, so plain torch runs'})"
    )


def is_tested(version: str) -> bool:
    """True if a version of transformers lies between those tested; no prerelease does."""
    given = re.fullmatch(r"\d+\.\d+(\.\d+)?", version)
    oldest, newest = _numbers(TESTED_TRANSFORMERS[0]), _numbers(TESTED_TRANSFORMERS[-1])
    return given is not None and oldest <= _numbers(version) <= newest


def is_before(version: str, other: str) -> bool:
    """True if a version comes before another; a prerelease counts as the release."""
    given = re.match(r"\d+(\.\d+)*", version)
    return given is not None and _numbers(given[0]) < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
