"""Whatever is missing, damaged or nonsense ends in one clear sentence, and nothing half-written."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speq import Generator, SpeqError
from speq.experts.int4 import Int4Arena
from speq.files.checkpoint import Checkpoint
from tests.helpers.command import PATIENCE_S, Command, Ended, arguments_of
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
# Changes a copy of a sound model.
Damage = Callable[[Path], object]

BUDGET = "2MiB"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.0.mlp.experts.0.gate_proj.weight"
NORM = "model.norm.weight"
PROMPT_IDS = [1, 2, 3]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where drafts go that have no room beside their model."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / ".cache"))
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(
        tmp_path_factory.mktemp("sharded") / "model", "qwen2_moe", max_shard_size="200KB"
    )
    assert len(shards(path)) > 3
    return path


@pytest.fixture(scope="module")
def wanted(tiny: Folder) -> list[int]:
    """What the sound model makes of PROMPT_IDS."""
    return greedy_tokens(load_plain(tiny("qwen2_moe")), PROMPT_IDS, 8)


def shards(model: Path) -> list[str]:
    return sorted(path.name for path in model.glob("model-*.safetensors"))


def copied(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to, ignore=shutil.ignore_patterns(".speq")))


def check_one_sentence(ended: Ended) -> str:
    """The sentence, where the command printed it as it should and nothing else."""
    assert ended.code == 1
    assert ended.out == ""
    assert "Traceback" not in ended.err
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert ended.err.endswith(f"{errors[0]}\n")
    return errors[0].removeprefix("error: ")


def refusal(command: Command, model: object, budget: object = BUDGET, **options: Any) -> str:
    """What the library says of a model or an option; the command must say the same."""
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(model, budget, **options)  # type: ignore[arg-type]
    sentence = str(refused.value)
    assert "\n" not in sentence
    flags = [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]
    given = ["--model", model, "--memory-budget", budget, *flags]
    # 64 tokens in all: what the library plans for while it knows no request.
    ended = command("generate", "--prompt", "hello", "--max-new-tokens", 59, *given)
    assert check_one_sentence(ended) == " ".join(sentence.split())
    return sentence


# Damaged models.


def write(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content)


def remove(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def folder_instead(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink()
        (model / name).mkdir()

    return damage


def config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        fields = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(fields))

    return damage


def tokenizer_config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        fields = json.loads((model / "tokenizer_config.json").read_text()) | changes
        (model / "tokenizer_config.json").write_text(json.dumps(fields))

    return damage


def named_pipe(name: str) -> Damage:
    """Which nobody ever writes to."""

    def damage(model: Path) -> None:
        (model / name).unlink()
        os.mkfifo(model / name)

    return damage


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(model: Path) -> None:
        found = load_file(model / SINGLE)
        change(found)
        save_file(found, model / SINGLE, metadata={"format": "pt"})

    return damage


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda found: found.update({name: change(found[name]).contiguous()}))


def cut(length: int) -> Damage:
    return lambda model: os.truncate(
        model / SINGLE, length if length >= 0 else (model / SINGLE).stat().st_size + length
    )


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the header of the shard in place, or put what `change` returns there."""

    def damage(model: Path) -> None:
        content = (model / SINGLE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        result = change(entries)
        result = entries if result is None else result
        encoded = result if isinstance(result, bytes) else json.dumps(result).encode()
        data = content[8 + length :]
        (model / SINGLE).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)

    return damage


def entry(name: str, **fields: Any) -> Damage:
    return header(lambda entries: entries[name].update(fields))


def length_claimed(length: int) -> Damage:
    def damage(model: Path) -> None:
        content = (model / SINGLE).read_bytes()
        (model / SINGLE).write_bytes(length.to_bytes(8, "little") + content[8:])

    return damage


def same_range(entries: dict[str, Any]) -> None:
    other = EXPERT.replace("experts.0", "experts.1")
    entries[EXPERT]["data_offsets"] = entries[other]["data_offsets"]


def only_pickles(model: Path) -> None:
    (model / SINGLE).rename(model / "pytorch_model.bin")


