"""DeepSeek-V4: entries of windows beside near tokens, and experts that token ids choose."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator, plan
from speq.errors import SpeqError
from speq.models.compressed_attention import windows_in
from speq.models.layer_range import LayerRange
from speq.models.opened import open_model
from speq.models.packed_batch import BatchKVLayer, SequenceTokens
from speq.models.tree import Tree
from speq.quantizing.models import quantize
from tests.helpers.fp8_files import SETTINGS
from tests.helpers.fp8_files import coded as fp8_codes
from tests.helpers.mxfp4_files import coded as mxfp4_codes
from tests.helpers.some_experts import SomeExperts, loaded
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model
from tools.tensors import tensors_of

pytestmark = pytest.mark.skipif("deepseek_v4" not in FAMILIES, reason="transformers lacks it")

FILE = "model.safetensors"
RUN: dict[str, Any] = {"dtype": "float32", "profile": "none"}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
# What is published in FP8 beside the experts.
IN_FP8 = re.compile(r"\.attn\.(w|indexer\.wq)[^.]*\.weight$|\.shared_experts\.")
PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(70)]
Folder = Callable[[str], Path]


def tokens_of(model: Path, count: int, **options: Any) -> list[int]:
    generator = Generator.from_pretrained(model, "64MiB", **(RUN | options))
    made = generator.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
    generator.close()
    return made.token_ids


def test_windows_count_along_a_path() -> None:
    """Two branches after two tokens, of which the second token completes a window of 2."""
    visible = torch.tensor(
        [
            [1, 1, 1, 0, 0, 0],  # after tokens 0 and 1
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],  # another branch
            [1, 1, 0, 0, 1, 1],
        ],
        dtype=torch.bool,
    )
    found = windows_in(visible, visible.sum(1), 2, 2)
    assert found.rows.tolist() == [1, 3]
    assert found.starts.tolist() == [2, 2]
    assert found.slots.tolist() == [[0, 1, 2, 3], [0, 1, 4, 5]]
    first = windows_in(visible[:1, :2], torch.tensor([2]), 2, 2)
    assert first.slots.tolist() == [[-1, -1, 0, 1]]


@pytest.mark.parametrize(
    ("kinds", "overrides"),
    [
        ([SPARSE, SPARSE, HEAVY], {"index_topk": 1}),
        ([HEAVY, SPARSE, SPARSE], {"compress_rate_csa": 1, "compress_rate_hca": 70}),
        (["sliding_attention"] * 3, {"sliding_window": 2, "num_hash_layers": 3}),
        (
            [SPARSE, HEAVY, "sliding_attention"],
            {
                "num_hash_layers": 0,
                "hc_mult": 3,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 32,
                    "beta_slow": 1,
                },
            },
        ),
    ],
    ids=["one entry", "sizes", "near alone", "yarn"],
)
def test_layers_of_other_sizes(kinds: list[str], overrides: Any, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "deepseek_v4", layer_types=kinds, **overrides)
    expected = greedy_tokens(load_plain(model), PROMPT, 24)
    assert tokens_of(model, 24, draft_length=3) == expected


def as_published(name: str) -> str:
    """A name of transformers' file as DeepSeek's files have it."""
    if name == "model.embed_tokens.weight":
        return "embed.weight"
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def write_published(to: Path, source: Path, tensors: dict[str, Tensor], **more: Any) -> Path:
    """A folder of these tensors, given by transformers' names, by those of DeepSeek's files."""
    to.mkdir()
    for file in source.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | more))
    renamed = {as_published(name): each.contiguous() for name, each in tensors.items()}
    ids = {name: each.int() for name, each in renamed.items() if name.endswith("tid2eid")}
    mtp = {"mtp.0.attn.wq_a.weight": torch.zeros(24, 64), "mtp.0.hc_head_base": torch.zeros(2)}
    save_file(renamed | ids | mtp, to / FILE, metadata={"format": "pt"})
    return to


def test_names_as_published(tiny: Folder, tmp_path: Path) -> None:
    source = tiny("deepseek_v4")
    folder = write_published(tmp_path / "model", source, load_file(source / FILE))
    wanted = {"norm.weight", "layers.1.ffn.gate.bias", "layers.0.attn.kv_norm.weight"}
    assert wanted <= load_file(folder / FILE).keys()
    found = tensors_of(folder)
    assert (found.unknown, found.missing, found.left) == ((), (), 2)
    expected = greedy_tokens(load_plain(source), PROMPT, 12)
    assert tokens_of(folder, 12) == expected


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_experts_in_codes_beside_matrices_in_fp8(
    experts: str, tiny: Folder, tmp_path: Path
) -> None:
    """As published; the output is that of the words that codes and scales stand for."""
    source, words, codes = tiny("deepseek_v4"), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / FILE).items():
        scales = name.removesuffix("weight") + "scale"
        if ".experts." in name and experts == "fp4":
            packed, exponents, exact = mxfp4_codes(tensor.numpy())
            codes[name] = torch.from_numpy(packed.reshape(len(packed), -1)).view(torch.int8)
            codes[scales] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
            words[name] = torch.from_numpy(exact)
        elif ".experts." in name or IN_FP8.search(name):
            codes[name], codes[scales], exact = fp8_codes(tensor, torch.float8_e8m0fnu)
            words[name] = exact.float()
        else:
            codes[name] = words[name] = tensor
    settings = SETTINGS | {"scale_fmt": "ue8m0"}
    more = {"expert_dtype": experts, "quantization_config": settings}
    folder = write_published(tmp_path / "codes", source, codes, **more)
    plain = write_published(tmp_path / "words", source, words)
    found = tensors_of(folder)
    assert (found.unknown, found.missing) == ((), ())
    expected = greedy_tokens(load_plain(plain), PROMPT, 16)
    assert tokens_of(plain, 16) == expected
    for length, drafter in ((0, None), (3, "ngram")):
        options = {} if drafter is None else {"drafter": drafter}
        assert tokens_of(folder, 16, draft_length=length, **options) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_counted_is_held(dtype: str, tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny("deepseek_v4"), "64MiB", **(RUN | {"dtype": dtype}))
    opened = open_model(tiny("deepseek_v4"))
    counted = opened.shape.resident_bytes(getattr(torch, dtype))
    assert counted == generator.runtime.model.nbytes
    # By hand: a key and what layers of windows of 4, of 12 and of none keep beside it.
    kept = (32 + (32 + 16) + 4 * (32 + 16)) + (32 + 32 + 2 * 32) + 32
    assert opened.shape.kv_elements_per_token == kept
    opened.close()
    generator.close()


@pytest.mark.parametrize("more", [{"moe_quant_algo": "NVFP4"}, {"expert_dtype": "fp6"}])
def test_experts_in_other_codes_are_refused(
    more: dict[str, Any], tiny: Folder, tmp_path: Path
) -> None:
    config = json.loads((tiny("deepseek_v4") / "config.json").read_text())
    config |= {"quantization_config": SETTINGS | {"expert_dtype": "fp4"} | more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / FILE).symlink_to(tiny("deepseek_v4") / FILE)
    with pytest.raises(SpeqError, match=r"quantised \(fp8\) with experts in (NVFP4|fp6)"):
        open_model(tmp_path)


@torch.inference_mode()
def test_batches_copy_no_cache(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch, a tree among them, are those of each sequence alone."""

    def no_copy(*given: Any, **others: Any) -> None:
        raise AssertionError("the KV of several sequences was put together")

    for name in ("update", "update_indexer"):
        monkeypatch.setattr(BatchKVLayer, name, no_copy)
    model, cache = loaded(tiny("deepseek_v4"), torch.float32)
    opened = open_model(tiny("deepseek_v4"))
    other = opened.shape.cache(64, torch.float32, model.device)
    opened.close()
    backend = SomeExperts()
    for kept, count in ((cache, 23), (other, 9)):
        model.forward(backend, [SequenceTokens(kept, [at * 7 % 256 for at in range(count)])])
        kept.advance(count)
    batch = (
        SequenceTokens(cache, [3, 5, 7, 9], Tree.of([0, 0, 1])),
        SequenceTokens(other, [11, 13]),
    )
    alone = [model.forward(backend, [each])[0] for each in batch]
    together = model.forward(backend, batch)[0]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_token_ids_choose_experts_of_first_layers(tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny("deepseek_v4"), "64MiB", **RUN)
    model = generator.runtime.model
    blocks = [*model._family.moe_blocks(model._hf_model).values()]
    assert [block.by_token for block in blocks] == [True, False, False]
    # Of the second and third layer's experts, which rows of the first and second say.
    assert [block.experts._next_logits is None for block in blocks] == [False, False, True]
    generator.close()


