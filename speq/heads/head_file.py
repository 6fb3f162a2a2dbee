"""A head on disk: one safetensors file beside its model, tied to it by a digest.

Its metadata say of which model it is, what its sizes are, how far its drafts stood where it was
trained, and the SHA-256 of its weights. Nothing of it is trusted before all were checked.
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

from speq.errors import SpeqError
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
# Of the model: what a head reads and what says its tokens, and routers, which tell models apart
# that share both.
SHARED_ENDS = ("embed_tokens.weight", "lm_head.weight")
SAMPLE_BYTES = 1 << 17
TRAIN_AGAIN = "train it again with `speq train-head`"


def head_beside(model: Path) -> Path:
    """Where the head of a model is looked for, and where `speq train-head` leaves one."""
    return model / FOLDER / NAME


def model_digest(checkpoint: Checkpoint, names: ExpertNames) -> str:
    """Names the model that a head is trained on: by samples of its embedding, its head and its
    routers, which packing leaves as they are.
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
    """The SHA-256 of weights in host memory, in their order."""
    digest = hashlib.sha256()
    for weight in weights.values():
        digest.update(bytes_of(weight.contiguous().view(-1).view(torch.uint8)))
    return digest.hexdigest()


def write_head(path: Path, head: MoEHead, model: str, dtype: torch.dtype) -> None:
    """Write a head whose model has that digest. Raises SpeqError where that cannot be done."""
    weights = {name: w.to("cpu", dtype).contiguous() for name, w in head.weights().items()}
    metadata = {
        "format": FORMAT,
        "model": model,
        "shape": json.dumps(head.shape.as_json()),
        "stand": json.dumps(head.stand),
        "sha256": sum_of(weights),
    }
    entries = {name: (dtype, tuple(weight.shape)) for name, weight in weights.items()}
    with writing(path, ANOTHER_PLACE), replacing(path) as file:
        file.write(header_of(entries, metadata))
        for weight in weights.values():
            file.write(bytes_of(weight.view(-1).view(torch.uint8)))


@dataclass(frozen=True, slots=True)
class HeadLabel:
    """What a head's file says of it beside its weights.

    stand  as `HeadSource` has it
    """

    shape: HeadShape
    stand: tuple[float, ...]


def read_label(path: Path, model: str, hidden_size: int) -> HeadLabel:
    """As `read_head`, of the file's header alone: what damage there is in weights is not seen."""
    with _opened(path) as file:
        return _label_in(file, model, hidden_size)


def read_stand(path: Path) -> tuple[float, ...]:
    """How far the drafts of a head stand by its file, whichever model it is of; empty where it does
    not say. Reads the header alone. Raises SpeqError where that is no head's.
    """
    with _opened(path) as file:
        return _stand_in(path, file.metadata)


def read_head(path: Path, model: str, hidden_size: int) -> MoEHead:
    """The head in a file, in host memory, in the dtype that it is stored in.

    model        digest of the model that it must have been trained on
    hidden_size  of that model

    Raises SpeqError where it is missing, damaged, or another model's.
    """
    with _opened(path) as file:
        label = _label_in(file, model, hidden_size)
        weights = {name: file.tensor(name) for name, _ in label.shape.tensors()}
    if file.metadata.get("sha256") != sum_of(weights):
        raise SpeqError(
            f"{path} is damaged: its weights are not those of its checksum; {TRAIN_AGAIN}"
        )
    return MoEHead(label.shape, weights, label.stand).requires_grad_(False)


def copy_head(source: Path, target: Path) -> bool:
    """Copy the head beside a model to another folder of the same model; whether there is one."""
    path = head_beside(source)
    if not path.exists():
        return False
    out = head_beside(target)
    with writing(out, ANOTHER_PLACE):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file, path.open("rb") as content:
            shutil.copyfileobj(content, file)
    return True


@contextmanager
def _opened(path: Path) -> Iterator[SafetensorsFile]:
    """A file of this version's heads."""
    if not os.path.exists(path):
        raise SpeqError(
            f"there is no head at {path}; train one with `speq train-head`, name another place "
            "with --head, or choose another drafter"
        )
    with SafetensorsFile(path) as file:
        if file.metadata.get("format") != FORMAT:
            raise SpeqError(f"{path} is no head of this version of speq; {TRAIN_AGAIN}")
        yield file


def _label_in(file: SafetensorsFile, model: str, hidden_size: int) -> HeadLabel:
    path, metadata = file.path, file.metadata
    shape = _shape_in(path, metadata)
    if metadata.get("model") != model or shape.hidden_size != hidden_size:
        raise SpeqError(
            f"head {path} was trained on another model: its digest of embedding, head and "
            "routers is not this model's; give the head of this model, or train one with "
            "`speq train-head`"
        )
    found = {name: info.shape for name, info in file.tensors.items()}
    floats = all(info.dtype.is_floating_point for info in file.tensors.values())
    if found != dict(shape.tensors()) or not floats:
        raise SpeqError(
            f"{path} is damaged: its tensors are not those of a head of its sizes; {TRAIN_AGAIN}"
        )
    return HeadLabel(shape, _stand_in(path, metadata))


def _shape_in(path: Path, metadata: Mapping[str, str]) -> HeadShape:
    try:
        return HeadShape.of_json(parse_json(metadata.get("shape", "")))
    except (ValueError, TypeError) as error:  # of JSON, or SpeqError
        reason = str(error).split(";")[0]
        raise SpeqError(f"{path} is damaged: {reason}; {TRAIN_AGAIN}") from error


def _stand_in(path: Path, metadata: Mapping[str, str]) -> tuple[float, ...]:
    """Shares by depth; none in files of versions that did not say them."""
    try:
        shares = parse_json(metadata.get("stand", "[]"))
    except ValueError:  # of JSON, or SpeqError
        shares = None
    numbers = isinstance(shares, list) and all(type(each) in (int, float) for each in shares)
    if not numbers or not all(0 <= share <= 1 for share in shares):
        raise SpeqError(
            f"{path} is damaged: it says that drafts stand in shares of {metadata['stand']:.80}; "
            f"{TRAIN_AGAIN}"
        )
    return tuple(map(float, shares))
