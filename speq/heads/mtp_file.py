"""The MTP layer of a checkpoint, on disk.

It is found and sized first, and read once it is known to fit the budget.
"""

import importlib
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.errors import CheckpointError
from speq.experts.codec import ExpertCodec
from speq.experts.expert_store import ExpertLayout, SafetensorsExpertStore
from speq.files.alignment import allocate_aligned
from speq.files.checkpoint import Checkpoint
from speq.files.safetensors_file import OTHER_VERSION
from speq.heads.mtp_head import MtpHead, MtpLayer
from speq.heads.mtp_shape import MtpShape
from speq.layers.offloaded_experts import ActiveBackend, OffloadedExperts
from speq.layers.resident_experts import ResidentExperts
from speq.models.dequantised import state_of
from speq.models.families import FAMILIES
from speq.models.mtp_layer import MtpLayerKind, PartNames
from speq.models.opened import Opened
from speq.models.own_head import HEAD, differ
from speq.models.shape import CONFIG_AGAIN, hf_config

# Value of the option head that selects it.
MTP = "mtp"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class MtpSource:
    """A checkpoint's MTP layer, not read yet.

    layer  its modules, on the meta device
    names  of its parts on disk
    owned  names on disk of an embedding and a head that differ from the exact model's
    store  store of its experts; None: it has none
    """

    opened: Opened
    shape: MtpShape
    layer: MtpLayer
    names: PartNames
    owned: tuple[str, ...]
    store: SafetensorsExpertStore | None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Empty: checkpoints do not state them."""
        return ()

    def load(self, dtype: torch.dtype, device: torch.device) -> MtpHead:
        """Read the layer from the checkpoint, with its experts in the published form."""
        layer, held = self.layer, loaded_tensors(self.layer)
        stored = {name: self.names.tensor(name) for name in held}
        wanted = {*stored.values(), *self.owned}
        checkpoint = self.opened.checkpoint
        state, part = state_of(checkpoint, wanted.__contains__), checkpoint.part

        def moved(name: str, kind: torch.dtype) -> Tensor:
            taken = name if part is None else part.published(name)
            # Copies: mapped tensors are lost with their file.
            return state[taken].to(device, kind, copy=True)

        made: dict[str, Tensor] = {}
        for name, like in held.items():
            kind = dtype if isinstance(like, torch.nn.Parameter) else like.dtype
            made[name] = moved(stored[name], kind)
        layer.load_state_dict(made, strict=False, assign=True)
        layer.rotary.to(device)
        layer.requires_grad_(False).eval()
        if self.store is not None:
            slots = read_slots(self.store, device)
            put_experts(layer, self.opened, slots, self.store.codec)
        ends = (f"{name}.weight" for name in (self.names.embedding, self.names.head))
        own = [moved(name, dtype) if name in self.owned else None for name in ends]
        return MtpHead(self.shape, layer, *own)


def mtp_of(opened: Opened) -> MtpSource:
    """Find the MTP layer of a model's checkpoint. Raises SpeqError if there is none that can
    draft.
    """
    checkpoint, shape = opened.checkpoint, opened.shape
    predictor = predictor_of(opened)
    names = predictor.names.for_layers(shape.num_layers)
    config: Any = deepcopy(hf_config(checkpoint))
    kinds = kinds_of(config, predictor, checkpoint.path)
    layer = layer_of(opened, predictor, config, kinds)
    first = names.tensor("eh_proj.weight")
    if first not in checkpoint.tensors:
        raise CheckpointError(
            f"head is {MTP} and {checkpoint.path} has no tensor {first}, of an "
            "MTP layer; download the model as its authors published it, or choose another head"
        )
    held = loaded_tensors(layer)
    for name, like in held.items():
        check(checkpoint, names.tensor(name), tuple(like.shape))
    ends = {names.embedding: EMBEDDING, names.head: HEAD}
    owned = tuple(
        f"{name}.weight"
        for name, of_model in ends.items()
        if name and is_own(checkpoint, f"{name}.weight", of_model)
    )
    for name in owned:
        check(checkpoint, name, (shape.vocab_size, shape.hidden_size))
    words = [each.numel() for each in held.values() if isinstance(each, torch.nn.Parameter)]
    words += [shape.vocab_size * shape.hidden_size] * len(owned)
    own_bytes = [each.nbytes for each in held.values() if not isinstance(each, torch.nn.Parameter)]
    store = store_of(opened, names) if has_experts(layer) else None
    if store is not None:
        own_bytes.append(store.num_experts * store.codec.slot_bytes)
    window = config.sliding_window if kinds.get("layer_types") == "sliding_attention" else None
    sizes = MtpShape(shape, tuple(words), tuple(own_bytes), window)
    return MtpSource(opened, sizes, layer, names, owned, store)


def predictor_of(opened: Opened) -> MtpLayerKind:
    """Find the family's MTP layer. Raises SpeqError if speq reads none of this family."""
    family = opened.family
    if family.predictor is None:
        known = sorted(each.model_type for each in FAMILIES.values() if each.predictor)
        raise CheckpointError(
            f"head is {MTP} and the model is of family {family.model_type}, whose MTP layer speq "
            f"does not read; it reads those of {', '.join(known)}: choose "
            "another head"
        )
    return family.predictor


