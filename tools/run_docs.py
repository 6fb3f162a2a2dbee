"""Runs the commands that README and docs/ print: `python tools/run_docs.py`.

Commands run in a scratch folder, on a copy of the bundled model. Left out are commands that need
another model or another file, and those that measure for minutes; `--slow` runs the latter too.
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
SPEQ = ".venv/bin/speq"
# Words of commands that cannot run here: they stand for a reader's own model or file.
ELSEWHERE = ("MODEL", "FOLDER_OR_HUB_ID", "Qwen/", "/tmp/wide", "humaneval.jsonl")
SLOW = (
    *("bench tpot", "bench governor", "bench kernels", "bench hit-rate", "bench locality"),
    *("bench equal-memory", "bench fidelity", "quantize"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `speq` as a page prints it; words: the arguments behind `speq`."""

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: speq {shlex.join(self.words)}"

    @property
    def text(self) -> str:
        return " ".join(self.words)


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
    """The commands of `speq` in a page's code blocks."""
    found = []
    for number, line in code_lines(page.read_text(encoding="utf-8")):
        if line.startswith(f"{SPEQ} "):
            words = shlex.split(line, comments=True)
            found.append(Command(page, number, tuple(words[1:])))
    return found


def programs_of(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def left_out(command: Command, slow: bool) -> str | None:
    """Why a command is not run here."""
    if any(word in command.text for word in ELSEWHERE):
        return "needs another model or file"
    if not slow and command.text.startswith(SLOW):
        return "measures for minutes"
    return None


def here(word: str, scratch: Path) -> list[str]:
    """A word of a command, in the scratch folder: /tmp is its own, patterns are expanded."""
    word = word.replace("/tmp/", f"{scratch}/tmp/")
    if "*" in word:
        return sorted(str(path.relative_to(scratch)) for path in scratch.glob(word))
    return [word]


def prepare(scratch: Path) -> None:
    """The files that pages name, with a model that commands may write beside."""
    (scratch / "tmp").mkdir()
    ignore = shutil.ignore_patterns(".speq")
    shutil.copytree(ROOT / "models" / "tiny-moe", scratch / "models" / "tiny-moe", ignore=ignore)
    shutil.copytree(ROOT / "tests" / "data", scratch / "tests" / "data")


def run(arguments: list[str], scratch: Path, timeout_s: float) -> str | None:
    """What went wrong with a command, if anything did."""
    # Profiles and drafts are kept in the scratch folder too.
    home = {"HOME": str(scratch), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
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
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each command")
    options = parser.parse_args()
    programs = Path(sys.executable).parent
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(scratch)
        tasks: list[tuple[str, list[str]]] = []
        seen = set()
        for page in PAGES:
            for command in commands_of(page):
                reason = left_out(command, options.slow)
                if reason is not None:
                    print(f"left out, {reason}: {command}")
                elif command.words not in seen:
                    seen.add(command.words)
                    words = [part for word in command.words for part in here(word, scratch)]
                    tasks.append((str(command), [str(programs / "speq"), *words]))
            for program in programs_of(page):
                name = f"{page.relative_to(ROOT)}: Python"
                tasks.append((name, [sys.executable, "-I", "-c", program]))
        for name, arguments in tasks:
            start_s = time.perf_counter()
            fault = run(arguments, scratch, options.timeout)
            verdict = "ran" if fault is None else "FAILED"
            print(f"{verdict}, {time.perf_counter() - start_s:.0f} s: {name}", flush=True)
            if fault is not None:
                failures += 1
                print(f"    {fault}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
