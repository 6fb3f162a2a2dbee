"""Dequantized weights of a checkpoint, for transformers."""

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from speq.files.checkpoint import Checkpoint
from speq.files.published_format import (
    FP8,
    INT4,
    WORDS,
    beside_codes,
    scales_name,
    words_name,
    zeros_name,
)
from speq.kernels.scaled_words import fp8_words, int4_words, mxfp4_words
from speq.models.families import family_of
from speq.models.shape import hf_config


def state_of(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors by the model's names. Plain weights are mapped from their files; codes are
    dequantized to bfloat16 in memory. What belongs to codes is left out.

    wanted  selects tensors by name
    """
    state: dict[str, Tensor] = {}
    coded = {name for name in checkpoint.tensors if checkpoint.is_coded(name)}
    beside = {each for name in coded for each in beside_codes(name)}
    for file in checkpoint.files.values():
        with safe_open(file.path, framework="pt") as mapped:
            for name, (holder, _) in checkpoint.tensors.items():
                if holder is not file or not wanted(name) or name in beside:
                    continue
                state[words_name(name)] = (
                    words_of(checkpoint, name)
                    if name in coded
                    else mapped.get_tensor(holder.stored[name])
                )
    return state


def words_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """Dequantize a tensor of codes. Rows stay as they are on disk, except for experts that a family
    stores transposed.
    """
    file, _ = checkpoint.tensors[name]
    of_scales = scales_name(name)
    codes, scales = file.tensor(name), checkpoint.tensors[of_scales][0].tensor(of_scales)
    if checkpoint.format == FP8:
        return fp8_words(codes, scales)
    if checkpoint.format == INT4:
        zeros = checkpoint.zeros_of(name)
        of_zeros = None if zeros is None else zeros[0].tensor(zeros_name(name))
        return int4_words(codes.view(torch.uint8), scales, of_zeros)
    rows = codes.flatten(0, -3).flatten(1), scales.flatten(0, -2)
    words = mxfp4_words(*rows).unflatten(0, codes.shape[:-2])
    transposed = family_of(checkpoint.config, checkpoint.path).transposed
    return words.mT.contiguous() if transposed else words


def load_dequantized(checkpoint: Checkpoint, wanted: Callable[[str], bool], **options: Any) -> Any:
    """Build transformers' model from a checkpoint; quantized weights are dequantized.

    wanted   selects tensors by the model's names; unquantized ones are always loaded
    options  of `from_pretrained`
    """
    path, config = checkpoint.path, hf_config(checkpoint)
    # transformers' loader fails on an index that has only a weight_map.
    if checkpoint.format == WORDS and checkpoint.has_metadata:
        if checkpoint.part is not None:
            options["key_mapping"] = checkpoint.part.renaming
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, trust_remote_code=False, **options
        )
    state = state_of(checkpoint, wanted)
    # The class itself: AutoModel wants a folder.
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return made.from_pretrained(None, config=config, state_dict=state, **options)
