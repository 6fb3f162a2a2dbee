"""Rendering of chat templates in a separate process.

Templates are programs of unknown authors. transformers' sandbox limits everything except time and
memory, and a thread cannot be stopped from outside. For a process, the system limits the processor
time per chat and the memory. It starts at the first chat and ends with its parent.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, BinaryIO

from speq.errors import present

# A long chat takes a few milliseconds.
MAX_CPU_S = 10
MAX_MEMORY_BYTES = 512 << 20
# Several times the text of the longest contexts.
MAX_CHARACTERS = 16 << 20

START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from speq.text.render_process import answer_all
answer_all(sys.stdin.buffer, sys.stdout.buffer, *map(int, sys.argv[2:]))
"""


class RenderError(Exception):
    """A template failed, or refused what it was given."""


class RenderProcess:
    """A process that renders templates. Thread-safe: calls queue.

    max_cpu_s         processor time that a chat may take
    max_memory_bytes  memory that the process may take in addition to its own
    max_characters    longest output of a template
    """

    def __init__(
        self,
        max_cpu_s: int = MAX_CPU_S,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._limits = max_cpu_s, max_memory_bytes, max_characters
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0
        atexit.register(self.close)

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
    ) -> str:
        """Render messages with a template, as transformers does, up to where an answer begins.
        Raises RenderError.

        variables  further names for templates: special tokens
        """
        asked = {"template": template, "messages": messages, "tools": tools, "more": variables}
        try:
            line = json.dumps(asked).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderError(f"the messages are not JSON: {error}") from error
        with self._turn:
            try:
                answer = self._ask(line)
            except BaseException:  # an interrupt: the next answer would belong to this call
                self._end()
                raise
            if not answer.endswith(b"\n"):
                raise RenderError(self._why_it_ended(self._end()))
        told = json.loads(answer)
        if "error" in told:
            raise RenderError(told["error"])
        return str(told["text"])

    def close(self) -> None:
        with self._turn:
            self._end()

    def _ask(self, line: bytes) -> bytes:
        asked, answers = pipes(self._running())
        try:
            asked.write(line)
            asked.flush()
        except BrokenPipeError:
            return b""
        return answers.readline()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._starter != os.getpid():  # a forked process has one of its own
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, json.dumps(sys.path), *map(str, self._limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # it ignores interrupts from a terminal
            )
            self._starter = os.getpid()
        return self._process

    def _end(self) -> int | None:
        """End the process. Return its exit status, if it ran."""
        process, self._process = self._process, None
        if process is None or self._starter != os.getpid():
            return None
        if process.poll() is None:
            process.kill()
        for pipe in pipes(process):
            pipe.close()
        return process.wait()

    def _why_it_ended(self, status: int | None) -> str:
        if status == -signal.SIGXCPU:
            return f"it takes more than {self._limits[0]} s of processor time"
        return f"the process that runs it ended with status {status}"


def pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    missing = "a process that renders has no pipes"
    return present(process.stdin, missing), present(process.stdout, missing)


def answer_all(asked: BinaryIO, answers: BinaryIO, *limits: int) -> None:
    """Render requests line by line until the input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    max_cpu_s, max_memory_bytes, max_characters = limits
    limit_memory(max_memory_bytes)
    for line in asked:
        limit_cpu(max_cpu_s)
        try:
            given = json.loads(line)
            (text,), _ = render_jinja_template(
                conversations=[given["messages"]],
                tools=given["tools"],
                chat_template=given["template"],
                add_generation_prompt=True,
                **given["more"],
            )
            if len(text) > max_characters:
                raise ValueError(f"it writes {len(text)} characters of at most {max_characters}")
            told = {"text": text}
        except MemoryError:
            told = {"error": f"it takes more than {max_memory_bytes >> 20} MiB"}
        except Exception as error:  # templates fail in their own ways
            told = {"error": " ".join(str(error)[:2000].split()) or type(error).__name__}
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()


def limit_memory(more_bytes: int) -> None:
    """Limit the memory of this process beyond what it has taken."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        taken = int(sizes.read_text().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, taken + more_bytes)


def limit_cpu(seconds: int) -> None:
    """Limit the processor time of this process beyond what it has used.

    The system counts whole seconds: it ends the process after up to a second more.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def limit(kind: int, most: int) -> None:
    """Set a resource limit; a lower hard limit stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


# Shared by all models: it keeps only compiled templates.
RENDERER = RenderProcess()
