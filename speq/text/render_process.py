"""Renders chat templates, in a process of its own.

Templates are programs that others wrote. Transformers' sandbox keeps them from everything but time
and memory, and no thread can be stopped from outside. A process can: its processor time for each
chat and its memory are limited by the system. It is started at the first chat, and ends with the
process that started it.
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

# A long chat takes some milliseconds.
MAX_CPU_S = 10
MAX_MEMORY_BYTES = 512 << 20
# Some times the text of the longest contexts.
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
    """Safe to call from several threads: calls queue.

    max_cpu_s         processor time that a chat may take
    max_memory_bytes  memory that the process may take beside what it takes by itself
    max_characters    of what a template writes
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
        """What a template writes for messages, as transformers renders it, up to where an answer
        begins. Raises RenderError.

        variables  more names that templates know: those of special tokens
        """
        asked = {"template": template, "messages": messages, "tools": tools, "more": variables}
        try:
            line = json.dumps(asked).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderError(f"the messages are no JSON: {error}") from error
        with self._turn:
            try:
                answer = self._ask(line)
            except BaseException:  # an interrupt: what comes next would be of this call
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
                process_group=0,  # interrupts from a terminal are not meant for it
            )
            self._starter = os.getpid()
        return self._process

    def _end(self) -> int | None:
        """End the process; its exit status, if there was one."""
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
    """What a process is asked by, and what it answers by."""
    missing = "a process that renders has no pipes"
    return present(process.stdin, missing), present(process.stdout, missing)


def answer_all(asked: BinaryIO, answers: BinaryIO, *limits: int) -> None:
    """Render what is asked for, line by line, to the end."""
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
    """Of this process, beside what it has taken."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        taken = int(sizes.read_text().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, taken + more_bytes)


def limit_cpu(seconds: int) -> None:
    """Of this process, beside what it has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def limit(kind: int, most: int) -> None:
    """A limit that is there already and that nobody may raise stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


# One of all models: it keeps nothing but templates that it has compiled.
RENDERER = RenderProcess()
