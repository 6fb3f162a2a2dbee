"""A model folder: config.json and safetensors shards, checked before a model is built from it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from speq.errors import SpeqError
from speq.files.checksums import Checksums, TensorCheck, check_seal, say_unchecked
from speq.files.json_file import read_json
from speq.files.model_folder import found_instead
from speq.files.published_format import (
    BLOCK_SCALES,
    BLOCKS,
    FP8,
    FP8_BLOCK,
    FP8_DTYPE,
    MXFP4,
    MXFP4_BLOCK_BYTES,
    MXFP4_DTYPE,
    QUANTISERS_FILES,
    SCALE_DTYPES,
    format_of,
    scales_name,
    words_name,
)
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.files.shards import INDEX, SINGLE, Shards, named_by
from speq.files.text_part import TextPart

# Of a packed model: what its experts' records are, and what is written until there is a model.
EXPERTS_MANIFEST = "experts.json"
EXPERTS_JOURNAL = "experts.journal"
# Of a model that is being quantised, until it is one.
QUANTIZE_JOURNAL = "quantize.journal"
# Of files that are sound, and do not go with each other.
OTHER_VERSION = "one of them belongs to another model or version: download the whole model again"
FROM_THE_HUB = (
    "check the name, the network and your access, or download it to a folder and give that"
)
WORD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# What a run needs of a hub repository: no pickles, no code.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# The same weights in other layouts. A `*` matches folders too, of which a run reads templates only.
NOT_FROM_THE_HUB = [*(f"*/{pattern}" for pattern in HUB_PATTERNS[:-1]), "consolidated*"]
# What `speq plan` needs of one.
PLAN_PATTERNS = ["config.json", *QUANTISERS_FILES]


def locate(model: str | Path, what: str = "model", instead: str = "") -> Path:
    """The folder of a model: a local one, or a download of the hub repository of that name.

    what, instead  what an error calls it, and what else it might have been
    """
    name = str(model)
    path = Path(os.path.expanduser(name))
    if not name:
        raise SpeqError(f"{what} is empty; give {instead}a folder or a hub id")
    if is_gguf(path):
        raise SpeqError(
            f"{what} {name!r} is in GGUF, whose files mostly hold other words than were published, "
            f"and all by other names; give {instead}the folder of the safetensors checkpoint that "
            "it was made from"
        )
    if os.path.isdir(path):
        if os.path.exists(path / EXPERTS_JOURNAL):
            raise SpeqError(
                f"{what} {name!r} was not packed to the end; run the same `speq pack` again, which "
                "goes on from there"
            )
        if os.path.exists(path / QUANTIZE_JOURNAL):
            raise SpeqError(
                f"model {name!r} was not quantised to the end; run the same `speq quantize` again, "
                "which goes on from there"
            )
        if not os.path.lexists(path / "config.json"):
            _say_instead(path, f"{what} {name!r}")
        return path
    if os.path.exists(path):
        raise SpeqError(f"{what} {name!r} is a file; give the folder that holds config.json")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise SpeqError(
            f"{what} folder {name!r} does not exist; give {instead}a folder, or a hub id such as "
            "Qwen/Qwen1.5-MoE-A2.7B"
        )
    with _hub(f"{what} {name!r} is neither a folder here nor to be had from the hub"):
        return _download(name, HUB_PATTERNS)


def _say_instead(path: Path, model: str) -> None:
    """Raise SpeqError where a folder without config.json is known to be something else."""
    if not os.listdir(path):
        raise SpeqError(f"{model} is an empty folder; download the model into it")
    found = found_instead(path)
    if found is not None:
        raise SpeqError(f"{model} holds no config.json, but {found[0]}; {found[1]}")


def locate_config(model: str | Path) -> Path:
    """The folder that holds a model's config.json and what quantisers say beside it, and perhaps
    nothing else: a local one, or where the hub's were downloaded to.
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
    """The folder of a hub id, behind which a branch, tag or commit may stand after an `@`."""
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
    """Errors of a download as one sentence: `failed`, the reason, and what to do."""
    try:
        yield
    except Exception as error:  # the hub client's errors have no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SpeqError(f"{failed}: {reason}; {FROM_THE_HUB}") from error


def is_gguf(path: Path) -> bool:
    """Whether a local path is a GGUF file, or a folder of such without weights that are read."""
    if os.path.isdir(path):
        return any(path.glob("*.gguf")) and not has_weights(path)
    return path.suffix.lower() == ".gguf" and os.path.exists(path)


def has_weights(path: Path) -> bool:
    """Whether a folder holds a model's weights, all of them, beside its config.json."""
    if any(os.path.exists(path / name) for name in (SINGLE, EXPERTS_MANIFEST)):
        return True
    if not os.path.exists(path / INDEX):
        return False
    shards = set(named_by(path / INDEX).values())
    return all(os.path.isfile(path / shard) for shard in shards)


