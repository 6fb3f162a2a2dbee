"""Dequantized weights of a checkpoint, for transformers."""

from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from speq.errors import present
from speq.experts.expert_names import FUSED, Stacked
from speq.experts.expert_store import stacked_in
from speq.files.checkpoint import Checkpoint
from speq.files.packing import INT4
from speq.files.published_format import FP8_DTYPE, WORDS, words_name
from speq.kernels.scaled_words import fp8_words, int4_words, mxfp4_words, nvfp4_words
from speq.models.families import family_of
from speq.models.shape import hf_config


def state_of(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors by the names that transformers' loader takes. Plain weights are mapped from their
    files; codes are dequantized to bfloat16 in memory. What belongs to codes is left out.

    wanted  selects tensors by name
    """
    state: dict[str, Tensor] = {}
    coded, part, turned = checkpoint.coded, checkpoint.part, _turned(checkpoint)
    for file in checkpoint.files.values():
        with safe_open(file.path, framework="pt") as mapped:
            for name, (holder, _) in checkpoint.tensors.items():
                if holder is not file or not wanted(name) or coded.is_left_out(name):
                    continue
                taken = name if part is None else part.published(name)
                if coded.is_coded(name):
                    state[words_name(taken)] = words_of(checkpoint, name)
                    continue
                words = mapped.get_tensor(holder.stored[name])
                state[taken] = words.mT if name.endswith(turned) else words
    return state


def _turned(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Ends of names of tensors that lie transposed, and do not in transformers' model."""
    family = family_of(checkpoint.config, checkpoint.path)
    if family.stacked is not Stacked.COLUMNS:
        return ()
    sizes = family.names, hf_config(checkpoint).hidden_size
    if stacked_in(checkpoint.tensors, family.stacked, *sizes) is Stacked.ROWS:
        return ()
    return tuple(f".experts.{name}" for name in FUSED)


def words_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """Dequantize a tensor of codes. Rows stay as they are on disk, except for experts that a family
    stores transposed.
    """
    packing, tensors = checkpoint.coded.packing, checkpoint.tensors
    of_scales, *others = checkpoint.coded.beside_codes(name)
    third = None
    if others and others[0] in tensors:
        third = tensors[others[0]][0].tensor(others[0])
    codes, scales = (tensors[each][0].tensor(each) for each in (name, of_scales))
    if codes.dtype == FP8_DTYPE and packing is not None:
        return fp8_words(codes, scales.view(1, 1), 0, 0)
    if codes.dtype == FP8_DTYPE:
        blocks = checkpoint.coded.fp8.blocks
        return fp8_words(codes, scales.view(blocks.scales_shape(*codes.shape)), *blocks)
    if packing is not None and packing.format == INT4:
        return int4_words(*packing.unpack(codes, scales, third))
    if packing is not None:
        third = present(third, "codes of NVFP4 have no scale of their matrix")
        return nvfp4_words(codes, scales, third, packing.divides)
    rows = codes.flatten(0, -3).flatten(1), scales.flatten(0, -2)
    words = mxfp4_words(*rows).unflatten(0, codes.shape[:-2])
    stacked = family_of(checkpoint.config, checkpoint.path).stacked
    return words.mT.contiguous() if stacked is Stacked.INTERLEAVED else words


def load_dequantized(checkpoint: Checkpoint, wanted: Callable[[str], bool], **options: Any) -> Any:
    """Build transformers' model from a checkpoint; quantized weights are dequantized.

    wanted   selects tensors by the model's names; unquantized ones are always loaded
    options  of `from_pretrained`
    """
    path, config = checkpoint.path, hf_config(checkpoint)
    as_published = family_of(checkpoint.config, path).built_as is None
    # transformers' loader fails on an index that has only a weight_map.
    if as_published and checkpoint.format == WORDS and checkpoint.has_metadata:
        if checkpoint.part is not None:
            options["key_mapping"] = checkpoint.part.renaming
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, trust_remote_code=False, **options
        )
    state = state_of(checkpoint, wanted)
    # The class itself: AutoModel wants a folder.
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return made.from_pretrained(None, config=config, state_dict=state, **options)
