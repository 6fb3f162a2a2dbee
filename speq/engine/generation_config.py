"""Reads transformers' GenerationConfig, whose fields are refused by name where they are not
supported, and how a model's makers would have it sampled.
"""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from speq.config import SamplingParams
from speq.errors import UnsupportedError, checked_int, checked_token_ids
from speq.files.json_file import read_json
from speq.options.declared import build

FILE = "generation_config.json"
# Options that a model's own file gives, where it samples.
OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Fields without a meaning here, or with the meaning of our own behaviour.
WITHOUT_EFFECT = {
    "_from_model_config",
    "bos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    # Only with an assistant model.
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
}
# Values without an effect; `save_pretrained` writes many of them.
HARMLESS = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "early_stopping": False,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
}
HONOURED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "max_length",
    "eos_token_id",
    "stop_strings",
}
# Defaults of transformers' `generate` with do_sample.
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


def options_of(config: GenerationConfig, prompt_tokens: int) -> dict[str, Any]:
    """Convert `config` to fields of SamplingParams, and eos_ids if it names any.

    Raises SpeqError naming every field that is set and not supported.
    """
    given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    refused = [
        name
        for name, value in given.items()
        if name not in HONOURED | WITHOUT_EFFECT and HARMLESS.get(name, ...) != value
    ]
    if refused:
        raise UnsupportedError(
            f"generation_config sets {', '.join(sorted(refused))}, which speq does not support; "
            f"supported are {', '.join(sorted(HONOURED))}"
        )
    options: dict[str, Any] = {}
    if given.get("do_sample"):
        for name, default in SAMPLING_DEFAULTS.items():
            options[name] = given.get(name, default)
        if "min_p" in given:
            options["min_p"] = given["min_p"]
    if "repetition_penalty" in given:  # of greedy decoding as well
        options["repetition_penalty"] = given["repetition_penalty"]
    if "max_length" in given:
        length = checked_int("max_length", given["max_length"], 1)
        options["max_new_tokens"] = length - prompt_tokens
    if "max_new_tokens" in given:
        options["max_new_tokens"] = given["max_new_tokens"]
    stop = given.get("stop_strings")
    if stop is not None:
        options["stop"] = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    eos = given.get("eos_token_id")
    if eos is not None:
        options["eos_ids"] = checked_token_ids("eos_token_id", eos)
    return options


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Options of sampling from a model's generation_config.json; none where it does not sample.

    Raises SpeqError where the file is damaged, or asks for what cannot be.
    """
    if not (folder / FILE).exists():
        return {}
    config = read_json(folder / FILE)
    given = {name: config[name] for name in OWN if config.get(name) is not None}
    if config.get("do_sample") is not True:
        return {}
    build(SamplingParams, given)
    return given