CORRUPT = "has a corrupt safetensors header: .*; download it again"
DAMAGED: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), r"config\.json cannot be read: No such file"),
    "config is a folder": (folder_instead("config.json"), r"config\.json cannot be read: Is a"),
    "empty config": (write("config.json", b""), r"config\.json is not valid JSON"),
    "config is no JSON": (write("config.json", b"{'a': 1}"), r"config\.json is not valid JSON"),
    "config is no UTF-8": (write("config.json", b'{"a": "\xff"}'), r"is not valid JSON"),
    "config is too deep": (write("config.json", b"[" * 100_000), r"is not valid JSON"),
    "config is a list": (write("config.json", b"[]"), "holds a JSON list; it must hold an object"),
    "config without family": (write("config.json", b"{}"), "is of family None, which is not supp"),
    "unknown family": (
        config(model_type="llama"),
        "is of family 'llama', which is not supported; supported are afmoe, bailing_hybrid, ",
    ),
    "family is a list": (config(model_type=["qwen2_moe"]), r"is of family \['qwen2_moe'\]"),
    "no experts": (config(num_experts=0), "has 0 experts a layer; it must be at least 1"),
    "negative experts": (config(num_experts=-1), "has -1 experts a layer"),
    "dense layers only": (config(mlp_only_layers=[0, 1, 2]), "describes a model without routed"),
    "number of experts is a string": (config(num_experts="8"), "expected int, got str"),
    "fewer experts": (config(num_experts=7), r"has shape \[8, 64\]; config\.json makes it \[7, 64"),
    "more experts": (config(num_experts=9), r"lacks gate_proj of expert 8 in layer 0; config\.jso"),
    "no experts per token": (
        config(num_experts_per_tok=0),
        "num_experts_per_tok 0; it must be from 1 to the 8 experts of a layer",
    ),
    "too many experts per token": (config(num_experts_per_tok=9), "num_experts_per_tok 9; it must"),
    "hidden size of another": (config(hidden_size=32), r"\[64, 48\]; config\.json .* \[32, 48\]"),
    "hidden size 0": (config(hidden_size=0), "no qwen2_moe model can be built from"),
    "expert width of another": (config(moe_intermediate_size=32), r"config\.json .* \[64, 32\]"),
    "heads that do not divide": (config(num_attention_heads=0), "no qwen2_moe model can be built"),
    "vocabulary of another": (config(vocab_size=300), r"\[264, 64\]; config\.json makes it \[300"),
    "more layers": (config(num_hidden_layers=4, layer_types=None), "holds weights of 3 layers"),
    "unknown activation": (
        config(hidden_act="tanh"),
        "has the activation 'tanh'; supported are silu, swish, gelu",
    ),
    "no context": (config(max_position_embeddings=0), "allows a context of 0 tokens; it must be"),
    "quantised": (
        config(quantization_config={"quant_method": "eetq"}),
        r"is quantised \(eetq\); give the original 16- or 32-bit checkpoint",
    ),
    "weights under another name": (
        config(transformers_weights="other.safetensors"),
        "names its weights in transformers_weights, which is not supported",
    ),
    "damaged generation config": (
        write("generation_config.json", b"{"),
        r"generation_config\.json is not valid JSON",
    ),
    "end of text is a word": (
        write("generation_config.json", b'{"eos_token_id": "x"}'),
        r"eos_token_id of .*generation_config\.json is 'x'; it must be a token id or a list",
    ),
    "no shard": (remove(SINGLE), r"holds neither model\.safetensors nor model\.safetensors\.index"),
    "pickles only": (only_pickles, "only safetensors checkpoints are read"),
    "shard is a folder": (folder_instead(SINGLE), r"model\.safetensors cannot be read: Is a dir"),
    "cut to nothing": (cut(0), "not a complete safetensors file: its header should take 0 bytes"),
    "cut within the length": (cut(4), "is not a complete safetensors file: .* the file has 4;"),
    "cut after the length": (cut(8), "is not a complete safetensors file: .* the file has 8;"),
    "cut within the header": (cut(1000), "not a complete safetensors file: .* the file has 1000;"),
    "cut within the data": (cut(200_000), "is truncated: tensor .* and the file has 200000;"),
    "cut by a byte": (cut(-1), "is truncated: tensor .*; download it again"),
    "grown by a byte": (
        lambda model: (model / SINGLE).open("ab").write(b"x"),
        CORRUPT,
    ),
    "header of any length": (length_claimed(2**64 - 1), "its header should take 18446744073709551"),
    "header of no length": (length_claimed(0), CORRUPT),
    "header is garbage": (header(lambda entries: b"\x00\xff" * 500), CORRUPT),
    "header is no JSON": (header(lambda entries: b"{" * 500), CORRUPT),
    "header is too deep": (header(lambda entries: b"[" * 100_000), CORRUPT),
    "header is a list": (header(lambda entries: [entries]), "it is a JSON list and must be an obj"),
    "header is a number": (header(lambda entries: 5), "it is a JSON int and must be an object"),
    "metadata is a list": (header(lambda e: e.update(__metadata__=[1])), "__metadata__ is a list"),
    "entry is a list": (header(lambda entries: entries.update({EXPERT: []})), "is a list, not an"),
    "entry is empty": (header(lambda entries: entries.update({EXPERT: {}})), "has dtype None"),
    "unknown dtype": (entry(EXPERT, dtype="F3"), "has dtype F3, which is not supported"),
    "dtype is a list": (entry(EXPERT, dtype=["F32"]), r"has dtype \['F32'\], which is not supp"),
    "dtype of another size": (entry(NORM, dtype="F16"), r"\[64\] needs 128 bytes but is given the"),
    "shape of another size": (entry(NORM, shape=[65]), r"\[65\] needs 260 bytes but is given the"),
    "shape is negative": (entry(NORM, shape=[-64]), CORRUPT),
    "shape is twice negative": (entry(NORM, shape=[-8, -8]), CORRUPT),
    "shape is a string": (entry(NORM, shape="64"), CORRUPT),
    "shape is a fraction": (entry(NORM, shape=[64.0]), CORRUPT),
    "shape is infinite": (entry(NORM, shape=[float("inf")]), CORRUPT),
    "shape is an object": (entry(NORM, shape={"64": 1}), CORRUPT),
    "shape is true": (entry(NORM, shape=[64, True]), CORRUPT),
    "range is negative": (entry(NORM, data_offsets=[-256, 0]), CORRUPT),
    "range is reversed": (entry(NORM, data_offsets=[256, 0]), CORRUPT),
    "range is beyond all": (entry(NORM, data_offsets=[2**62, 2**62 + 256]), "is truncated: tens"),
    "range of one number": (entry(NORM, data_offsets=[0]), CORRUPT),
    "range of three numbers": (entry(NORM, data_offsets=[0, 1, 256]), CORRUPT),
    "range is an object": (entry(NORM, data_offsets={"0": 1, "256": 2}), CORRUPT),
    "range of strings": (entry(NORM, data_offsets=["0", "256"]), CORRUPT),
    "range of another tensor": (header(same_range), "begins at byte .* and the one before it ends"),
    "range at the beginning": (entry(NORM, data_offsets=[0, 256]), CORRUPT),
    "tensor not named": (header(lambda entries: entries.pop(NORM) and None), CORRUPT),
    "expert of another shape": (
        replaced(EXPERT, lambda weight: weight.T),
        r"gate_proj\.weight is torch\.float32 \[64, 48\]; config\.json .* \[48, 64\]",
    ),
    "expert flattened": (replaced(EXPERT, Tensor.flatten), r"is torch\.float32 \[3072\]; config"),
    "expert of another dtype": (
        replaced(EXPERT.replace("experts.0", "experts.5"), Tensor.half),
        r"experts\.5\.gate_proj\.weight is torch\.float16 \[48, 64\]; .* torch\.float32 \[48, 64\]",
    ),
    "expert of integers": (
        replaced(EXPERT, lambda weight: weight.to(torch.int8)),
        r"has dtype torch\.int8; exact weights are bfloat16, float16, float32 or float64",
    ),
    "integers": (replaced(NORM, lambda weight: weight.int()), r"norm\.weight has dtype torch\.in"),
    "expert missing": (tensors(lambda found: found.pop(EXPERT)), "lacks gate_proj of expert 0 in"),
    "all experts missing": (
        tensors(lambda found: [found.pop(name) for name in list(found) if ".experts." in name]),
        "holds no expert tensors such as",
    ),
    "tensor of another shape": (
        replaced(NORM, lambda weight: weight[:63]),
        r"tensor model\.norm\.weight has shape \[63\]; config\.json makes it \[64\]",
    ),
    "tensor missing": (
        tensors(lambda found: found.pop(NORM)),
        r"lacks 1 tensors that config\.json requires, model\.norm\.weight among them",
    ),
    "no tensors": (tensors(dict.clear), "holds no expert tensors such as"),
    "empty tokenizer": (write("tokenizer.json", b""), "the tokenizer in .* cannot be loaded"),
    "tokenizer is no JSON": (write("tokenizer.json", b"{"), "the tokenizer in .* cannot be loaded"),
    "tokenizer is a list": (write("tokenizer.json", b"[]"), "the tokenizer in .* cannot be loaded"),
    "tokenizer of nothing": (write("tokenizer.json", b"{}"), "the tokenizer in .* cannot be loa"),
    "tokenizer config is no JSON": (
        write("tokenizer_config.json", b"nope"),
        r"tokenizer_config\.json is not valid JSON: .*; download it again",
    ),
    "tokenizer config of wrong types": (
        tokenizer_config(model_max_length="x"),
        r"tokenizer_config\.json has model_max_length 'x'; it must be a number: download it again",
    ),
    "tokenizer config of an endless template": (
        tokenizer_config(chat_template="x" * 10_000_000),
        r"has a chat_template of 10000000 characters; it must be a text of at most 1048576: downl",
    ),
    "tokenizer config of a template that is none": (
        tokenizer_config(chat_template=[{"name": "default"}]),
        r"has a chat_template of no text; it must be a text",
    ),
    "tokenizer config of odd tokens": (
        tokenizer_config(eos_token=["x"]),
        "the tokenizer in .* cannot be loaded: .*; download its tokenizer files again",
    ),
    "template file of any length": (
        write("chat_template.jinja", b"x" * 2_000_000),
        r"chat_template\.jinja has 1\.91 MiB and files of its kind at most 1 MiB; download the",
    ),
    "tokenizer is a named pipe": (
        named_pipe("tokenizer.json"),
        r"tokenizer\.json is a named pipe and must be a regular file; download the model again",
    ),
    "config is a named pipe": (named_pipe("config.json"), r"config\.json is a named pipe and must"),
    "generation config is a named pipe": (
        named_pipe("generation_config.json"),
        r"generation_config\.json is a named pipe",
    ),
    "shard is a named pipe": (named_pipe(SINGLE), r"model\.safetensors is a named pipe and must b"),
    "index is a named pipe": (
        lambda model: [remove(SINGLE)(model), os.mkfifo(model / INDEX)],
        r"index\.json is a named pipe",
    ),
    "layers without end": (
        config(num_hidden_layers=2**31, layer_types=None),
        r"num_hidden_layers 2147483648 and .* holds weights of 3 layers; one of them belongs",
    ),
    "a vocabulary without end": (
        config(vocab_size=16_000_000),
        r"has shape \[264, 64\]; config\.json makes it \[16000000, 64\]; one of them belongs to",
    ),
    "a width without end": (
        config(hidden_size=2**40),
        "has hidden_size 1099511627776; it must be at most 131072: download it again",
    ),
}  # fmt: skip


