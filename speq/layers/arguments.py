"""Arguments that transformers gives to modules which ours stand in for.

Their names change from one version to another. A module of ours that took any name could miss the
KV cache, and would begin the text anew in every pass: wrong tokens, and no error. So all names are
known here, and others are refused.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from speq.errors import SpeqError
from speq.version import TESTED, transformers_version

# What a KV cache is called from transformers 5.24 on; before; and before by what keeps states.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# What a decoder layer is given beside it, and hands on. Modules of ours that take no attention's
# place know from the KV cache where rows stand.
LAYER_ARGUMENTS = ("attention_mask", "position_ids", "position_embeddings", "use_cache")
# What transformers 5.17 gives to convolutions: None, unless rows of several texts lie side by side.
PACKING = ("seq_idx",)


def cache_name(forward: Callable[..., Any]) -> str:
    """What a forward of transformers calls the KV cache that it takes. Raises SpeqError where it
    takes none under a name that is known.
    """
    taken = inspect.signature(forward).parameters
    return _only(forward.__qualname__, "takes", [name for name in CACHE_NAMES if name in taken])


def given_cache(module: object, given: Mapping[str, Any]) -> Any:
    """The KV cache among the arguments of a mixer, which a module of ours stands in for; None: the
    rows are a whole text.

    Raises SpeqError where there is none, and for arguments that are not known.
    """
    name = type(module).__name__
    told = {each for each, value in given.items() if each not in PACKING or value is not None}
    refuse_unknown(name, told, (*CACHE_NAMES, *LAYER_ARGUMENTS))
    return given[_only(name, "is given", [each for each in CACHE_NAMES if each in given])]


def refuse_unknown(taker: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise SpeqError for arguments that are not known.

    taker  what they were given to
    """
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise SpeqError(
            f"{taker} is given {', '.join(unknown)} by transformers {transformers_version()}, "
            f"which speq does not know; install {TESTED}"
        )


def _only(taker: str, does: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    raise SpeqError(
        f"{taker} of transformers {transformers_version()} {does} the KV cache by "
        f"{' and '.join(names) or 'no name that speq knows'}; it must be one of "
        f"{', '.join(CACHE_NAMES)}: install {TESTED}"
    )
