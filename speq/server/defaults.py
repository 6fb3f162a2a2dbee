"""How a model's makers would have it drawn from, where a request says nothing."""

from pathlib import Path
from typing import Any

from speq.config import SamplingParams
from speq.files.json_file import read_json
from speq.options.declared import build

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Options of sampling from a model's generation_config.json; none where it does not sample.

    Raises SpeqError where the file is damaged, or asks for what cannot be.
    """
    if not (folder / FILE).exists():
        return {}
    config = read_json(folder / FILE)
    given = {name: config[name] for name in NAMES if config.get(name) is not None}
    if config.get("do_sample") is not True:
        return {}
    build(SamplingParams, given)
    return given