# What to do, behind what is wrong.
REMEDY = re.compile(
    r"[;:] (download|give|convert|put|correct|remove|one of them belongs)|must (be|hold)|"
    r"supported are"
)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_models_are_refused(
    name: str, tiny: Folder, tmp_path: Path, command: Command
) -> None:
    damage, message = DAMAGED[name]
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    damage(model)
    sentence = refusal(command, model)
    assert re.search(message, sentence), sentence
    assert str(model) in sentence or "eos_token_id" in sentence
    assert REMEDY.search(sentence), sentence
    assert not [*tmp_path.rglob("*.partial")]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 0}, "has 0 experts a layer; it must be at least 1"),
        ("mixtral", {"num_local_experts": -1}, "has -1 experts a layer"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok 7; it must be from 1"),
        ("mixtral", {"sliding_window": -1}, "sliding_window -1; it must be 0, which is none"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method 'best'; it must be greedy or group_"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group 3 and topk_group 1; n_group must divide the 8 experts of a layer",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5},
            "n_group 4 and topk_group 5",
        ),
        ("glm4_moe", {"n_group": 3}, "n_group 3 and topk_group 1; n_group must divide the 8"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "leave 4 groups of 1 experts to choose"),
        ("glm4_moe", {"n_group": 4}, "leave 1 groups of 2 .* num_experts_per_tok, 3"),
        ("glm4_moe_lite", {"n_group": 2, "topk_group": 3}, "n_group 2 and topk_group 3"),
        ("deepseek_v3", {"n_group": 8}, "leave 2 groups of 1 experts to choose from"),
        ("deepseek_v32", {"index_topk": 0}, "has index_topk 0; it must be at least 1"),
        ("deepseek_v32", {"index_head_dim": 6}, "has index_head_dim 6; it must be at least 8"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, "and the first full"),
        ("minimax_m2", {"num_local_experts": 0}, "has 0 experts a layer"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0; its family's experts run with 7.0"),
        ("ernie4_5_moe", {"moe_k": 9}, "num_experts_per_tok 9; it must be from 1 to the 8 exp"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 2, 3]}, r"different numbers of experts .*, \[2, 3\];"),
        ("hunyuan_v1_moe", {"moe_topk": [9, 9, 9]}, "num_experts_per_tok 9; it must be from 1"),
        ("deepseek_v2", {"kv_lora_rank": 9}, r"config\.json makes it \[9\]"),
        ("olmoe", {"num_experts": 0}, "has 0 experts a layer"),
        ("phimoe", {"num_local_experts": 0}, "has 0 experts a layer"),
        ("qwen3_moe", {"num_local_experts": 0}, "has 0 experts a layer"),
    ],
)  # fmt: skip
def test_configs_of_other_families(
    family: str,
    changes: dict[str, Any],
    message: str,
    tiny: Folder,
    tmp_path: Path,
    command: Command,
) -> None:
    model = copied(tiny(family), tmp_path / "model")
    config(**changes)(model)
    assert re.search(message, refusal(command, model))


