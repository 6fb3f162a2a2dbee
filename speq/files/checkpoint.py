"""A model folder: config.json and safetensors shards, checked before a model is built from it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from speq.errors import CheckpointError, UnsupportedError
from speq.files.checksums import Checksums, TensorCheck, check_seal, warn_unchecked
from speq.files.coded_tensors import CodedTensors
from speq.files.json_file import read_json
from speq.files.model_folder import recognise
from speq.files.published_format import QUANTISERS_FILES, format_of
from speq.files.shards import INDEX, SINGLE, Shards, read_weight_map
from speq.files.text_part import TextModelPart

# Files of a packed model: the experts' manifest, and the journal while it is incomplete.
EXPERTS_MANIFEST = "experts.json"
EXPERTS_JOURNAL = "experts.journal"
# Journal of a model that is being quantised.
QUANTIZE_JOURNAL = "quantize.journal"
FROM_THE_HUB = (
    "check the name, the network and your access, or download it to a folder and give that"
)
WORD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Files of a hub repository that a run needs: no pickles, no code.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# The same weights in other layouts. A `*` also matches folders, of which a run reads only
# templates.
NOT_FROM_THE_HUB = [*(f"*/{pattern}" for pattern in HUB_PATTERNS[:-1]), "consolidated*"]
# Files of a hub repository that `speq plan` needs.
PLAN_PATTERNS = ["config.json", *QUANTISERS_FILES]


def locate(model: str | Path, what: str = "model", instead: str = "") -> Path:
    """Locate the folder of a model: a local one, or a download of the hub repository of that name.

    what, instead  name in errors, and an alternative to suggest
    """
    name = str(model)
    path = Path(os.path.expanduser(name))
    if not name:
        raise CheckpointError(f"{what} is empty; give {instead}a folder or a hub id")
    if is_gguf(path):
        raise CheckpointError(
            f"{what} {name!r} is in GGUF, whose weights mostly differ from the published ones "
            f"and have other names; give {instead}the folder of the safetensors checkpoint that "
            "it was made from"
        )
    if os.path.isdir(path):
        if os.path.exists(path / EXPERTS_JOURNAL):
            raise CheckpointError(
                f"{what} {name!r} is not packed completely; run the same `speq pack` again, which "
                "continues from there"
            )
        if os.path.exists(path / QUANTIZE_JOURNAL):
            raise CheckpointError(
                f"model {name!r} is not quantised completely; run the same `speq quantize` again, "
                "which continues from there"
            )
        if not os.path.lexists(path / "config.json"):
            _check_instead(path, f"{what} {name!r}")
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{what} {name!r} is a file; give the folder that holds config.json")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"{what} folder {name!r} does not exist; give {instead}a folder, or a hub id such as "
            "Qwen/Qwen1.5-MoE-A2.7B"
        )
    with _hub(f"{what} {name!r} is neither a folder here nor to be had from the hub"):
        return _download(name, HUB_PATTERNS)


def _check_instead(path: Path, model: str) -> None:
    """Raise SpeqError if a folder without config.json is recognised as something else."""
    if not os.listdir(path):
        raise CheckpointError(f"{model} is an empty folder; download the model into it")
    found = recognise(path)
    if found is not None:
        raise CheckpointError(f"{model} holds no config.json, but {found[0]}; {found[1]}")


def locate_config(model: str | Path) -> Path:
    """Locate a folder with a model's config.json and quantisers' files, possibly nothing else: a
    local one, or a download from the hub.
    """
    name = str(model)
    path = Path(os.path.expanduser(name))
    if os.path.exists(path) or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        return locate(model)
    with _hub(
        f"model {name!r} is neither a folder here nor is its config.json to be had from the hub"
    ):
        return _download(name, PLAN_PATTERNS)


def _download(name: str, patterns: list[str]) -> Path:
    """Download a hub id, optionally followed by `@` and a branch, tag or commit. Return the
    folder.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    return Path(
        snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=NOT_FROM_THE_HUB,
        )
    )


@contextmanager
def _hub(failed: str) -> Iterator[None]:
    """Turn errors of a download into one sentence: `failed`, the reason, and what to do."""
    try:
        yield
    except Exception as error:  # the hub client's errors have no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{failed}: {reason}; {FROM_THE_HUB}") from error


def is_gguf(path: Path) -> bool:
    """True if a local path is a GGUF file, or a folder of such files without readable weights."""
    if os.path.isdir(path):
        return any(path.glob("*.gguf")) and not has_weights(path)
    return path.suffix.lower() == ".gguf" and os.path.exists(path)


