"""The layer of a checkpoint that predicts tokens ahead (MTP), on disk.

It is found and sized first, and read when the budget is known to hold it.
"""

import importlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec
from speq.experts.expert_store import ExpertLayout, SafetensorsExpertStore
from speq.files.alignment import aligned_bytes
from speq.files.checkpoint import OTHER_VERSION, Checkpoint
from speq.heads.mtp_head import MtpHead, MtpLayer
from speq.heads.mtp_shape import MtpShape
from speq.layers.offloaded_experts import BankSwitch
from speq.layers.resident_experts import ResidentExperts
from speq.models.dequantised import state_of
from speq.models.families import FAMILIES, Family
from speq.models.opened import Opened
from speq.models.shape import hf_config

# How its option is called.
MTP = "mtp"
SHARED_NORM = "shared_head.norm.weight"
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
# Copies of the exact model's, in most checkpoints: these are its names.
COPIED = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
# Copies are told by so many blocks of so many bytes.
BLOCKS, BLOCK_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class MtpSource:
    """A checkpoint's layer that predicts tokens ahead, not read yet.

    layer  its modules, without storage
    owned  which of EMBEDDING and HEAD it has of its own
    store  of its experts
    """

    opened: Opened
    shape: MtpShape
    layer: MtpLayer
    owned: tuple[str, ...]
    store: SafetensorsExpertStore

    @property
    def stand(self) -> tuple[float, ...]:
        """Nobody says."""
        return ()

    def held(self, dtype: torch.dtype, device: torch.device) -> MtpHead:
        """The layer, its experts as they are published, read from the checkpoint."""
        prefix = prefix_of(self.opened)
        names = self.opened.family.names

        def wanted(name: str) -> bool:
            return name.startswith(prefix) and not names.is_expert(name)

        stored = state_of(self.opened.checkpoint, wanted)
        state = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}

        def moved(name: str, kind: torch.dtype) -> Tensor:
            # Of their own: what is mapped goes with its file.
            return state[name].to(device, kind, copy=True)

        layer = self.layer
        made: dict[str, Tensor] = {}
        for name, like in [*layer.named_parameters(), *layer.named_buffers()]:
            if not name.startswith("rotary."):
                kind = dtype if isinstance(like, torch.nn.Parameter) else like.dtype
                made[name] = moved(on_disk(name), kind)
        layer.load_state_dict(made, strict=False, assign=True)
        layer.rotary.to(device)
        layer.requires_grad_(False).eval()
        slots = read_slots(self.store, device)
        put_experts(layer, self.opened, slots, self.store.codec)
        own = [moved(name, dtype) if name in self.owned else None for name in (EMBEDDING, HEAD)]
        return MtpHead(self.shape, layer, *own)


def mtp_of(opened: Opened) -> MtpSource:
    """The layer behind a model's last. Raises SpeqError where there is none that can draft."""
    family, checkpoint, shape = opened.family, opened.checkpoint, opened.shape
    layer = layer_of(family, opened)
    tensors, prefix = checkpoint.tensors, prefix_of(opened)
    if prefix + "eh_proj.weight" not in tensors:
        raise SpeqError(
            f"head is {MTP} and {checkpoint.path} has no tensor {prefix}eh_proj.weight, of a layer "
            "that predicts tokens ahead; download the model as its authors published it, or choose "
            "another head"
        )
    parameters: dict[str, Tensor] = dict(layer.named_parameters())
    buffers = {name: b for name, b in layer.named_buffers() if not name.startswith("rotary.")}
    for name, like in (parameters | buffers).items():
        check(checkpoint, prefix + on_disk(name), tuple(like.shape))
    owned = tuple(name for name, of_model in COPIED.items() if is_own(opened, name, of_model))
    for name in owned:
        check(checkpoint, prefix + name, (shape.vocab_size, shape.hidden_size))
    store = store_of(opened)
    words = [like.numel() for like in parameters.values()]
    words += [shape.vocab_size * shape.hidden_size] * len(owned)
    arena_bytes = shape.experts.num_experts * store.codec.slot_bytes
    own_bytes = (*(each.nbytes for each in buffers.values()), arena_bytes)
    return MtpSource(opened, MtpShape(shape, tuple(words), own_bytes), layer, owned, store)


def prefix_of(opened: Opened) -> str:
    return f"model.layers.{opened.shape.num_layers}."


