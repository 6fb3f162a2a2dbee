"""What a draft and its target take of memory, as they share more and more: MoE-SpeQ's Table 2.

Scenarios of the paper, each with what the one before has:

    independent         a 16-bit target, and a draft that is the same with INT4 routed experts
    + shared experts    both use the target's shared experts
    + other parameters  and its attention, routers, norms, embedding and head
    + KV cache          and its keys and values

Ours, of the last of these:

    lossless           the exact experts and the dense matrices are lossless records
    residual           the exact experts are residual records over the draft's codes, which then
                       belong to both; the dense matrices are lossless records
    INT4 dense layers  the draft runs dense layers on codes of their own; with residual records the
                       exact ones are read over these codes

Experts can be counted in three ways. The paper does not say how it counts. Its figures are those of
`token`: 96 exact experts of Qwen1.5-MoE take its 1.55 GB, and its GB are GiB.

    token     draft and target hold as many experts of each layer as one token uses
    resident  the draft holds all of its experts, the target as many as one token uses
    all       both hold all experts

A folder with weights is measured: every record that the pack does not hold is made, to tell its
size. A folder with a config.json alone is computed: records are of the size that they usually have.
Words, codes and the KV cache follow from shapes in both.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from bench.lab.command import main
from speq.drafts.dense_draft import DenseCodes, DenseDraft
from speq.drafts.draft_source import dense_draft, open_draft
from speq.errors import OptionError
from speq.experts.codec import codec_of, codecs_for
from speq.experts.draft_codes import DraftSource
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.files.alignment import allocate_aligned
from speq.kernels import dense_ops
from speq.measure.picture import Axis, Picture, gibibytes
from speq.measure.report import Column, Report
from speq.models.dense_form import DenseForm
from speq.models.opened import Opened, open_model
from speq.options.declared import Option, Options
from speq.options.kinds import Choice, ListOf, Whole
from speq.planning.model_spec import ModelSpec
from speq.units import Progress, format_bytes, track


@dataclass(frozen=True, slots=True)
class MemorySettings(Options):
    context: Annotated[int, Option("Tokens of KV cache.", Whole(1))] = 12288
    experts: Annotated[
        tuple[str, ...],
        Option(
            "How experts are counted: token (of one token, in draft and target), resident (all in "
            "the draft) or all (in both).",
            ListOf(Choice(("token", "resident", "all"))),
        ),
    ] = ("token", "resident", "all")


# Tensors of shared experts; what gates them is not theirs.
SHARED_EXPERT = re.compile(r"\.shared_(?:experts?|mlp)\.")

COLUMNS: dict[str, Column] = {
    "model": ("model", "{}"),
    "sizes": ("sizes", "{}"),
    "experts": ("experts", "{}"),
    "scenario": ("scenario", "{}"),
    "draft": ("draft_bytes", format_bytes),
    "target": ("target_bytes", format_bytes),
    "shared": ("shared_bytes", format_bytes),
    "total": ("total_bytes", format_bytes),
    "of independent": ("of_independent", "{:.0%}"),
}
SIZES = (
    gibibytes("draft_bytes", "draft"),
    gibibytes("target_bytes", "target"),
    gibibytes("shared_bytes", "shared"),
)
PICTURES = (
    Picture(
        *("memory", "Memory of draft and target"),
        (Axis("scenario", "scenario"), Axis("experts", "experts")),
        SIZES,
        mark="stack",
        each="model",
    ),
)


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """How many experts draft and target hold, all layers together."""

    draft: int
    target: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's parts.

    expert          an exact expert, by the form it is held in; forms that cannot be had are absent
    draft_expert    an INT4 expert
    shared_experts  of all layers, by form; others: every other parameter outside the routed experts
    dense_draft     codes of the dense layers that a draft runs on codes
    kv_cache        for the context
    """

    expert: Mapping[str, float]
    draft_expert: int
    shared_experts: Mapping[str, int]
    others: Mapping[str, int]
    dense_draft: int
    kv_cache: int


def run(
    folders: Sequence[Path], settings: MemorySettings, progress: Progress | None = None
) -> Report:
    """Rows of every scenario for each model and way to count its experts.

    Raises SpeqError for a folder that holds no supported model, or one without a draft.
    """
    rows = []
    for folder in folders:
        has_weights = any(folder.glob("*.safetensors"))
        name = folder.resolve().name
        if has_weights:
            with closing(open_model(folder)) as opened:
                model_spec, sizes = measured(opened, settings.context, progress)
        else:
            model_spec = ModelSpec.of_config(name, folder, "auto")
            sizes = computed(model_spec, settings.context)
        for counted in settings.experts:
            about = {
                "model": name,
                "sizes": "measured" if has_weights else "computed",
                "experts": counted,
            }
            rows += [about | row for row in scenarios(sizes, held(model_spec, counted))]
    return Report("memory", " ".join(f.name for f in folders), settings.as_json(), rows)


