"""Runs the commands that README and docs/ print: `python tools/run_docs.py`.

Commands run in a scratch folder, on a copy of the bundled model, which replaces the reader's own
model; the widened model is a small one unless `--wide` is given. Commands that measure for minutes
are skipped unless `--slow` is given, and servers are always skipped.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SPEQ = ".venv/bin/speq "
PYTHON = ".venv/bin/python -m "
LAB = "bench.lab."
MODEL = "models/tiny-moe"
PROMPTS = "speq/measure/prompts/mixed.jsonl"
# What a reader would bring, and what stands in for it here.
STAND_INS = {
    PROMPTS: str(ROOT / PROMPTS),
    "MODEL": MODEL,
    "FOLDER/lossless": MODEL,
    "FOLDER/model": MODEL,
    "FOLDER_OR_HUB_ID": MODEL,
    "WIDENED-PACK": MODEL,
    "Qwen/Qwen1.5-MoE-A2.7B": MODEL,
}
RESULTS = "bench/results"
PROMPT_FILES = ("humaneval.jsonl", "text.jsonl")
TEXTS = "TEXTS"
REQUESTS = "requests.jsonl"
SMALL = ("--hidden-size", "512", "--expert-width", "128")
QUICK_BENCHES = ("widen", "bench.lab.step")
SLOW = ("bench", "quantize", "train-head", "tune", "prove")
# They serve until an interrupt, or ask what serves.
ENDLESS = ("dashboard", "serve")
ASKING = ("bench", "serve")
# They need a package of hundreds of megabytes, and start processes that outlive them for a while.
ON_RAY = "--ray"
# They wait for other machines.
WITH_OTHERS = "--rendezvous"


@dataclass(frozen=True, slots=True)
class Command:
    """A command as a page prints it.

    words  the arguments of `speq`; of a bench of the lab those of `python -m`
    """

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"

    @property
    def in_lab(self) -> bool:
        return self.words[0].startswith(LAB)


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of code blocks, fenced and indented, with their numbers; continued lines joined."""
    fenced, begun, joined = False, 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if not fenced and not line.startswith("    "):
            continue
        begun = begun if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        yield begun, joined
        joined = ""


def commands_of(page: Path) -> list[Command]:
    """The commands of `speq`, and of benches of the lab, in a page's code blocks."""
    found = []
    for number, line in code_lines(page.read_text(encoding="utf-8")):
        for program in (SPEQ, PYTHON + LAB):
            if line.startswith(program):
                words = line.removeprefix(SPEQ).removeprefix(PYTHON)
                found.append(Command(page, number, tuple(shlex.split(words, comments=True))))
    return found


def programs_of(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def slow(command: Command) -> bool:
    """Tell whether a command measures for minutes."""
    name, *rest = command.words
    bench = rest[0] if name == "bench" else name
    return (name in SLOW or command.in_lab) and bench not in QUICK_BENCHES


def here(command: Command, scratch: Path, wide: bool) -> list[str]:
    """The words of a command in the scratch folder, where /tmp is its own."""
    words: list[str] = []
    for word in command.words:
        moved = STAND_INS.get(word, word).replace("/tmp/", f"{scratch}/tmp/")
        moved = moved.replace(RESULTS, str(ROOT / RESULTS))
        if "*" in moved:
            words += sorted(path.relative_to(scratch).as_posix() for path in scratch.glob(moved))
        else:
            words.append(moved)
    if words[:2] == ["bench", "widen"] and not wide:
        words += SMALL
    return words


def prepare(scratch: Path) -> None:
    """Make the files that pages name, and a model in a folder that commands may write to."""
    (scratch / "tmp").mkdir()
    shutil.copytree(ROOT / MODEL, scratch / MODEL, ignore=shutil.ignore_patterns(".speq"))
    shutil.copytree(ROOT / "tests" / "data", scratch / "tests" / "data")
    for name in PROMPT_FILES:
        shutil.copy(ROOT / PROMPTS, scratch / name)
    (scratch / TEXTS).mkdir()
    shutil.copy(ROOT / "CONTRIBUTING.md", scratch / TEXTS / "contributing.txt")
    (scratch / REQUESTS).write_text('{"prompt": "The sea", "max_new_tokens": 8}\n' * 3)


def run(arguments: list[str], scratch: Path, timeout_s: float) -> str | None:
    """Run a command; return what went wrong, or None."""
    # Profiles and drafts are kept in the scratch folder too.
    home = {"HOME": str(scratch), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    home["PYTHONPATH"] = str(ROOT)
    try:
        done = subprocess.run(
            arguments,
            cwd=scratch,
            env=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    return f"exit status {done.returncode}: {done.stderr.strip()[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the commands that README and docs/ print.")
    parser.add_argument("--slow", action="store_true", help="also run what measures for minutes")
    parser.add_argument("--wide", action="store_true", help="widen to real size: 25 GB of disk")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each command")
    options = parser.parse_args()
    programs = Path(sys.executable).parent
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(scratch)
        tasks: dict[tuple[str, ...], str] = {}
        for page in PAGES:
            for command in commands_of(page):
                if command.words[0] in ENDLESS or command.words[:2] == ASKING:
                    print(f"left out, serves until an interrupt or asks a server: {command}")
                    continue
                if ON_RAY in command.words:
                    print(f"left out, starts a Ray cluster: {command}")
                    continue
                if WITH_OTHERS in command.words:
                    print(f"left out, waits for other machines: {command}")
                    continue
                if slow(command) and not options.slow:
                    print(f"left out, measures for minutes: {command}")
                    continue
                program = (sys.executable, "-m") if command.in_lab else (str(programs / "speq"),)
                words = here(command, scratch, options.wide)
                tasks.setdefault((*program, *words), str(command))
            for text in programs_of(page):
                tasks[(sys.executable, "-I", "-c", text)] = f"{page.name}: Python"
        # Several pages use what widening writes.
        for arguments, name in sorted(tasks.items(), key=lambda task: "widen" not in task[0]):
            start_s = time.perf_counter()
            fault = run(list(arguments), scratch, options.timeout)
            verdict = "ran" if fault is None else "FAILED"
            print(f"{verdict}, {time.perf_counter() - start_s:.0f} s: {name}", flush=True)
            if fault is not None:
                failures += 1
                print(f"    {fault}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
