"""Writes a checkpoint of random weights in a published model's shapes, once, and keeps it."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from speq.bench.shapes.published import BF16, PublishedShape
from speq.bench.shapes.tensors import RandomTensor, WeightPool, tensors_of
from speq.bench.widen import existing_parent
from speq.errors import FileError, NoRoom
from speq.files.atomic_file import writing
from speq.files.checkpoint import locate
from speq.files.json_file import read_json
from speq.files.published_format import WORDS, format_of
from speq.models.families import family_of
from speq.models.shape import config_in
from speq.planning.model_spec import ModelSpec
from speq.units import Progress, format_bytes, track

# Says what a folder holds, and whether all of it is there.
STAMP = "shapes.json"
SHARD_BYTES = 4_000_000_000
# Of one more kind of weights or of how they are drawn.
VERSION = 1


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """A model of published shapes before it is written.

    content      its config.json
    layer_types  kinds of attention, by layer
    """

    shape: PublishedShape
    content: dict[str, Any]
    weights: str
    seed: int
    model_spec: ModelSpec
    tensors: list[RandomTensor]
    layer_types: list[str]

    @classmethod
    def of(
        cls, shape: PublishedShape, layers: int | None, weights: str | None, seed: int
    ) -> "ShapedModel":
        """Raises SpeqError for what is no model that speq runs."""
        content = shape.content(layers, weights)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(content))
            spec = ModelSpec.of_config(shape.name, folder, "auto")
            family, config = family_of(content, folder), config_in(folder)
            published = format_of(content, folder).name
            tensors = tensors_of(family, config, spec.shape, published)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * spec.shape.num_layers
        return cls(shape, content, published, seed, spec, tensors, kinds)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Weights, whatever bits each takes."""
        experts = self.model_spec.shape.experts
        of_experts = len(experts.layers) * experts.num_experts * experts.weights
        return self.model_spec.shape.resident_weights + of_experts

    @property
    def text(self) -> dict[str, Any]:
        """Configuration of the part of text."""
        return dict(self.content.get("text_config", self.content))

    @property
    def kind(self) -> str:
        """Name of its weights' form."""
        return BF16 if self.weights == WORDS else self.weights

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.shape.name}-{self.kind}-{self.text['num_hidden_layers']}-layers"

    def stamp(self, whole: bool) -> dict[str, Any]:
        made = {"version": VERSION, "seed": self.seed, "config": self.content}
        return made | {"shapes": self.shape.name, "source": self.shape.source, "whole": whole}


def write(
    model: ShapedModel,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> bool:
    """Write the checkpoint, one shard at a time; False if it is there already.

    Raises SpeqError for a folder with anything else, and where the disk has too little space.
    """
    stamp = target / STAMP
    found = read_json(stamp) if stamp.exists() else None
    if found == model.stamp(whole=True):
        return False
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken and found != model.stamp(whole=False):
        raise FileError(
            f"{target} holds something else than {model.name} of seed {model.seed}; remove it, or "
            "give another folder"
        )
    held = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    free = shutil.disk_usage(existing_parent(target)).free + held
    if model.nbytes > free:
        raise NoRoom(
            f"{model.name} takes {format_bytes(model.nbytes)} of disk and {format_bytes(free)} are "
            f"left at {target}; free some, give another folder, or fewer layers"
        )
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        for file in target.glob("*.safetensors"):
            file.unlink()
        stamp.write_text(json.dumps(model.stamp(whole=False), indent=1))
        write_shards(model, target, shard_bytes, progress)
        write_tokenizer(target, model)
        (target / "config.json").write_text(json.dumps(model.content, indent=1))
        stamp.write_text(json.dumps(model.stamp(whole=True), indent=1))
    locate(target)
    return True


def shards_of(tensors: list[RandomTensor], shard_bytes: int) -> list[list[RandomTensor]]:
    """Cut the tensors into shards of so many bytes at most, or of one tensor."""
    shards: list[list[RandomTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def write_shards(
    model: ShapedModel, target: Path, shard_bytes: int, progress: Progress | None
) -> None:
    """Write the shards and their index."""
    pool, shards = WeightPool(model.seed), shards_of(model.tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for at, shard in enumerate(track("writing random weights", shards, len(shards), progress)):
        file = f"model-{at + 1:05d}-of-{len(shards):05d}.safetensors"
        drawn = {tensor.name: pool.draw(tensor) for tensor in shard}
        save_file(drawn, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(drawn, file)
    index = {"metadata": {"total_size": model.nbytes}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(target: Path, model: ShapedModel) -> None:
    """Write a tokenizer of bytes whose vocabulary is as large as the model's, and defaults that
    sample from the whole of it.
    """
    size, ends = model.text["vocab_size"], model.text.get("eos_token_id") or 0
    end = ends[0] if isinstance(ends, list) else ends
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merge = ("t", "h")  # llama.cpp takes no vocabulary without merges
    more = (f"<|{at}|>" for at in range(len(alphabet) + 1, size))
    named = [*alphabet, "".join(merge), *more][:size]
    vocabulary = {token: at for at, token in enumerate(named)}
    merges = [merge] if "".join(merge) in vocabulary else []
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([named[end]])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": named[end]}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    defaults = {"do_sample": True, "temperature": 1.0, "eos_token_id": end}
    (target / "generation_config.json").write_text(json.dumps(defaults))
