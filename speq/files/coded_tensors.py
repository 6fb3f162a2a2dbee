"""Tensors of a checkpoint that are codes in its published format, and what belongs to them."""

from math import prod

import torch

from speq.errors import CheckpointError, UnsupportedError
from speq.files.packed_settings import ORIGINAL
from speq.files.packing import (
    BESIDE_FP8,
    CODES_PER_WORD,
    COMPRESSED,
    MODELOPT,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    CodePacking,
    Int4Groups,
)
from speq.files.published_format import (
    BLOCK_SCALES,
    BLOCKS,
    FP8,
    FP8_DTYPE,
    INT4_DTYPE,
    KV_SCALES,
    MXFP4,
    MXFP4_BLOCK_BYTES,
    MXFP4_DTYPE,
    PLAIN,
    SCALE_DTYPES,
    WORDS,
    PublishedFormat,
    words_name,
)
from speq.files.safetensors_file import OTHER_VERSION, SafetensorsFile, TensorInfo

# End of the name of the scale of a module's inputs.
INPUT_SCALE = ".input_scale"
# Dtypes of exponents of MXFP4.
MXFP4_SCALES = (MXFP4_DTYPE, torch.float8_e8m0fnu)
Tensors = dict[str, tuple[SafetensorsFile, TensorInfo]]


