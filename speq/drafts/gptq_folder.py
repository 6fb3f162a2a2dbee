"""A GPTQ checkpoint as a draft: its experts, checked and loaded into the INT4 arena, and its
quantised dense layers.

Everything else in the folder is ignored: a draft shares it with the exact model. So are biases of
dense layers. Biases of experts, which AutoGPTQ once wrote, must be zero: no supported family has
them.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from speq.drafts.dense_draft import DenseLayer, DenseLayout
from speq.drafts.gptq_config import gptq_config
from speq.drafts.gptq_format import (
    CODES_PER_WORD,
    GptqMatrix,
    Int4Linear,
    check_zeros,
    concatenate,
    dequantise,
    float16_scales,
    input_perm_of,
    to_int4,
)
from speq.drafts.gptq_modules import ExpertFinder, PackedModule, dense_modules, file_names
from speq.errors import CheckpointError
from speq.experts.expert_store import ExpertLayout
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.files.json_file import read_json
from speq.files.safetensors_file import SafetensorsFile, TensorInfo
from speq.files.shards import Shards
from speq.files.text_part import TextModelPart
from speq.kernels.ops import Int4Weight
from speq.units import Done


class GptqFolder:
    """A folder of GPTQ experts for a model whose experts are `experts`.

    layout  layout of one of its experts in an arena
    dense   by name, the model's dense layers of `shapes` that it has packed
    part    prefix of the text model in multimodal checkpoints

    Opening checks names, shapes, dtypes and settings, and the scales, zero points and g_idx of one
    expert of each layer. Loading checks those of the others. Raises SpeqError.
    """

    label = "loading the GPTQ draft"

    def __init__(
        self,
        path: Path,
        experts: ExpertLayout,
        shapes: tuple[DenseLayer, ...] = (),
        part: TextModelPart | None = None,
    ) -> None:
        self.path = path
        self.config = gptq_config(path, read_json(path / "config.json"))
        self.layout = self._layout(experts)
        called = None if part is None else part.called
        self._shards = Shards(path, *file_names(path), called)
        try:
            self._experts = ExpertFinder(self._shards, experts, self.config).find()
            for expert in self._experts[:: experts.num_experts]:
                for module in expert.modules:
                    self._read_values(module)
            self._dense = dense_modules(self._shards, self.config, shapes)
            packed = (shape for shape in shapes if shape.name in self._dense)
            self.dense = {shape.name: self._dense_layout(shape) for shape in packed}
        except BaseException:
            self.close()
            raise

    def _layout(self, experts: ExpertLayout) -> Int4Layout:
        hidden, width = experts.hidden_size, experts.expert_width
        for columns in (hidden, width):
            if columns % self.config.group_size_for(columns) or columns % CODES_PER_WORD:
                raise CheckpointError(
                    f"draft {self.path} has group_size {self.config.group_size}, and the model's "
                    f"experts have rows of {columns}, which must be whole groups and whole words "
                    "of eight codes; quantise with a group_size that divides them, or -1"
                )
        # An order of inputs is needed only with several groups.
        permuted = self.config.desc_act and self.config.group_size_for(hidden) < hidden
        return Int4Layout(hidden, width, self.config.group_size, permuted, experts.gated)

    def _dense_layout(self, shape: DenseLayer) -> DenseLayout:
        group_size = self.config.group_size_for(shape.columns)
        permuted = self.config.desc_act and group_size < shape.columns
        sizes = shape.name, shape.outputs, shape.columns
        return DenseLayout(*sizes, 1, group_size, permuted, brought=True)

    @property
    def fingerprint(self) -> str:
        return self._shards.fingerprint(repr(self.config).encode())

    @property
    def tensors(self) -> dict[str, tuple[SafetensorsFile, TensorInfo]]:
        return self._shards.tensors

    def fill(self, arena: Int4Arena, progress: Done | None = None) -> None:
        """Load the experts that an arena of `layout` holds. progress: called with (experts done,
        experts).
        """
        for base_slot, at in enumerate(arena.held):
            arena.put(base_slot, self.expert(at))
            if progress is not None:
                progress(base_slot + 1, len(arena.held))

    def sample(self, base_slot: int, count: int) -> Tensor:
        """Dequantise the first `count` rows of an expert's gate if it has one, up and down,
        flattened and concatenated, in float32.
        """
        expert, rows = self._experts[base_slot], torch.arange(count)
        gate_up = self._concatenate(*expert.gate_up)
        parts = [
            dequantise(gate_up, torch.cat(self.layout.in_each(rows))),
            dequantise(self._read(expert.down), rows),
        ]
        return torch.cat([part.flatten() for part in parts])

    def close(self) -> None:
        self._shards.close()

    def expert(self, at: int) -> Int4Expert:
        """Read one expert in the kernels' layout. Raises SpeqError if it is damaged."""
        expert = self._experts[at]
        gate_up, down = self._matrix(*expert.gate_up), self._matrix(expert.down)
        if down.input_perm is not None:
            # The inputs of down are the outputs of gate and up, whose rows take its order.
            gate_up = gate_up.reorder_rows(torch.cat(self.layout.in_each(down.input_perm)))
        parts = {
            "gate_up_qweight": gate_up.qweight,
            "gate_up_scales": gate_up.scales,
            "down_qweight": down.qweight,
            "down_scales": down.scales,
        }
        if self.layout.permuted:
            in_order = torch.arange(self.layout.hidden_size)
            order = in_order if gate_up.input_perm is None else gate_up.input_perm
            parts["input_perm"] = order.to(torch.int32)
        return Int4Expert(parts, down.input_perm)

    def dense_weight(self, name: str) -> Int4Weight:
        """Read one of `dense` in the kernels' layout. Raises SpeqError if it is damaged."""
        module = self._dense[name]
        biasless = {part: held for part, held in module.parts.items() if part != "bias"}
        matrix = self._matrix(replace(module, parts=biasless))
        order = matrix.input_perm
        if self.dense[name].permuted and order is None:
            order = torch.arange(module.columns)
        return Int4Weight(
            matrix.qweight, matrix.scales, None if order is None else order.to(torch.int32)
        )

    def _matrix(self, *modules: PackedModule) -> Int4Linear:
        whole = self._concatenate(*modules)
        return to_int4(whole, self.config.group_size_for(modules[0].columns))

    def _concatenate(self, *modules: PackedModule) -> GptqMatrix:
        """Concatenate the rows of modules over the same inputs."""
        matrices = [self._read(module) for module in modules]
        try:
            return concatenate(matrices)
        except ValueError as error:
            names = " and ".join(module.name for module in modules)
            raise CheckpointError(
                f"{modules[0].path}: {names} {error}; quantise them together"
            ) from error

    def _read(self, module: PackedModule) -> GptqMatrix:
        values = self._read_values(module)
        return replace(values, qweight=module.parts["qweight"].read())

    def _read_values(self, module: PackedModule) -> GptqMatrix:
        """Read a module without its codes, and check its values against the config."""
        parts = {name: part.read() for name, part in module.parts.items() if name != "qweight"}
        g_idx, bias = parts.get("g_idx"), parts.get("bias")
        at, remedy = "qzeros", self._zeros_remedy
        try:
            check_zeros(parts["qzeros"], self.config.checkpoint_format)
            at, remedy = "scales", "download or quantise it again"
            float16_scales(parts["scales"])
            at = "g_idx"
            order = input_perm_of(g_idx, module.columns, self.config.group_size_for(module.columns))
            if order is not None and not self.config.desc_act:
                raise ValueError("puts inputs out of order, although the config has desc_act false")
            at = "bias"
            if bias is not None and bool(bias.any()):
                raise ValueError("is not zero, and the model's experts have no bias")
        except ValueError as error:
            raise CheckpointError(f"{module.path}: {module.name}.{at} {error}; {remedy}") from error
        return GptqMatrix(torch.empty(0), parts["qzeros"], parts["scales"], g_idx)

    @property
    def _zeros_remedy(self) -> str:
        if not self.config.sym:
            return "asymmetric checkpoints are not read: quantise with sym true"
        return (
            "the config (sym true, checkpoint_format "
            f"{self.config.checkpoint_format}) is not true of it: download or quantise it again"
        )
