"""Where the model of text lies in a checkpoint of text and of something else, such as pictures."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.errors import SpeqError

# What the names of a model of text begin with, but for its head.
MODEL = "model."


@dataclass(frozen=True, slots=True)
class TextPart:
    """How a family's checkpoints of several parts hold the one of text.

    model_type  of that part's own configuration, which may also stand alone in config.json
    prefix      what its tensors' names begin with there, in place of MODEL
    beside      what names of other parts' tensors begin with
    field       of config.json, that has its configuration
    """

    model_type: str
    prefix: str
    beside: tuple[str, ...]
    field: str = "text_config"

    def config(self, config: dict[str, Any], where: Path) -> dict[str, Any]:
        """What a config.json says of the part of text; all of it, where there is no other part.

        Raises SpeqError where it says nothing of it.
        """
        if config.get("model_type") == self.model_type:
            return config
        found = config.get(self.field)
        if not isinstance(found, dict):
            raise SpeqError(
                f"{where / 'config.json'} has {self.field} {found!r:.40}; it must describe the "
                "part of the model that is of text: download it again"
            )
        return found

    @property
    def renaming(self) -> dict[str, str]:
        """What `called` does, as transformers' loader takes it: a pattern, and what it gives."""
        return {f"^{re.escape(self.prefix)}": MODEL}

    def called(self, stored: str) -> str:
        """What the model of text calls a tensor, by its name on disk."""
        return MODEL + stored[len(self.prefix) :] if stored.startswith(self.prefix) else stored

    def stored(self, name: str) -> str:
        """The name on disk of a tensor of the model of text, where there are other parts."""
        of_text = name.startswith(MODEL) and not self.is_beside(name)
        return self.prefix + name[len(MODEL) :] if of_text else name

    def is_beside(self, name: str) -> bool:
        """Whether a tensor is of another part."""
        return name.startswith(self.beside)
