"""A head on disk: one safetensors file beside its model, with the model's digest.

Its metadata has the model's digest, the head's sizes, the acceptance rates measured in training,
and the SHA-256 of its weights. All are checked before any is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speq.errors import FileError
from speq.experts.expert_names import ExpertNames
from speq.files.atomic_file import ANOTHER_PLACE, replacing, writing
from speq.files.checkpoint import Checkpoint
from speq.files.json_file import parse_json
from speq.files.range_file import bytes_of
from speq.files.safetensors_file import SafetensorsFile, header_of
from speq.heads.head_shape import HeadShape
from speq.heads.moe_head import MoEHead

FORMAT = "speq-head-1"
FOLDER, NAME = Path(".speq") / "head", "head.safetensors"
# Tensors that identify the model: the head's inputs and outputs, and routers, which differ between
# models that share both.
SHARED_ENDS = ("embed_tokens.weight", "lm_head.weight")
SAMPLE_BYTES = 1 << 17
TRAIN_AGAIN = "train it again with `speq train-head`"


def head_path(model: Path) -> Path:
    """Path of the head of a model, where `speq train-head` writes it."""
    return model / FOLDER / NAME


def model_digest(checkpoint: Checkpoint, names: ExpertNames) -> str:
    """Digest of the model that a head is trained on: samples of its embedding, its head and its
    routers, which packing does not change.
    """
    digest = hashlib.sha256()
    for name, (file, info) in sorted(checkpoint.tensors.items()):
        if not name.endswith(SHARED_ENDS) and names.router.search(name) is None:
            continue
        digest.update(f"{name}:{info.dtype}:{list(info.shape)}:".encode())
        data = torch.empty(min(info.nbytes, SAMPLE_BYTES), dtype=torch.uint8)
        file.read_into(info.offset, data)
        digest.update(bytes_of(data))
    return digest.hexdigest()


def sum_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of weights in host memory, in their order."""
    digest = hashlib.sha256()
    for weight in weights.values():
        digest.update(bytes_of(weight.contiguous().view(-1).view(torch.uint8)))
    return digest.hexdigest()


def write_head(path: Path, head: MoEHead, model: str, dtype: torch.dtype) -> None:
    """Write a head for the model with that digest. Raises SpeqError if that fails."""
    weights = {name: w.to("cpu", dtype).contiguous() for name, w in head.weights().items()}
    metadata = {
        "format": FORMAT,
        "model": model,
        "shape": json.dumps(head.shape.as_json()),
        "stand": json.dumps(head.acceptance_rates),
        "sha256": sum_of(weights),
    }
    entries = {name: (dtype, tuple(weight.shape)) for name, weight in weights.items()}
    with writing(path, ANOTHER_PLACE), replacing(path) as file:
        file.write(header_of(entries, metadata))
        for weight in weights.values():
            file.write(bytes_of(weight.view(-1).view(torch.uint8)))


@dataclass(frozen=True, slots=True)
class HeadLabel:
    """Metadata of a head's file.

    acceptance_rates  see `HeadSource`
    """

    shape: HeadShape
    acceptance_rates: tuple[float, ...]


def read_label(path: Path, model: str, hidden_size: int) -> HeadLabel:
    """Read the metadata of a head as `read_head` does, from the header only: damaged weights go
    unnoticed.
    """
    with _open(path) as file:
        return _label_in(file, model, hidden_size)


def read_acceptance_rates(path: Path) -> tuple[float, ...]:
    """Read a head's acceptance rates, for any model; empty if the file has none. Reads only the
    header. Raises SpeqError if the file is not a head.
    """
    with _open(path) as file:
        return _acceptance_rates_in(path, file.metadata)


def read_head(path: Path, model: str, hidden_size: int) -> MoEHead:
    """Read the head in a file to host memory, in its stored dtype.

    model        digest of the model that it must be for
    hidden_size  of that model

    Raises SpeqError if it is missing, damaged, or another model's.
    """
    with _open(path) as file:
        label = _label_in(file, model, hidden_size)
        weights = {name: file.tensor(name) for name, _ in label.shape.tensors()}
    if file.metadata.get("sha256") != sum_of(weights):
        raise FileError(
            f"{path} is damaged: its weights are not those of its checksum; {TRAIN_AGAIN}"
        )
    return MoEHead(label.shape, weights, label.acceptance_rates).requires_grad_(False)


def copy_head(source: Path, target: Path) -> bool:
    """Copy the head beside a model to another folder of the same model. Return True if there is
    one.
    """
    path = head_path(source)
    if not path.exists():
        return False
    out = head_path(target)
    with writing(out, ANOTHER_PLACE):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file, path.open("rb") as content:
            shutil.copyfileobj(content, file)
    return True


@contextmanager
def _open(path: Path) -> Iterator[SafetensorsFile]:
    """Open a head file of this version."""
    if not os.path.exists(path):
        raise FileError(
            f"there is no head at {path}; train one with `speq train-head`, name another place "
            "with --head, or choose another drafter"
        )
    with SafetensorsFile(path) as file:
        if file.metadata.get("format") != FORMAT:
            raise FileError(f"{path} is not a head of this version of speq; {TRAIN_AGAIN}")
        yield file


def _label_in(file: SafetensorsFile, model: str, hidden_size: int) -> HeadLabel:
    path, metadata = file.path, file.metadata
    shape = _shape_in(path, metadata)
    if metadata.get("model") != model or shape.hidden_size != hidden_size:
        raise FileError(
            f"head {path} was trained on another model: its digest of embedding, head and "
            "routers is not this model's; give the head of this model, or train one with "
            "`speq train-head`"
        )
    found = {name: info.shape for name, info in file.tensors.items()}
    floats = all(info.dtype.is_floating_point for info in file.tensors.values())
    if found != dict(shape.tensors()) or not floats:
        raise FileError(
            f"{path} is damaged: its tensors are not those of a head of its sizes; {TRAIN_AGAIN}"
        )
    return HeadLabel(shape, _acceptance_rates_in(path, metadata))


def _shape_in(path: Path, metadata: Mapping[str, str]) -> HeadShape:
    try:
        return HeadShape.of_json(parse_json(metadata.get("shape", "")))
    except (ValueError, TypeError) as error:  # from JSON, or SpeqError
        reason = str(error).split(";")[0]
        raise FileError(f"{path} is damaged: {reason}; {TRAIN_AGAIN}") from error


def _acceptance_rates_in(path: Path, metadata: Mapping[str, str]) -> tuple[float, ...]:
    """Acceptance rates by depth; empty in files of earlier versions."""
    try:
        shares = parse_json(metadata.get("stand", "[]"))
    except ValueError:  # from JSON, or SpeqError
        shares = None
    numbers = isinstance(shares, list) and all(type(each) in (int, float) for each in shares)
    if not numbers or not all(0 <= share <= 1 for share in shares):
        raise FileError(
            f"{path} is damaged: its acceptance rates are {metadata['stand']:.80}; {TRAIN_AGAIN}"
        )
    return tuple(map(float, shares))
