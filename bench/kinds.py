"""Prompts by kind: those of `bench/prompts`, whose kinds have names, and files that users give."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from speq.errors import OptionError
from speq.measure.report import read_prompts

KINDS = ("code", "maths", "prose", "questions", "dialogue")
# What prompts of several kinds, which come with the package, are called.
MIXED = "mixed"
PROMPTS = Path(__file__).parent / "prompts"


def name_of(given: str | Path) -> str:
    """A kind's name as tables show it: a file's is the file's, without folder and suffix."""
    return Path(given).stem


def prompts_of_kind(given: str | Path, count: int) -> list[str]:
    """`count` prompts, spread evenly over those of a kind or of a JSON Lines file.

    A name of `KINDS` is a kind, also where a file has that name: an absolute path names the file.

    Raises SpeqError for what is neither, and for fewer prompts than are asked for.
    """
    if str(given) in KINDS:
        return read_prompts(PROMPTS / f"{given}.jsonl", count)
    if not Path(given).exists():
        raise OptionError(
            f"prompts {str(given)!r} are neither a kind nor a file; give one of "
            f"{', '.join(KINDS)}, or a JSON Lines file with a `prompt` in each row"
        )
    return read_prompts(Path(given), count)


def texts_of(given: Sequence[str | Path], count: int) -> list[tuple[str, str]]:
    """(kind, prompt): `count` of each kind or file, or of our mixed ones where none is given."""
    if not given:
        return [(MIXED, prompt) for prompt in read_prompts(None, count)]
    by_kind = prompts_by_kind(given, count)
    return [(kind, prompt) for kind, prompts in by_kind.items() for prompt in prompts]


def prompts_by_kind(given: Iterable[str | Path], count: int) -> dict[str, list[str]]:
    """`count` prompts of each kind or file, by its name.

    Raises SpeqError as `prompts_of_kind`, and where two have one name.
    """
    found: dict[str, list[str]] = {}
    for each in given:
        name = name_of(each)
        if name in found:
            raise OptionError(
                f"two kinds of prompts are called {name!r}; give each once, or rename a file"
            )
        found[name] = prompts_of_kind(each, count)
    return found
