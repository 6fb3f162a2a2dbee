"""The text model's part of a checkpoint, and its names there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq.errors import CheckpointError, UnsupportedError

# Prefixes of a text model's tensors, and of its head's.
MODEL, HEAD = "model.", "lm_head."


@dataclass(frozen=True, slots=True)
class TextModelPart:
    """Place of the text model in a family's checkpoints, and what they name otherwise.

    model_type  of the text model's own configuration, which may also be alone in config.json
    prefix      prefix of its tensors on disk, in place of MODEL
    head        the same of its head
    beside      prefixes of other parts' tensors
    field       field of config.json with its configuration
    renamed     parts of names on disk, each with what the model has in its place
    bare        beginnings of names on disk without a prefix, which transformers never writes, each
                with what the model has in its place
    integers    ends of names of tensors that are no weights, and may be missing: transformers makes
                them of the configuration
    ids         the same of tensors of ids, which must be there
    """

    model_type: str
    prefix: str = MODEL
    beside: tuple[str, ...] = ()
    head: str = HEAD
    field: str = "text_config"
    renamed: tuple[tuple[str, str], ...] = ()
    bare: tuple[tuple[str, str], ...] = ()
    integers: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def config(self, config: dict[str, Any], where: Path) -> dict[str, Any]:
        """Configuration of the text model in a config.json; the whole, if there is no other part.

        Raises SpeqError if there is none.
        """
        if config.get("model_type") == self.model_type:
            return with_layer_count(config)
        found = config.get(self.field)
        if not isinstance(found, dict):
            if self.field not in config and "num_hidden_layers" in config:
                raise UnsupportedError(
                    f"{where / 'config.json'} has no {self.field}, and transformers would take no "
                    f"field of the text model from it: put these fields into {self.field}, with "
                    f"model_type {self.model_type!r}"
                )
            raise CheckpointError(
                f"{where / 'config.json'} has {self.field} {found!r:.40}; it must describe the "
                "text model: download it again"
            )
        return found

    @property
    def _prefixes(self) -> tuple[tuple[str, str], ...]:
        return (self.prefix, MODEL), (self.head, HEAD)

    @property
    def renaming(self) -> dict[str, str]:
        """What transformers' loader does not rename by itself: pattern and replacement."""
        changed = ((on_disk, own) for on_disk, own in self._prefixes if on_disk != own)
        return {f"^{re.escape(on_disk)}": own for on_disk, own in changed}

    def called(self, stored: str) -> str:
        """Map a tensor's name on disk to its name in the text model."""
        for on_disk, own in (*self._prefixes, *self.bare):
            if stored.startswith(on_disk):
                stored = own + stored[len(on_disk) :]
        for on_disk, own in self.renamed:
            stored = stored.replace(on_disk, own)
        return stored

    def stored(self, name: str) -> str:
        """Map a tensor's name in the text model to its name on disk."""
        name = self.published(name)
        if self.is_beside(name):
            return name
        for on_disk, own in self._prefixes:
            if name.startswith(own):
                return on_disk + name[len(own) :]
        return name

    def published(self, name: str) -> str:
        """Map a tensor's name in the text model to the name that transformers' loader renames."""
        for on_disk, own in self.renamed:
            name = name.replace(own, on_disk)
        return name

    def is_beside(self, name: str) -> bool:
        """True if a tensor is of another part."""
        return name.startswith(self.beside)


def with_layer_count(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with `num_hidden_layers`, which transformers leaves out where it writes a
    list of the layers' kinds.
    """
    kinds = config.get("layers_block_type")
    if "num_hidden_layers" in config or not isinstance(kinds, list):
        return config
    return config | {"num_hidden_layers": len(kinds)}
