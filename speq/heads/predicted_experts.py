"""Opening of the head that options name: our own, a published one, or the checkpoint's MTP
layer.
"""

import logging
from pathlib import Path

from speq.errors import FileError, SpeqError
from speq.heads.draft_head import HeadSource
from speq.heads.eagle_file import CONFIG, read_eagle
from speq.heads.head_file import NAME, head_path, model_digest, read_acceptance_rates, read_head
from speq.heads.mtp_file import MTP, mtp_of
from speq.models.opened import Opened

logger = logging.getLogger("speq")

AUTO = "auto"


def open_head(name: str, opened: Opened) -> HeadSource:
    """Open a model's head, in host memory or still on disk.

    name  auto (beside the model), mtp (the MTP layer of the model's own checkpoint), a file or
          folder of `speq train-head`, or the folder of a published head

    Raises SpeqError if it is missing, damaged or another model's, or needs layers of other
    machines.
    """
    if name == MTP:
        check_whole(opened, name)
        return mtp_of(opened)
    checkpoint = opened.checkpoint
    path = head_path(checkpoint.path) if name == AUTO else Path(name)
    if (path / CONFIG).is_file() and not (path / NAME).exists():
        check_whole(opened, name)
        return read_eagle(path, opened.shape)
    path = path / NAME if path.is_dir() else path
    digest = model_digest(checkpoint, opened.family.names)
    head = read_head(path, digest, opened.shape.hidden_size)
    if head.predicted_layers:
        check_whole(opened, name)
    return head


def check_whole(opened: Opened, name: str) -> None:
    """Raise SpeqError for a head that needs layers of other machines."""
    if opened.part is not None:
        raise FileError(
            f"head {name} needs layers of the whole model, which runs in stages; give a head of "
            "`speq train-head` that predicts no experts"
        )


def head_worth_weighing(opened: Opened) -> HeadSource | None:
    """Open the head beside a model if it has acceptance rates; None otherwise. One that is damaged
    or another model's is skipped with a warning, since it was not requested.
    """
    path = head_path(opened.checkpoint.path)
    if not path.exists():
        return None
    try:
        # Its weights are as large as a layer of experts, so they are read only if it may be chosen.
        return open_head(AUTO, opened) if read_acceptance_rates(path) else None
    except SpeqError as error:
        logger.warning("the head beside the model is not used: %s", error)
        return None