def held(model_spec: ModelSpec, counted: str) -> HeldExperts:
    """The experts that are counted, by the name of the way."""
    token = model_spec.num_layers * model_spec.shape.top_k
    return {
        "token": HeldExperts(token, token),
        "resident": HeldExperts(model_spec.count, token),
        "all": HeldExperts(model_spec.count, model_spec.count),
    }[counted]


def scenarios(sizes: Sizes, held: HeldExperts) -> list[dict[str, Any]]:
    """A row for each, in order; of ours, those whose forms can be had."""
    draft = held.draft * sizes.draft_expert
    target = {form: int(held.target * nbytes) for form, nbytes in sizes.expert.items()}
    dense = {form: sizes.shared_experts[form] + others for form, others in sizes.others.items()}
    kv = sizes.kv_cache
    own = dense["raw"] + kv
    split = {"independent": (draft + own, target["raw"] + own, 0)}
    shared = 0
    steps = {
        "+ shared experts": sizes.shared_experts["raw"],
        "+ other parameters": sizes.others["raw"],
        "+ KV cache": kv,
    }
    for name, nbytes in steps.items():
        own, shared = own - nbytes, shared + nbytes
        split[name] = draft + own, target["raw"] + own, shared
    if "lossless" in target and "lossless" in dense:
        split["lossless"] = draft, target["lossless"], dense["lossless"] + kv
        with_codes = draft + sizes.dense_draft
        ours = target["lossless"], dense["lossless"] + kv
        split["lossless, INT4 dense layers"] = with_codes, *ours
    if "residual" in target and "lossless" in dense:
        split["residual"] = 0, target["residual"], draft + dense["lossless"] + kv
    if "residual" in target and "residual" in dense:
        codes = draft + sizes.dense_draft
        split["residual, INT4 dense layers"] = 0, target["residual"], codes + dense["residual"] + kv
    whole = sum(split["independent"])
    return [
        {
            "scenario": name,
            "draft_bytes": parts[0],
            "target_bytes": parts[1],
            "shared_bytes": parts[2],
            "total_bytes": sum(parts),
            "of_independent": sum(parts) / whole,
        }
        for name, parts in split.items()
    ]


def computed(model_spec: ModelSpec, context: int) -> Sizes:
    """From a config.json: records are of the size that they usually have."""
    codecs = {
        form: codec_of(form, model_spec.codec.shape) for form in codecs_for(model_spec.codec.shape)
    }
    weights = model_spec.codec.shape.weights
    expert = {
        form: weights * codec.usual_bits / 8 if codec.usual_bits else codec.shape.nbytes
        for form, codec in codecs.items()
    }
    matrices = {form: matrix_sizes(model_spec, form) for form in codecs}
    return sizes_of(model_spec, expert, matrices, context)


def matrix_sizes(model_spec: ModelSpec, form: str) -> tuple[int, ...]:
    """Usual bytes of each dense matrix: residual where the draft has codes of it."""
    shapes, itemsize = model_spec.shape.dense, model_spec.words.itemsize
    if form == "raw":
        return DenseForm.raw(shapes, itemsize).sizes
    lossless = DenseForm.usual("lossless", shapes, itemsize).sizes
    if form == "lossless":
        return lossless
    bases = names_of_bases(model_spec.dense_draft)
    return tuple(
        over_codes if name in bases else alone
        for name, over_codes, alone in zip(
            model_spec.shape.dense_names,
            DenseForm.usual("residual", shapes, itemsize).sizes,
            lossless,
            strict=True,
        )
    )


def names_of_bases(draft: DenseDraft) -> set[str]:
    """Tensors whose exact words may be residuals of a draft's codes."""
    return {f"{layout.name}.weight" for layout in draft.bases}


