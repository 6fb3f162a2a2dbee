"""Plain transformers' model of a checkpoint: what runs are compared with.

Where memory cannot hold its experts, they are read a layer at a time by our own store. All else,
and what they compute, is transformers' own.
"""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from speq.errors import NoRoom
from speq.experts.expert_names import GATE_UP, UNGATED_PROJECTIONS, Stacked
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.files.checkpoint import Checkpoint
from speq.files.published_format import MXFP4_DTYPE, WORDS
from speq.host_memory import available_bytes
from speq.models.bounds import LAYER
from speq.models.dequantised import load_dequantized
from speq.models.family import Family
from speq.models.moe_model import quiet_transformers
from speq.models.opened import Opened
from speq.units import format_bytes

# In these dtypes a model is compared with itself in float32, for which weights are widened.
ROUNDED = (torch.bfloat16, torch.float16)
# Sequences that run together where experts are read from the disk for them.
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model of transformers. streamed: its experts are read a layer at a time"""

    hf_model: Any
    streamed: bool

    @torch.inference_mode()
    def logits(self, sequences: list[list[int]]) -> list[Tensor]:
        """Compute logits of each sequence, [T, V] float32 on the CPU."""
        longest, model = max(map(len, sequences)), self.hf_model
        # What stands behind a token does not change its logits.
        ids = [each + [0] * (longest - len(each)) for each in sequences]
        made: Tensor = model(torch.tensor(ids, device=model.device)).logits
        lengths = map(len, sequences)
        return [each[:n].float().cpu() for each, n in zip(made, lengths, strict=True)]

    @property
    def together(self) -> int:
        """Sequences to run at a time."""
        return TOGETHER if self.streamed else 1


class StreamedExperts(nn.Module):
    """Transformers' own experts of a layer, whose weights are in memory only while they run."""

    own: ClassVar[type[nn.Module]]
    store: ClassVar[ExpertStore]
    family: ClassVar[Family]
    up: ClassVar[str]

    def __init__(self, config: Any, **of_layer: Any) -> None:
        super().__init__()
        self._is_hf_initialized = True  # prevents the family's weight initialisation
        self.config, self.of_layer, self.layer = config, of_layer, -1
        if self.family.biased:
            count, width = config.num_local_experts, config.intermediate_size
            self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
            self.down_proj_bias = nn.Parameter(torch.empty(count, config.hidden_size))

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        experts = self._read(hidden_states, topk_ids)
        made: Tensor = experts(hidden_states, topk_ids, topk_weights)
        return made

    def _read(self, hidden_states: Tensor, topk_ids: Tensor) -> nn.Module:
        """Build the experts in the dtype of their inputs, with the weights of those chosen."""
        with torch.device("meta"):
            experts = self.own(self.config, **self.of_layer)
        experts = experts.to(hidden_states.dtype).to_empty(device=hidden_states.device)
        slot = expert_slot(self.store)
        weights = {name: parameter.data for name, parameter in experts.named_parameters()}
        for expert in topk_ids.unique().tolist():
            gate_up, down = read_matrices(self.store, self.layer, expert, slot)
            if self.family.stacked is Stacked.INTERLEAVED:
                gate_up, down = torch.stack(gate_up.chunk(2), 1).flatten(0, 1).T, down.T
            weights[self.up][expert] = gate_up
            weights["down_proj"][expert] = down
        for name, parameter in self.named_parameters():
            weights[name].copy_(parameter)
        return experts.eval()


def load_plain(opened: Opened, dtype: torch.dtype, device: torch.device) -> PlainModel:
    """Load a checkpoint with plain transformers. Raises SpeqError where memory does not suffice."""
    streamed = not fits(opened, dtype, device)
    options = {"dtype": dtype, "experts_implementation": "eager"}
    family, part = opened.family, opened.checkpoint.part
    with quiet_transformers(), closing(Checkpoint(opened.checkpoint.path, part)) as checkpoint:
        if not streamed:
            whole = load_dequantized(checkpoint, lambda name: True, **options)
            return PlainModel(whole.eval().to(device), streamed)
        layers = checkpoint.model_config.get("num_hidden_layers")
        with family.replacing_experts(lambda own: of_store(family, own, opened.store)):
            model = load_dequantized(
                checkpoint,
                lambda name: family.holds(name, layers) or family.is_on_disk(name),
                **options,
            )
    found = (module for module in model.modules() if isinstance(module, StreamedExperts))
    for layer, experts in enumerate(found):
        experts.layer = layer
    return PlainModel(model.eval().to(device), streamed)


def of_store(family: Family, own: type[nn.Module], store: ExpertStore) -> type[StreamedExperts]:
    """A class of experts that stands in for a family's own."""
    up = GATE_UP if store.codec.shape.gated else UNGATED_PROJECTIONS[0]
    parts = {"own": own, "store": store, "family": family, "up": up}
    return type(StreamedExperts.__name__, (StreamedExperts,), parts)


def fits(opened: Opened, dtype: torch.dtype, device: torch.device) -> bool:
    """True if memory holds all weights; False: all but experts, and a layer of these.

    Raises SpeqError where there is not even room for that.
    """
    free = available_bytes()
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info()[0])
    whole, streamed = needed_bytes(opened, dtype)
    if min(whole, streamed) > free:
        raise NoRoom(
            f"plain transformers needs {format_bytes(streamed)} for one layer's experts and all "
            f"else in {str(dtype).removeprefix('torch.')}, and {format_bytes(free)} of memory are "
            "left; give a model that fits, or a smaller dtype"
        )
    return whole <= free


def needed_bytes(opened: Opened, dtype: torch.dtype) -> tuple[int, int]:
    """Memory for all weights, and for all but experts beside one layer's."""
    checkpoint, family = opened.checkpoint, opened.family
    coded, part = checkpoint.coded, checkpoint.part
    dense, experts = Counter[str | None](), Counter[str | None]()
    for name, (_, info) in checkpoint.tensors.items():
        if coded.is_left_out(name) or (part is not None and part.is_beside(name)):
            continue
        found = LAYER.search(name)
        codes = 2 if info.dtype == MXFP4_DTYPE and coded.format != WORDS else 1
        count = prod(info.shape) * codes if codes > 1 else prod(coded.matrix_shape(name))
        layers = experts if family.names.is_expert(name) else dense
        layers[found and found[1]] += count
    each = Counter({layer: dense[layer] + experts[layer] for layer in {*dense, *experts}})
    largest, of_layer = max(experts.values(), default=0), max(each.values(), default=0)
    whole = each.total() * dtype.itemsize
    streamed = (dense.total() + largest) * dtype.itemsize
    if dtype in ROUNDED:  # one layer is widened at a time
        widened = (dense[None] + of_layer) * torch.float32.itemsize
        whole, streamed = whole + widened, streamed + widened
    if coded.format != WORDS and dtype != torch.bfloat16:  # dequantised to bfloat16 first
        whole += each.total() * torch.bfloat16.itemsize
        streamed += dense.total() * torch.bfloat16.itemsize
    return whole, streamed
