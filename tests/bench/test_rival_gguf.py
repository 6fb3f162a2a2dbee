"""GGUF files against the checkpoints they are written from, read back by the gguf package."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq.bench.rivals.gguf_file import GgufTensor
from speq.bench.rivals.llama_cpp import gguf_of
from speq.bench.rivals.packages import rival_package
from speq.errors import SpeqError
from speq.files.checkpoint import Checkpoint
from tests.helpers.paths import BUNDLED
from tests.helpers.tiny_models import write_model

# llama.cpp's names of a layer's tensors, by ours.
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}
STACKED = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
FLOAT32 = ("attn_norm.weight", "ffn_norm.weight", ".bias", "output_norm.weight")
ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


def expected(path: Path) -> dict[str, Tensor]:
    """What the file of a qwen2_moe model holds, by llama.cpp's names, in the checkpoint's words."""
    checkpoint = Checkpoint(path)
    read = {name: file.tensor(name) for name, (file, _) in checkpoint.tensors.items()}
    checkpoint.close()
    config = checkpoint.config
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    found = {
        "token_embd.weight": read["model.embed_tokens.weight"],
        "output.weight": read[head],
        "output_norm.weight": read["model.norm.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for ours, theirs in IN_LAYER.items():
            found[f"blk.{layer}.{theirs}"] = read[f"{prefix}.{ours}"]
        for ours, theirs in STACKED.items():
            found[f"blk.{layer}.{theirs}.weight"] = torch.stack(
                [
                    read[f"{prefix}.mlp.experts.{expert}.{ours}.weight"]
                    for expert in range(config["num_experts"])
                ]
            )
    return found


def holds(reader: Any, path: Path) -> None:
    """Assert that a file has a model's tensors, all and no others, and their values."""
    wanted = expected(path)
    assert {tensor.name for tensor in reader.tensors} == set(wanted)
    for tensor in reader.tensors:
        want = wanted[tensor.name]
        if tensor.name.endswith(FLOAT32 + ROUTERS) or want.dtype == torch.float32:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            want = want.float().view(torch.int32)
        else:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
            want = want.view(torch.int16)
        # GGUF's first dimension is the innermost.
        assert tuple(tensor.shape)[::-1] == tuple(want.shape), tensor.name
        stored = np.ascontiguousarray(tensor.data).tobytes()
        assert stored == want.numpy().tobytes(), tensor.name