def sizes_of(
    model_spec: ModelSpec,
    expert: Mapping[str, float],
    matrices: Mapping[str, Sequence[int]],
    context: int,
) -> Sizes:
    """matrices: bytes of each dense matrix, by form, in the order of `ModelShape.dense`."""
    shape, itemsize = model_spec.shape, model_spec.words.itemsize
    if model_spec.draft is None:
        raise OptionError(
            f"{model_spec.name} has experts of {shape.experts.hidden_size} x "
            f"{shape.experts.expert_width}, and INT4 codes need even sizes; give another model"
        )
    shared = [bool(SHARED_EXPERT.search(name)) for name in shape.dense_names]
    small = sum(shape.other_bytes(model_spec.words)) + shape.own_bytes

    def of_shared(sizes: Sequence[int]) -> int:
        return sum(nbytes for nbytes, is_shared in zip(sizes, shared, strict=True) if is_shared)

    return Sizes(
        expert=expert,
        draft_expert=model_spec.draft.nbytes,
        shared_experts={form: of_shared(sizes) for form, sizes in matrices.items()},
        others={form: sum(sizes) - of_shared(sizes) + small for form, sizes in matrices.items()},
        dense_draft=model_spec.dense_draft.nbytes,
        kv_cache=context * shape.kv_elements_per_token * itemsize,
    )


def measured(opened: Opened, context: int, progress: Progress | None) -> tuple[ModelSpec, Sizes]:
    """From a model with its weights, whose draft is the one that a run would find."""
    store, shape = opened.store, opened.shape
    with closing(
        open_draft("auto", opened.checkpoint, store, shape.experts, shape.draft_layers)
    ) as source:
        dense = dense_draft("auto", shape.draft_layers, source)
        name = opened.checkpoint.path.name
        model_spec = ModelSpec.of_draft(name, opened, "auto", source.layout, dense)
        expert = expert_sizes(store, source, progress)
        matrices = measured_matrices(opened, dense, progress)
    return model_spec, sizes_of(model_spec, expert, matrices, context)


def expert_sizes(
    store: ExpertStore, source: DraftSource, progress: Progress | None
) -> dict[str, float]:
    """Mean bytes of an exact expert: as words, as in the pack, and as what its words encode to."""
    shape, own = store.codec.shape, store.codec.name
    count = store.num_layers * store.num_experts
    sizes: dict[str, float] = {"raw": shape.nbytes}
    if own != "raw":
        records = (store.record_bytes(*divmod(at, store.num_experts)) for at in range(count))
        sizes[own] = sum(records) / count
    if store.codec.needs_draft:
        return sizes  # its words would have to be rebuilt first
    slot = expert_slot(store)
    codecs = [codec_of(form, shape) for form in codecs_for(shape) if form not in sizes]
    rooms = [allocate_aligned(1, codec.slot_bytes)[0] for codec in codecs]
    totals = [0] * len(codecs)
    for at in track("encoding experts", range(count), count, progress):
        exact = read_matrices(store, *divmod(at, store.num_experts), slot)
        base = source.expert(at)
        for each, (codec, room) in enumerate(zip(codecs, rooms, strict=True)):
            totals[each] += codec.encode(exact, base, room)
    return sizes | {codec.name: total / count for codec, total in zip(codecs, totals, strict=True)}


def measured_matrices(
    opened: Opened, draft: DenseDraft, progress: Progress | None
) -> dict[str, tuple[int, ...]]:
    """Bytes of each dense matrix, by form; only words where they are not of bfloat16."""
    shape, words = opened.shape, opened.store.codec.shape.dtype
    sizes: dict[str, list[int]] = {form: [] for form in codecs_for(opened.store.codec.shape)}
    codes, names = DenseCodes(draft, opened.checkpoint), shape.dense_names
    bases = names_of_bases(draft)
    for name in track("encoding dense matrices", names, len(names), progress):
        matrix = opened.checkpoint.tensors[name][0].tensor(name)
        sizes["raw"].append(matrix.numel() * words.itemsize)
        if "lossless" in sizes:
            lossless = min(len(dense_ops.encode_dense_lossless(matrix)), matrix.nbytes)
            sizes["lossless"].append(lossless)
            residual = residual_bytes(matrix, name, codes) if name in bases else lossless
            sizes["residual"].append(residual)
    return {form: tuple(found) for form, found in sizes.items()}


def residual_bytes(matrix: Tensor, name: str, codes: DenseCodes) -> int:
    """Of a matrix' residual record, or of its words where they are fewer."""
    weight = codes.weight(name.removesuffix(".weight"), lambda: matrix)
    record = dense_ops.encode_dense_residual(matrix, (weight.qweight, weight.scales))
    return min(len(record), matrix.nbytes)


if __name__ == "__main__":
    main("memory")