class CodedTensors:
    """Codes among a checkpoint's tensors.

    format   published format
    packing  of INT4 and NVFP4; None for other formats
    groups   of INT4, with the dtype of its scales; None for other formats
    fp8      what shares a scale in FP8
    blocks   whether codes are MXFP4 in tensors of blocks, as gpt_oss's
    held     format of experts in slots
    ordered  whether a tensor says which input is of which group
    """

    def __init__(self, tensors: Tensors, published: PublishedFormat) -> None:
        self.tensors, self.format, self.fp8 = tensors, published.name, published.fp8
        self.held, packed = published.held, published.packed
        self.blocks = self.format == MXFP4 and packed is None
        self.ordered = packed is not None and packed.ordered
        self.packing: CodePacking | None = None if packed is None else packed.packing
        self.groups: Int4Groups | None = None
        if packed is not None and packed.groups is not None:
            scales = (name for name in tensors if name.endswith(packed.packing.scales))
            dtype = next((tensors[name][1].dtype for name in scales), packed.groups.dtype)
            self.groups = packed.groups._replace(halves=dtype == torch.float16)

    def is_coded(self, name: str) -> bool:
        """True if a tensor is codes in the checkpoint's published format."""
        dtype = self.tensors[name][1].dtype
        if self.blocks:
            return dtype == MXFP4_DTYPE and name.endswith(BLOCKS)
        if self.packing is not None:
            return dtype in self._dtypes(self.packing) and name.endswith(self.packing.codes)
        return self.format == FP8 and dtype == FP8_DTYPE

    @staticmethod
    def _dtypes(packing: CodePacking) -> tuple[torch.dtype, ...]:
        """Dtypes of codes. ModelOpt has layers in FP8 beside NVFP4, with one scale each."""
        return (packing.dtype, FP8_DTYPE) if packing in BESIDE_FP8 else (packing.dtype,)

    def beside_codes(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that belong to a tensor of codes, of which some may be absent."""
        if self.blocks:
            return (name.removesuffix(BLOCKS) + BLOCK_SCALES,)
        if self.packing is None:
            return self.fp8.scales_name(name), name.removesuffix(PLAIN) + INPUT_SCALE
        packing, module = self.packing, name.removesuffix(self.packing.codes)
        return tuple(module + end for end in (packing.scales, packing.third, *packing.others))

    def is_beside(self, name: str) -> bool:
        """True if a tensor belongs to one of codes, whose other dtypes are words'."""
        words = words_name(name)
        codes = words + BLOCKS if self.blocks else words
        if self.packing is not None:
            codes = words.removesuffix(PLAIN) + self.packing.codes
        return codes in self.tensors and self.is_coded(codes) and name in self.beside_codes(codes)

    def is_left_out(self, name: str) -> bool:
        """True if a tensor is no weight: what belongs to codes, or to a KV cache in fewer bits."""
        coded = self.format != WORDS
        return coded and (self.is_beside(name) or name.endswith(KV_SCALES))

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the plain weights that a tensor of plain weights, or of codes, stands for."""
        info = self.tensors[name][1]
        if self.packing is None or info.dtype == FP8_DTYPE or not self.is_coded(name):
            return info.shape
        return self.packing.matrix_shape(info.shape)

    def scales_of(self, name: str) -> tuple[SafetensorsFile, TensorInfo] | None:
        """Find the scales of a tensor of codes; None for plain weights."""
        return self.tensors[self.beside_codes(name)[0]] if self.is_coded(name) else None

    def third_of(self, name: str) -> tuple[SafetensorsFile, TensorInfo] | None:
        """Find the zero points of a tensor of codes, or the scale of its matrix; None where there
        are none.
        """
        if self.packing is None or not self.is_coded(name):
            return None
        return self.tensors.get(self.beside_codes(name)[1])

    def order_of(self, name: str) -> str | None:
        """Name of the groups of a tensor's inputs [K] int32; None where groups are neighbours."""
        if self.packing is None or not self.ordered or not self.is_coded(name):
            return None
        return name.removesuffix(self.packing.codes) + self.packing.order

    def check(self, name: str) -> None:
        """Raise SpeqError unless a tensor of codes has what belongs to it, in its shapes."""
        file, info = self.tensors[name]
        of_scales = self.beside_codes(name)[0]
        if of_scales not in self.tensors:
            raise CheckpointError(
                f"{file.path}: tensor {name} lacks its scales, {of_scales}; {OTHER_VERSION}"
            )
        holder, scales = self.tensors[of_scales]
        dtypes, wanted = self._scales(name, info)
        same = tuple(scales.shape) in wanted and scales.dtype in dtypes
        if not same:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            shapes = " or ".join(str(list(shape)) for shape in wanted)
            raise CheckpointError(
                f"{holder.path}: tensor {of_scales} is {scales.dtype} {list(scales.shape)}; of "
                f"{self.format} codes {list(info.shape)} it must be {names} {shapes}; "
                f"{OTHER_VERSION}"
            )

    def _scales(
        self, name: str, info: TensorInfo
    ) -> tuple[tuple[torch.dtype, ...], tuple[tuple[int, ...], ...]]:
        """Dtypes and shapes that scales of codes may have. Raises SpeqError for the codes' own."""
        if self.packing is not None and self.groups is not None:
            self._check_int4(name, self.packing, self.groups)
            rows, columns = self.packing.matrix_shape(info.shape)
            shape = self.packing.scales_shape(rows, self.groups.count(columns))
            return (self.groups.dtype,), (shape,)
        if self.packing is not None:
            self._check_floats(name)
            if info.dtype == FP8_DTYPE and self.packing is MODELOPT:
                return (torch.float32,), ((), (1,))
            if info.dtype == FP8_DTYPE:
                return SCALE_DTYPES, (self.fp8.blocks.scales_shape(*info.shape),)
            rows, columns = self.packing.matrix_shape(info.shape)
            if self.format == MXFP4:
                return MXFP4_SCALES, ((rows, columns // MXFP4_BLOCK),)
            return (FP8_DTYPE,), ((rows, columns // NVFP4_BLOCK),)
        if self.blocks:
            whole = len(info.shape) > 1 and info.shape[-1] == MXFP4_BLOCK_BYTES
            return (MXFP4_DTYPE,), ((info.shape[:-1],) if whole else ())
        if len(info.shape) == 3 and name.endswith(PLAIN):  # of all experts of a layer
            of_one = self.fp8.blocks.scales_shape(*info.shape[1:])
            return SCALE_DTYPES, ((info.shape[0], *of_one),)
        if len(info.shape) != 2:
            raise UnsupportedError(
                f"{self.tensors[name][0].path}: tensor {name} has codes of {self.format} of "
                f"several matrices, {list(info.shape)}; give a model with a tensor for each of "
                "them, or the original 16-bit checkpoint"
            )
        of_blocks = self.fp8.blocks.scales_shape(*info.shape)
        # A scale of a row or a matrix may be without the dimensions that are 1.
        shapes = of_blocks, (), (1,), of_blocks[:1]
        return SCALE_DTYPES, tuple(each for each in shapes if prod(each) == prod(of_blocks))

    def _check_floats(self, name: str) -> None:
        """Raise SpeqError unless codes are whole blocks with a scale of the matrix, and multiplied
        by inputs as they are.
        """
        file, info = self.tensors[name]
        _, third, *others = self.beside_codes(name)
        scaled = [other for other in others if other.endswith(".pre_quant_scale")]
        if scaled and scaled[0] in self.tensors:
            raise UnsupportedError(
                f"{file.path}: tensor {name} is for inputs that {scaled[0]} scales, which is not "
                f"read; {ORIGINAL}"
            )
        if info.dtype == FP8_DTYPE:
            return
        block = MXFP4_BLOCK if self.format == MXFP4 else NVFP4_BLOCK
        if len(info.shape) != 2 or self.matrix_shape(name)[1] % block:
            raise CheckpointError(
                f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; of "
                f"{self.format.upper()} codes it must be of rows of whole blocks of {block}, two "
                f"to a byte; {OTHER_VERSION}"
            )
        if self.format == MXFP4:
            return
        found = self.tensors.get(third)
        if found is None or found[1].dtype != torch.float32 or found[1].nbytes != 4:
            said = "is absent" if found is None else f"is {found[1].dtype} {list(found[1].shape)}"
            raise CheckpointError(
                f"{file.path}: tensor {third}, the scale of all of {name}, {said}; it must be one "
                f"float32; {OTHER_VERSION}"
            )

    def _check_int4(self, name: str, packing: CodePacking, groups: Int4Groups) -> None:
        """Raise SpeqError unless codes are whole groups, with zero points where the config has
        them, and in the order in which rows are multiplied.
        """
        size, has_zeros, _ = groups
        size = size or CODES_PER_WORD
        file, info = self.tensors[name]
        rows, columns = packing.matrix_shape(info.shape) if len(info.shape) == 2 else (0, 1)
        if columns % size or not rows:
            raise CheckpointError(
                f"{file.path}: tensor {name} is {info.dtype} {list(info.shape)}; of INT4 codes it "
                f"must be of rows of whole groups of {size}, {CODES_PER_WORD} to a number; "
                f"{OTHER_VERSION}"
            )
        _, of_zeros, *others = self.beside_codes(name)
        if has_zeros != (of_zeros in self.tensors):
            raise CheckpointError(
                f"{file.path}: tensor {name} has {'no ' if has_zeros else ''}zero points, "
                f"{of_zeros}, and config.json says otherwise; {OTHER_VERSION}"
            )
        if has_zeros:
            holder, zeros = self.tensors[of_zeros]
            wanted = [*packing.zeros_shape(rows, groups.count(columns))]
            if list(zeros.shape) != wanted or zeros.dtype != INT4_DTYPE:
                raise CheckpointError(
                    f"{holder.path}: tensor {of_zeros} is {zeros.dtype} {list(zeros.shape)}; of "
                    f"INT4 codes {list(info.shape)} it must be int32 {wanted}; {OTHER_VERSION}"
                )
        of_inputs = self.order_of(name)
        if of_inputs is not None:
            self._check_order(name, of_inputs, columns)
        if packing is COMPRESSED:
            self._check_compressed(name, [rows, columns], *others)

    def _check_order(self, name: str, of_inputs: str, columns: int) -> None:
        """Raise SpeqError unless there are groups of inputs."""
        file, info = self.tensors.get(of_inputs, (self.tensors[name][0], None))
        if info is None or list(info.shape) != [columns] or info.dtype != INT4_DTYPE:
            said = "is absent" if info is None else f"is {info.dtype} {list(info.shape)}"
            raise CheckpointError(
                f"{file.path}: tensor {of_inputs}, the groups of inputs of {name}, {said}; it must "
                f"be int32 [{columns}], as config.json says that inputs are in another order; "
                f"{OTHER_VERSION}"
            )

    def _check_compressed(self, name: str, shape: list[int], of_shape: str, order: str) -> None:
        """Raise SpeqError if compressed-tensors has columns in another order, or another shape."""
        file, info = self.tensors[name]
        if order in self.tensors and not self.ordered:
            raise CheckpointError(
                f"{file.path}: tensor {name} has inputs in another order, {order}, and config.json "
                f"has no actorder that says so; {OTHER_VERSION}"
            )
        if of_shape in self.tensors:
            holder, _ = self.tensors[of_shape]
            said = holder.tensor(of_shape).tolist()
            if said != shape:
                raise CheckpointError(
                    f"{holder.path}: tensor {of_shape} says {said}, and {name} is "
                    f"{list(info.shape)} of {CODES_PER_WORD} codes to a number; {OTHER_VERSION}"
                )
