"""How routers choose: our gates beside transformers' routers, and among fewer experts by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from speq.kernels.decoder_ops import RouterRule
from speq.layers.gates import ScoreGate, SparseMixer
from speq.layers.offloaded_experts import first_of
from speq.models.families import FAMILIES as KNOWN
from speq.models.family import MoEBlock
from tests.helpers.tiny_models import BY_FAMILY, COMMON, FAMILY_OPTIONS, config_of
from tests.reference import routing

# Groups are left out of account among allowed experts.
UNGROUPED = {"n_group": 1, "topk_group": 1}
VARIANTS = [
    *[pytest.param(each.values[0], {}, marks=each.marks) for each in BY_FAMILY],
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("deepseek_v2", {"routed_scaling_factor": 2.5}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("glm4_moe", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
]


def block_of(family: str, overrides: dict[str, Any]) -> MoEBlock:
    given = FAMILY_OPTIONS[family]
    options = {name: value for name, value in UNGROUPED.items() if given.get(name)}
    config = config_of(family, **(options | overrides))
    config = KNOWN[family].built_config(getattr(config, "text_config", config))
    torch.manual_seed(3)
    with KNOWN[family].without_experts():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(0.2 * torch.randn(tensor.shape))
        elif ("gate" in name or "router." in name) and tensor.is_floating_point():
            tensor.data.normal_(std=0.2)
    return list(KNOWN[family].moe_blocks(model).values())[-1]


def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> list[dict[int, float]]:
    pairs = zip(ids.tolist(), weights.tolist(), strict=True)
    return [dict(zip(row, of_row, strict=True)) for row, of_row in pairs]


@torch.inference_mode()
@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_among_all_experts_a_gate_is_the_router(family: str, overrides: dict[str, Any]) -> None:
    block = block_of(family, overrides)
    rows = torch.randn(64, COMMON["hidden_size"])
    _, weights, ids = block.route(rows)
    logits = block.logits(rows)
    everything = torch.ones(logits.shape[1], dtype=torch.bool)
    chosen, given = block.gate.choose(logits, everything, ids.shape[1])
    for ours, theirs in zip(by_expert(chosen, given), by_expert(ids, weights), strict=True):
        assert set(ours) == set(theirs)
        # The router may add its weights up in another order, or say probabilities for logits.
        close = 3e-7 if block.logits_of is first_of else 2e-6
        assert ours == pytest.approx(theirs, rel=close, abs=0)
    shares = block.gate.shares(logits)
    assert shares.sum(-1).numpy() == pytest.approx(1, abs=1e-5)


def test_fewer_experts_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    allowed = torch.tensor([False, True, True, True])
    e = np.exp([2.0, 1.0, 0.0, -1.0])
    softmax, sigmoid = e / e.sum(), e / (1 + e)
    cases = [
        (ScoreGate(RouterRule()), {1: softmax[1], 2: softmax[2]}),
        (ScoreGate(RouterRule(divided=True)), {1: e[1] / (e[1] + e[2]), 2: e[2] / (e[1] + e[2])}),
        (ScoreGate(RouterRule(scale=3.0)), {1: 3 * softmax[1], 2: 3 * softmax[2]}),
        # A bias decides who is chosen, and has no part in the weights.
        (
            ScoreGate(RouterRule(sigmoid=True, bias=torch.tensor([9.0, 0.0, 0.0, 0.3]))),
            {1: sigmoid[1], 3: sigmoid[3]},
        ),
    ]
    for gate, wanted in cases:
        ((chosen),) = by_expert(*gate.choose(logits, allowed, 2))
        assert chosen == pytest.approx(wanted, rel=1e-6)


def test_sparse_mixer_by_hand() -> None:
    """Far experts have no part in the weights; one that is left out has none either."""
    logits = torch.tensor([[10.0, 9.9, 9.8, 1.0]])
    allowed = torch.tensor([True, False, True, True])
    (chosen,) = by_expert(*SparseMixer(0.01).choose(logits, allowed, 2))
    near = np.exp(10.0) / (np.exp(10.0) + np.exp(9.8))
    assert chosen == pytest.approx({0: near, 2: 1.0}, rel=1e-5)


# As published: experts, and how many a row takes.
SIZES = [(8, 3), (128, 8), (256, 8), (512, 10)]


def some_of(experts: int, top_k: int, share: float) -> tuple[torch.Tensor, set[int]]:
    """Experts that may be chosen, as many as a row takes at least."""
    generator = torch.Generator().manual_seed(experts)
    allowed = torch.rand(experts, generator=generator) < share
    allowed[torch.randperm(experts, generator=generator)[:top_k]] = True
    return allowed, set(allowed.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("of", ["softmax", "sigmoid"])
@pytest.mark.parametrize("divided", [False, True])
def test_choices_are_those_of_the_definition(
    divided: bool, of: str, experts: int, top_k: int, share: float
) -> None:
    """In double precision, expert by expert: with a bias, factors and a scale."""
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(16, experts, generator=generator)
    bias, factors = torch.rand(experts, generator=generator) / 9, torch.rand(experts) + 0.5
    gate = ScoreGate(RouterRule(of == "sigmoid", divided, 2.5, bias, 1e-6, factors))
    allowed, names = some_of(experts, top_k, share)
    found = by_expert(*gate.choose(logits, allowed, top_k))
    for row, chosen in zip(logits.double().numpy(), found, strict=True):
        wanted = routing.by_scores(
            row,
            names,
            top_k,
            of=of,
            divided=divided,
            scale=2.5,
            bias=bias.double().numpy(),
            added=1e-6,
            factors=factors.double().numpy(),
        )
        assert chosen == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_mixed_choices_are_those_of_the_definition(share: float) -> None:
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(7)) * 4
    logits[:, 1] = logits[:, 0] * 1.01  # near, on either side
    allowed, names = some_of(16, 2, share)
    found = by_expert(*SparseMixer(0.05).choose(logits, allowed, 2))
    for row, chosen in zip(logits.double().numpy(), found, strict=True):
        assert chosen == pytest.approx(routing.by_mixer(row, names, 2, 0.05), rel=1e-4)


@torch.inference_mode()
def test_groups_of_a_published_router() -> None:
    """DeepSeek-V3's 256 experts in 8 groups, of which 4 are kept: transformers' router, which runs,
    and the definition.
    """
    published = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    config = config_of("deepseek_v3", **published)
    torch.manual_seed(3)
    with KNOWN["deepseek_v3"].without_experts():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    router = KNOWN["deepseek_v3"].routers(model)[-1]
    router.weight.data.normal_(std=0.2)  # type: ignore[operator, union-attr]
    router.e_score_correction_bias.data.normal_(std=0.2)  # type: ignore[operator, union-attr]
    logits, weights, ids = router(torch.randn(16, COMMON["hidden_size"]))
    bias = router.e_score_correction_bias.double().numpy()  # type: ignore[operator, union-attr]
    for row, chosen in zip(logits.double().numpy(), by_expert(ids, weights), strict=True):
        inside = routing.in_groups(routing.sigmoid(row) + bias, 8, 4, 2)
        wanted = routing.by_scores(row, inside, 8, of="sigmoid", divided=True, scale=2.5, bias=bias)
        assert chosen == pytest.approx(wanted, rel=1e-4)
