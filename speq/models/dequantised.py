"""Dequantized weights of a checkpoint, for transformers."""

from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from speq.files.checkpoint import Checkpoint
from speq.files.published_format import FP8, WORDS, words_name
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
    beside = {each for name in coded for each in checkpoint.beside_codes(name)}
    for file in checkpoint.files.values():
        with safe_open(file.path, framework="pt") as mapped:
            for name, (holder, _) in checkpoint.tensors.items():
                if holder is not file or not wanted(name) or name in beside:
                    continue
                if name in coded:
                    state[words_name(name)] = words_of(checkpoint, name)
                else:
                    state[name] = mapped.get_tensor(holder.stored[name])
    return state


def words_of(checkpoint: Checkpoint, name: str) -> Tensor:
    """Dequantize a tensor of codes. Rows stay as they are on disk, except for experts that a family
    stores transposed.
    """
    of_scales, *others = checkpoint.beside_codes(name)
    codes, scales = (checkpoint.tensors[each][0].tensor(each) for each in (name, of_scales))
    if checkpoint.format == FP8:
        return fp8_words(codes, scales)
    if checkpoint.packing is not None:
        of_zeros = others[0]
        has_zeros = of_zeros in checkpoint.tensors
        zeros = checkpoint.tensors[of_zeros][0].tensor(of_zeros) if has_zeros else None
        return int4_words(*checkpoint.packing.unpack(codes, scales, zeros))
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
