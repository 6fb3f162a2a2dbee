"""The undamaged inputs, made once: models, and what the speq under test makes of them."""

import json
import os
import shutil
import signal
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.fuzz.damage import copied, set_json
from tests.fuzz.target import Command, Target, killed, speq
from tests.helpers.tiny_models import write_model

BUDGET = "2MiB"
PROMPT = "Once upon a time"
NEW_TOKENS = 12
MEMORY = ("--memory-budget", BUDGET)
FAMILY = "qwen3_moe"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CALIBRATION = "".join(f"The {n}th line has {n * n} stones and {n} birds.\n" for n in range(60))
QUANTIZE = ("--group-size", -1, "--samples", 4, "--sequence-length", 48)
CODECS = ("raw", "lossless", "residual")


def generate(model: str, *more: object, **options: Any) -> Command:
    return speq(
        *("generate", "--model", model, *MEMORY, "--prompt", PROMPT),
        *("--max-new-tokens", NEW_TOKENS, *more),
        **options,
    )


def pack(codec: str) -> Command:
    """Of the model `half` to the folder `out`."""
    return speq("pack", "half", "--out", "out", "--codec", codec)


def quantize(*more: object) -> Command:
    """Of the model `half` to the folder `out`, calibrated on `text.txt`."""
    return speq("quantize", "half", "--out", "out", "--calibration", "text.txt", *QUANTIZE, *more)


class Sound:
    """Folders of sound inputs below `root`; cases copy them to their rooms.

    model  float32, one shard
    """

    def __init__(self, root: Path, target: Target) -> None:
        self.root, self.target = root, target
        self._texts: dict[str, str] = {}
        self._begun: dict[str, Path] = {}
        self._syncs: dict[str, int] = {}
        self.model = two_layers(root / "model")
        (self.model / "chat_template.jinja").write_text(TEMPLATE)
        target.warm(generate("model", "--draft-length", "2"), root)
        shutil.rmtree(self.model / ".speq")

    @cached_property
    def half(self) -> Path:
        """bfloat16: what lossless and residual packs are of."""
        return two_layers(self.root / "half", dtype=torch.bfloat16)

    @cached_property
    def sharded(self) -> Path:
        return two_layers(self.root / "sharded", max_shard_size="200KB")

    @cached_property
    def calibration(self) -> Path:
        path = self.root / "text.txt"
        path.write_text(CALIBRATION)
        return path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    @cached_property
    def drafted(self) -> Path:
        """The model with the draft that a run keeps beside it."""
        room = self._room("drafted")
        copied(self.model, room / "model")
        self._ran(generate("model", "--draft-length", "2"), room)
        return room / "model"

    @cached_property
    def quantised(self) -> Path:
        return self._made("quantised", quantize())

    def packed(self, codec: str) -> Path:
        path = self.root / f"packed-{codec}" / "out"
        return path if path.exists() else self._made(f"packed-{codec}", pack(codec))

    @cached_property
    def tuned(self) -> Path:
        """A home that keeps a profile of the model."""
        room = self._room("tuned")
        copied(self.model, room / "model")
        self._ran(speq("tune", "model", *MEMORY, "--num-prompts", 1, "--max-new-tokens", 40), room)
        (path,) = room.rglob("profiles/*.json")
        # Figures that no machine changes make the same inputs everywhere.
        profile = json.loads(path.read_text())
        path.write_text(json.dumps({name: settled(name, found) for name, found in profile.items()}))
        return room / "home"

    @cached_property
    def routes(self) -> Path:
        """Recorded routes of the model, as `python -m bench.lab.hit_rate` writes them."""
        layers, experts = 2, 8
        steps = []
        for at in range(6):
            used = [[[(at + node + e) % experts for e in range(3)] for node in range(2)]] * layers
            drafted = [[[[0, 1, 2], [0.5, 0.25, 0.25]]] * layers]
            guessed: list[Any] = [[], [[ids, [0.3, 0.2, 0.1]] for ids in used[1]]]
            step = {"drafted": drafted, "used": used, "guessed": guessed, "path": [0, 1]}
            weights = [[[0.5, 0.25, 0.25]] * 2] * layers
            steps.append(step | {"weights": weights, "leads": [0.5]})
        content = {"format": "speq-routes-2", "model": "model", "draft_length": 1}
        content |= {"num_layers": layers, "num_experts": experts, "top_k": 3, "steps": steps}
        path = self.root / "routes.json"
        path.write_text(json.dumps(content))
        return path

    @cached_property
    def routes_option(self) -> str:
        """The option of `speq plan` that takes them."""
        shown = self._ran(speq("plan", "--help"), self._room("help"))
        return "--routes" if "--routes" in shown else "--trace"

    def begun(self, command: Command, count: int) -> Path:
        """The folder `out` of a command that was killed at its count-th sync."""
        name = f"{command} {count}"
        if name not in self._begun:
            room = self._room(f"begun-{len(self._begun)}")
            copied(self.half, room / "half")
            copied(self.calibration, room / "text.txt")
            ended = self.target.run(killed(command, count, signal.SIGKILL), room)
            if ended.signal != signal.SIGKILL:
                raise RuntimeError(f"{command} was to be killed at sync {count}: {ended}")
            self._begun[name] = room / "out"
        return self._begun[name]

    def syncs(self, command: Command) -> int:
        """How often a command that ran to its end synced files."""
        return self._syncs[str(command)]

    def text(self, command: Command, room: Path) -> str:
        """Standard output of a command in a room that is still sound; run once for all such rooms.

        The room's inputs are told apart by their names and sizes.
        """
        before = set(room.rglob("*"))
        sizes = sorted((str(p.relative_to(room)), p.stat().st_size) for p in before if p.is_file())
        name = f"{command} {sizes}"
        if name not in self._texts:
            self._texts[name] = self._ran(command, room)
            for path in sorted(set(room.rglob("*")) - before, reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        return self._texts[name]

    def _room(self, name: str) -> Path:
        path = self.root / name
        path.mkdir()
        return path

    def _made(self, name: str, command: Command) -> Path:
        room = self._room(name)
        copied(self.half, room / "half")
        copied(self.calibration, room / "text.txt")
        self._ran(command, room)
        return room / "out"

    def _ran(self, command: Command, room: Path) -> str:
        ended = self.target.run(command, room)
        if not ended.succeeded:
            raise RuntimeError(f"{command} fails on sound input: {ended}")
        self._syncs[str(command)] = ended.syncs
        return ended.out


def two_layers(path: Path, **options: Any) -> Path:
    """A small random model, whose text tells any two tokens apart, unlike undecodable bytes'."""
    write_model(path, FAMILY, num_hidden_layers=2, **options)
    set_json(path / "tokenizer.json", "decoder", {"type": "Fuse"})
    return path


def settled(name: str, found: Any) -> Any:
    """What a profile has under a name, with times and speeds that are always the same."""
    if name == "link":
        return [[size, 1e9] for size, _ in found]
    if name == "verify":
        return [[rows, 1e-3] for rows, _ in found]
    if name.endswith("bytes_per_s"):
        return dict.fromkeys(found, 1e9)
    return 1e-3 if name.endswith("_s") else found


def unlocked(path: Path) -> None:
    """Let a room be removed whatever a case did to it."""
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
