"""Features of n-grams that some layers of Qwen4-Exp add to their inputs (PLE).

Hashes of a token and those before it name rows of a table of tens of gigabytes, which stays on
disk. What is made of them goes through a convolution over tokens apart. A cache with rollback has
the last tokens, and the last inputs of the convolution.
"""

import math
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.errors import CheckpointError, UnsupportedError, present
from speq.files.checkpoint import WORD_DTYPES, Checkpoint
from speq.files.range_file import RangeFile
from speq.files.row_table import RowTable, TablePart
from speq.files.safetensors_file import OTHER_VERSION
from speq.kernels.convolution import convolve
from speq.kernels.recurrent import RecurrentSizes
from speq.models.conv_inputs import ConvInputs, windows_in
from speq.models.delta_net import delta_states
from speq.models.length import Length
from speq.models.recurrent_cache import RecurrentLayer, RecurrentState
from speq.models.short_conv import ConvLayer
from speq.models.states import StateShape

# transformers' class that has a table, and its name for the table.
TABLE_CLASS, TABLE = "Qwen4ExpTextNGramEmbedding", "ngram_embedding"
# A part of a table on disk; group 1 is its number.
SHARD = re.compile(rf"\.{TABLE}\.shard_(\d+)\.weight$")


class TableOnDisk(nn.Module):
    """Replacement of an n-gram embedding: ids [...] to rows [..., width], read from files.

    rows, width  of the table
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self._table: RowTable | None = None
        self._files: list[RangeFile] = []

    def open(self, checkpoint: Checkpoint, name: str) -> None:
        """Find the table's tensors: `name`.weight, or parts of it. Raises SpeqError if one is
        missing, of another size or not of plain weights.
        """
        tensors = checkpoint.tensors
        own = [each for each in tensors if each.startswith(f"{name}.")]
        shards = {int(found[1]): each for each in own if (found := SHARD.search(each))}
        stored = [shards[at] for at in sorted(shards)]
        stored = stored or [each for each in (f"{name}.weight",) if each in tensors]
        where = checkpoint.path
        infos = [tensors[each][1] for each in stored]
        if sum(info.shape[0] for info in infos) != self.rows:
            raise CheckpointError(
                f"{where} has {sum(info.shape[0] for info in infos)} rows of table "
                f"{checkpoint.on_disk(name)}; config.json makes it {self.rows}: {OTHER_VERSION}"
            )
        for each, info in zip(stored, infos, strict=True):
            if info.dtype not in WORD_DTYPES or info.dtype != infos[0].dtype:
                raise UnsupportedError(
                    f"{where}: tensor {checkpoint.on_disk(each)} is {info.dtype}, and rows of "
                    "n-gram tables are read as 16-bit or 32-bit words alone; give a checkpoint "
                    "that has its table in bfloat16"
                )
            if list(info.shape[1:]) != [self.width]:
                raise CheckpointError(
                    f"{where}: tensor {checkpoint.on_disk(each)} has shape {list(info.shape)}; "
                    f"config.json makes its rows {self.width} wide: {OTHER_VERSION}"
                )
        paths = {tensors[each][0].path for each in stored}
        files = {path: RangeFile(path) for path in paths}
        parts = [
            TablePart(files[tensors[each][0].path], info.offset, info.shape[0])
            for each, info in zip(stored, infos, strict=True)
        ]
        self._table, self._files = RowTable(parts, self.width, infos[0].dtype), [*files.values()]

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
        for file in self._files:
            file.close()

    def forward(self, ids: Tensor) -> Tensor:
        table = present(self._table, "an n-gram table was read before it was opened")
        return table.read(ids.cpu()).to(ids.device)


def with_table_on_disk(own: type[nn.Module]) -> type[nn.Module]:
    """A class that stands in for TABLE_CLASS while models are built without experts."""

    def init(self: Any, *given: Any, **others: Any) -> None:
        with torch.device("meta"):  # the table itself is never made
            own.__init__(self, *given, **others)
        table = getattr(self, TABLE)
        setattr(self, TABLE, TableOnDisk(*table.weight.shape))

    return type(own.__name__, (own,), {"__init__": init, "__module__": own.__module__})


def tables_in(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Rows and width of a model's tables on disk."""
    tables = (each for each in model.modules() if isinstance(each, TableOnDisk))
    return tuple((each.rows, each.width) for each in tables)


