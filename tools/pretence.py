"""The sitecustomize of `tools/rehearse.py`: hides scipy and the network, and pretends a GPU."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = ("scipy",)


class Without(PathFinder):
    """Finds modules as Python does, except hidden ones."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


def refuse(event: str, _: Any) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise OSError("there is no network: a rehearsal")


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.addaudithook(refuse)

import torch  # noqa: E402

for name, value in {
    "is_available": lambda: True,
    "get_device_capability": lambda *device: (9, 0),
    "get_device_name": lambda *device: "none: a rehearsal",
}.items():
    setattr(torch.cuda, name, value)
