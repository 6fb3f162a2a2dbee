"""The head that options name: our own, or a published one."""

from pathlib import Path

from speq.heads.draft_head import DraftHead
from speq.heads.eagle_file import is_published, read_eagle
from speq.heads.head_file import NAME, head_beside, model_digest, read_head
from speq.models.opened import Opened

AUTO = "auto"


def head_named(name: str, opened: Opened) -> DraftHead:
    """A model's head, in host memory.

    name  auto (beside the model), a file or folder of `speq train-head`, or the folder of a
          published head

    Raises SpeqError where it is missing, damaged or another model's.
    """
    checkpoint = opened.checkpoint
    path = head_beside(checkpoint.path) if name == AUTO else Path(name)
    if is_published(path):
        return read_eagle(path, opened.shape)
    path = path / NAME if path.is_dir() else path
    digest = model_digest(checkpoint, opened.family.names)
    return read_head(path, digest, opened.shape.hidden_size)
