"""Whatever folder people point at: what is wrong with it is named, with what helps."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from speq import Generator
from speq.errors import SpeqError
from speq.files.checkpoint import HUB_PATTERNS, NOT_FROM_THE_HUB, Checkpoint, locate
from speq.files.published_format import format_of
from speq.measure.plan import plan
from speq.models.opened import open_model
from speq.models.shape import config_in
from speq.text.endings import end_ids
from speq.text.tokenizer import NoTokenizer, load_tokenizer, tokens_of
from tests.helpers.paths import METADATA
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    f"oid sha256:{'0123456789abcdef' * 4}\nsize 4998821872\n"
)
PUBLISHED = METADATA / "configs"


def put(folder: Path, name: str, content: str | bytes = b"") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def gone(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/0123456789")


@pytest.fixture
def copied(tiny: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("qwen3_moe"), tmp_path / "model"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "is an empty folder; download the model into it"),
        (["pytorch_model-00001-of-00002.bin"], r"\.bin \(pickles, which speq does not open\)"),
        (["consolidated.00.pth", "params.json"], "weights in their publisher's own layout"),
        (["adapter_config.json", "adapter_model.safetensors"], r"a LoRA adapter.*merge_and_unload"),
        (["model.onnx"], "ONNX"),
        (["a.safetensors.incomplete"], "an unfinished download"),
        (["snapshots/abc/config.json"], "give the folder below its snapshots"),
        (["tf_model.h5"], "TensorFlow"),
    ],
)
def test_folders_that_hold_something_else(names: list[str], said: str, tmp_path: Path) -> None:
    for name in names:
        put(tmp_path, name, "{}")
    with pytest.raises(SpeqError, match=said):
        locate(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, r"is not the file itself but a Git LFS pointer to it.*`git lfs pull`"),
        ("\n<!DOCTYPE html><html>Sign in</html>", "a page of HTML"),
        (None, "is a link to ../../blobs/0123456789, which is gone; download"),
    ],
)
def test_files_that_are_not_there(name: str, content: str | None, said: str, copied: Path) -> None:
    if content is None:
        gone(copied, name)
    else:
        put(copied, name, content)
    with pytest.raises(SpeqError, match=f"{name}.*{said}"):
        Generator.from_pretrained(copied, "8MiB")


def test_a_link_of_a_hub_cache_is_followed(copied: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    os.rename(copied / "model.safetensors", blob)
    (copied / "model.safetensors").symlink_to(os.path.relpath(blob, copied))
    Checkpoint(locate(copied)).close()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_MXFP4_FP8"}},
            r"quantised \(modelopt W4A8_MXFP4_FP8: W4A8_MXFP4_FP8\), and NVFP4 is read",
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, r"quantised \(4 bits\)"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, r"quantised \(4 bits\)"),
    ],
)
def test_a_format_that_only_a_quantisers_file_names(
    name: str, content: dict[str, Any], said: str, copied: Path
) -> None:
    put(copied, name, json.dumps(content))
    with pytest.raises(SpeqError, match=said):
        open_model(copied)
    with pytest.raises(SpeqError, match=said):
        plan(copied, "8MiB")


def test_a_quantised_cache_is_no_quantised_model(copied: Path) -> None:
    algorithms = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    put(copied, "hf_quant_config.json", json.dumps({"quantization": algorithms}))
    open_model(copied).close()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization", {"bits": 4, "group_size": 64}, "4 bits"),
        ("quantization_config", {"quant_method": "eetq"}, "eetq"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_format_in_any_field(field: str, value: Any, said: str, nested: bool) -> None:
    config = {"text_config": {field: value}} if nested else {field: value}
    with pytest.raises(SpeqError, match=rf"quantised \({said}\)"):
        format_of(config, Path("nowhere"))


def test_two_formats_are_a_contradiction() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    config = {"quantization_config": fp8, "text_config": mxfp4}
    with pytest.raises(SpeqError, match="names two formats, in quantization_config"):
        format_of(config, Path("nowhere"))


def test_an_index_that_has_no_metadata(tmp_path: Path) -> None:
    """Tokens are those of the same model as it is written."""
    model = write_model(tmp_path / "model", "qwen3_moe", max_shard_size="100KB")
    prompt = [3, 1, 4, 1, 5]
    wanted = greedy_tokens(load_plain(model), prompt, 8)
    index = model / "model.safetensors.index.json"
    put(model, index.name, json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    generator = Generator.from_pretrained(model, "8MiB", dtype="float32")
    assert generator.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids == wanted
    generator.close()


def test_a_plan_needs_no_shards(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "model", "qwen3_moe", max_shard_size="100KB")
    config_alone, with_index = tmp_path / "config", tmp_path / "index"
    for folder, names in ((config_alone, []), (with_index, ["model.safetensors.index.json"])):
        folder.mkdir()
        for name in ("config.json", *names):
            shutil.copy(whole / name, folder / name)
    options: Any = {"link": "2GB/s", "memory_bandwidth": "20GB/s"}
    made = [plan(folder, "4MiB", **options).to_dict() for folder in (config_alone, with_index)]
    assert made[0] | {"model": None} == made[1] | {"model": None}
    with pytest.raises(SpeqError, match="which is absent"):
        open_model(with_index)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            [
                *("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"),
                *("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
                *("original/model.safetensors", "original/config.json", "original/dtypes.json"),
                *("metal/model.bin", "README.md", "USAGE_POLICY"),
            ],
            {"original/model.safetensors", "original/config.json", "original/dtypes.json"},
        ),
        (
            [
                *("consolidated.00.pt", "consolidated-00001-of-00005.safetensors"),
                *("consolidated.safetensors.index.json", "params.json", "tokenizer.model"),
                "model-00001-of-00019.safetensors",
            ],
            {"consolidated-00001-of-00005.safetensors", "consolidated.safetensors.index.json"},
        ),
        (["onnx/model.json", "additional_chat_templates/tool_use.jinja"], {"onnx/model.json"}),
    ],
)
def test_what_is_downloaded(files: list[str], left: set[str]) -> None:
    """By huggingface_hub's own filter: nothing that no run reads."""
    taken = filter_repo_objects(
        files, allow_patterns=HUB_PATTERNS, ignore_patterns=NOT_FROM_THE_HUB
    )
    wanted = [
        name
        for name in files
        if name not in left
        and name.rpartition(".")[2] in ("json", "safetensors", "jinja", "model", "txt")
    ]
    assert [*taken] == wanted


