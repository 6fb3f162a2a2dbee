"""Which tokens end a text: several files of a checkpoint say so, and they need not agree."""

import logging
from pathlib import Path
from typing import Any

from speq.errors import checked_token_ids
from speq.files.json_file import read_json

GENERATION_CONFIG = "generation_config.json"
# Ends a call of a tool, where a tokenizer has it: what gpt-oss writes behind it is the tool's turn.
CALL = "<|call|>"

logger = logging.getLogger("speq")


def end_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Token ids that end a text.

    config     the config.json of the folder
    tokenizer  the model's, whose own end of text (that of a turn, for a chat) ends one as well

    generation_config.json counts before config.json, as for transformers. What a class of
    transformers has for a default is nobody's word and counts for nothing. A token of config.json
    that the tokenizer holds for a part of ordinary text is no end where the tokenizer has one: a
    checkpoint that was saved with a class's default names such. Where the tokenizer and the file
    disagree, a line says so.
    """
    found, where = _named(folder, config)
    own = tokenizer.eos_token_id
    if own is None:
        return found
    if where != GENERATION_CONFIG:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ordinary = sorted(found - special)
        if ordinary:
            logger.warning(
                "%s: config.json ends texts at %s, which the tokenizer holds for ordinary text; "
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


def _named(folder: Path, config: dict[str, Any]) -> tuple[frozenset[int], str]:
    """What the first file that names any says, and which it is."""
    path = folder / GENERATION_CONFIG
    places: list[tuple[str, Any]] = [(GENERATION_CONFIG, read_json(path) if path.exists() else {})]
    places += [("config.json", part) for part in (config, config.get("text_config"))]
    for name, fields in places:
        value = fields.get("eos_token_id") if isinstance(fields, dict) else None
        if value is not None and value != []:
            return checked_token_ids(f"eos_token_id of {folder / name}", value), name
    return frozenset(), "config.json"
