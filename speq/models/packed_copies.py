"""Which packed copy of a published model's experts a run reads, and which one it writes."""

from dataclasses import replace

from speq.config import ExpertOptions
from speq.devices.device import Accelerator, Processor
from speq.errors import CheckpointError
from speq.experts.copied_store import CopiedExperts
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.packed_copy import PackedCopy, copy_codec, copy_folder, open_copy
from speq.models.opened import Opened


def read_copy(opened: Opened, options: ExpertOptions, device: Processor | Accelerator) -> Opened:
    """A model whose experts are read from their packed copy, where there is one that is whole.
    On a GPU it is planned first what the host's memory holds.

    Raises as `check_verifiable` does.
    """
    if isinstance(device, Processor):
        copy = whole_copy(opened, options)
        if copy is not None:
            return replace(opened, store=copy)
        check_verifiable(opened, options)
    return opened


def check_verifiable(opened: Opened, options: ExpertOptions) -> None:
    """Raise SpeqError where reads are to be compared with checksums, and there are none."""
    if options.verify_reads and opened.store.published:
        raise CheckpointError(
            f"{opened.checkpoint.path} has no checksums to verify reads by, and this run reads no "
            "packed copy, which has some; `speq pack` writes a model that has"
        )


def whole_copy(opened: Opened, options: ExpertOptions) -> CopiedExperts | None:
    """The packed copy of a model's experts, if it is whole and may be read."""
    store = opened.store
    if not options.reads_copies or not isinstance(store, SafetensorsExpertStore):
        return None
    copy = open_copy(opened.checkpoint, opened.shape.experts, store)
    if copy is not None:
        copy.verify_reads = options.verify_reads
    return copy


def copy_to_write(opened: Opened, options: ExpertOptions) -> PackedCopy | None:
    """The packed copy of published experts that a run is to write; None: it writes none."""
    store = opened.store
    if not options.reads_copies or not isinstance(store, SafetensorsExpertStore):
        return None
    folder = copy_folder(opened.checkpoint) if copy_codec(store) is not None else None
    return None if folder is None else PackedCopy(opened.checkpoint, store, folder)