@pytest.mark.skipif("minimax_m3_vl" not in FAMILIES, reason="this transformers lacks the family")
@pytest.mark.parametrize("name", ["index_block_size", "index_topk_blocks"])
def test_blocks_of_nothing(name: str, tiny: Folder, tmp_path: Path, command: Command) -> None:
    model = copied(tiny("minimax_m3_vl"), tmp_path / "model")
    text = json.loads((model / "config.json").read_text())["text_config"]
    config(text_config=text | {name: 0})(model)
    assert f"has {name} 0; it must be at least 1" in refusal(command, model)


def index(change: Callable[[dict[str, Any], list[str]], object]) -> Damage:
    """Change weight_map, given the names of the shards; or put what `change` returns there."""

    def damage(model: Path) -> None:
        content = json.loads((model / INDEX).read_text())
        result = change(content["weight_map"], shards(model))
        if result is not None:
            content["weight_map"] = result
        (model / INDEX).write_text(json.dumps(content))

    return damage


def first_shard(damage: Callable[[Path], object]) -> Damage:
    return lambda model: damage(model / shards(model)[0])


SHARDED: dict[str, tuple[Damage, str]] = {
    "shard missing": (first_shard(Path.unlink), "names shard model-00001-of-.*, which is absent"),
    "shard cut": (first_shard(lambda p: os.truncate(p, 50_000)), "model-00001-of-.* is truncated"),
    "shard is empty": (first_shard(lambda p: os.truncate(p, 0)), "not a complete safetensors"),
    "another name": (
        index(lambda names, _: names.update({NORM: "model-00001-of-00099.safetensors"})),
        r"names shard model-00001-of-00099\.safetensors, which is absent; download it",
    ),
    "name too long": (index(lambda names, _: names.update({NORM: "x" * 300})), "which is absent"),
    "tensor in another shard": (
        index(lambda names, files: names.update({EXPERT: files[-1]})),
        f"lacks tensor {re.escape(EXPERT)}, which {re.escape(INDEX)} says it holds",
    ),
    "tensor in none": (
        index(lambda names, files: names.update({"model.nope": files[0]})),
        r"lacks tensor model\.nope, which",
    ),
    "tensor left out": (index(lambda names, _: names.pop(EXPERT) and None), "lacks gate_proj of"),
    "shard outside": (
        index(lambda names, _: names.update({NORM: "../x"})),
        r"names '\.\./x', not a file of that folder",
    ),
    "the folder above": (index(lambda names, _: names.update({NORM: ".."})), "names '..', not"),
    "absolute path": (index(lambda names, _: names.update({NORM: "/etc/passwd"})), "not a file of"),
    "no name": (index(lambda names, _: names.update({NORM: ""})), "names '', not a file"),
    "name is null": (index(lambda names, _: names.update({NORM: None})), "names None, not a"),
    "name is a list": (index(lambda names, _: names.update({NORM: []})), r"names \[\], not"),
    "no map": (index(lambda names, _: {}), "has no weight_map; download it again"),
    "map is a list": (index(lambda names, files: files), "has no weight_map"),
    "index is no JSON": (write(INDEX, b"{"), r"index\.json is not valid JSON"),
    "index is a list": (write(INDEX, b"[]"), "holds a JSON list; it must hold an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDED)
def test_damaged_shards_are_refused(
    name: str, sharded: Path, tmp_path: Path, command: Command
) -> None:
    damage, message = SHARDED[name]
    model = copied(sharded, tmp_path / "model")
    damage(model)
    sentence = refusal(command, model)
    assert re.search(message, sentence), sentence
    assert str(model) in sentence


def test_a_single_file_beside_shards(
    tiny: Folder, sharded: Path, tmp_path: Path, wanted: list[int]
) -> None:
    """The two must not be mixed: experts and all else come from where transformers reads."""
    model = copied(sharded, tmp_path / "model")
    for name in shards(model):
        found = load_file(model / name)
        save_file({key: tensor + 1 for key, tensor in found.items()}, model / name)
    shutil.copy(tiny("qwen2_moe") / SINGLE, model)
    assert greedy_tokens(load_plain(model), PROMPT_IDS, 8) == wanted
    assert generate(model) == wanted


def test_quantised_whatever_the_form(tiny: Folder, tmp_path: Path) -> None:
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    for settings in ("eetq", {"quant_method": "eetq"}):
        config(quantization_config=settings)(model)
        with pytest.raises(SpeqError, match=r"is quantised \(eetq\); give the original"):
            Checkpoint(model)
    config(quantization_config=None)(model)
    Checkpoint(model).close()


def test_models_that_are_none(tmp_path: Path, command: Command) -> None:
    file, gguf, of_gguf = tmp_path / "file", tmp_path / "m.Q4_K_M.GGUF", tmp_path / "of"
    file.write_text("")
    gguf.write_bytes(b"GGUF")
    of_gguf.mkdir()
    (of_gguf / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    (of_gguf / "config.json").write_text("{}")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes").write_text("")
    in_gguf = "is in GGUF, whose weights .* give the folder of the safetensors checkpoint"
    for model, message in (
        (tmp_path / "nope", "model folder '.*/nope' does not exist; give a folder, or a hub id"),
        (file, "model '.*/file' is a file; give the folder that holds config.json"),
        (file / "below", "does not exist"),
        (gguf, f"model '.*/m.Q4_K_M.GGUF' {in_gguf}"),
        (of_gguf, f"model '.*/of' {in_gguf}"),
        (tmp_path / "n.gguf", "does not exist"),
        (
            tmp_path,
            r"holds no config\.json, but m\.Q4_K_M\.GGUF \(GGUF\); download the model's safe",
        ),
        (
            tmp_path / "none",
            r"config\.json cannot be read: No such file or directory; give the fol",
        ),
        ("", "model is empty; give a folder or a hub id"),
        ("nope", "model folder 'nope' does not exist"),
        ("~nobody-at-all/model", "does not exist"),
        ("x" * 5000, "does not exist"),
        ("a/..", "neither a folder here nor to be had from the hub"),
    ):
        assert re.search(message, refusal(command, model))


def test_weights_that_are_not_numbers(tiny: Folder, tmp_path: Path) -> None:
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    replaced(NORM, lambda weight: weight * torch.nan)(model)
    generator = Generator.from_pretrained(model, BUDGET)
    for options in ({}, {"temperature": 1.0, "seed": 1}):
        with pytest.raises(
            SpeqError, match=r"logits are not numbers \(NaN or infinite\): its weights are dam"
        ):
            generator.generate(PROMPT_IDS, max_new_tokens=4, **options)
    generator.close()


# Budgets.


@pytest.mark.parametrize(
    "budget", ["abc", "-1GiB", "0", "12XB", "", " ", "1e9", "0.1B", "9" * 400 + "GiB"]
)
def test_budgets_that_are_none(budget: str, tiny: Folder, command: Command) -> None:
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(tiny("qwen2_moe"), budget)
    assert str(refused.value) == (
        f"memory size {budget!r} is not understood; give a positive number with a unit, such as "
        "8GiB, 512MiB or 20GB"
    )
    given = ("--model", tiny("qwen2_moe"), "--prompt", "x", f"--memory-budget={budget}")
    assert check_one_sentence(command("generate", *given)) == str(refused.value)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "mixtral"])
@pytest.mark.parametrize(
    "options",
    [{}, {"context_length": 300}, {"dtype": "float64", "draft": "none"}],
    ids=["as is", "longer", "wider"],
)
def test_a_budget_too_small_names_the_smallest(
    family: str, options: dict[str, Any], tiny: Folder
) -> None:
    """At every budget below it the same one is named; it works, and a byte less does not."""
    model = tiny(family)
    with pytest.raises(SpeqError) as refused:
        Generator.from_pretrained(model, 1, **options)
    sentence = str(refused.value)
    context = options.get("context_length", 64)
    items = ("non expert weights", "kv cache", "workspace", "slots")
    for item in items:
        assert re.search(rf"{item} [\d.]+ [KM]iB", sentence)
    assert f"memory budget 1 B is too small for a context of {context} tokens" in sentence
    match = re.search(r"the smallest workable budget is (\d+) bytes \(", sentence)
    assert match is not None
    smallest = int(match[1])
    for budget in (smallest // 2, smallest - 1):
        with pytest.raises(SpeqError, match=f"smallest workable budget is {smallest} bytes"):
            Generator.from_pretrained(model, budget, **options)
    generator = Generator.from_pretrained(model, smallest, **options)
    result = generator.generate(PROMPT_IDS, max_new_tokens=8, ignore_eos=True)
    assert result.stats["memory"]["unused"] == 0
    generator.close()
    if "dtype" not in options:
        assert result.token_ids == greedy_tokens(load_plain(model), PROMPT_IDS, 8)


def test_the_command_plans_for_its_prompt(tiny: Folder, command: Command) -> None:
    given = ["--model", tiny("qwen2_moe"), "--prompt", "hello", "--max-new-tokens", 95]
    sentence = check_one_sentence(command("generate", *given, "--memory-budget", "100KiB"))
    assert "memory budget 100 KiB is too small for a context of 100 tokens" in sentence
    match = re.search(r"the smallest workable budget is (\d+) bytes", sentence)
    assert match is not None
    ended = command("generate", *given, "--memory-budget", match[1], "--echo")
    assert ended.code == 0
    assert ended.out.startswith("hello")
    short = command("generate", *given, "--memory-budget", int(match[1]) - 1)
    assert match[0] in check_one_sentence(short)


# Options.


def test_options_the_library_does_not_know(tiny: Folder) -> None:
    for options, message in (
        (
            {"max_new_tokens": 3},
            "unknown option max_new_tokens; the options are memory_budget, host",
        ),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of auto, cpu, cuda"),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of auto, bfloat16, float16, flo"),
        ({"dtype": torch.float32}, "dtype is torch.float32; it must be one of"),
        ({"cache_policy": "best"}, "cache_policy is 'best'; it must be one of lru"),
        ({"prefetch": "all"}, "prefetch is 'all'; it must be one of none"),
        ({"context_length": 0}, "context_length is 0; it must be at least 1"),
        ({"context_length": -5}, "context_length is -5; it must be at least 1"),
        ({"context_length": 513}, "context_length is 513; the model's limit is 512"),
        ({"draft_length": -1}, "draft_length is -1; it must be from 0 to 63"),
        ({"draft_length": "many"}, "draft_length is 'many'; it must be auto or a whole number"),
    ):
        with pytest.raises(SpeqError, match=re.escape(message)):
            Generator.from_pretrained(tiny("qwen2_moe"), BUDGET, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens is 0; it must be at least 1"),
        (["--max-new-tokens", "-4"], "max_new_tokens is -4; it must be at least 1"),
        (["--max-new-tokens", "508"], "need a context of 513 tokens and the model's limit is 512"),
        (["--context-length", "8", "--max-new-tokens", "4"], "context of 9 tokens and context_len"),
        (["--prompt", ""], "the prompt is empty; give at least one token"),
        (
            ["--prompt", "a\udcff"],
            "which is not Unicode text; give text that was decoded from UTF-8",
        ),
        (["--temperature", "-1"], r"temperature is -1\.0; it must be from 0 to 10000"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], r"top_p is 0\.0; it must be above 0 and at most 1"),
        (["--top-p", "1.5"], r"top_p is 1\.5; it must be above 0 and at most 1"),
        (["--top-k", "-1"], "top_k is -1; it must be at least 0"),
        (["--seed", "-1"], "seed is -1; it must be from 0"),
        (["--stop", ""], "stop is empty; give non-empty strings"),
        (["--device", "tpu"], "device is 'tpu'; it must be one of"),
        (["--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["--draft-length", "99"], "draft_length is 99; it must be from 0 to 63"),
        (["--draft", ""], "draft is empty; give auto, none, a folder or a hub id"),
        (["--cache-policy", "x"], "cache_policy is 'x'; it must be one of lru"),
    ],
    ids=repr,
)
def test_bad_options_of_generate(
    options: list[str], message: str, tiny: Folder, command: Command
) -> None:
    given = ["--model", tiny("qwen2_moe"), "--memory-budget", BUDGET, "--prompt", "hello"]
    sentence = check_one_sentence(command("generate", *given, *options))
    assert re.search(message, sentence), sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tiny: Folder, command: Command) -> None:
    sentence = refusal(command, tiny("qwen2_moe"), device="cuda")
    assert sentence.startswith("device cuda was asked for, but torch sees no CUDA device: Torch")


