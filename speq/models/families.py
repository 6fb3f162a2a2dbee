"""One adapter per model family: as little as transformers' own classes leave to say."""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from speq.errors import SpeqError
from speq.layers.offloaded_experts import OffloadedExperts

# transformers' modules are shared by all threads: two at a time would leave ours behind.
_PATCHING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families.

    model_type    in config.json, and the name of transformers' module
    experts_class class of a block's `experts`, which ours replaces
    router        attribute of a block that holds its router
    num_experts, expert_width   attributes of the config
    window        whether the model honours config.sliding_window in its mask
    typed_masks   whether the model wants one mask for each of config.layer_types
    latent_kv     whether attention caches compressed latents (MLA) instead of heads
    """

    model_type: str
    experts_class: str
    router: str = "gate"
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    window: bool = False
    typed_masks: bool = False
    latent_kv: bool = False

    @contextlib.contextmanager
    def without_experts(self) -> Iterator[None]:
        """Models built inside the block have OffloadedExperts for experts."""
        name = f"transformers.models.{self.model_type}.modeling_{self.model_type}"
        module = importlib.import_module(name)
        with _PATCHING:
            original = getattr(module, self.experts_class)
            setattr(module, self.experts_class, OffloadedExperts)
            try:
                yield
            finally:
                setattr(module, self.experts_class, original)

    def moe_blocks(self, model: nn.Module) -> dict[int, nn.Module]:
        """Blocks that have routed experts, by model layer."""
        blocks = {}
        for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
            if isinstance(getattr(layer.mlp, "experts", None), OffloadedExperts):
                blocks[index] = layer.mlp
        return blocks


FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2_moe", "Qwen2MoeExperts", typed_masks=True),
        Family("qwen3_moe", "Qwen3MoeExperts", window=True),
        Family("olmoe", "OlmoeExperts", expert_width="intermediate_size"),
        Family(
            "mixtral",
            "MixtralExperts",
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
        ),
        Family(
            "phimoe",
            "PhimoeExperts",
            router="router",
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
        ),
        Family("deepseek_v2", "DeepseekV2Experts", num_experts="n_routed_experts", latent_kv=True),
    )
}


def family_of(config: dict[str, Any], where: object) -> Family:
    """The adapter for a config.json. Raises SpeqError naming what is supported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SpeqError(
            f"{where} is of family {model_type!r}, which is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