def key(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


@pytest.fixture(scope="module")
def bundled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_of(str(BUNDLED), tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """The bundled model in a folder of the test's own, fields of its config changed."""

    def copy(**changed: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        for file in BUNDLED.iterdir():
            if file.is_file():
                (path / file.name).symlink_to(file)
        config = json.loads((BUNDLED / "config.json").read_text()) | changed
        (path / "config.json").unlink()
        (path / "config.json").write_text(json.dumps(config))
        return path

    return copy


def test_tensors_of_the_bundled_model(bundled_file: Path) -> None:
    reader = gguf.GGUFReader(bundled_file)
    holds(reader, BUNDLED)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    # Its head is its embedding; llama.cpp wants both.
    assert by_name["output.weight"].data_offset != by_name["token_embd.weight"].data_offset


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_of_its_own_and_grouped_heads(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_model(tmp_path / "m", "qwen2_moe", dtype, mlp_only_layers=[], vocab_size=4100)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, path / name)
    reader = gguf.GGUFReader(gguf_of(str(path), tmp_path))
    holds(reader, path)
    assert key(reader, "qwen2moe.attention.head_count_kv") == 2
    # Rows of the embedding beyond the tokenizer's 4096 tokens.
    assert key(reader, "tokenizer.ggml.tokens")[4095:] == [
        *key(reader, "tokenizer.ggml.tokens")[4095:4096],
        *(f"[PAD{token}]" for token in range(4096, 4100)),
    ]
    assert key(reader, "tokenizer.ggml.token_type")[4096:] == [gguf.TokenType.UNUSED] * 4


def test_a_model_of_qwen3_moe(tmp_path: Path) -> None:
    """Its heads have norms and a width of their own, and there is no shared expert."""
    path = write_model(tmp_path / "m", "qwen3_moe", vocab_size=4096, norm_topk_prob=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, path / name)
    config = json.loads((path / "config.json").read_text())
    config.setdefault("num_experts", config.get("num_local_experts"))  # as it is published
    (path / "config.json").write_text(json.dumps(config))
    reader = gguf.GGUFReader(gguf_of(str(path), tmp_path))
    checkpoint = Checkpoint(path)
    read = {name: file.tensor(name) for name, (file, _) in checkpoint.tensors.items()}
    checkpoint.close()
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    experts = range(config["num_experts"])
    ours = "model.layers.1.mlp.experts.{}.up_proj.weight"
    for name, wanted in (
        ("blk.1.attn_k_norm.weight", read["model.layers.1.self_attn.k_norm.weight"].float()),
        ("blk.1.ffn_up_exps.weight", torch.stack([read[ours.format(each)] for each in experts])),
    ):
        stored = np.ascontiguousarray(by_name[name].data).tobytes()
        assert stored == wanted.contiguous().view(torch.uint8).numpy().tobytes(), name
    assert len(by_name) == 3 + 12 * config["num_hidden_layers"]
    assert key(reader, "general.architecture") == "qwen3moe"
    assert key(reader, "qwen3moe.attention.key_length") == config["head_dim"]
    assert key(reader, "qwen3moe.expert_used_count") == config["num_experts_per_tok"]


def test_keys_of_the_bundled_model(bundled_file: Path) -> None:
    reader = gguf.GGUFReader(bundled_file)
    found = {
        name: key(reader, name)
        for name in reader.fields
        if not name.startswith(("GGUF.", "tokenizer."))
    }
    assert found.pop("qwen2moe.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert found == {
        "general.architecture": "qwen2moe",
        "general.name": "tiny-moe",
        "general.file_type": gguf.LlamaFileType.MOSTLY_BF16,
        "qwen2moe.block_count": 8,
        "qwen2moe.context_length": 2048,
        "qwen2moe.embedding_length": 256,
        "qwen2moe.feed_forward_length": 256,
        "qwen2moe.attention.head_count": 4,
        "qwen2moe.attention.head_count_kv": 4,
        "qwen2moe.vocab_size": 4096,
        "qwen2moe.rope.freq_base": 10_000.0,
        "qwen2moe.expert_count": 32,
        "qwen2moe.expert_used_count": 4,
        "qwen2moe.expert_feed_forward_length": 64,
        "qwen2moe.expert_shared_feed_forward_length": 256,
    }


def test_tokenizer_of_the_bundled_model(bundled_file: Path) -> None:
    reader = gguf.GGUFReader(bundled_file)
    model = json.loads((BUNDLED / "tokenizer.json").read_text())["model"]
    assert key(reader, "tokenizer.ggml.model") == "gpt2"
    assert key(reader, "tokenizer.ggml.pre") == "gpt-2"
    tokens = key(reader, "tokenizer.ggml.tokens")
    assert {token: number for number, token in enumerate(tokens)} == model["vocab"]
    assert key(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in model["merges"]]
    assert key(reader, "tokenizer.ggml.token_type") == [
        gguf.TokenType.CONTROL,  # the end of text
        *[gguf.TokenType.NORMAL] * 4095,
    ]
    assert key(reader, "tokenizer.ggml.eos_token_id") == 0
    assert "tokenizer.chat_template" not in reader.fields


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"model_type": "mixtral"},
            r"'mixtral'.* are qwen2_moe, qwen3_moe: compare without llama\.cpp",
        ),
        ({"model_type": None}, "of family None"),
        ({"norm_topk_prob": True}, "norm_topk_prob True"),
        ({"mlp_only_layers": [2]}, r"mlp_only_layers \[2\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"head_dim": 32}, "head_dim times heads 128"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "of type 'yarn'"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"rope_parameters": 5}, "embeddings of type 5"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be from 1 to"),
        ({"num_experts": 33}, "has 32 experts of .* and promises 33"),
        ({"num_hidden_layers": 9}, "num_hidden_layers 9 and .* holds weights of 8 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; it must be at most"),
        ({"max_position_embeddings": 2**33}, "it must be from 1 to 4294967295"),
        ({"vocab_size": 4000}, r"config.json makes it \[4000, 256\]"),
        ({"num_hidden_layers": 7}, "has tensor model.layers.7.* no place"),
        ({"tie_word_embeddings": False}, r"llama.cpp calls output\.weight"),
    ],
)
def test_refused_configs(
    copied: Callable[..., Path], tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SpeqError, match=sentence):
        gguf_of(str(copied(**changed)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"type": "Unigram"}, "a model of type 'Unigram'; only BPE"),
        ({"merges": []}, "has no merges"),
        ({"vocab": 7}, "cannot be loaded"),
    ],
)
def test_refused_tokenizers(
    copied: Callable[..., Path], tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    path = copied()
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").unlink()
    tokenizer["model"] |= changed
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SpeqError, match=sentence):
        gguf_of(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_model_and_package(tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="does not exist"):
        gguf_of(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(SpeqError, match=r"speq_nothing is not installed.*pip install speq_nothing"):
        rival_package("speq_nothing")


def test_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = GgufTensor.words

    def fails_at_the_head(tensor: GgufTensor, checkpoint: Checkpoint) -> Any:
        if tensor.name == "output.weight":
            raise OSError(28, "No space left on device")
        return words(tensor, checkpoint)

    monkeypatch.setattr(GgufTensor, "words", fails_at_the_head)
    with pytest.raises(SpeqError, match="No space left on device"):
        gguf_of(str(BUNDLED), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(SpeqError, match=r"takes 35.* MiB and 1 MiB of disk are left"):
        gguf_of(str(BUNDLED), tmp_path)


def test_file_is_written_once_for_each_version(copied: Callable[..., Path], tmp_path: Path) -> None:
    path = copied()
    first = gguf_of(str(path), tmp_path / "out")
    written = first.stat().st_mtime_ns
    assert gguf_of(str(path), tmp_path / "out") == first
    assert first.stat().st_mtime_ns == written
    config = path / "config.json"
    os.utime(config, ns=(0, config.stat().st_mtime_ns + 1))
    second = gguf_of(str(path), tmp_path / "out")
    assert second != first
    assert {file.name for file in (tmp_path / "out").iterdir()} == {first.name, second.name}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda held: held.pop("model.layers.2.mlp.gate.weight"), r"calls blk\.2\.ffn_gate_inp"),
        (lambda held: held.pop("model.norm.weight"), r"calls output_norm\.weight"),
        (
            lambda held: held.pop("model.layers.1.mlp.experts.7.up_proj.weight"),
            "has 31 experts of model.layers.1.mlp.experts.up_proj.weight and promises 32",
        ),
        (
            lambda held: held.update(
                {"model.layers.1.mlp.experts.7.up_proj.weight": torch.zeros(64, 256)}
            ),
            "experts must be alike",
        ),
        (lambda held: held.update({"model.odd.weight": torch.zeros(4)}), "has tensor model.odd"),
        (lambda held: held.update({"model.norm.weight": torch.zeros(256).double()}), "in float64"),
    ],
)
def test_refused_weights(
    copied: Callable[..., Path],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], Any],
    sentence: str,
) -> None:
    path = copied()
    held = load_file(path / "model.safetensors")
    change(held)
    (path / "model.safetensors").unlink()
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpeqError, match=sentence):
        gguf_of(str(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
