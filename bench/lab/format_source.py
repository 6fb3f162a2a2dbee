"""A model that is written in several formats: one of random weights, or one of a checkpoint."""

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from speq.bench.settings import Neighbours, PromptKinds
from speq.config import DEFAULT_READER_THREADS, Device, Dtype, ReaderThreads
from speq.errors import OptionError, SpeqError
from speq.experts.codec import Matrices
from speq.experts.expert_names import USUAL_NAMES, ExpertNames
from speq.experts.expert_store import expert_slot, read_matrices
from speq.files.checkpoint import EXPERTS_MANIFEST
from speq.files.published_format import WORDS
from speq.measure.settings import NumPrompts, Rounds
from speq.models.opened import Opened, open_model
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, File, ListOf, Size, Text, Whole

# As `bench.lab.format_files` writes them.
PUBLISHED_FORMATS = ("bf16", "fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class FormatSettings(Options):
    """layers to prompt_tokens: of random weights, and their texts."""

    source: Annotated[
        str | None,
        Option(
            "A model published in 16 bits, whose experts are rounded to each format; "
            "default: random weights.",
            Text("a folder or a hub id", path=True),
        ),
    ] = None
    work: Annotated[
        Path | None,
        Option(
            "Folder that the checkpoints are written to and stay in; default: a temporary one.",
            File("a folder"),
        ),
    ] = None
    formats: Annotated[
        tuple[str, ...], Option("Which formats.", ListOf(Choice(PUBLISHED_FORMATS)))
    ] = PUBLISHED_FORMATS
    budgets: Annotated[
        tuple[str, ...],
        Option(
            "Memory budgets; default: 0.4 of what the model takes in BF16, and room for all of it.",
            ListOf(Size(kept=True), optional=True),
        ),
    ] = ()
    layers: Annotated[int, Option("Layers.", Whole(1, 1000))] = 8
    hidden_size: Annotated[int, Option("Hidden size.", Whole(64))] = 1024
    expert_width: Annotated[int, Option("Width of an expert.", Whole(32))] = 768
    experts: Annotated[int, Option("Experts of a layer.", Whole(1, 4096))] = 32
    top_k: Annotated[int, Option("Experts that a token chooses.", Whole(1, 64))] = 4
    vocab_size: Annotated[int, Option("Tokens of the vocabulary.", Whole(16))] = 8192
    prompt_tokens: Annotated[int, Option("Length of the random prompts.", Whole(1, 2048))] = 64
    seed: Annotated[int, Option("Of weights and prompts.", Whole(0, 2**31 - 1))] = 0
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 2
    max_new_tokens: Annotated[int, Option("Tokens of each text.", Whole(2, 2000))] = 32
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS


HEAD_DIM = 64
# Heads of queries to one of keys and values.
GROUPED = 4
WEIGHTS = (".safetensors", ".index.json")
# Of random models: longer texts than any bench runs.
CONTEXT = 4096


class WeightSource(Protocol):
    """The words of a model, layer by layer."""

    @property
    def config(self) -> dict[str, Any]:
        """As config.json has it."""

    @property
    def names(self) -> ExpertNames:
        """Of its experts."""

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Hidden size, and width of an expert."""

    @property
    def experts_weights(self) -> int:
        """Weights of all experts."""

    @property
    def rest_bytes(self) -> int:
        """Of everything else."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int:
        """Of all layers together."""

    @property
    def chosen_share(self) -> float:
        """Of a layer's experts, those that a token chooses."""

    def rest(self, layer: int | None) -> dict[str, Tensor]:
        """Tensors outside the experts: of a layer, or of none. They are bfloat16 or wider."""

    def experts(self, layer: int) -> list[Matrices]:
        """gate_up_proj [2F, H] and down_proj [H, F] of each expert; none where there are none."""

    def put_beside(self, folder: Path) -> None:
        """Write what lies beside the weights: a tokenizer's files, and perhaps others."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RandomModel:
    """Random weights in the shapes of family qwen3_moe: no shared experts, and no biases.

    Rows keep the size of what they are given, so that routers and the head tell tokens apart.
    """

    settings: FormatSettings
    names: ExpertNames = USUAL_NAMES

    @cached_property
    def config(self) -> dict[str, Any]:
        asked = self.settings
        heads = asked.hidden_size // HEAD_DIM
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": asked.vocab_size,
            "hidden_size": asked.hidden_size,
            "num_hidden_layers": asked.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // GROUPED or 1,
            "head_dim": HEAD_DIM,
            "num_experts": asked.experts,
            "num_experts_per_tok": asked.top_k,
            "moe_intermediate_size": asked.expert_width,
            "intermediate_size": asked.expert_width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }

    @property
    def num_layers(self) -> int:
        return self.settings.layers

    @property
    def expert_sizes(self) -> tuple[int, int]:
        return self.settings.hidden_size, self.settings.expert_width

    @property
    def num_experts(self) -> int:
        return self.settings.layers * self.settings.experts

    @property
    def chosen_share(self) -> float:
        return self.settings.top_k / self.settings.experts

    @property
    def experts_weights(self) -> int:
        return self.num_experts * 3 * self.settings.hidden_size * self.settings.expert_width

    @property
    def rest_bytes(self) -> int:
        one, none = self.shapes(0), self.shapes(None)
        weights = sum(torch.Size(shape).numel() for shape in none.values())
        weights += self.num_layers * sum(torch.Size(shape).numel() for shape in one.values())
        return weights * torch.bfloat16.itemsize

    def shapes(self, layer: int | None) -> dict[str, tuple[int, ...]]:
        """Of the tensors outside the experts."""
        config = self.config
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        if layer is None:
            return {
                "model.embed_tokens.weight": (vocabulary, hidden),
                "model.norm.weight": (hidden,),
                "lm_head.weight": (vocabulary, hidden),
            }
        queries = config["num_attention_heads"] * HEAD_DIM
        keys = config["num_key_value_heads"] * HEAD_DIM
        named = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate": (config["num_experts"], hidden),
        }
        return {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}

    def rest(self, layer: int | None) -> dict[str, Tensor]:
        draws = self.draws(0 if layer is None else 2 * layer + 2)
        found = {}
        for name, shape in self.shapes(layer).items():
            if len(shape) == 1:
                found[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                size = 1.0 if "embed_tokens" in name else 1 / sqrt(shape[1])
                found[name] = (torch.randn(shape, generator=draws) * size).bfloat16()
        return found

    def experts(self, layer: int) -> list[Matrices]:
        asked, draws = self.settings, self.draws(2 * layer + 1)
        hidden, width = asked.hidden_size, asked.expert_width

        def drawn(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=draws)
            return (values / sqrt(columns)).bfloat16()

        return [(drawn(2 * width, hidden), drawn(hidden, width)) for _ in range(asked.experts)]

    def draws(self, number: int) -> torch.Generator:
        """What draws one part of the model: no part depends on others."""
        return torch.Generator().manual_seed((self.settings.seed << 20) + number)

    def put_beside(self, folder: Path) -> None:
        """A tokenizer whose tokens are numbers, as words."""
        numbers = {str(token): token for token in range(self.settings.vocab_size)}
        tokenizer = Tokenizer(WordLevel(numbers, unk_token="0"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "0", "unk_token": "0"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def close(self) -> None:
        pass


class CheckpointModel:
    """The words of a model folder as published. Raises SpeqError for what has none, or is no family
    of plain experts.
    """

    def __init__(self, model: str) -> None:
        self._opened = opened = open_model(model)
        try:
            check_plain(opened)
        except SpeqError:
            opened.close()
            raise
        self.config = opened.checkpoint.config
        self.names = opened.family.names
        self._slot = expert_slot(opened.store)
        count = self.num_layers
        names = (name for name in opened.checkpoint.tensors if opened.family.holds(name, count))
        self._outside: dict[int | None, list[str]] = {}
        for name in names:
            self._outside.setdefault(layer_of(name), []).append(name)

    @property
    def num_layers(self) -> int:
        found: int = self.config["num_hidden_layers"]
        return found

    @property
    def expert_sizes(self) -> tuple[int, int]:
        shape = self._opened.store.codec.shape
        return shape.hidden_size, shape.expert_width

    @property
    def num_experts(self) -> int:
        return self._opened.store.num_layers * self._opened.store.num_experts

    @property
    def chosen_share(self) -> float:
        return self._opened.shape.top_k / self._opened.store.num_experts

    @property
    def experts_weights(self) -> int:
        return self.num_experts * self._opened.store.codec.shape.weights

    @property
    def rest_bytes(self) -> int:
        tensors = self._opened.checkpoint.tensors
        held = (tensors[name][1] for names in self._outside.values() for name in names)
        return sum(info.nbytes for info in held)

    def rest(self, layer: int | None) -> dict[str, Tensor]:
        tensors = self._opened.checkpoint.tensors
        return {name: tensors[name][0].tensor(name) for name in self._outside.get(layer, [])}

    def experts(self, layer: int) -> list[Matrices]:
        store, layers = self._opened.store, self._opened.shape.experts.layers
        if layer not in layers:
            return []
        at, found = layers.index(layer), []
        for expert in range(store.num_experts):
            gate_up, down = read_matrices(store, at, expert, self._slot)
            # The next expert is read into the same slot.
            found.append((gate_up.clone().bfloat16(), down.clone().bfloat16()))
        return found

    def put_beside(self, folder: Path) -> None:
        for file in self._opened.checkpoint.path.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHTS) and file.name != "config.json":
                shutil.copy(file, folder / file.name)

    def close(self) -> None:
        self._opened.close()


def layer_of(name: str) -> int | None:
    """The layer that a tensor is of; None: of none."""
    _, found, rest = name.partition("layers.")
    return int(rest.partition(".")[0]) if found else None


def check_plain(opened: Opened) -> None:
    """Raise SpeqError unless experts are two matrices of words that their family publishes as
    others do.
    """
    family, path = opened.family, opened.checkpoint.path
    if (path / EXPERTS_MANIFEST).exists() or opened.checkpoint.format != WORDS:
        raise OptionError(
            f"{path} holds its experts as codes or as records; give a model published in 16 or 32 "
            "bits"
        )
    if family.biased or family.transposed or family.text_part is not None:
        raise OptionError(
            f"{path} is of family {family.model_type!r}, whose experts are published in a form of "
            "their own; give a model of another family, such as qwen3_moe"
        )