def open_tables(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Open the tables of a model that was loaded without them."""
    for name, module in model.named_modules():
        if isinstance(module, TableOnDisk):
            module.open(checkpoint, name)


def close_tables(model: nn.Module) -> None:
    """Give back the files of a model's tables."""
    for module in model.modules():
        if isinstance(module, TableOnDisk):
            module.close()


class TokenLayer(ConvLayer):
    """The last tokens of one sequence, less the end of text, which is before its first one."""

    def run(self, rows: Tensor, parts: Any) -> Tensor:
        """Read what belongs to each token of [T, 1], with those before it, from the table of
        `NGramFeatures`: [T, heads * width].
        """
        found: Tensor = parts.read(self.windows(rows)[..., 0])
        return found

    def output(self, rows: Tensor, parts: Any) -> Tensor:
        made: Tensor = parts.empty(len(rows))
        return made


class FeatureLayer(ConvLayer):
    """The last inputs of one sequence of a convolution whose taps are tokens apart."""

    def run(self, rows: Tensor, parts: Any) -> Tensor:
        return convolve(self.windows(rows)[:, :: parts.apart], parts.weight)


class NGramLayer(RecurrentLayer):
    """Cache of a layer with a recurrent state and with features of n-grams.

    tokens    the last tokens
    features  the last inputs of the convolution
    """

    def __init__(
        self,
        sizes: RecurrentSizes,
        ngrams: "NGramSizes",
        dtype: torch.dtype,
        device: torch.device,
        length: Length,
    ) -> None:
        super().__init__(sizes, dtype, device, length)
        self.tokens = TokenLayer(ngrams.tokens, 1, torch.int64, device, length)
        self.features = FeatureLayer(ngrams.taps, ngrams.channels, dtype, device, length)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, *self.tokens.tensors, *self.features.tensors]

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the tokens from `start` on, those at positions `nodes`."""
        super().keep(start, nodes)
        self.tokens.keep(start, nodes)
        self.features.keep(start, nodes)

    def new_snapshot(self) -> list[Tensor]:
        own = super().new_snapshot()
        return [*own, *self.tokens.new_snapshot(), *self.features.new_snapshot()]

    def save(self, snapshot: list[Tensor]) -> None:
        """Copy the state after the sequence's tokens, which are all settled."""
        *own, tokens, features = snapshot
        super().save(own)
        self.tokens.save([tokens])
        self.features.save([features])

    def restore(self, snapshot: list[Tensor]) -> None:
        """Go on from a copied state, which is the one after `Length.count` tokens."""
        *own, tokens, features = snapshot
        super().restore(own)
        self.tokens.restore([tokens])
        self.features.restore([features])


class NGramSizes(NamedTuple):
    """tokens of the longest n-gram; taps of the convolution, those that are left out included; its
    channels.
    """

    tokens: int
    taps: int
    channels: int


class NGramState(NamedTuple):
    """Sizes of the state of a layer with features of n-grams, and of what it has without them."""

    state: RecurrentState
    ngrams: NGramSizes

    @property
    def mixer(self) -> str:
        return self.state.mixer

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        tokens, taps, channels = self.ngrams
        more = [ConvInputs.nbytes(tokens, 1, torch.int64), ConvInputs.nbytes(taps, channels, dtype)]
        return [*self.state.sizes_of(dtype), *more]

    def snapshot_sizes(self, dtype: torch.dtype) -> list[int]:
        tokens, taps, channels = self.ngrams
        more = [(tokens - 1) * torch.int64.itemsize, (taps - 1) * channels * dtype.itemsize]
        return [*self.state.snapshot_sizes(dtype), *more]

    def layer(self, dtype: torch.dtype, device: torch.device, length: Length) -> NGramLayer:
        return NGramLayer(self.state.sizes, self.ngrams, dtype, device, length)

    def stand_in(self, module: nn.Module) -> Callable[..., Tensor]:
        return self.state.stand_in(module)