@pytest.mark.parametrize("experts", [(1, -1, 2), (8, 0, 1), (5, 2, 5)])
def test_tables_of_experts_that_are_refused(
    experts: tuple[int, ...], tiny: Folder, tmp_path: Path
) -> None:
    source = tiny("deepseek_v4")
    tensors = load_file(source / FILE)
    name = next(each for each in tensors if each.endswith("tid2eid"))
    tensors[name][77] = torch.tensor(experts)
    folder = write_published(tmp_path / "model", source, tensors)
    with pytest.raises(SpeqError) as error:
        Generator.from_pretrained(folder, "64MiB", **RUN)
    sentence = f"tid2eid of layer 0 gives token 77 experts {[*experts]}; they must differ"
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_experts_that_token_ids_choose_are_not_forecast(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "deepseek_v4", num_hash_layers=2)
    generator = Generator.from_pretrained(model, "64MiB", **RUN)
    runs = generator.runtime.model
    blocks = [*runs._family.moe_blocks(runs._hf_model).values()]
    assert [block.experts._next_logits is None for block in blocks] == [True, False, True]
    generator.close()


def test_what_the_family_does_not_run_in_is_refused(tiny: Folder, tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match=r"pass on several rows of a token, .* run it on one"):
        open_model(tiny("deepseek_v4"), part=LayerRange(0, 2))
    with pytest.raises(SpeqError, match="keeps some matrices in float32 under float16"):
        Generator.from_pretrained(tiny("deepseek_v4"), "64MiB", **(RUN | {"dtype": "float16"}))
    config = tmp_path / "config.json"
    config.write_bytes((tiny("deepseek_v4") / "config.json").read_bytes())
    for folder in (tiny("deepseek_v4"), tmp_path):
        with pytest.raises(SpeqError, match="keeps some matrices in float32 under float16"):
            plan(folder, "64MiB", dtype="float16")
    with pytest.raises(SpeqError, match="deepseek_v4, whose layers"):
        quantize(tiny("deepseek_v4"), out=tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index_topk": 0}, "has index_topk 0; it must be at least 1"),
        ({"compress_rates": {SPARSE: 4}}, f"compress_rates of {HEAVY} None; it must be at least 1"),
        ({"swiglu_limit": 0.0}, "has swiglu_limit 0.0; it must be above 0"),
        (
            {"scoring_func": "sigmoid"},
            "speq knows models of family deepseek_v4 with 'sqrtsoftplus'",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"has rotary embeddings of type 'dynamic' \(compress\)",
        ),
    ],
)
def test_configurations_that_are_refused(
    changed: dict[str, Any], message: str, tiny: Folder, tmp_path: Path
) -> None:
    config = json.loads((tiny("deepseek_v4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / FILE).symlink_to(tiny("deepseek_v4") / FILE)
    with pytest.raises(SpeqError, match=message):
        open_model(tmp_path)
