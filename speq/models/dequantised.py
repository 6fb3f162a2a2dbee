"""Dequantized weights of a checkpoint, for transformers."""

from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from speq.experts.decoded import decode
from speq.experts.expert_names import FUSED, Stacked
from speq.experts.expert_store import stacked_in
from speq.files.checkpoint import Checkpoint
from speq.files.published_format import WORDS, words_name
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
    words = decode(checkpoint.coded, name)
    stacked = family_of(checkpoint.config, checkpoint.path).stacked
    turned = checkpoint.coded.blocks and stacked is Stacked.INTERLEAVED
    return words.mT.contiguous() if turned else words


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
