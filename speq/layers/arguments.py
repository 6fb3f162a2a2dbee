"""Arguments that transformers passes to modules that ours replace.

Their names change between versions. A module that accepted any name could miss the KV cache and
restart the sequence in every pass: wrong tokens and no error. So all names are listed here, and
others are refused.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from speq.errors import UnsupportedError
from speq.version import TESTED, transformers_version

# Names of the KV cache: from transformers 5.24 on, before that, and before that for layers that
# keep states.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# Further arguments that a decoder layer passes on. Our modules other than attention know positions
# from the KV cache.
LAYER_ARGUMENTS = (
    *("attention_mask", "position_ids", "position_embeddings", "use_cache"),
    "input_ids",
)
# Argument of convolutions in transformers 5.17: None, unless rows of several sequences are packed.
PACKING = ("seq_idx",)


def cache_name(forward: Callable[..., Any]) -> str:
    """Name of the KV cache among the parameters of a forward of transformers. Raises SpeqError if
    it has none of the known names.
    """
    taken = inspect.signature(forward).parameters
    return _refuse_names(
        forward.__qualname__, "takes", [name for name in CACHE_NAMES if name in taken]
    )


def find_cache(module: object, given: Mapping[str, Any]) -> Any:
    """Return the KV cache among the arguments of a mixer; None: the rows are a whole sequence.

    Raises SpeqError if there is none, and for unknown arguments.
    """
    name = type(module).__name__
    told = {each for each, value in given.items() if each not in PACKING or value is not None}
    refuse_unknown(name, told, (*CACHE_NAMES, *LAYER_ARGUMENTS))
    return given[_refuse_names(name, "is given", [each for each in CACHE_NAMES if each in given])]


def refuse_unknown(taker: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise SpeqError for unknown arguments.

    taker  name of the module or function that received them
    """
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise UnsupportedError(
            f"transformers {transformers_version()} passes {', '.join(unknown)} to {taker}, "
            f"which speq does not know; install {TESTED}"
        )


def _refuse_names(taker: str, does: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    raise UnsupportedError(
        f"{taker} of transformers {transformers_version()} {does} the KV cache by "
        f"{' and '.join(names) or 'no name that speq knows'}; it must be one of "
        f"{', '.join(CACHE_NAMES)}: install {TESTED}"
    )
