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
from speq.files.int4_packing import CODES_PER_WORD, COMPRESSED, Int4Groups, Int4Packing
from speq.files.json_file import read_json
from speq.files.model_folder import recognise
from speq.files.published_format import (
    BLOCKS,
    FP8,
    FP8_BLOCK,
    FP8_DTYPE,
    INT4_DTYPE,
    MXFP4,
    MXFP4_BLOCK_BYTES,
    MXFP4_DTYPE,
    PLAIN,
    QUANTISERS_FILES,
    SCALE_DTYPES,
    format_of,
    int4_settings,
    scales_name,
    words_name,
)
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.files.shards import INDEX, SINGLE, Shards, read_weight_map
from speq.files.text_part import TextModelPart

# Files of a packed model: the experts' manifest, and the journal while it is incomplete.
EXPERTS_MANIFEST = "experts.json"
EXPERTS_JOURNAL = "experts.journal"
# Journal of a model that is being quantised.
QUANTIZE_JOURNAL = "quantize.journal"
# Remedy for sound files that do not match each other.
OTHER_VERSION = "one of them belongs to another model or version: download the whole model again"
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
    packing, groups  of INT4, with the dtype of its scales; None for other formats

    Raises SpeqError if a file is missing, damaged or not of an exact model.
    """

    def __init__(self, path: Path, part: TextModelPart | None = None) -> None:
        self.path, self.part = path, part
        self.config = read_json(path / "config.json")
        if os.path.lexists(path / "generation_config.json"):
            read_json(path / "generation_config.json")  # transformers ignores a damaged one
        self.format = format_of(self.config, path)
        int4 = int4_settings(self.config, path)
        self.packing: Int4Packing | None = None if int4 is None else int4.packing
        self.groups: Int4Groups | None = None if int4 is None else int4.groups
        if "transformers_weights" in self.config:
            raise UnsupportedError(
                f"{path / 'config.json'} names its weights in transformers_weights, which is not "
                f"supported; give a folder with {SINGLE} or {INDEX}, and without that field"
            )
        self._checksums = self._read_checksums()
        self._shards = Shards(path, called=None if part is None else part.called)
        self.files, self.tensors = self._shards.files, self._shards.tensors
        try:
            if self._checksums is not None:
                self._checksums.check_headers(self.files)
            self._find_scales_dtype()
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

    def _find_scales_dtype(self) -> None:
        """Take the dtype of INT4's scales from the first of them."""
        if self.packing is not None and self.groups is not None:
            names = (name for name in self.tensors if name.endswith(self.packing.scales))
            dtype = next((self.tensors[name][1].dtype for name in names), self.groups.dtype)
            self.groups = self.groups._replace(halves=dtype == torch.float16)

    def _check_dtypes(self) -> None:
        for name, (file, info) in self.tensors.items():
            if self.is_coded(name):
                self._check_scales(name, file, info)
            elif info.dtype not in WORD_DTYPES and not self._is_beside_codes(name):
                raise CheckpointError(
                    f"{file.path}: tensor {name} has dtype {info.dtype}; exact weights are "
                    "bfloat16, float16, float32 or float64: convert it to bfloat16, or download "
                    "the original model"
                )

    def is_coded(self, name: str) -> bool:
        """True if a tensor is codes in the checkpoint's published format."""
        dtype = self.tensors[name][1].dtype
        if self.format == MXFP4:
            return dtype == MXFP4_DTYPE and name.endswith(BLOCKS)
        if self.packing is not None:
            return dtype == INT4_DTYPE and name.endswith(self.packing.codes)
        return self.format == FP8 and dtype == FP8_DTYPE

    def _is_beside_codes(self, name: str) -> bool:
        """True if a tensor belongs to one of codes, whose other dtypes are words'."""
        words = words_name(name)
        codes = words + BLOCKS
        if self.packing is not None:
            codes = words.removesuffix(PLAIN) + self.packing.codes
        return codes in self.tensors and self.is_coded(codes) and name in self.beside_codes(codes)

    def beside_codes(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that belong to a tensor of codes, of which some may be absent."""
        if self.packing is None:
            return (scales_name(name),)
        packing, module = self.packing, name.removesuffix(self.packing.codes)
        return tuple(module + end for end in (packing.scales, packing.zeros, *packing.others))

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the plain weights that a tensor of plain weights, or of codes, stands for."""
        shape = self.tensors[name][1].shape
        if self.packing is not None and self.is_coded(name):
            return self.packing.matrix_shape(shape)
        return shape

    def _check_scales(self, name: str, file: SafetensorsFile, info: TensorInfo) -> None:
        """Raise SpeqError unless codes have scales for their blocks."""
        of_scales = self.beside_codes(name)[0]
        if of_scales not in self.tensors:
            raise CheckpointError(
                f"{file.path}: tensor {name} lacks its scales, {of_scales}; {OTHER_VERSION}"
            )
        holder, scales = self.tensors[of_scales]
        dtypes: tuple[torch.dtype, ...]
        if self.packing is not None and self.groups is not None:
            self._check_int4(name, self.packing)
            rows, columns = self.matrix_shape(name)
            known, dtypes = True, (self.groups.dtype,)
            wanted = [*self.packing.scales_shape(rows, columns // self.groups.size)]
        elif self.format == MXFP4:
            known = len(info.shape) > 1 and info.shape[-1] == MXFP4_BLOCK_BYTES
            wanted, dtypes = list(info.shape[:-1]), (MXFP4_DTYPE,)
        else:
            known, dtypes = len(info.shape) == len(FP8_BLOCK), SCALE_DTYPES
            wanted = [-(-size // block) for size, block in zip(info.shape, FP8_BLOCK, strict=False)]
        if not known or list(scales.shape) != wanted or scales.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{holder.path}: tensor {of_scales} is {scales.dtype} {list(scales.shape)}; of "
                f"{self.format} codes {list(info.shape)} it must be {names} {wanted}; "
                f"{OTHER_VERSION}"
            )

    def _check_int4(self, name: str, packing: Int4Packing) -> None:
        """Raise SpeqError unless INT4 codes are whole groups, with zero points where the config has
        them, and in the order in which rows are multiplied.
        """
        size, has_zeros, _ = self.groups or (1, False, False)
        file, info = self.tensors[name]
        rows, columns = packing.matrix_shape(info.shape) if len(info.shape) == 2 else (0, 1)
        if columns % size or not rows:
            raise CheckpointError(
                f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; of INT4 codes it "
                f"must be of rows of whole groups of {size}, {CODES_PER_WORD} to a number; "
                f"{OTHER_VERSION}"
            )
        _, of_zeros, *others = self.beside_codes(name)
        if has_zeros != (of_zeros in self.tensors):
            raise CheckpointError(
                f"{file.path}: tensor {name} has {'no ' if has_zeros else ''}zero points, "
                f"{of_zeros}, and config.json says otherwise; {OTHER_VERSION}"
            )
        if has_zeros:
            holder, zeros = self.tensors[of_zeros]
            wanted = [*packing.zeros_shape(rows, columns // size)]
            if list(zeros.shape) != wanted or zeros.dtype != INT4_DTYPE:
                raise CheckpointError(
                    f"{holder.path}: tensor {of_zeros} is {zeros.dtype} {list(zeros.shape)}; of "
                    f"INT4 codes {list(info.shape)} it must be int32 {wanted}; {OTHER_VERSION}"
                )
        if packing is COMPRESSED:
            self._check_compressed(name, [rows, columns], *others)

    def _check_compressed(self, name: str, shape: list[int], of_shape: str, order: str) -> None:
        """Raise SpeqError if compressed-tensors has columns in another order, or another shape."""
        file, info = self.tensors[name]
        if order in self.tensors:
            raise UnsupportedError(
                f"{file.path}: tensor {name} has columns in another order, {order}, which is not "
                "read; give a checkpoint without actorder"
            )
        if of_shape in self.tensors:
            holder, _ = self.tensors[of_shape]
            said = holder.tensor(of_shape).tolist()
            if said != shape:
                raise CheckpointError(
                    f"{holder.path}: tensor {of_shape} says {said}, and {name} is "
                    f"{list(info.shape)} of {CODES_PER_WORD} codes to a number; {OTHER_VERSION}"
                )

    def zeros_of(self, name: str) -> tuple[SafetensorsFile, TensorInfo] | None:
        """Find the zero points of a tensor of codes; None where there are none."""
        has_zeros = self.groups is not None and self.groups.zeros and self.is_coded(name)
        return self.tensors[self.beside_codes(name)[1]] if has_zeros else None

    def scales_of(self, name: str) -> tuple[SafetensorsFile, TensorInfo] | None:
        """Find the scales of a tensor of codes; None for plain weights."""
        return self.tensors[self.beside_codes(name)[0]] if self.is_coded(name) else None

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