def test_prompts_of_ids_need_no_tokenizer(copied: Path, tiny: Folder) -> None:
    prompt = [3, 1, 4, 1, 5]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    generator = Generator.from_pretrained(copied, "8MiB", dtype="float32")
    made = generator.generate(prompt, max_new_tokens=8, ignore_eos=True)
    assert made.token_ids == greedy_tokens(load_plain(tiny("qwen3_moe")), prompt, 8)
    assert made.text == ""
    for asked in ("a text", [{"role": "user", "content": "a chat"}]):
        with pytest.raises(SpeqError, match=r"has no tokenizer .* or give prompts as token ids"):
            generator.generate(asked, max_new_tokens=1)
    with pytest.raises(SpeqError, match="stop is given, and the model has no tokenizer"):
        generator.generate(prompt, stop=("x",))
    generator.close()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tiktoken.model": b"IQ== 0\n"}, r"is code \(tiktoken.model\), which speq does not run"),
        (
            {"tokenization_x.py": b"", "vocab.json": b"{}"},
            r"is code \(tokenization_x.py\), which speq does not run.*tokenizer.json",
        ),
        (
            {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"},
            r"is tokenizer.model, which is read with .*sentencepiece.*-e '\.\[tokenizers\]'",
        ),
    ],
)
def test_tokenizers_that_cannot_be_read_here(
    files: dict[str, bytes], said: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speq.text.tokenizer.find_spec", lambda name: None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    for name, content in files.items():
        put(copied, name, content)
    generator = Generator.from_pretrained(copied, "8MiB")
    with pytest.raises(SpeqError, match=said):
        generator.generate("a text", max_new_tokens=1)
    assert len(generator.generate([1, 2], max_new_tokens=2, ignore_eos=True).token_ids) == 2
    generator.close()


@pytest.mark.parametrize("named", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_vocabulary_of_sentencepiece_gives_its_own_tokens(named: str, tmp_path: Path) -> None:
    """As Mixtral's: sentencepiece itself says which. The class that transformers chooses for the
    family by itself loses the space before the first word.
    """
    reason = "sentencepiece or protobuf is not installed"
    sentences = pytest.importorskip("sentencepiece", reason=reason)
    pytest.importorskip("google.protobuf", reason=reason)
    words = "\n".join(f"the sea is word {i} and {i * 7}" for i in range(200))
    put(tmp_path, "text", words)
    sentences.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    put(tmp_path, "config.json", json.dumps({"model_type": "mixtral"}))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    put(tmp_path, "tokenizer_config.json", json.dumps({"tokenizer_class": named} | marks))
    if named != "LlamaTokenizer":
        with pytest.raises(NoTokenizer, match=r"tokenises .* differently from sentencep"):
            load_tokenizer(tmp_path)
        return
    tokenizer = load_tokenizer(tmp_path)
    published = sentences.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("the sea is 7", " is", "word\n\nand", "unseen: é 海"):
        assert tokens_of(tokenizer, text, add_special_tokens=False) == published.encode(text)


def test_a_null_that_the_model_stumbles_over_is_named(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    put(copied, "config.json", json.dumps(config | {"num_attention_heads": None}))
    with pytest.raises(SpeqError, match="num_attention_heads"):
        open_model(copied)


@pytest.mark.parametrize("family", ["qwen3_moe", "mellum"])
def test_yarn_says_how_far_it_reaches(family: str, tmp_path: Path) -> None:
    """As publishers write it: the limit is that of before, and the factor stretches it. Layers of
    mellum have parameters by kind.
    """
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
    }
    if family == "mellum":
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        rope = {"full_attention": rope, "sliding_attention": plain}
    model = write_model(
        tmp_path / "yarn", family, max_position_embeddings=160, rope_parameters=rope
    )
    opened = open_model(model)
    assert opened.shape.max_context == 512
    opened.close()


def test_an_old_file_of_a_template_is_read(copied: Path) -> None:
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    put(copied, "tokenizer_config.json", json.dumps(config))
    put(copied, "chat_template.json", json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    generator = Generator.from_pretrained(copied, "8MiB")
    chat = [{"role": "user", "content": "ab"}]
    assert generator.encode(chat) == generator.encode("ab!")
    generator.close()


ENDS: list[tuple[Any, Any, set[int]]] = [
    # (of config.json, of generation_config.json, ends; the tokenizer's own is 256)
    (256, 256, {256}),
    (256, [7, 256], {7, 256}),
    (None, [256, 9], {256, 9}),
    (256, None, {256}),
    ([256, 5], None, {256}),  # 5 is ordinary text for the tokenizer
    (None, None, {256}),
    (256, 8, {8, 256}),
]


@pytest.mark.parametrize(("in_config", "in_generation", "ends"), ENDS)
def test_ends_of_text(in_config: Any, in_generation: Any, ends: set[int], copied: Path) -> None:
    """generation_config.json counts before config.json, and the tokenizer's own end is one too."""
    config = json.loads((copied / "config.json").read_text()) | {"eos_token_id": in_config}
    put(copied, "config.json", json.dumps(config))
    put(copied, "generation_config.json", json.dumps({"eos_token_id": in_generation}))
    generator = Generator.from_pretrained(copied, "8MiB")
    request = generator.prepare([1], None, {})
    assert request.eos_token_ids == ends
    generator.close()


class Named:
    """A tokenizer as far as the ends of texts go: ids by special token, the first of which ends."""

    def __init__(self, *special: str) -> None:
        self.vocab = {name: 90 + at for at, name in enumerate(special)}
        self.all_special_tokens, self.eos_token = list(special), special[0]
        self.all_special_ids = list(self.vocab.values())
        self.eos_token_id = self.vocab[special[0]]
        self.added_tokens_decoder: dict[int, str] = {}


def test_calls_end_texts_of_gpt_oss(tmp_path: Path) -> None:
    """Its generation_config.json did not always name the mark behind a call."""
    put(tmp_path, "generation_config.json", json.dumps({"eos_token_id": [90, 80]}))
    marks = Named("<|return|>", "<|call|>", "<|channel|>")
    assert end_ids(tmp_path, {}, marks) == {80, 90, 91}
    assert end_ids(tmp_path, {}, Named("<|return|>", "<|channel|>")) == {80, 90}


def test_ends_that_files_disagree_on_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = Named("<|im_end|>", "<|endoftext|>")
    pictures = {"text_config": {"eos_token_id": 1}, "eos_token_id": [90, 91]}
    assert end_ids(tmp_path, pictures, turns) == {90, 91}  # the whole knows more than the part
    assert not caplog.records
    assert end_ids(tmp_path, {"text_config": {"eos_token_id": 91}}, turns) == {90, 91}
    (said,) = caplog.messages
    assert "end at 90 (<|im_end|>) as well" in said and "config.json does not" in said
    caplog.clear()
    assert end_ids(tmp_path, {"eos_token_id": 2}, turns) == {90}
    assert "config.json ends texts at [2], which the tokenizer treats as ordinary" in caplog.text


@pytest.mark.parametrize(
    ("family", "tied", "head"),
    [
        ("qwen3_moe", False, "same"),
        ("qwen3_moe", True, "none"),
        ("qwen3_moe", True, "same"),
        ("qwen3_moe", True, "other"),
        ("qwen3_5_moe", True, "other"),  # a part of a whole
        ("nemotron_h", True, "other"),  # whose embedding has another name
    ],
)
def test_heads_are_tied_as_the_files_say(
    family: str, tied: bool, head: str, tmp_path: Path
) -> None:
    """transformers ties none where a file has two that differ; what is planned is held."""
    if family not in FAMILIES:
        pytest.skip("transformers lacks the family")
    model = write_model(tmp_path / "m", family, tie_word_embeddings=tied)
    file = model / "model.safetensors"
    tensors = load_file(file)
    (name,) = (each for each in tensors if re.search(r"embed(_tokens|dings)\.weight$", each))
    tensors.pop("lm_head.weight", None)
    if head != "none":
        own = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(5))
        tensors["lm_head.weight"] = tensors[name].clone() if head == "same" else 0.2 * own
    save_file(tensors, file, metadata={"format": "pt"})
    generator = Generator.from_pretrained(model, "16MiB", dtype="float32")
    result = generator.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    assert result.token_ids == greedy_tokens(load_plain(model), [1, 2, 3], 12)
    runtime = generator.runtime
    held = runtime.model.nbytes
    assert runtime.shape.resident_bytes(torch.float32) == held
    assert runtime.plan.items["non_expert_weights"] == held
    generator.close()


def published() -> list[Path]:
    return sorted(PUBLISHED.glob("*_config.json")) if PUBLISHED.is_dir() else []


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no metadata of published models lies here")
def test_published_configurations_are_planned_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Each is read, with what a quantiser left beside it; none ends in a raw error, and none that a
    file says is quantised is planned as words.
    """
    planned = []
    for path in published():
        if path.name.endswith("hf_quant_config.json"):
            continue
        folder = tmp_path / path.name.removesuffix("_config.json")
        folder.mkdir()
        shutil.copy(path, folder / "config.json")
        beside = path.with_name(path.name.replace("_config.json", "_hf_quant_config.json"))
        if beside.exists():
            shutil.copy(beside, folder / "hf_quant_config.json")
        try:
            config_in(folder)
            format_ = format_of(json.loads(path.read_text()), folder).name
            made = plan(folder, "24GiB", link="3GB/s", memory_bandwidth="40GB/s")
        except SpeqError as error:
            assert "\n" not in str(error)
            continue
        assert made.candidates
        assert ("NVFP4" in path.name) == (format_ == "nvfp4")
        assert format_ in ("words", "fp8", "mxfp4", "int4", "nvfp4")
        planned.append(folder.name)
    assert len(planned) >= 20


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no metadata of published models lies here")
@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3.5-18b-reap", "wizardlm-2-8x22b"])
def test_published_indexes_change_no_plan(name: str, tmp_path: Path) -> None:
    folder, alone = METADATA / "indexes" / name, tmp_path / name
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    rates = {"link": "3GB/s", "memory_bandwidth": "40GB/s"}
    with_index, without = (plan(each, "24GiB", **rates) for each in (folder, alone))
    assert replace(with_index.model_spec, name="") == replace(without.model_spec, name="")
    assert with_index.candidates == without.candidates
    # Words and codes of all experts and of all else are what the index counts, but for MTP.
    size = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    model_spec = with_index.model_spec
    words = (
        model_spec.non_expert_bytes + sum(model_spec.dense.words_bytes) - model_spec.dense.nbytes
    )
    counted = model_spec.count * model_spec.codec.record_range[1] + words
    assert counted == pytest.approx(size["total_size"], rel=0.05)
