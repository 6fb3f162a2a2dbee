"""The dense matrices of a model, outside its experts and routers, and the forms that hold them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from speq.experts.expert_names import GATE_UP
from speq.experts.packed_dense import PackedDense, smaller_record
from speq.experts.passes import for_each_key
from speq.files.alignment import prefer_huge_pages
from speq.kernels import dense_ops
from speq.kernels.dense_ops import RecordMatrix
from speq.kernels.library import KERNELS, Kernels
from speq.kernels.ops import Int4Pair
from speq.layers.dense_linear import DenseEmbedding, DenseLinear
from speq.layers.dense_matrix import ExactMatrix, RawMatrix
from speq.layers.offloaded_experts import ActiveBackend
from speq.models.dense_parts import EXPANDING, WEIGHING
from speq.models.resident import MappedWeights
from speq.units import Done

Plain = nn.Linear | nn.Embedding
# Returns the INT4 codes that a module's matrix may be a residual of, given its name and its
# weights; None if drafts do not run it on codes.
Base = Callable[[str, Tensor], Int4Pair | None]
# Encodes the matrices of named modules; returns what holds them, by the same names.
Records = Callable[[Iterable[tuple[str, Plain]], MappedWeights], Mapping[str, ExactMatrix]]


def plain_modules(
    model: nn.Module, routers: Iterable[nn.Module] = ()
) -> Iterator[tuple[str, Plain]]:
    """Yield transformers' own dense layers and embedding, by name. Derived classes are left as they
    are, except an embedding that scales its rows. So are the modules of routers, and what weighs
    an indexer's heads.
    """
    left = {id(module) for router in routers for module in router.modules()}
    for name, module in model.named_modules():
        plain = type(module) in (nn.Linear, nn.Embedding) or is_scaled(module)
        if plain and id(module) not in left and not name.endswith(WEIGHING):
            yield name, module


def packable_modules(
    model: nn.Module, routers: Iterable[nn.Module] = ()
) -> Iterator[tuple[str, Plain]]:
    """Yield the `plain_modules` whose matrices may be packed."""
    return ((name, each) for name, each in plain_modules(model, routers) if is_packable(name))


def is_packable(name: str) -> bool:
    """False for a module that expands latents, or has a gate above an up projection: its matrix
    stays plain weights. Latent attention multiplies parts of the former by other rows than a dense
    layer's, and files have the parts of the latter.
    """
    return name.rpartition(".")[2] not in (EXPANDING, GATE_UP)


def is_scaled(module: nn.Module) -> bool:
    """True for an embedding that multiplies its rows by a buffer."""
    return isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")


def hold_dense(
    model: nn.Module,
    switch: ActiveBackend,
    records: Mapping[str, ExactMatrix],
    routers: Iterable[nn.Module] = (),
) -> None:
    """Replace all dense layers and the embedding by modules of ours.

    records  packed matrices, by the name of the module; others stay plain weights
    routers  modules that are left as they are
    """
    raw: dict[int, RawMatrix] = {}
    for name, module in [*plain_modules(model, routers)]:
        matrix = records.get(name)
        if matrix is None:
            matrix = raw.setdefault(id(module.weight), RawMatrix(module.weight.detach()))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement_of(module, matrix, switch))


def replacement_of(module: Plain, matrix: ExactMatrix, switch: ActiveBackend) -> nn.Module:
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        return DenseEmbedding(matrix, scale)
    bias = None if module.bias is None else module.bias.detach()
    return DenseLinear(matrix, bias, switch)


def matrices_in(model: nn.Module) -> list[ExactMatrix]:
    """Distinct matrices of `packable_modules`, in modules of ours."""
    return [*_matrices_in(model, is_packable).values()]


def matrix_bytes(model: nn.Module) -> int:
    """Bytes of the matrices and biases of modules of ours."""
    layers = [module for module in model.modules() if isinstance(module, DenseLinear)]
    biases = sum(layer.bias.nbytes for layer in layers if layer.bias is not None)
    matrices = _matrices_in(model, lambda _: True).values()
    return sum(matrix.nbytes for matrix in matrices) + biases


def _matrices_in(model: nn.Module, wanted: Callable[[str], bool]) -> dict[int, ExactMatrix]:
    held: dict[int, ExactMatrix] = {}
    for name, module in model.named_modules():
        if isinstance(module, DenseLinear) and wanted(name):
            held[id(module.exact)] = module.exact
        elif isinstance(module, DenseEmbedding):
            held[id(module.table)] = module.table
    return held


def encode_dense(
    plain: Iterable[tuple[str, Plain]],
    mapped: MappedWeights,
    threads: int,
    device: torch.device,
    progress: Done | None = None,
    base: Base | None = None,
    packed: PackedDense | None = None,
) -> dict[str, ExactMatrix]:
    """Pack all matrices. Those stay plain weights that would not be smaller, or are larger than the
    device's kernels take.

    plain   the modules that have them, by name
    mapped  files that the weights of a model that was just loaded are mapped from
    base    codes on the device that the packed matrices are residuals of; None, and where it has
            none: lossless
    packed  lossless matrices in a pack, which are read instead of being encoded

    A matrix's plain weights are freed when it is packed. The largest come first, while little else
    is held: `DenseForm.loading_bytes` counts on it.
    """
    names: dict[int, list[str]] = {}
    weights: dict[int, Tensor] = {}
    for name, module in plain:
        names.setdefault(id(module.weight), []).append(name)
        weights[id(module.weight)] = module.weight
    made: dict[str, ExactMatrix] = {}
    kernels = KERNELS[device.type]
    # One thread talks to a device; the others encode what is sent there.
    one_by_one = base is not None and device.type != "cpu"
    place = device if one_by_one else torch.device("cpu")

    def encode(key: int) -> None:
        given = weights[key].data
        weights[key].data = given.new_empty(0)
        stored = mapped.name(given)
        if packed is not None and stored is not None and stored in packed:
            matrix = load_packed(given, stored, packed, mapped, place, kernels)
            made.update(dict.fromkeys(names[key], matrix))
            return
        exact = mapped.words(given)
        pairs = [] if base is None else [base(name, exact) for name in names[key]]
        pair = next((pair for pair in pairs if pair is not None), None)
        if pair is None:
            matrix = pack_lossless(exact, place, kernels)
        else:
            matrix = pack_residual(exact, pair, place, kernels)
        made.update(dict.fromkeys(names[key], matrix))

    largest = sorted(weights, key=lambda key: -weights[key].numel())
    if one_by_one:
        for key in largest:
            encode(key)
    else:
        for_each_key(encode, [(key,) for key in largest], threads, progress)
    if place == device:
        return made
    sent = {id(matrix): move_to_device(matrix, device) for matrix in made.values()}
    return {name: sent[id(matrix)] for name, matrix in made.items()}


def move_to_device(matrix: ExactMatrix, device: torch.device) -> ExactMatrix:
    """Copy a matrix from the host to a device."""
    if isinstance(matrix, RecordMatrix):
        return replace(matrix, record=matrix.record.to(device))
    return RawMatrix(matrix.words().to(device))


def load_packed(
    given: Tensor,
    name: str,
    packed: PackedDense,
    mapped: MappedWeights,
    device: torch.device,
    kernels: Kernels,
) -> ExactMatrix:
    """Load a mapped matrix to a device in the form in which the pack has it. Its plain weights are
    not read if the pack has a form that the kernels take.
    """
    nbytes = packed.nbytes(name, 0) or 0
    record = packed.read(name) if kernels.takes_record(nbytes, given.shape[1]) else None
    if record is None:
        return RawMatrix(mapped.words(given).to(device))
    mapped.leave(given)
    return RecordMatrix(record.to(device), *given.shape)


def pack_lossless(
    words: Tensor, device: torch.device, kernels: Kernels = KERNELS["cpu"]
) -> ExactMatrix:
    """Pack a matrix [N, K] bfloat16 from the host to a device, if that makes it smaller.

    kernels  that run it
    """
    record = smaller_record(words)
    if record is None or not kernels.takes_record(record.nbytes, words.shape[1]):
        return RawMatrix(words.to(device))
    return RecordMatrix(record.to(device), *words.shape)


def pack_residual(
    words: Tensor, pair: Int4Pair, device: torch.device, kernels: Kernels = KERNELS["cpu"]
) -> ExactMatrix:
    """Pack a matrix as a residual over codes on the device, if that makes it smaller."""
    codes, scales = (part.to(words.device) for part in pair)
    record = dense_ops.encode_dense(words, (codes, scales), prefer_huge_pages)
    taken = kernels.takes_record(record.nbytes, words.shape[1])
    if record.nbytes >= words.nbytes or not taken:
        return RawMatrix(words.to(device))
    outputs, columns = words.shape
    return RecordMatrix(record.to(device), outputs, columns, pair)
