"""End-of-sequence tokens, which several files of a checkpoint name, not always consistently."""

import logging
from pathlib import Path
from typing import Any

from speq.errors import checked_token_ids
from speq.files.json_file import read_json

GENERATION_CONFIG = "generation_config.json"
# Ends a tool call, if a tokenizer has it: gpt-oss continues with the tool's turn.
CALL = "<|call|>"

logger = logging.getLogger("speq")


def end_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Find the token ids that end a sequence.

    config     the folder's config.json
    tokenizer  the model's, whose own end token (of a turn, for a chat) ends a sequence as well

    generation_config.json takes precedence over config.json, as in transformers. Defaults of
    transformers' classes are ignored. A token of config.json that the tokenizer treats as ordinary
    text is ignored if the tokenizer has an end token: checkpoints saved with a class's default have
    such tokens. If the tokenizer and the file disagree, a log line says so.
    """
    found, where = _read_end_ids(folder, config)
    own = tokenizer.eos_token_id
    if own is None:
        return found
    if where != GENERATION_CONFIG:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = sorted(found - special)
        if ordinary:
            logger.warning(
                "%s: config.json ends texts at %s, which the tokenizer treats as ordinary text; "
                "they end at its own end, %d (%s)",
                folder,
                ordinary,
                own,
                tokenizer.eos_token,
            )
        found -= frozenset(ordinary)
    if found and own not in found:
        logger.warning(
            "%s: texts end at %d (%s) as well, which the tokenizer calls the end and %s does not",
            folder,
            own,
            tokenizer.eos_token,
            where,
        )
    calls = {own} if CALL not in tokenizer.all_special_tokens else {own, tokenizer.vocab[CALL]}
    return found | calls


def _read_end_ids(folder: Path, config: dict[str, Any]) -> tuple[frozenset[int], str]:
    """Read the ids of the first file that names any, and its name."""
    path = folder / GENERATION_CONFIG
    places: list[tuple[str, Any]] = [(GENERATION_CONFIG, read_json(path) if path.exists() else {})]
    places += [("config.json", part) for part in (config, config.get("text_config"))]
    for name, fields in places:
        value = fields.get("eos_token_id") if isinstance(fields, dict) else None
        if value is not None and value != []:
            return checked_token_ids(f"eos_token_id of {folder / name}", value), name
    return frozenset(), "config.json"