def has_weights(path: Path) -> bool:
    """True if a folder has all of a model's weights besides its config.json."""
    if any(os.path.exists(path / name) for name in (SINGLE, EXPERTS_MANIFEST)):
        return True
    if not os.path.exists(path / INDEX):
        return False
    shards = set(read_weight_map(path / INDEX).values())
    return all(os.path.isfile(path / shard) for shard in shards)


class Checkpoint:
    """Weights of a model on disk, by the model's names.

    part    the text model's part of a multimodal checkpoint; None: the model is all of it
    format  published format: plain weights (WORDS), or one of `published_format.FORMATS`
    coded   which tensors are codes, and what belongs to them

    Raises SpeqError if a file is missing, damaged or not of an exact model.
    """

    def __init__(self, path: Path, part: TextModelPart | None = None) -> None:
        self.path, self.part = path, part
        self.config = read_json(path / "config.json")
        if os.path.lexists(path / "generation_config.json"):
            read_json(path / "generation_config.json")  # transformers ignores a damaged one
        published = format_of(self.config, path)
        self.format = published.name
        if "transformers_weights" in self.config:
            raise UnsupportedError(
                f"{path / 'config.json'} names its weights in transformers_weights, which is not "
                f"supported; give a folder with {SINGLE} or {INDEX}, and without that field"
            )
        self._checksums = self._read_checksums()
        self._shards = Shards(path, called=None if part is None else part.called)
        self.files, self.tensors = self._shards.files, self._shards.tensors
        self.coded = CodedTensors(self.tensors, published)
        try:
            if self._checksums is not None:
                self._checksums.check_headers(self.files)
            self._check_dtypes()
        except BaseException:
            self.close()
            raise

    @property
    def model_config(self) -> dict[str, Any]:
        """Config of the text model."""
        return self.config if self.part is None else self.part.config(self.config, self.path)

    def on_disk(self, name: str) -> str:
        """Name of a tensor in its file, or the name that it would have."""
        if name in self.tensors:
            return self.tensors[name][0].stored[name]
        return name if self.part is None or not self._renamed else self.part.stored(name)

    @cached_property
    def _renamed(self) -> bool:
        """True if the model's names of some tensors differ from those on disk."""
        files = self.files.values()
        return any(name != stored for file in files for name, stored in file.stored.items())

    @property
    def has_metadata(self) -> bool:
        """True unless the shards' index lacks the usual metadata."""
        return self._shards.has_metadata

    def _read_checksums(self) -> Checksums | None:
        """Read a pack's checksums and compare its files with them; None if it is not a pack."""
        manifest = self.path / EXPERTS_MANIFEST
        if not os.path.exists(manifest):
            return None
        entries = read_json(manifest, "pack the model again")
        check_seal(manifest, entries)
        if entries.get("checksums") is None:
            warn_unchecked(self.path)
            return None
        try:
            checksums = Checksums.of(entries["checksums"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{manifest} is damaged ({error!r}); pack the model again"
            ) from error
        checksums.check_files(self.path)
        return checksums

    @property
    def checksums(self) -> Checksums | None:
        """Checksums of a pack; None for other checkpoints, and for packs of earlier versions."""
        return self._checksums

    def tensor_check(self) -> TensorCheck:
        """Build the check of tensors against a pack's checksums, if any."""
        return TensorCheck(self.tensors, self._checksums or Checksums())

    def _check_dtypes(self) -> None:
        """Raise SpeqError unless tensors are plain weights, or codes with what belongs to them."""
        integers = () if self.part is None else (*self.part.integers, *self.part.ids)
        for name, (file, info) in self.tensors.items():
            if info.dtype in (torch.int32, torch.int64) and name.endswith(integers):
                continue
            if self.coded.is_coded(name):
                self.coded.check(name)
            elif info.dtype not in WORD_DTYPES and not self.coded.is_beside(name):
                raise CheckpointError(
                    f"{file.path}: tensor {name} has dtype {info.dtype}; exact weights are "
                    "bfloat16, float16, float32 or float64: convert it to bfloat16, or download "
                    "the original model"
                )

    def fingerprint(self) -> str:
        """Digest of the shards' headers, sizes and samples, and of a pack's manifest.

        A change of few weights may not change it. So it may identify what only costs speed when out
        of date: drafts, heads, profiles, expert counts. Whatever tokens depend on is keyed by
        `speq.files.contents`, or compares its sources: packed copies, continued packs and quantised
        models, answers of a batch, other machines' stages.
        """
        manifest = self.path / EXPERTS_MANIFEST
        return self._shards.fingerprint(manifest.read_bytes() if manifest.exists() else b"")

    def close(self) -> None:
        self._shards.close()
