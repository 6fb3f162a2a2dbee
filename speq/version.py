"""The version of this code, which is in a file that the build reads too."""

from importlib import resources

__version__ = resources.files("speq").joinpath("VERSION").read_text().strip()
