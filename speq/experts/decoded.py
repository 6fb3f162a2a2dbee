"""Published codes, decoded to bfloat16 words in plain torch: those outside the experts, and those
of experts that no kernel multiplies.
"""

import torch
from torch import Tensor

from speq.errors import CheckpointError, present
from speq.files.coded_tensors import CodedTensors
from speq.files.packing import INT4, MODELOPT, MXFP4
from speq.files.published_format import FP8_DTYPE
from speq.files.safetensors_file import OTHER_VERSION
from speq.kernels.scaled_words import ROWS, fp8_words, int4_words, mxfp4_words, nvfp4_words

# Bytes that decoding takes besides the result: for each weight, as codes that are turned, and for
# each of the ROWS that are decoded at a time.
WEIGHT_BYTES, BLOCK_BYTES = 4, 32


def decode(coded: CodedTensors, name: str) -> Tensor:
    """Read a tensor of codes and decode it. Rows stay as they are on disk; [..., N, K] bfloat16."""
    packing, tensors = coded.packing, coded.tensors
    of_scales, *others = coded.beside_codes(name)
    codes, scales = (tensors[each][0].tensor(each) for each in (name, of_scales))
    third = None
    if others and others[0] in tensors:
        third = tensors[others[0]][0].tensor(others[0])
    if codes.dtype == FP8_DTYPE and packing is MODELOPT:
        return fp8_words(codes, scales.view(1, 1), 0, 0)
    if codes.dtype == FP8_DTYPE:
        blocks = coded.fp8.blocks
        if codes.dim() == 3:
            pairs = zip(codes, scales, strict=True)
            return torch.stack([fp8_words(*each, *blocks) for each in pairs])
        return fp8_words(codes, scales.view(blocks.scales_shape(*codes.shape)), *blocks)
    if packing is not None and packing.format == INT4:
        return int4_words(*packing.unpack(codes, scales, third), _order(coded, name))
    if packing is not None and packing.format == MXFP4:
        return mxfp4_words(codes.view(torch.uint8), scales.view(torch.uint8))
    if packing is not None:
        third = present(third, "codes of NVFP4 have no scale of their matrix")
        return nvfp4_words(codes, scales, third, packing.divides)
    rows = codes.flatten(0, -3).flatten(1), scales.flatten(0, -2)
    return mxfp4_words(*rows).unflatten(0, codes.shape[:-2])


def _order(coded: CodedTensors, name: str) -> Tensor | None:
    """Read the groups of a tensor's inputs. Raises SpeqError for groups that it has not."""
    of_inputs, groups = coded.order_of(name), coded.groups
    if of_inputs is None or groups is None:
        return None
    file = coded.tensors[of_inputs][0]
    order, count = file.tensor(of_inputs), groups.count(coded.matrix_shape(name)[1])
    least, most = (int(each) for each in order.aminmax())
    if least < 0 or most >= count:
        raise CheckpointError(
            f"{file.path}: tensor {of_inputs} has groups {least} to {most}, and {name} has "
            f"{count}, which are counted from 0; {OTHER_VERSION}"
        )
    return order


def stored_bytes(coded: CodedTensors, name: str) -> int:
    """Bytes of a tensor of codes and of all that decodes it."""
    names = (name, *coded.beside_codes(name))
    return sum(coded.tensors[each][1].nbytes for each in names if each in coded.tensors)


def decoding_bytes(rows: int, columns: int) -> int:
    """Memory that a thread takes to read and decode a matrix."""
    return WEIGHT_BYTES * rows * columns + BLOCK_BYTES * min(rows, ROWS) * columns