def ngram_states(config: Any) -> StateShape:
    """States of gated delta nets, and of the features of n-grams in some of their layers."""
    shape = delta_states(config)
    state: Any = shape.kind
    taps = (config.ple_conv_kernel_size - 1) * config.ngram_size + 1
    sizes = NGramSizes(config.ngram_size, taps, config.hc_count * config.hidden_size)
    layers = (number - 1 for number in config.ple_layer_ids)
    own = tuple((at, NGramState(state, sizes)) for at in layers if at < config.num_hidden_layers)
    return StateShape(shape.layers, shape.kind, own)


class NGramFeatures:
    """Replacement of the forward of a layer's features, over caches with rollback."""

    def __init__(self, module: Any, rotary: Any) -> None:
        self._module = weakref.proxy(module)

    @property
    def weight(self) -> Tensor:
        """Weight of the convolution: [channels, taps]."""
        weight: Tensor = self._module.conv1d.weight
        return weight[:, 0]

    @property
    def apart(self) -> int:
        """Tokens between two taps."""
        apart: int = self._module.conv1d.dilation[0]
        return apart

    def __call__(
        self, hidden_states: Tensor, token_ids: Tensor, cache: Any, conv_mask: None = None
    ) -> Tensor:
        """Features of tokens [1, T] for their hidden states [1, T, streams * H]: the same shape."""
        module, layer = self._module, None
        if cache is not None:
            layer = cache.layers[module.layer_idx]
        rows = self._rows(token_ids[0], layer)[None]
        streams = (module.hc_count, module.hidden_size)
        keys = module.norm_key(module.key_proj(rows)).unflatten(-1, streams)
        queries = module.norm_query(hidden_states).unflatten(-1, streams)
        gate = (keys * queries).sum(-1, keepdim=True) / math.sqrt(module.hidden_size)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = (torch.sigmoid(gate) * module.value_proj(rows).unsqueeze(-2)).flatten(-2)
        inputs = module.norm_conv(gated)[0]
        if layer is None:
            before = (self.weight.shape[1] - 1) * self.apart
            windows = windows_in(functional.pad(inputs, (0, 0, before, 0)), before + 1)
            mixed = convolve(windows[:, :: self.apart], self.weight)
        else:
            mixed = layer.features.run(inputs, self)
        return gated + functional.silu(mixed)[None]

    def _rows(self, token_ids: Tensor, layer: Any) -> Tensor:
        """Rows of the table for tokens [T], side by side: [T, heads * width]."""
        own = self._module.ple_embedding
        since_end = token_ids[:, None] - own.eos_token_id
        if layer is not None:
            read: Tensor = layer.tokens.run(since_end, self)
            return read
        padded = functional.pad(since_end, (0, 0, own.ngram_size - 1, 0))
        return self.read(windows_in(padded, own.ngram_size)[..., 0])

    def empty(self, count: int) -> Tensor:
        """Allocate what `read` returns of so many tokens."""
        module = self._module
        made: Tensor = module.norm_key.weight.new_empty(count, module.value_proj.exact.columns)
        return made

    def read(self, since_end: Tensor) -> Tensor:
        """Rows of the table, side by side, of tokens with those before them, less the end of text:
        [T, taps] to [T, heads * width].
        """
        own = self._module.ple_embedding
        count, end = own.ngram_size, own.eos_token_id
        # The token itself comes first. What is behind an end of text is another one's.
        tokens = since_end.flip(1) + end
        behind = functional.pad((tokens[:, 1:] == end).cumsum(1) > 0, (1, 0))
        parts = torch.where(behind, end, tokens) * own.layer_multipliers[:count]
        mixed, made = parts[:, 0], []
        for at in range(1, count):
            mixed = mixed ^ parts[:, at]
            heads = slice((at - 1) * own.heads_per_ngram, at * own.heads_per_ngram)
            sizes, offsets = own.ngram_heads_vocab_sizes[heads], own.ngram_heads_offsets[heads]
            made.append(torch.remainder(mixed[:, None], sizes) + offsets)
        ids = torch.cat(made, 1)
        rows: Tensor = getattr(own, TABLE)(ids.flatten())
        return rows.view(len(ids), -1).to(self._module.norm_key.weight.dtype)
