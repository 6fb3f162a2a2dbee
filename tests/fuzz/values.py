"""Values of the library's options and of the command's."""

import math
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speq.registries import CACHE_POLICIES, PREFETCHERS
from tests.fuzz.case import Case, Expect, Make
from tests.fuzz.damage import copied, short
from tests.fuzz.sound import BUDGET, MEMORY, PROMPT, Sound, generate
from tests.fuzz.target import Command, Ended, speq

ODD_NAMES = (
    "bytes",
    "memoryview",
    "set",
    "tuple",
    "complex",
    "decimal",
    "fraction",
    "object",
    "path",
)
NUMBERS = (0, 1, 2, 3, -1, 64, 65, 0.5, -0.5, 1e-320, 1e308, 2**31, 2**63, 10**19, 10**400)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "auto",
        "none",
        "1",
        "\0",
        "a\nb",
        "\ud800",
        "x" * 100_000,
        "nan",
    ),
    *("cpu", "cuda", "raw", "lossless", "[red]", "[/red]", "..", "/dev/zero", "~", "~nobody/x"),
    *NUMBERS,
    *(float("nan"), float("inf"), -float("inf")),
    *([], [1], {}, {"a": 1}, ["x"]),
    *({"odd": name} for name in ODD_NAMES),
)


def whole(value: Any, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def real(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether a value is a finite number in some bounds."""
    if type(value) is float:
        return math.isfinite(value) and least <= value <= most
    return type(value) is int and least <= value <= most


def named(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names if isinstance(value, str) else False


# Values that an option may take at all; it may refuse some of them, and must refuse all others.
# Paths and texts that stand for paths are among those.
LOAD: dict[str, Callable[[Any], bool]] = {
    "memory_budget": lambda value: whole(value, 1) or isinstance(value, str),
    "device": named("auto", "cpu", "cuda"),
    "dtype": named("auto", "bfloat16", "float16", "float32", "float64"),
    "context_length": lambda value: value is None or whole(value, 1),
    "draft": lambda value: isinstance(value, str) or value == {"odd": "path"},
    "draft_length": lambda value: value in (None, "auto", "1") or whole(value, 0, 63),
    "tpot_slo_ms": lambda value: value is None or real(value, 1e-323),
    "latency_slo_ms": lambda value: value is None or real(value, 1e-323),
    "cache_policy": named(*CACHE_POLICIES.names),
    "prefetch": named(*PREFETCHERS.names),
    "codec": named("auto", "raw", "lossless", "residual"),
    "profile": lambda value: isinstance(value, str) or value == {"odd": "path"},
    "verify_reads": lambda value: isinstance(value, bool),
    "reader_threads": lambda value: value in (None, "auto", "1") or whole(value, 1, 64),
    "no_such_option": lambda value: False,
}
SAMPLE: dict[str, Callable[[Any], bool]] = {
    "max_new_tokens": lambda value: whole(value, 1),
    "temperature": lambda value: real(value, 0),
    "top_p": lambda value: real(value, 1e-323, 1),
    "top_k": lambda value: whole(value, 0),
    "seed": lambda value: value is None or whole(value, 0, 2**63 - 1),
    "stop": lambda value: value is None or bool(texts_in(value)) or value in ([], {"odd": "tuple"}),
    "ignore_eos": lambda value: isinstance(value, bool),
    "generation_config": lambda value: value is None,
    "no_such_option": lambda value: False,
}


def texts_in(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(each, str) and each for each in values) else []


def api(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.model, room / "model")
    options = rng.choice((LOAD, SAMPLE))
    name, value = rng.choice(sorted(options)), rng.choice(VALUES)
    return calling(options, name, value, options[name](value))


def known_call(
    rng: random.Random, sound: Sound, room: Path, name: str, value: Any, sensible: bool = True
) -> Case:
    copied(sound.model, room / "model")
    return calling(LOAD if name in LOAD else SAMPLE, name, value, sensible)


KNOWN_API = (
    partial(known_call, name="tpot_slo_ms", value=10**400),
    partial(known_call, name="latency_slo_ms", value=10**400),
    partial(known_call, name="profile", value="\0", sensible=False),
    partial(known_call, name="temperature", value=10**400),
    partial(known_call, name="context_length", value=10**400),
    partial(known_call, name="prompt", value={"odd": "memoryview"}, sensible=False),
)


def calling(options: Any, name: str, value: Any, sensible: bool) -> Case:
    load: dict[str, Any] = {"model": "model", "memory_budget": BUDGET}
    # A run at a temperature of its own, so that the other sampling options have a say.
    request = {"prompt": PROMPT, "max_new_tokens": 4, "temperature": 1.0, "seed": 1}
    (load if options is LOAD else request)[name] = value
    command = Command(kind="library", load=load, requests=(request,))
    expect = Expect.ANY if sensible else Expect.REFUSED
    return Case(f"{name} = {short(ascii(value))}", (command,), expect)


@dataclass(frozen=True)
class Untouched:
    """Files that a command may not replace by others, by the kind and target that they have."""

    path: Path
    mode: int
    target: str | None

    @classmethod
    def now(cls, path: Path) -> "Untouched":
        return cls(path, stat.S_IFMT(path.lstat().st_mode), target_of(path))

    def __call__(self, ended: Ended) -> list[str]:
        return [] if Untouched.now(self.path) == self else [f"{self.path.name} was replaced"]


def target_of(path: Path) -> str | None:
    return os.readlink(path) if path.is_symlink() else None


@dataclass(frozen=True)
class NothingNew:
    """The names that a folder may hold after a command."""

    folder: Path
    names: frozenset[str]

    def __call__(self, ended: Ended) -> list[str]:
        new = sorted(set(os.listdir(self.folder)) - self.names)
        return [f"wrote {', '.join(new)} into the current folder"] if new else []


# Commands of a sound model, whose options are damaged.
PLAN = ("plan", "model", "--memory-budget", BUDGET, "--preset", "laptop-ddr5")
QUICK = generate("model").arguments
CALIBRATED = ("quantize", "model", "--out", "out", "--calibration", "text.txt")
BAD_NUMBERS = (
    "",
    "x",
    "-1",
    "nan",
    "inf",
    "1e999",
    "0x10",
    "1,5",
    "--",
    "1 2",
    "\udcff",
    "9" * 5000,
)
BAD_SIZES = (
    "",
    "x",
    "-1GiB",
    "0",
    "nan",
    "infGiB",
    "1e999",
    "GiB",
    "1 Gi B",
    "99999999999999999999TiB",
)
BAD_NAMES = ("", "x", "[red]", "[/red]", "\udcff", "AUTO", "none ", "x" * 100_000)
# By command and option, what none of them can mean.
OPTIONS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    *((QUICK, name, BAD_NUMBERS) for name in ("--max-new-tokens", "--top-k", "--temperature")),
    *((QUICK, name, BAD_NUMBERS) for name in ("--top-p", "--seed", "--context-length")),
    *(
        (QUICK, name, BAD_NUMBERS)
        for name in ("--draft-length", "--tpot-slo-ms", "--reader-threads")
    ),
    *((QUICK, name, BAD_NAMES) for name in ("--device", "--dtype", "--cache-policy", "--prefetch")),
    *((QUICK, name, BAD_NAMES) for name in ("--codec", "--profile", "--no-such-option", "--draft")),
    *((command, "--memory-budget", BAD_SIZES) for command in (QUICK, PLAN, CALIBRATED)),
    *((PLAN, name, BAD_SIZES) for name in ("--link", "--memory-bandwidth")),
    *((PLAN, name, BAD_NAMES) for name in ("--preset", "--locality", "--profile", "--device")),
    *((PLAN, name, BAD_NUMBERS) for name in ("--acceptance", "--context-length")),
    *((CALIBRATED, name, BAD_NUMBERS) for name in ("--bits", "--samples", "--damp", "--seed")),
    *((CALIBRATED, name, BAD_NUMBERS) for name in ("--group-size", "--sequence-length")),
    *((CALIBRATED, name, BAD_NAMES) for name in ("--method", "--codes")),
)
MODELS = (
    "[red]",
    "[/red]",
    "./[/bold]",
    "",
    " ",
    ".",
    "..",
    "/",
    "/dev/null",
    "a/b/c",
    "\udcff",
    "~x/y",
)
# What makes -1 and a group of all columns, or a plan of no acceptance, sensible.
SENSIBLE = {("--group-size", "-1"), ("--seed", "0"), ("--bits", "4")}


def option(rng: random.Random, sound: Sound, room: Path) -> Case:
    command, name, values = rng.choice(OPTIONS)
    value = rng.choice(values)
    label = f"{command[0]} {name} {short(ascii(value))}"
    expect = Expect.ANY if (name, value) in SENSIBLE else Expect.REFUSED
    return Case(label, (speq(*command, f"{name}={value}"),), expect)


def model_name(rng: random.Random, sound: Sound, room: Path) -> Case:
    name = rng.choice(MODELS)
    command = rng.choice(
        (generate(name), speq("plan", name, *MEMORY), speq("pack", name, "--out", "out"))
    )
    return Case(f"model {name!a}", (command,), Expect.REFUSED)


def bracketed(rng: random.Random, sound: Sound, room: Path) -> Case:
    """A sound model whose folder has a name that some printers take for markup."""
    name = rng.choice(("[red]", "[/red]", "a [/b] c", "[bold"))
    (room / "model").rename(room / name.replace("/", "\\"))
    if "/" in name:
        inner = room / name
        inner.parent.mkdir(parents=True, exist_ok=True)
        (room / name.replace("/", "\\")).rename(inner)
    command = rng.choice(
        (
            speq("plan", f"./{name}", *MEMORY, "--preset", "laptop-ddr5"),
            speq(
                "quantize",
                f"./{name}",
                "--out",
                "out",
                "--calibration",
                "text.txt",
                "--group-size",
                -1,
                "--samples",
                4,
                "--sequence-length",
                48,
            ),
            generate(f"./{name}"),
            speq("prove", f"./{name}", *MEMORY, "--minutes", 0, "--num-prompts", 1),
        )
    )
    return Case(f"{command.arguments[0]} of a folder named {name}", (command,), Expect.ANY)


def output(rng: random.Random, sound: Sound, room: Path) -> Case:
    how = rng.choice(("closed", "broken"))
    pack = speq("pack", "model", "--out", "out", output=how)
    plan = speq(*PLAN, output=how)
    run = generate("model", output=how)
    help_ = speq("--help", output=how)
    command = rng.choice((pack, plan, run, help_, speq("--version", output=how)))
    return Case(f"{command.arguments[0]}, standard output {how}", (command,), Expect.ANY)


def forced(rng: random.Random, sound: Sound, room: Path) -> Case:
    """`--force` replaces files, and neither symlinks nor what is no file."""
    path = room / "trace.json"
    (room / "real.json").write_text("old")
    way = rng.choice(("symlink", "pipe", "device", "dangling", "to a device"))
    if way == "symlink":
        path.symlink_to("real.json")
    elif way == "dangling":
        path.symlink_to("not-there.json")
    elif way == "to a device":
        path.symlink_to("/dev/null")
    elif way == "pipe" or not node(path):
        os.mkfifo(path)
    command = generate("model", "--trace", path.name, "--force")
    return Case(f"--force on a {way}", (command,), Expect.ANY, check=Untouched.now(path))


def node(path: Path) -> bool:
    """Make a device like /dev/null; whether this user may."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        return False
    return True


def nowhere(rng: random.Random, sound: Sound, room: Path) -> Case:
    """Nothing is written where no name was given, or where there is something else."""
    (room / "tmp").mkdir()
    (room / "home").mkdir()
    (room / "file").write_text("")
    out = rng.choice(
        ("", "", "model", "file", "/dev/null", "file/below", "/dev/null/x", "\udcff/\udcfe")
    )
    command = rng.choice(
        (speq("pack", "model", "--out", out), speq(*CALIBRATED[:3], out, *CALIBRATED[4:]))
    )
    expect = Expect.ANY if out.startswith("\udcff") else Expect.REFUSED
    check = NothingNew(room, frozenset(os.listdir(room)) | {"\udcff"})
    return Case(f"{command.arguments[0]} --out {out!a}", (command,), expect, check=check)


def senseless(rng: random.Random, sound: Sound, room: Path) -> Case:
    """What the options allow one by one, and what makes no sense all the same."""
    tpot = ("bench", "tpot", "model", "--budgets", BUDGET, "--max-new-tokens", 1)
    serve = ("bench", "serve", "model", "--rates", rng.choice(("1e9", "nan", "-1", "0")))
    folder = (*CALIBRATED[:4], "--calibration", rng.choice((".", "model", "/dev/null", "")))
    big = ("plan", "model", "--memory-budget", "99999999999999999999TiB")
    command = speq(*rng.choice((tpot, serve, folder, big)))
    return Case(" ".join(command.arguments), (command,), Expect.REFUSED)


def interrupted(rng: random.Random, sound: Sound, room: Path) -> Case:
    """A writer of a file is stopped; the next one leaves nothing of it behind."""
    command = generate("model", "--trace", "trace.json", "--force", "--draft-length", 2)
    text = sound.text(command, room)
    number, count = rng.choice((15, 9)), rng.randrange(1, 4)
    stopped = generate(*command.arguments[2:3], *command.arguments[9:], killed_at=(count, number))
    label = f"signal {number} at sync {count}"
    return Case(label, (stopped, command), Expect.SAME, text)


def saying(
    rng: random.Random, sound: Sound, room: Path, arguments: tuple[str, ...], output: str = "kept"
) -> Case:
    """A known command line over the sound model: senseless, or with nowhere to print to."""
    copied(sound.model, room / "model")
    copied(sound.calibration, room / "text.txt")
    (room / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    for folder in ("home", "tmp"):
        (room / folder).mkdir()
    label = f"{' '.join(arguments)}, standard output {output}"
    expect = Expect.REFUSED if output == "kept" else Expect.ANY
    names = frozenset(os.listdir(room)) | ({"out"} if output != "kept" else frozenset())
    check = NothingNew(room, names)
    return Case(label, (speq(*arguments, output=output),), expect, check=check)


def unnamed(rng: random.Random, sound: Sound, room: Path) -> Case:
    """No name for a new folder, where the current one is empty."""
    copied(sound.model, room / "model")
    (room / "empty").mkdir()
    command = speq("pack", "../model", "--out", "", folder="empty")
    check = NothingNew(room / "empty", frozenset())
    return Case("pack --out ''", (command,), Expect.REFUSED, check=check)


def laid_out(rng: random.Random, sound: Sound, room: Path, way: Make) -> Case:
    copied(sound.model, room / "model")
    copied(sound.calibration, room / "text.txt")
    return way(rng, sound, room)


SHORT = ("--prompts", "prompts.jsonl", "--num-prompts", "1")
KNOWN_CLI: tuple[Make, ...] = (
    unnamed,
    *(
        partial(saying, arguments=arguments)
        for arguments in (
            ("plan", "model", "--memory-budget", "99999999999999999999TiB"),
            ("quantize", "model", "--out", "out", "--calibration", "model"),
            ("quantize", "model", "--out", "out", "--calibration", ""),
            ("bench", "tpot", "model", "--budgets", BUDGET, *SHORT, "--max-new-tokens", "1"),
            ("bench", "serve", "model", "--rates", "1e9"),
        )
    ),
    *(
        partial(saying, arguments=arguments, output=output)
        for arguments in (QUICK, PLAN, ("--help",))
        for output in ("closed", "broken")
    ),
    *(partial(laid_out, way=way) for way in (bracketed, bracketed, forced, forced, interrupted)),
)
WAYS = (
    *(option, option, option, option, option, option, model_name, bracketed, output, forced),
    *(nowhere, senseless, interrupted),
)


def cli(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.model, room / "model")
    copied(sound.calibration, room / "text.txt")
    return rng.choice(WAYS)(rng, sound, room)