def test_bad_options_of_bench(tiny: Folder, tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "words.jsonl").write_text("hello\n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    for options, message in (
        (["--budgets", "abc"], "memory size 'abc' is not understood"),
        (["--budgets", ""], "budgets must be given, such as 8GiB"),
        (["--budgets", "2MiB,,4MiB"], "memory size '' is not understood"),
        (["--budgets", "1KiB"], "memory budget 1 KiB is too small"),
        (["--draft-lengths", "2,x"], "draft_length is 'x'; it must be auto or a whole number"),
        (["--rounds", "0"], "rounds is 0; it must be at least 1"),
        (["--num-prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["--max-new-tokens", "1"], "max_new_tokens is 1; it must be at least 2"),
        (["--max-new-tokens", "600"], "and the model's limit is 512"),
        (["--prompts", tmp_path / "nope"], "nope' are neither a kind nor a file; give one of code"),
        (["--prompts", tmp_path], "cannot be read"),
        (["--prompts", tmp_path / "latin.jsonl"], "cannot be read"),
        (
            ["--prompts", tmp_path / "words.jsonl"],
            r"words\.jsonl:1 is no JSON object with a prompt",
        ),
        (
            ["--prompts", tmp_path / "other.jsonl"],
            r"other\.jsonl:2 is no JSON object with a prompt",
        ),
        (["--prompts", tmp_path / "number.jsonl"], r"number\.jsonl:1 has the prompt 3; it must be"),
        (["--prompts", tmp_path / "empty.jsonl"], "holds no prompts"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--dtype", "int4"], "dtype is 'int4'"),
        (["--json", tmp_path / "file" / "x.json"], r"x\.json cannot be written; choose a file in"),
        (["--json", tmp_path], "cannot be written; choose a file in"),
        (["--json", tmp_path / "file"], "exists already; choose another name or add --force"),
    ):
        given = ["bench", "tpot", tiny("qwen2_moe"), "--budgets", BUDGET]
        sentence = check_one_sentence(command(*given, *options))
        assert re.search(message, sentence), sentence
    assert (tmp_path / "file").read_text() == ""


def test_results_that_cannot_be_written_after_all(
    tiny: Folder, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "tpot.json"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    ended = command(
        "bench", "tpot", tiny("qwen2_moe"), "--budgets", BUDGET, "--draft-lengths", "0",
        "--num-prompts", 1, "--max-new-tokens", 2, "--rounds", 1, "--json", target, "--force",
    )  # fmt: skip
    sentence = check_one_sentence(ended)
    assert sentence == (
        f"{target} cannot be written: No space left on device; free some space, or choose another "
        "place"
    )
    assert target.read_text() == "old"
    assert not [*tmp_path.rglob("*.partial")]


def test_a_proof_is_not_replaced(tiny: Folder, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "proof.json"
    target.write_text("old")
    given = ["prove", tiny("qwen2_moe"), "--memory-budget", BUDGET, "--json", target]
    assert "exists already" in check_one_sentence(command(*given))
    assert target.read_text() == "old"


# Drafts.


@pytest.mark.parametrize(
    "budget",
    [pytest.param(820_000, marks=pytest.mark.wide), pytest.param(BUDGET, marks=pytest.mark.full)],
)
def test_drafts_that_are_none(budget: int, tiny: Folder, tmp_path: Path, command: Command) -> None:
    """With room for a draft and without: nonsense is not passed over."""
    model = tiny("qwen2_moe")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    other = write_model(tmp_path / "other", "qwen2_moe", moe_intermediate_size=64)
    fewer = write_model(tmp_path / "fewer", "qwen2_moe", num_experts=4)
    packed, damaged = (copied(model, tmp_path / name) for name in ("packed", "damaged"))
    config(quantization_config={"quant_method": "gptq", "bits": 4})(packed)
    cut(100_000)(damaged)
    for draft, message in (
        (tmp_path / "nope", "draft folder '.*/nope' does not exist; give auto, none, a folder"),
        (tmp_path / "file", "draft '.*/file' is a file; give the folder"),
        ("x" * 5000, "does not exist; give auto, none, a folder, or a hub id"),
        (tmp_path / "empty", "draft '.*/empty' is an empty folder; download the model into"),
        (other, "does not fit the model: "),
        (fewer, "does not fit the model: .* lacks gate_proj of expert 4"),
        (packed, "has group_size None; it must be -1"),
        (damaged, "is truncated"),
    ):
        sentence = refusal(command, model, budget, draft=str(draft))
        assert re.search(message, sentence), sentence
        assert str(draft) in sentence
    assert not [*tmp_path.rglob(".speq")]


def generate(model: Path) -> list[int]:
    generator = Generator.from_pretrained(model, BUDGET, draft_length=2, draft_dense="none")
    result = generator.generate(PROMPT_IDS, max_new_tokens=8, ignore_eos=True)
    assert result.stats["draft_length_mean"] > 0
    generator.close()
    return result.token_ids


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != SINGLE and (
        path.suffix in (".safetensors", ".partial"))]  # fmt: skip


def full_at_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)


def full_at_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes the header and one record more."""
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file
            self._left = 2

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def fileno(self) -> int:
            return int(self._file.fileno())

        def write(self, data: Any) -> int:
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self._file.write(data))

    def limited(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(path, *args, **kwargs)
        return Full(file) if path.name.endswith(".partial") else file

    monkeypatch.setattr(Path, "open", limited)


@pytest.mark.parametrize("fill", [full_at_fsync, full_at_write])
def test_a_full_disk_costs_the_draft_only(
    fill: Callable[[pytest.MonkeyPatch], None],
    tiny: Folder,
    tmp_path: Path,
    wanted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="speq"):
        fill(patch)
        assert generate(model) == wanted
    assert "the draft could not be cached and will be made again next time" in caplog.text
    assert caplog.text.count("No space left on device") == 2
    assert drafts(tmp_path) == []
    # With room again it is kept.
    assert generate(model) == wanted
    assert [path.parent for path in drafts(tmp_path)] == [model / ".speq"]


def test_an_interrupt_while_the_draft_is_kept(
    tiny: Folder, tmp_path: Path, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Generator.from_pretrained(model, BUDGET, draft_length=2, draft_dense="none")
    assert drafts(tmp_path) == []
    assert generate(model) == wanted


def test_half_a_draft_of_a_killed_process_goes(
    tiny: Folder, tmp_path: Path, wanted: list[int]
) -> None:
    """Whatever weights it was of: nobody else would ever look for it."""
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    left = model / ".speq" / "draft-int4-rtn-0123456789abcdef.safetensors.1-2.partial"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert generate(model) == wanted
    assert len(drafts(tmp_path)) == 1
    assert not left.exists()


def test_a_draft_that_cannot_lie_beside_its_model(
    tiny: Folder,
    tmp_path: Path,
    home: Path,
    wanted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("rounded although a draft was kept")

    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    (model / ".speq").write_text("")
    assert generate(model) == wanted
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    (kept,) = drafts(tmp_path)
    assert kept.is_relative_to(home)
    with monkeypatch.context() as patch:
        patch.setattr(Int4Arena, "quantize_into", fail)
        assert generate(model) == wanted
    # Nor anywhere else.
    shutil.rmtree(home)
    home.write_text("")
    with caplog.at_level(logging.WARNING, logger="speq"):
        assert generate(model) == wanted
    assert "the draft could not be cached" in caplog.text
    assert drafts(tmp_path) == []


def as_draft(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the header of a draft."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        encoded = json.dumps(entries).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "is not a complete safetensors file"),
        (lambda path: path.write_bytes(b"nonsense" * 100), "is not a complete safetensors file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is truncated"),
        (as_draft(lambda entries: entries.update(__metadata__=[1])), "__metadata__ is a list"),
        (as_draft(lambda entries: entries.update(__metadata__={})), "is not a draft of format"),
        (
            as_draft(lambda entries: entries["down_scales"].update(dtype="BF16")),
            "holds no down_scales of shape",
        ),
        (
            as_draft(lambda entries: entries["down_qweight"]["shape"].reverse()),
            "holds no down_qweight of shape",
        ),
    ],
    ids=["empty", "garbage", "cut", "metadata", "format", "dtype", "shape"],
)
def test_a_damaged_draft_is_made_anew(
    damage: Callable[[Path], object],
    message: str,
    tiny: Folder,
    tmp_path: Path,
    wanted: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    assert generate(model) == wanted
    (kept,) = drafts(tmp_path)
    sound = kept.read_bytes()
    damage(kept)
    assert kept.read_bytes() != sound
    with caplog.at_level(logging.WARNING, logger="speq"):
        assert generate(model) == wanted
    assert re.search(f"the draft on disk is made again: .*{message}", caplog.text)
    assert drafts(tmp_path) == [kept]
    assert kept.read_bytes() == sound


# Processes of their own.


@dataclass(frozen=True)
class Case:
    """A command line that must fail. model: what is done to a copy of the small model first."""

    message: str
    damage: Damage | None = None
    model: str = "{model}"
    budget: str = BUDGET
    options: tuple[str, ...] = ()


PROCESSES = {
    "missing folder": Case("does not exist; give a folder", model="/nope/nope"),
    "file": Case("is a file; give the folder", model="{model}/config.json"),
    "hub without a network": Case("nor to be had from the hub: ", model="nobody/no-such-model"),
    "config is no JSON": Case("is not valid JSON", write("config.json", b"{")),
    "pickles only": Case("only safetensors checkpoints are read", only_pickles),
    "cut shard": Case("is truncated: tensor", cut(300_000)),
    "corrupt header": Case("has a corrupt safetensors header", header(lambda entries: [1])),
    "broken tokenizer": Case("cannot be loaded", write("tokenizer.json", b"{}")),
    "nonsense for a budget": Case("memory size '12XB' is not understood", budget="12XB"),
    "budget too small": Case("the smallest workable budget is", budget="100KiB"),
    "prompt too long": Case("need a context of 605 tokens", options=("--max-new-tokens", "600")),
    "missing draft": Case("does not exist; give auto, none", options=("--draft", "/nope")),
}


# A process takes seconds to start: the others run in CI.
ALWAYS = {"cut shard"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.wide) for name in PROCESSES],
)
def test_a_process_ends_with_one_sentence(name: str, tiny: Folder, tmp_path: Path) -> None:
    case = PROCESSES[name]
    model = copied(tiny("qwen2_moe"), tmp_path / "model")
    if case.damage is not None:
        case.damage(model)
    given = ["--model", case.model.format(model=model), "--memory-budget", case.budget]
    environment = os.environ | {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / ".cache"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # where nobody listens
    }
    ended = subprocess.run(
        arguments_of("generate", "--prompt", "hello", *given, *case.options),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    sentence = check_one_sentence(
        Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode())
    )
    assert case.message in sentence