def kinds_of(config: Any, predictor: MtpLayerKind, path: Path) -> dict[str, str]:
    """Kind of the decoder layer in each of the config's lists of kinds by layer: what the config
    says of MTP layers, or the family's. Raises SpeqError for a kind that speq does not run.
    """
    found = {}
    for name, *known in predictor.kinds:
        own = getattr(config, f"mtp_{name}", None) or known
        found[name] = own[0] if isinstance(own, list) else own
        if found[name] not in known:
            raise CheckpointError(
                f"head is {MTP} and {path / 'config.json'} has the kind {found[name]!r} in "
                f"mtp_{name}; speq runs MTP layers of {' or '.join(known)}: choose another head"
            )
    return found


def layer_of(
    opened: Opened, predictor: MtpLayerKind, config: Any, kinds: dict[str, str]
) -> MtpLayer:
    """Build its modules on the meta device, except the rotary embedding.

    config  the model's, which becomes that of the layer
    """
    family = opened.family
    config._attn_implementation = "sdpa"
    for name, kind in kinds.items():
        setattr(config, name, [*getattr(config, name)[: config.num_hidden_layers], kind])
    module = importlib.import_module(family.module)
    decoder, norm = getattr(module, predictor.layer), getattr(module, predictor.norm)
    try:
        rotary = getattr(module, predictor.rotary)(config)
    except KeyError as error:  # parameters for each kind of layers
        raise CheckpointError(
            f"head is {MTP} and rope_parameters of {opened.checkpoint.path / 'config.json'} lack "
            f"{error}, the kind of its MTP layer; {CONFIG_AGAIN}, or choose another head"
        ) from error
    with family.without_experts(), torch.device("meta"):
        return MtpLayer(config, predictor, decoder, norm, rotary)


def loaded_tensors(layer: MtpLayer) -> dict[str, Tensor]:
    """Parameters and buffers to load: all but the rotary embedding's, which the config
    determines.
    """
    found: dict[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: each for name, each in found.items() if not name.startswith("rotary.")}


def has_experts(layer: MtpLayer) -> bool:
    return any(isinstance(module, OffloadedExperts) for module in layer.modules())


def check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raise SpeqError unless a checkpoint has a tensor of that shape."""
    if name not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} lacks tensor {name} of its layer that predicts tokens ahead; "
            f"{OTHER_VERSION}, or choose another head"
        )
    file, info = checkpoint.tensors[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{file.path}: tensor {name} has shape {list(info.shape)}; config.json makes it "
            f"{list(shape)}; {OTHER_VERSION}, or choose another head"
        )


def is_own(checkpoint: Checkpoint, name: str, of_model: str) -> bool:
    """True if an MTP layer's embedding or head differs from the exact model's. An error only makes
    drafts worse.
    """
    tensors = checkpoint.tensors
    if name not in tensors:
        return False
    if of_model not in tensors:
        of_model = EMBEDDING  # a head that shares the embedding
    if of_model not in tensors:
        return True
    return differ(checkpoint, name, of_model)


def store_of(opened: Opened, names: PartNames) -> SafetensorsExpertStore:
    """Open the store of the layer's experts. Raises SpeqError if a pack has left them out."""
    checkpoint, experts = opened.checkpoint, opened.shape.experts
    parent, number = names.place
    of_experts = replace(experts.names, parent=parent)
    matrices = (of_experts.matrix(name) for name in checkpoint.tensors)
    if not any(matrix is not None and matrix.layer == number for matrix in matrices):
        raise CheckpointError(
            f"head is {MTP} and {checkpoint.path} holds no experts of {names.decoder}, which "
            "predicts tokens ahead, as packs leave them out; give the model as its authors "
            "published it, or choose another head"
        )
    layout = ExpertLayout(
        (number,), experts.num_experts, experts.hidden_size, experts.expert_width, of_experts
    )
    return SafetensorsExpertStore(checkpoint, layout)


def read_slots(store: SafetensorsExpertStore, device: torch.device) -> Tensor:
    """Read all experts of a store of one layer, each into the slot of its number."""
    slots = allocate_aligned(store.num_experts, store.codec.slot_bytes, device)
    room = allocate_aligned(1, store.codec.slot_bytes)[0]
    for expert in range(store.num_experts):
        here = slots[expert] if device.type == "cpu" else room
        store.read(0, expert, here)
        if here is room:
            slots[expert].copy_(room)
    return slots


def put_experts(layer: MtpLayer, opened: Opened, slots: Tensor, codec: ExpertCodec) -> None:
    """Make the layer's block run experts out of slots."""
    names = opened.family.names
    block: Any = getattr(layer.decoder, names.blocks[0])
    switch = ActiveBackend()
    getattr(block, names.experts).attach(0, switch, getattr(block, names.routers[0]), None)
    switch.use(ResidentExperts(slots, codec, opened.shape.activation))
