"""The matrices of a model outside its experts and routers: which there are, how they are held."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from speq.experts.packed_dense import PackedDense, smaller_record
from speq.experts.passes import over_all
from speq.files.alignment import prefer_huge_pages
from speq.kernels import dense_ops
from speq.kernels.library import KERNELS, Kernels
from speq.kernels.ops import Int4Pair
from speq.layers.dense_linear import DenseEmbedding, DenseLinear
from speq.layers.dense_matrix import ExactMatrix, LosslessMatrix, RawMatrix, ResidualMatrix
from speq.layers.offloaded_experts import ActiveBackend
from speq.models.resident import MappedWeights
from speq.units import Done

Plain = nn.Linear | nn.Embedding
# The codes that a module's matrix may be a residual of, where it is one that drafts run on codes;
# given its name and its words.
Base = Callable[[str, Tensor], Int4Pair | None]
# Makes what holds matrices in the place of their words, by the names of the modules, which it is
# given.
Records = Callable[[Iterable[tuple[str, Plain]], MappedWeights], Mapping[str, ExactMatrix]]


def plain_modules(
    model: nn.Module, routers: Iterable[nn.Module] = ()
) -> Iterator[tuple[str, Plain]]:
    """transformers' own dense layers and embedding, by name. Classes derived from them are left as
    they are, but for an embedding that multiplies its rows, and so is what routers are made of.
    """
    left = {id(module) for router in routers for module in router.modules()}
    for name, module in model.named_modules():
        plain = type(module) in (nn.Linear, nn.Embedding) or is_scaled(module)
        if plain and id(module) not in left:
            yield name, module


def is_scaled(module: nn.Module) -> bool:
    """Whether it is an embedding that multiplies its rows by a buffer."""
    return isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")


def hold_dense(
    model: nn.Module,
    switch: ActiveBackend,
    records: Mapping[str, ExactMatrix],
    routers: Iterable[nn.Module] = (),
) -> None:
    """Put modules of ours in the place of all dense layers and of the embedding.

    records  matrices that are held as records, by the name of the module; others stay words
    routers  modules that are left as they are
    """
    raw: dict[int, RawMatrix] = {}
    for name, module in [*plain_modules(model, routers)]:
        matrix = records.get(name)
        if matrix is None:
            matrix = raw.setdefault(id(module.weight), RawMatrix(module.weight.detach()))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, standing_in(module, matrix, switch))


def standing_in(module: Plain, matrix: ExactMatrix, switch: ActiveBackend) -> nn.Module:
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        return DenseEmbedding(matrix, scale)
    bias = None if module.bias is None else module.bias.detach()
    return DenseLinear(matrix, bias, switch)


def held_matrices(model: nn.Module) -> list[ExactMatrix]:
    """The matrices in modules of ours; one that two share comes once."""
    held: dict[int, ExactMatrix] = {}
    for module in model.modules():
        if isinstance(module, DenseLinear):
            held[id(module.exact)] = module.exact
        elif isinstance(module, DenseEmbedding):
            held[id(module.table)] = module.table
    return [*held.values()]


def held_bytes(model: nn.Module) -> int:
    """Bytes of the matrices and biases of modules of ours."""
    layers = [module for module in model.modules() if isinstance(module, DenseLinear)]
    biases = sum(layer.bias.nbytes for layer in layers if layer.bias is not None)
    return sum(matrix.nbytes for matrix in held_matrices(model)) + biases


def encode_dense(
    plain: Iterable[tuple[str, Plain]],
    mapped: MappedWeights,
    threads: int,
    device: torch.device,
    progress: Done | None = None,
    base: Base | None = None,
    packed: PackedDense | None = None,
) -> dict[str, ExactMatrix]:
    """Records of all matrices, or the words of those that take no less as records, or more than the
    device's kernels take.

    plain   the modules that have them, by name
    mapped  what the weights of a model that was just loaded are mapped from
    base    what records are residuals of, on the device; None, and where it has none: lossless ones
    packed  lossless records that a pack holds, which are read instead of being made

    A matrix's words are given up when its record is made. The largest come first, as long as little
    else is held: `DenseForm.loading_bytes` counts on it.
    """
    names: dict[int, list[str]] = {}
    weights: dict[int, Tensor] = {}
    for name, module in plain:
        names.setdefault(id(module.weight), []).append(name)
        weights[id(module.weight)] = module.weight
    made: dict[str, ExactMatrix] = {}
    kernels = KERNELS[device.type]
    # One thread talks to a device: others make what is sent there.
    one_by_one = base is not None and device.type != "cpu"
    place = device if one_by_one else torch.device("cpu")

    def encode(key: int) -> None:
        given = weights[key].data
        weights[key].data = given.new_empty(0)
        stored = mapped.name(given)
        if packed is not None and stored is not None and stored in packed:
            matrix = as_packed(given, stored, packed, mapped, place, kernels)
            made.update(dict.fromkeys(names[key], matrix))
            return
        exact = mapped.words(given)
        pairs = [] if base is None else [base(name, exact) for name in names[key]]
        pair = next((pair for pair in pairs if pair is not None), None)
        if pair is None:
            matrix = lossless(exact, place, kernels)
        else:
            matrix = residual(exact, pair, place, kernels)
        made.update(dict.fromkeys(names[key], matrix))

    largest = sorted(weights, key=lambda key: -weights[key].numel())
    if one_by_one:
        for key in largest:
            encode(key)
    else:
        over_all(encode, [(key,) for key in largest], threads, progress)
    if place == device:
        return made
    sent = {id(matrix): on_device(matrix, device) for matrix in made.values()}
    return {name: sent[id(matrix)] for name, matrix in made.items()}


def on_device(matrix: ExactMatrix, device: torch.device) -> ExactMatrix:
    """A matrix of the host on a device."""
    if isinstance(matrix, LosslessMatrix):
        return replace(matrix, record=matrix.record.to(device))
    return RawMatrix(matrix.words().to(device))


def as_packed(
    given: Tensor,
    name: str,
    packed: PackedDense,
    mapped: MappedWeights,
    device: torch.device,
    kernels: Kernels,
) -> ExactMatrix:
    """A matrix that is mapped from a pack's tensor of that name, as the pack has it, on a device.

    Its words are not read where there is a record that kernels take.
    """
    nbytes = packed.nbytes(name, 0) or 0
    record = packed.read(name) if kernels.takes_record(nbytes, given.shape[1]) else None
    if record is None:
        return RawMatrix(mapped.words(given).to(device))
    mapped.leave(given)
    return LosslessMatrix(record.to(device), *given.shape)


def lossless(words: Tensor, device: torch.device, kernels: Kernels = KERNELS["cpu"]) -> ExactMatrix:
    """A matrix [N, K] bfloat16 of the host, as a record on a device where that is smaller.

    kernels  that run it
    """
    record = smaller_record(words)
    if record is None or not kernels.takes_record(record.nbytes, words.shape[1]):
        return RawMatrix(words.to(device))
    return LosslessMatrix(held_on(record, device), *words.shape)


def residual(
    words: Tensor, pair: Int4Pair, device: torch.device, kernels: Kernels = KERNELS["cpu"]
) -> ExactMatrix:
    """As `lossless`, over codes that lie on the device."""
    codes, scales = (part.to(words.device) for part in pair)
    record = dense_ops.encode_dense_residual(words, (codes, scales))
    taken = kernels.takes_record(record.nbytes, words.shape[1])
    if record.nbytes >= words.nbytes or not taken:
        return RawMatrix(words.to(device))
    return ResidualMatrix(held_on(record, device), pair)


def held_on(record: Tensor, device: torch.device) -> Tensor:
    """A record where it stays."""
    if device.type != "cpu":
        return record.to(device)
    held = torch.empty_like(record)
    prefer_huge_pages(held)
    return held.copy_(record)