def on_disk(name: str) -> str:
    """A tensor of `MtpLayer` by its name behind the layer's prefix."""
    if name.startswith("shared_head_norm."):
        return SHARED_NORM
    return name.removeprefix("decoder.")


def layer_of(family: Family, opened: Opened) -> MtpLayer:
    """Its modules, without storage but for rotary positions."""
    predictor = family.predictor
    if predictor is None:
        known = sorted(each.model_type for each in FAMILIES.values() if each.predictor)
        raise SpeqError(
            f"head is {MTP} and the model is of family {family.model_type}, of which speq reads no "
            f"layer that predicts tokens ahead; it reads those of {', '.join(known)}: choose "
            "another head"
        )
    config: Any = deepcopy(hf_config(opened.checkpoint))
    config._attn_implementation = "sdpa"
    module = importlib.import_module(family.module)
    decoder, norm = getattr(module, predictor.layer), getattr(module, predictor.norm)
    rotary = getattr(module, predictor.rotary)(config)
    with family.without_experts(), torch.device("meta"):
        return MtpLayer(config, decoder, norm, rotary)


def check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raise SpeqError unless a checkpoint has a tensor of that shape."""
    if name not in checkpoint.tensors:
        raise SpeqError(
            f"{checkpoint.path} lacks tensor {name} of its layer that predicts tokens ahead; "
            f"{OTHER_VERSION}, or choose another head"
        )
    file, info = checkpoint.tensors[name]
    if info.shape != shape:
        raise SpeqError(
            f"{file.path}: tensor {name} has shape {list(info.shape)}; config.json makes it "
            f"{list(shape)}; {OTHER_VERSION}, or choose another head"
        )


def is_own(opened: Opened, name: str, of_model: str) -> bool:
    """Whether a layer has an embedding or a head that is not the exact model's. Samples tell them
    apart: at worst drafts are worse.
    """
    tensors, name = opened.checkpoint.tensors, prefix_of(opened) + name
    if name not in tensors:
        return False
    if of_model not in tensors:
        of_model = COPIED[EMBEDDING]  # a head that shares the embedding
    if of_model not in tensors:
        return True
    (_, info), (_, other) = tensors[name], tensors[of_model]
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return True
    pairs = zip(*(samples(opened.checkpoint, each) for each in (name, of_model)), strict=True)
    return any(not torch.equal(*pair) for pair in pairs)


def samples(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Bytes of blocks spread over a tensor."""
    file, info = checkpoint.tensors[name]
    block_bytes = min(BLOCK_BYTES, info.nbytes)
    for at in range(BLOCKS):
        block = torch.empty(block_bytes, dtype=torch.uint8)
        file.read_into(info.offset + at * (info.nbytes - block_bytes) // (BLOCKS - 1), block)
        yield block


def store_of(opened: Opened) -> SafetensorsExpertStore:
    """The store of the layer's experts. Raises SpeqError where a pack has left them out."""
    checkpoint, experts = opened.checkpoint, opened.shape.experts
    number = opened.shape.num_layers
    matrices = (experts.names.matrix(name) for name in checkpoint.tensors)
    if not any(matrix is not None and matrix.layer == number for matrix in matrices):
        raise SpeqError(
            f"head is {MTP} and {checkpoint.path} holds no experts of layer {number}, which "
            "predicts tokens ahead, as packs leave them out; give the model as its authors "
            "published it, or choose another head"
        )
    layout = ExpertLayout(
        (number,),
        experts.num_experts,
        experts.hidden_size,
        experts.expert_width,
        experts.names,
    )
    return SafetensorsExpertStore(checkpoint, layout)


def read_slots(store: SafetensorsExpertStore, device: torch.device) -> Tensor:
    """All experts of a store of one layer, each in the slot of its number."""
    slots = aligned_bytes(store.num_experts, store.codec.slot_bytes, device)
    room = aligned_bytes(1, store.codec.slot_bytes)[0]
    for expert in range(store.num_experts):
        here = slots[expert] if device.type == "cpu" else room
        store.read(0, expert, here)
        if here is room:
            slots[expert].copy_(room)
    return slots


def put_experts(layer: MtpLayer, opened: Opened, slots: Tensor, codec: ExpertCodec) -> None:
    """Have the layer's block run experts out of slots."""
    names = opened.family.names
    block: Any = getattr(layer.decoder, names.blocks[0])
    switch = BankSwitch()
    getattr(block, names.experts).attach(0, switch, getattr(block, names.routers[0]), None)
    switch.turn(ResidentExperts(slots, codec, opened.shape.activation))
