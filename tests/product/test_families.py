"""What a family's entry says: names on disk, what transformers has of it, and what is loaded."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import __version__ as transformers_version
from transformers.models.qwen2_moe import modeling_qwen2_moe

from speq import Generator, SpeqError
from speq.devices.device import Processor
from speq.experts.expert_names import USUAL_NAMES, ExpertMatrix
from speq.layers.offloaded_experts import OffloadedExperts
from speq.models import moe_model
from speq.models.families import FAMILIES, MIXTRAL_NAMES, PHIMOE_NAMES, Family, family_of
from speq.models.opened import open_model
from speq.models.resident import mapped_regions
from tests.helpers.tiny_models import greedy_tokens, load_plain, write_model

BIASED = ("glm4_moe", "glm4_moe_lite")


def test_two_threads_leave_the_familys_own_experts() -> None:
    """The second waits: otherwise it would take the first one's stand-in for the original."""
    original = modeling_qwen2_moe.Qwen2MoeExperts
    family = FAMILIES["qwen2_moe"]
    inside, leave = threading.Event(), threading.Event()
    entered: list[str] = []

    def first() -> None:
        with family.without_experts():
            entered.append("first")
            inside.set()
            leave.wait(10)

    def second() -> None:
        with family.without_experts():
            entered.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    assert modeling_qwen2_moe.Qwen2MoeExperts is OffloadedExperts
    threads[1].start()
    assert entered == ["first"]
    leave.set()
    for thread in threads:
        thread.join(10)
    assert entered == ["first", "second"]
    assert modeling_qwen2_moe.Qwen2MoeExperts is original
    assert issubclass(original, torch.nn.Module)


@pytest.mark.parametrize(
    ("names", "name", "matrix"),
    [
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.up_proj.weight", (3, 12, "up_proj")),
        (USUAL_NAMES, "layers.0.mlp.experts.0.down_proj.weight", (0, 0, "down_proj")),
        (USUAL_NAMES, "model.layers.3.block_sparse_moe.experts.12.w3.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.w3.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.shared_experts.up_proj.weight", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.12.up_proj.weight_scale", None),
        (USUAL_NAMES, "model.layers.3.mlp.experts.up_proj.weight", None),
        (MIXTRAL_NAMES, "model.layers.3.block_sparse_moe.experts.1.w1.weight", (3, 1, "gate_proj")),
        (MIXTRAL_NAMES, "model.layers.3.block_sparse_moe.experts.1.w2.weight", (3, 1, "down_proj")),
        (MIXTRAL_NAMES, "model.layers.3.mlp.experts.1.up_proj.weight", (3, 1, "up_proj")),
    ],
)  # fmt: skip
def test_experts_by_their_names(names: object, name: str, matrix: object) -> None:
    assert isinstance(names, type(USUAL_NAMES))
    assert names.matrix(name) == (None if matrix is None else ExpertMatrix(*matrix))  # type: ignore[misc]
    assert names.is_expert(name) == (matrix is not None)


def test_routers_by_their_names() -> None:
    router = "model.layers.7.block_sparse_moe.gate.weight"
    assert USUAL_NAMES.router.search(router) is None
    for names in (MIXTRAL_NAMES, PHIMOE_NAMES):
        found = names.router.search(router)
        assert found is not None
        assert found[1] == "7"
    assert PHIMOE_NAMES.router.search("model.layers.7.mlp.router.weight")
    assert not MIXTRAL_NAMES.router.search("model.layers.7.mlp.router.weight")


def test_a_family_that_transformers_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "later_moe", Family("later_moe", "LaterExperts", since="9.3"))
    sentence = (
        f"/a is of family 'later_moe', which transformers {transformers_version} lacks; install "
        "transformers 9.3 or later"
    )
    with pytest.raises(SpeqError) as refused:
        family_of({"model_type": "later_moe"}, "/a")
    assert str(refused.value) == sentence


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_routers_correction_is_loaded_in_float32(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Path]
) -> None:
    """Into memory of its own, as all that is resident, and counted as such."""
    opened = open_model(tiny(family))
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    stored = load_file(tiny(family) / "model.safetensors")
    for layer in opened.shape.experts.layers:
        bias = model.body.layers[layer].mlp.gate.e_score_correction_bias  # type: ignore[index, union-attr]
        assert isinstance(bias, torch.Tensor)
        assert bias.dtype == torch.float32
        assert bias.abs().max() > 0.05
        assert torch.equal(bias, stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
        file = str(tiny(family) / "model.safetensors")
        mapped = [region for region in mapped_regions() if region.path == file]
        assert not any(region.start <= bias.data_ptr() < region.end for region in mapped)
    assert model.nbytes == opened.shape.resident_bytes(dtype)
    opened.close()


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GLM-4.5-Air has one behind its 46 layers, with experts; transformers does not run it."""
    model = write_model(tmp_path / "model", "glm4_moe")
    plain = greedy_tokens(load_plain(model), [5, 6, 7], 24)
    tensors = load_file(model / "model.safetensors")
    of_last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    for name, tensor in of_last.items():
        tensors[name.replace(".layers.2.", ".layers.46.")] = tensor.clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    opened = open_model(model)
    assert (opened.store.num_layers, opened.store.num_experts) == (2, 8)
    opened.close()
    with caplog.at_level(logging.WARNING, "speq"):
        generator = Generator.from_pretrained(model, "16MiB", dtype="float32", draft_length=3)
    result = generator.generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert result.token_ids == plain
    assert "has no use for" not in caplog.text