class Checkpoint:
    """The weights of a model on disk, by the names that the model has for them.

    part    where the model is a part of what is on disk; None: it is all of that
    format  what they are published as: words, or `published_format.FORMATS`

    Raises SpeqError where a file is missing, damaged or holds what no exact model holds.
    """

    def __init__(self, path: Path, part: TextPart | None = None) -> None:
        self.path, self.part = path, part
        self.config = read_json(path / "config.json")
        if os.path.lexists(path / "generation_config.json"):
            read_json(path / "generation_config.json")  # transformers passes over a damaged one
        self.format = format_of(self.config, path)
        if "transformers_weights" in self.config:
            raise SpeqError(
                f"{path / 'config.json'} names its weights in transformers_weights, which is not "
                f"supported; give a folder with {SINGLE} or {INDEX}, and without that field"
            )
        self._checksums = self._read_checksums()
        self._shards = Shards(path, called=None if part is None else part.called)
        self.files, self.tensors = self._shards.files, self._shards.tensors
        try:
            if self._checksums is not None:
                self._checksums.check_headers(self.files)
            self._check_dtypes()
        except BaseException:
            self.close()
            raise

    @property
    def model_config(self) -> dict[str, Any]:
        """What config.json says of the model itself."""
        return self.config if self.part is None else self.part.config(self.config, self.path)

    def on_disk(self, name: str) -> str:
        """What a tensor is called in its file, or would be beside those that are there."""
        if name in self.tensors:
            return self.tensors[name][0].stored[name]
        return name if self.part is None or not self._renamed else self.part.stored(name)

    @cached_property
    def _renamed(self) -> bool:
        """Whether the model's names for some tensors are not those on disk."""
        files = self.files.values()
        return any(name != stored for file in files for name, stored in file.stored.items())

    @property
    def has_metadata(self) -> bool:
        """Whether the shards' index, where one is read, has the metadata that most have."""
        return self._shards.has_metadata

    def _read_checksums(self) -> Checksums | None:
        """Of a pack, once its files were compared with them; None of anything else."""
        manifest = self.path / EXPERTS_MANIFEST
        if not os.path.exists(manifest):
            return None
        entries = read_json(manifest, "pack the model again")
        check_seal(manifest, entries)
        if entries.get("checksums") is None:
            say_unchecked(self.path)
            return None
        try:
            checksums = Checksums.of(entries["checksums"])
        except (KeyError, TypeError, ValueError) as error:
            raise SpeqError(f"{manifest} is damaged ({error!r}); pack the model again") from error
        checksums.check_files(self.path)
        return checksums

    @property
    def checksums(self) -> Checksums | None:
        """Of a pack; None of anything else, and of packs of earlier versions."""
        return self._checksums

    def tensor_check(self) -> TensorCheck:
        """Compares tensors with a pack's checksums; where there are none, with nothing."""
        return TensorCheck(self.tensors, self._checksums or Checksums())

    def _check_dtypes(self) -> None:
        for name, (file, info) in self.tensors.items():
            if self.is_coded(name):
                self._check_scales(name, file, info)
            elif info.dtype not in WORD_DTYPES and not self._is_scales(name):
                raise SpeqError(
                    f"{file.path}: tensor {name} has dtype {info.dtype}; exact weights are "
                    "bfloat16, float16, float32 or float64: convert it to bfloat16, or download "
                    "the original model"
                )

    def is_coded(self, name: str) -> bool:
        """Whether a tensor is of codes, in the format that the checkpoint is published in."""
        dtype = self.tensors[name][1].dtype
        if self.format == MXFP4:
            return dtype == MXFP4_DTYPE and name.endswith(BLOCKS)
        return self.format == FP8 and dtype == FP8_DTYPE

    def _is_scales(self, name: str) -> bool:
        blocks = words_name(name) + BLOCKS
        return name.endswith(BLOCK_SCALES) and blocks in self.tensors and self.is_coded(blocks)

    def _check_scales(self, name: str, file: SafetensorsFile, info: TensorInfo) -> None:
        """Raise SpeqError unless codes have the scales of their blocks."""
        of_scales = scales_name(name)
        if of_scales not in self.tensors:
            raise SpeqError(
                f"{file.path}: tensor {name} lacks its scales, {of_scales}; {OTHER_VERSION}"
            )
        holder, scales = self.tensors[of_scales]
        dtypes: tuple[torch.dtype, ...]
        if self.format == MXFP4:
            known = len(info.shape) > 1 and info.shape[-1] == MXFP4_BLOCK_BYTES
            wanted, dtypes = list(info.shape[:-1]), (MXFP4_DTYPE,)
        else:
            known, dtypes = len(info.shape) == len(FP8_BLOCK), SCALE_DTYPES
            wanted = [-(-size // block) for size, block in zip(info.shape, FP8_BLOCK, strict=False)]
        if not known or list(scales.shape) != wanted or scales.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise SpeqError(
                f"{holder.path}: tensor {of_scales} is {scales.dtype} {list(scales.shape)}; of "
                f"{self.format} codes {list(info.shape)} it must be {names} {wanted}; "
                f"{OTHER_VERSION}"
            )

    def scales_of(self, name: str) -> tuple[SafetensorsFile, TensorInfo] | None:
        """Where the scales of a tensor of codes are; None: it is of words."""
        return self.tensors[scales_name(name)] if self.is_coded(name) else None

    def fingerprint(self) -> str:
        """A digest of the shards' headers, sizes and samples, and of a pack's manifest.

        A change of few weights may leave it as it was. So it may name what costs no more than speed
        when it is out of date: drafts, heads, profiles, counts of experts. What tokens depend on is
        keyed by `speq.files.contents`, or compares what it was made of: packed copies, packs and
        quantised models that are gone on with, answers of a batch, other machines' stages.
        """
        manifest = self.path / EXPERTS_MANIFEST
        return self._shards.fingerprint(manifest.read_bytes() if manifest.exists() else b"")

    def close(self) -> None:
        self._shards.close()
