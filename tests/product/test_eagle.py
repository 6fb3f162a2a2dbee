"""Published EAGLE-3 heads: what is read, computed and refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.engine.drafter import DraftContext, DraftLimits, DraftRequest
from speq.engine.drafters.head import HeadDrafter
from speq.engine.request import Request
from speq.engine.sampler import HostSampler
from speq.heads.draft_head import FeatureState
from speq.heads.eagle_file import read_eagle
from speq.heads.eagle_head import FAR, EagleHead
from speq.heads.eagle_shape import eagle_shape
from speq.heads.head_context import HeadContext
from speq.layers.int4_matrix import Int4Matrix
from speq.models.kv_cache import KVCache
from speq.models.opened import open_model
from speq.models.shape import ModelShape
from tests.helpers.eagle_files import (
    FILE,
    as_speculators,
    eagle_config,
    eagle_in_numpy,
    random_tensors,
    said_by,
    write_eagle,
    write_random_eagle,
)
from tests.helpers.head_walk import assert_pieces_make_the_whole
from tests.helpers.tiny_models import VOCAB, load_plain
from tests.reference.noise import noise

HIDDEN, WORDS, SAID = 16, 40, 25
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide heads": {"head_dim": 10, "num_key_value_heads": 4},
    "one head of keys": {"num_key_value_heads": 1, "norm_before_residual": True},
    "slow turns": {"rope_scaling": LLAMA3, "rope_theta": 5000.0},
}


class Sizes:
    """As much of a model's sizes as a head is checked by."""

    hidden_size, vocab_size, num_layers = HIDDEN, WORDS, 6


