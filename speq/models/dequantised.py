"""Weights of a checkpoint that was published as codes with scales, as the words they stand for."""

from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig

from speq.files.checkpoint import Checkpoint
from speq.files.published_format import SCALES, WORDS
from speq.kernels.scaled_words import fp8_words
from speq.models.shape import hf_config


def state_of(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors by their names on disk: words, mapped from their files, and codes as words of
    bfloat16 in memory. Scales are left out.

    wanted  tells which
    """
    state: dict[str, Tensor] = {}
    scales = {name + SCALES for name in checkpoint.tensors if checkpoint.scales_of(name)}
    for file in checkpoint.files.values():
        with safe_open(file.path, framework="pt") as mapped:
            for name, (holder, _) in checkpoint.tensors.items():
                if holder is not file or not wanted(name) or name in scales:
                    continue
                if checkpoint.scales_of(name) is None:
                    state[name] = mapped.get_tensor(name)
                else:
                    factors = checkpoint.tensors[name + SCALES][0].tensor(name + SCALES)
                    state[name] = fp8_words(file.tensor(name), factors)
    return state


def from_checkpoint(checkpoint: Checkpoint, wanted: Callable[[str], bool], **options: Any) -> Any:
    """transformers' model of a checkpoint, or of the words of one that was published as codes.

    wanted   tells the tensors by their names on disk; those of plain words are all there
    options  of `from_pretrained`
    """
    path = checkpoint.path
    if checkpoint.format == WORDS:
        return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    config = hf_config(checkpoint)
    if (path / "generation_config.json").exists():
        options["generation_config"] = GenerationConfig.from_pretrained(path)
    state = state_of(checkpoint, wanted)
    # The class itself: the automatic one wants a folder.
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return made.from_pretrained(None, config=config, state_dict=state, **options)
