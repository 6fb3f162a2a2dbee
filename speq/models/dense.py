"""The matrices of a model outside its experts and routers: which there are, how they are held."""

from collections.abc import Iterator, Mapping

from torch import nn

from speq.layers.dense_linear import DenseEmbedding, DenseLinear
from speq.layers.dense_matrix import ExactMatrix, RawMatrix
from speq.layers.offloaded_experts import BankSwitch

Plain = nn.Linear | nn.Embedding


def plain_modules(model: nn.Module) -> Iterator[tuple[str, Plain]]:
    """transformers' own dense layers and embedding, by name. Classes derived from them are left as
    they are, and so are routers, which are none.
    """
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Embedding):
            yield name, module


def hold_dense(model: nn.Module, switch: BankSwitch, records: Mapping[str, ExactMatrix]) -> None:
    """Put modules of ours in the place of all dense layers and of the embedding.

    records  matrices that are held as records, by the name of the module; others stay words
    """
    raw: dict[int, RawMatrix] = {}
    for name, module in [*plain_modules(model)]:
        matrix = records.get(name)
        if matrix is None:
            weight = module.weight.detach()
            matrix = raw.setdefault(id(module.weight), RawMatrix(weight))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, standing_in(module, matrix, switch))


def standing_in(module: Plain, matrix: ExactMatrix, switch: BankSwitch) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return DenseEmbedding(matrix)
    bias = None if module.bias is None else module.bias.detach()
    return DenseLinear(matrix, bias, switch)


def held_bytes(model: nn.Module) -> int:
    """Bytes of the matrices and biases of modules of ours; matrices that two share count once."""
    matrices, biases = {}, 0
    for module in model.modules():
        if isinstance(module, DenseLinear):
            matrices[id(module.exact)] = module.exact.nbytes
            biases += 0 if module.bias is None else module.bias.nbytes
        elif isinstance(module, DenseEmbedding):
            matrices[id(module.table)] = module.table.nbytes
    return sum(matrices.values()) + biases