class Model:
    """As much of a model as a head asks for."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.table = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(3))

    def tokens(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids)

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.table[token_ids]

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.table.T


def sizes(**others: int) -> ModelShape:
    made: Any = Sizes()
    for name, value in others.items():
        setattr(made, name, value)
    return made


def read(path: Path) -> EagleHead:
    return read_eagle(path, sizes()).load(torch.float32, torch.device("cpu"))


class Whole:
    """A text at once, in numpy: features of its first tokens, and what a path of tokens makes."""

    def __init__(self, path: Path, config: Any, table: Tensor, features: Tensor) -> None:
        self.path, self.config, self.table, self.features = path, config, table, features

    def at(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """What the head makes of the last token, and its scores of all tokens."""
        rows, fed = self.features.double(), 0
        while True:
            embedded = self.table.double()[token_ids[1 : len(rows) + 1]]
            found = eagle_in_numpy(self.path, self.config, embedded, rows, fed)
            if len(rows) == len(token_ids) - 1:
                scores = torch.full((WORDS,), FAR, dtype=torch.float64)
                scores[said_by(self.path)] = torch.from_numpy(found["scores"][-1])
                return torch.from_numpy(found["feature"][-1]), scores
            own = torch.zeros(1, rows.shape[1], dtype=torch.float64)
            own[0, :HIDDEN] = torch.from_numpy(found["feature"][-1])
            rows, fed = torch.cat([rows, own]), fed + 1


def test_runs_of_16_bits_hold_heads_in_eight(tmp_path: Path) -> None:
    """All matrices but the embedding, of which rows are looked up."""
    config = eagle_config(64, 200, 128, intermediate_size=96)
    tensors = random_tensors(config, seed=2, embedding=True)
    given = write_eagle(tmp_path / "given", *as_speculators(config, tensors))
    plain = read_eagle(given, sizes(hidden_size=64, vocab_size=200))
    held = plain.load(torch.bfloat16, torch.device("cpu"))
    assert held.nbytes == held.shape.nbytes(torch.bfloat16)
    coded = {name for name, each in held.weights.items() if isinstance(each, Int4Matrix)}
    assert coded == {"fc", "qkv", "output", "gate_up", "down", "head"}
    for name in coded:
        weight = plain.weights[name].double()
        error = (held.weights[name].words().double() - weight).norm() / weight.norm()
        assert error < 0.01, name
    model: Any = Model()
    state = FeatureState(torch.randn(1, 64, generator=torch.Generator().manual_seed(5)))
    wanted = plain.load(torch.float32, torch.device("cpu")).next_scores(state, model)[0]
    found = held.next_scores(FeatureState(state.feature.bfloat16()), model)[0]
    said = wanted > FAR
    assert torch.equal(found > FAR, said)
    error = (found[said] - wanted[said]).norm() / wanted[said].norm()
    assert error < 0.03


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_pieces_make_the_whole(variant: str, layout: str, tmp_path: Path) -> None:
    """Prompts in chunks, then rounds: a chain, a tree, what was accepted."""
    config = eagle_config(HIDDEN, WORDS, SAID, **VARIANTS[variant])
    own = layout == "speculators"  # which hold the embedding as well
    tensors = random_tensors(config, seed=2, embedding=own)
    path = write_eagle(tmp_path / "plain", config, tensors)
    given = write_eagle(tmp_path / "given", *as_speculators(config, tensors)) if own else path
    model = Model()
    table = tensors["embed_tokens.weight"] if own else model.table
    head = read(given)
    assert head.nbytes == head.shape.nbytes(torch.float32)
    assert_pieces_make_the_whole(
        HeadContext(model, head, 200),  # type: ignore[arg-type]
        torch.randn(60, 3 * HIDDEN),
        lambda features: Whole(path, config, table, features),
        WORDS,
        chunks=(1, 9, 17),
        rounds=(2, 0, 3),
        nodes=4,
        atol=1e-5,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_the_likeliest_tokens(temperature: float, tmp_path: Path) -> None:
    config = eagle_config(HIDDEN, WORDS, SAID)
    path = write_eagle(tmp_path / "head", config, random_tensors(config, seed=4))
    model = Model()
    sampling = SamplingParams(max_new_tokens=50, temperature=temperature, seed=5)
    prompt, features = [*range(12)], torch.randn(12, 3 * HIDDEN)
    whole = Whole(path, config, model.table, features)
    cache = KVCache(1, ((1, 2), (1, 2)), 100, model.dtype, model.device)
    base = DraftContext(model, cache, None, HostSampler(), head=read(path))  # type: ignore[arg-type]

    def likeliest(ahead: list[int]) -> int:
        scores = whole.at([*prompt, 7, *ahead])[1]
        if not temperature:
            return int(scores.argmax())
        probs = (scores / temperature).softmax(-1).float()
        return int((probs / torch.from_numpy(noise(5, 1 + len(ahead), WORDS))).argmax())

    for nodes in (None, 12):
        drafter = HeadDrafter(base)
        text = Request(prompt, sampling, output_token_ids=[7])
        drafter.reset(0, drafter)
        drafter.observe_verified(prompt, features)
        draft = drafter.propose(
            DraftRequest(text, DraftLimits(4, nodes), lambda *_: None, lambda *_: True)
        )
        assert set(draft.token_ids) <= set(said_by(path))
        assert draft.is_chain == (nodes is None)
        for node in range(draft.passes):
            ahead = draft.above(node)
            children = [draft.token_ids[child - 1] for child in draft.children(node)]
            assert children[0] == likeliest(ahead) or not children


def test_heads_without_a_vocabulary_say_what_the_model_does(tmp_path: Path) -> None:
    config = eagle_config(HIDDEN, WORDS, WORDS)
    tensors = random_tensors(config, seed=1)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    head, model = read(write_eagle(tmp_path / "head", config, tensors)), Model()
    text = HeadContext(model, head, 20)  # type: ignore[arg-type]
    text.observe_verified([1, 2], torch.randn(2, 3 * HIDDEN))
    state = text.root(3)
    row = state.feature[0] / (state.feature[0].square().mean() + 1e-5).sqrt()
    wanted = (row * tensors["norm.weight"]) @ model.table.T
    torch.testing.assert_close(text.next_scores(state)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "num_layers", "wanted"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 48, (2, 24, 45)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}, 94, (1, 46, 90)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, 48, (2, 24, 45)),
    ],
)
def test_layers_that_features_go_into(
    given: dict[str, Any], num_layers: int, wanted: tuple[int, ...]
) -> None:
    config = eagle_config(HIDDEN, WORDS, SAID)
    del config["eagle_aux_hidden_state_layer_ids"]
    shape = eagle_shape(
        config | given, Path("config.json"), sizes(num_layers=num_layers), (False, True)
    )
    assert shape.captured_layers == wanted


# What is refused.


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_size": 18}, "of hidden_size 18 and this model's is 16.*made for this model"),
        ({"vocab_size": 41}, "of vocab_size 41 and this model's is 40"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"layers \[2, 3, 3\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 6]}, "in a model of 6 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "takes the inputs of layers '2'"),
        ({"architectures": ["MedusaModel"]}, "has architectures .*EAGLE-3 heads"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2.*where it is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4'"),
        ({"num_key_value_heads": 3}, "4 heads of 4 over 3 of keys"),
        ({"draft_vocab_size": 99}, "draft_vocab_size 99 and vocab_size 40"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps 'x'"),
        ({"rope_scaling": {"rope_type": "what"}}, "rotary embeddings that speq lacks"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary embeddings of type dynamic",
        ),
        ({"intermediate_size": 20}, r"mlp.gate_proj.weight .*\[48, 16\]; .* must be \[20, 16\]"),
        ({"draft_vocab_size": 24}, r"lm_head.weight .*\[25, 16\]; .* must be \[24, 16\]"),
    ],
)
def test_configs_that_no_head_has(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    config = eagle_config(HIDDEN, WORDS, SAID)
    path = write_eagle(tmp_path / "head", config | changed, random_tensors(config, seed=1))
    with pytest.raises(SpeqError, match=sentence) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"fc.weight": None}, "lacks tensor fc.weight"),
        ({"d2t": None}, "lacks tensor d2t"),
        ({"d2t": torch.zeros(SAID, dtype=torch.int64) + WORDS}, "d2t does not map its 25 tokens"),
        ({"d2t": -torch.arange(SAID)}, "d2t does not map its 25 tokens to different ones"),
        ({"d2t": torch.zeros(SAID)}, "d2t does not map"),
        ({"d2t": torch.zeros(SAID - 1, dtype=torch.int64)}, "d2t does not map"),
        ({"d2t": torch.zeros(SAID, dtype=torch.int64)}, "d2t and t2d do not have the same tokens"),
        ({"t2d": torch.zeros(WORDS + 1, dtype=torch.bool)}, "do not have the same tokens"),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "norm.weight is torch.int32"),
        (
            {"norm.weight": torch.zeros(HIDDEN).to(torch.float8_e4m3fn)},
            "norm.weight is torch.float8_e4m3fn",
        ),
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(16)}, "q_proj.bias, which an EAGLE-3"),
    ],
)
def test_tensors_that_no_head_has(
    changed: dict[str, Tensor | None], sentence: str, tmp_path: Path
) -> None:
    config = eagle_config(HIDDEN, WORDS, SAID)
    tensors = random_tensors(config, seed=1) | changed
    kept = {name: each for name, each in tensors.items() if each is not None}
    path = write_eagle(tmp_path / "head", config, kept)
    with pytest.raises(SpeqError, match=sentence) as error:
        read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_heads(tmp_path: Path) -> None:
    path = write_random_eagle(tmp_path / "head", HIDDEN, WORDS, SAID)
    whole = (path / FILE).read_bytes()
    (path / FILE).write_bytes(whole[:-8])
    with pytest.raises(SpeqError, match="is truncated"):
        read(path)
    (path / FILE).rename(path / "pytorch_model.bin")
    with pytest.raises(SpeqError, match=r"pytorch_model.bin, a pickle.*save_file") as error:
        read(path)
    assert "\n" not in str(error.value)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(SpeqError, match=r"holds neither model.safetensors"):
        read(path)
    (path / "config.json").write_text("[")
    with pytest.raises(SpeqError, match=r"config.json is not valid JSON"):
        read(path)


# In a model.


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_random_eagle(tmp_path / "eagle", 64, VOCAB, 200)


def test_heads_hear_what_goes_into_layers(tiny: Callable[[str], Path], head: Path) -> None:
    """In prompts, which transformers runs, and in chains and trees, which are walked."""
    model = tiny("qwen3_moe")
    generator = Generator.from_pretrained(
        model, "64MiB", drafter="head", head=head, dtype="float32", draft_nodes=6, draft_length=3
    )
    heard: list[tuple[list[int], Tensor]] = []
    generator.reserve(90)
    drafter: Any = generator.runtime.engine.drafters[0]
    observe_verified = drafter.observe_verified
    drafter.observe_verified = lambda ids, features: (
        heard.append((ids, features.clone())),
        observe_verified(ids, features),
    )
    prompt = [(7 * i) % 250 for i in range(50)]
    result = generator.generate(prompt, max_new_tokens=12, ignore_eos=True)
    generator.close()
    tokens = [token_id for ids, _ in heard for token_id in ids]
    assert tokens == [*prompt, *result.token_ids][: len(tokens)]
    assert len(tokens) >= len(prompt) + 8
    plain = load_plain(model, torch.float32)
    with torch.inference_mode():
        states = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in (0, 1, 2)], -1)
    found = torch.cat([features for _, features in heard])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_head_takes_its_share_of_the_budget(tiny: Callable[[str], Path], head: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "draft_length": 2, "context_length": 64}
    generator = Generator.from_pretrained(
        tiny("olmoe"), "64MiB", drafter="head", head=str(head), **options
    )
    plan, held = generator.runtime.plan, generator.runtime._loaded.head
    assert isinstance(held, EagleHead)
    assert plan.items["head"] == held.nbytes == held.shape.nbytes(torch.float32)
    words = sum(each.numel() for name, each in load_file(head / FILE).items() if "." in name)
    assert held.nbytes == 4 * words + 8 * 200
    caches = [*generator.runtime.engine.caches]
    caches += [drafter._context.cache for drafter in generator.runtime.engine.drafters]  # type: ignore[attr-defined]
    assert plan.items["kv_cache"] == sum(cache.nbytes for cache in caches)
    generator.close()


def test_no_layer_is_watched_for_others(tiny: Callable[[str], Path]) -> None:
    generator = Generator.from_pretrained(tiny("olmoe"), "64MiB", dtype="float32")
    model = generator.runtime.model
    assert model._capture is None
    assert not any(layer._forward_pre_hooks for layer in model.body.layers)
    generator.close()


def test_heads_of_other_models_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_random_eagle(tmp_path / "eagle", 32, VOCAB, 200)
    with pytest.raises(SpeqError, match="of hidden_size 32 and this model's is 64"):
        Generator.from_pretrained(tiny("olmoe"), "64MiB", drafter="head", head=path)
    opened = open_model(tiny("olmoe"))
    assert opened.shape.vocab_size == VOCAB
    opened.close()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    save_file(load_file(path / FILE), path / FILE)
    with pytest.raises(SpeqError, match=r"fc.weight is torch.float32 \[32, 96\]"):
        Generator.from_pretrained(tiny("olmoe"), "64MiB", drafter="head", head=path)
