"""`pack` and `quantize`: conversion of a model, from its name to a folder."""

from contextlib import closing
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Unpack

from speq.drafts.draft_source import gptq_path, open_draft
from speq.errors import OptionError
from speq.experts.codec import codec_of, own_codec
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.mirrored_records import write_mirror
from speq.experts.pack import pack as write_pack
from speq.experts.pack import packed_from
from speq.experts.packed_store import RECORDS_FILE, Manifest
from speq.experts.record_writer import Packing
from speq.files.published_format import WORDS
from speq.heads.head_file import copy_head
from speq.host_memory import available_bytes
from speq.models.opened import Opened, open_model
from speq.options.declared import build, split
from speq.options.typed import PackOptions, QuantizeOptions
from speq.quantizing.calibration import calibration_of, read_texts, tokenise
from speq.quantizing.quantizer import quantize as write_gptq
from speq.quantizing.report import QuantizeReport
from speq.quantizing.settings import ConversionSettings, PackSettings, QuantizeSettings
from speq.text.tokenizer import load_tokenizer, tokens_of
from speq.units import Progress, no_progress
from speq.version import __version__

# Share of the machine's free memory used without a budget.
DEFAULT_SHARE = 3 / 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """The output folder, and the report on its experts."""

    folder: Path
    report: QuantizeReport


def pack(
    model: str | Path,
    out: str | Path,
    *,
    progress: Progress = no_progress,
    **options: Unpack[PackOptions],
) -> Manifest:
    """Pack a model into the folder `out`, each expert contiguous and with a checksum.

    options   codec and draft; see docs/options.md
    progress  called with (what, done, total)

    If interrupted, it leaves a folder that no run opens, and the same call continues from there.
    Raises SpeqError if the model, the draft, the folder or the disk does not allow it.
    """
    return pack_with(model, build(PackSettings, {"out": out, **options}), progress)


def pack_with(
    model: str | Path, settings: PackSettings, progress: Progress = no_progress
) -> Manifest:
    """Pack a model with parsed settings; otherwise as `pack`."""
    with closing(open_model(model)) as opened:
        store = opened.store
        if not isinstance(store, SafetensorsExpertStore):
            raise OptionError(
                f"model {str(model)!r} is packed already; give the one it was packed from"
            )
        manifest = None
        if settings.mirror is not None:  # the pack may be whole, and its mirror cut short
            codec = (
                own_codec(store.codec.shape).name if settings.codec == "auto" else settings.codec
            )
            manifest = packed_from(opened.checkpoint, codec, settings.out)
            if manifest is not None and manifest.stripe is not None:
                raise OptionError(
                    f"mirror is given and {settings.out} is divided between two disks already; "
                    "leave it out, or pack to another folder"
                )
        if manifest is None:
            packing = packing_of(opened, settings.codec, settings.draft)
            packing = replace(packing, stripe=settings.stripe)
            try:
                manifest = write_pack(opened.checkpoint, store, settings.out, packing, progress)
                copy_head(opened.checkpoint.path, settings.out)
            finally:
                if packing.draft is not None:
                    packing.draft.close()
    if settings.mirror is not None:
        write_mirror(settings.out / RECORDS_FILE, settings.mirror, progress)
    return manifest


def packing_of(opened: Opened, codec: str, draft: str) -> Packing:
    """Build the packing that the options request. Raises SpeqError if the model or the draft does
    not allow it.
    """
    shape = opened.store.codec.shape
    made = own_codec(shape) if codec == "auto" else codec_of(codec, shape)
    if not made.needs_draft:
        if draft != "auto":
            raise OptionError(
                f"draft {draft!r} cannot be used with codec {codec}; only residual takes one"
            )
        model, dense = opened.checkpoint.path, opened.shape.dense_names
        beside = gptq_path(model)
        return Packing(
            made,
            dense=dense if opened.checkpoint.format == WORDS and made.name != "raw" else (),
            draft_folder=beside.relative_to(model) if (beside / "config.json").exists() else None,
        )
    if draft == "none":
        raise OptionError(f"codec {codec} needs a draft; give one, or auto")
    source = open_draft(draft, opened.checkpoint, opened.store, opened.shape.experts)
    return Packing(made, source, opened.shape.dense_names)


def quantize(
    model: str | Path, *, progress: Progress = no_progress, **options: Unpack[QuantizeOptions]
) -> Quantized:
    """Quantise a model's experts by GPTQ, calibrated on the tokens routed to each.

    options   of QuantizeSettings and ConversionSettings; see docs/options.md
    progress  called with (what, done, total)

    Experts are read one at a time, so the model may be several times the memory. If interrupted, it
    leaves a folder that no run opens, and the same call continues from there. Raises SpeqError if
    the model, the text, the budget, the folder or the disk does not allow it.
    """
    settings, conversion = split(options, QuantizeSettings, ConversionSettings)
    return quantize_with(model, settings, conversion, progress)


def quantize_with(
    model: str | Path,
    settings: QuantizeSettings,
    conversion: ConversionSettings,
    progress: Progress = no_progress,
) -> Quantized:
    """Quantise a model with parsed settings; otherwise as `quantize`."""
    with closing(open_model(model)) as opened:
        if opened.checkpoint.format != WORDS:
            raise OptionError(
                f"model {str(model)!r} is published in {opened.checkpoint.format}; speq quantize "
                "takes weights of 16 or 32 bits: give a checkpoint of those"
            )
        if opened.shape.experts.normed:
            raise OptionError(
                f"model {str(model)!r} is of family {opened.family.model_type}, which norms the "
                "output of experts; speq quantize adds it without a norm: leave the draft to be "
                "rounded, or give a GPTQ checkpoint"
            )
        if opened.shape.attention.shares_choices:
            raise OptionError(
                f"model {str(model)!r} has layers that attend to what the indexer of a layer "
                "before them chose; speq quantize runs each layer alone: leave the draft to be "
                "rounded, or give a GPTQ checkpoint"
            )
        if opened.family.streams is not None:
            raise OptionError(
                f"model {str(model)!r} is of family {opened.family.model_type}, whose layers mix "
                "several rows of a token; speq quantize adds experts to one: leave the draft to be "
                "rounded, or give a GPTQ checkpoint"
            )
        if opened.store.codec.needs_draft:
            raise OptionError(
                f"model {str(model)!r} is packed as residuals of a draft; give the one it was "
                "packed from"
            )
        tokenizer = load_tokenizer(opened.checkpoint.path)
        given = conversion.calibration
        tokens = tokenise(
            [
                text
                for path in (own_texts() if given is None else [given])
                for text in read_texts(path)
            ],
            lambda text: tokens_of(tokenizer, text),
            opened.shape.vocab_size,
            tokenizer.eos_token_id,
        )
        out = conversion.out or gptq_path(opened.checkpoint.path)
        budget = conversion.memory_budget or int(DEFAULT_SHARE * available_bytes())
        report = write_gptq(
            opened,
            calibration_of(tokens, settings),
            settings,
            out,
            budget,
            __version__,
            progress,
        )
    return Quantized(out, report)


def own_texts() -> list[Path]:
    """Files of the prompts that measurements use."""
    folder = Path(str(files("speq.measure"))) / "prompts"
    return [folder / "mixed.jsonl", folder / "long.jsonl"]
