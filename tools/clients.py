"""Install programs that others wrote, run each against our server, and say which work.

    python -m tools.clients [NAME...]

They get environments of their own in build/clients. The server's model is scripted: it calls tools
and writes JSON as a good one would. lm-evaluation-harness asks the bundled model.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "clients"
# Libraries by environment: what is installed, and the cells of tests/clients/libraries.py.
LIBRARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sdks": (
        (
            *("anthropic==2.14.0", "litellm", "langchain==1.5.2"),
            *("langchain-openai==1.7.4", "instructor==1.17.0", "pydantic-ai-slim[openai]==2.38.0"),
            *("openai-agents==0.24.0", "smolagents[openai]==1.26.0", "dspy==3.4.1"),
        ),
        (
            *("openai_chat", "openai_forms_and_tools", "openai_responses", "anthropic_messages"),
            *("litellm_sdk", "langchain", "instructor", "pydantic_ai", "openai_agents"),
            *("smolagents", "dspy"),
        ),
    ),
    "llama-index": (
        ("llama-index-core>=0.14,<0.16", "llama-index-llms-openai-like==0.8.1"),
        ("llama_index",),
    ),
    "more": (
        (
            *("ollama==0.6.3", "autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
            "inspect-ai==0.3.285",
        ),
        ("ollama", "autogen", "inspect_ai"),
    ),
    "crewai": (("crewai==1.15.30",), ("crewai",)),
}
# The same of Node: packages, and the cells of tests/clients/libraries.mjs.
NODE_LIBRARIES = (
    ("openai@6", "ai@6", "@ai-sdk/openai-compatible@2", "ollama@0.6", "zod@4"),
    ("openai_node", "vercel_ai", "ollama_node"),
)
# Programs of Python, each with what is installed.
PROGRAMS = {
    "llm": ("llm==0.36",),
    "aider": ("aider-chat==0.86.2",),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "litellm_proxy": ("litellm[proxy]==1.108.7",),
    "guidellm": ("guidellm==0.8.1",),
}
# Programs of Node, with their packages.
AGENTS = {
    "claude": "@anthropic-ai/claude-code@2.1.197",
    "codex": "@openai/codex@0.171.0",
    "opencode": "opencode-ai@1.18.33",
}
SAID = "Hello from speq."
# What a model says that has run a command of ours.
RAN = "hello"
SECONDS = 300
TASK = {
    "task": "pairs",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
PAIRS = [
    {"q": "Once upon a time there was a little", "choices": [" dog", " xq", " 7}"], "label": 0},
    {"q": "She said that she was very", "choices": [" happy", " import", " 0x"], "label": 0},
]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a program runs. url: of the server; folder: empty, and the program's home"""

    url: str
    folder: Path

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def run(self, *command: str | Path, **variables: str) -> str:
        """What a program printed. Raises CalledProcessError where it failed, and TimeoutExpired."""
        given = dict(os.environ) | {"HOME": str(self.folder), "OPENAI_API_KEY": "none"} | variables
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            text=True,
            check=False,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command[0], done.stdout)
        return done.stdout


def claude(bench: Bench) -> bool:
    asked = (node("claude"), "-p", "run a command", "--allowedTools", "Bash")
    key, quiet = "none-0123456789", {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    told = bench.run(*asked, ANTHROPIC_BASE_URL=bench.root, ANTHROPIC_API_KEY=key, **quiet)
    return RAN in told


def codex(bench: Bench) -> bool:
    (bench.folder / ".codex").mkdir()
    (bench.folder / ".codex" / "config.toml").write_text(
        'model = "any"\nmodel_provider = "speq"\n'
        f'[model_providers.speq]\nname = "speq"\nbase_url = "{bench.url}"\n'
    )
    return RAN in bench.run(node("codex"), "exec", "--skip-git-repo-check", "run a command")


def opencode(bench: Bench) -> bool:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": bench.url, "apiKey": "none"},
        "models": {"any": {"name": "any"}},
    }
    config = {"provider": {"speq": provider}, "model": "speq/any"}
    folder = bench.folder / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(config))
    return RAN in bench.run(node("opencode"), "run", "run a command")


def llm(bench: Bench) -> bool:
    folder = bench.folder / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True)
    (folder / "extra-openai-models.yaml").write_text(
        f"- {{model_id: speq, model_name: any, api_base: '{bench.url}', supports_schema: true, "
        "supports_tools: true}\n"
    )
    program = BUILT / "llm" / "bin" / "llm"
    formed = json.loads(bench.run(program, "-m", "speq", "--schema", "name, age int", "hi"))
    called = bench.run(program, "-m", "speq", "-T", "llm_version", "hi")
    said = SAID in bench.run(program, "-m", "speq", "hi")
    return said and set(formed) == {"name", "age"} and "It says: 0." in called


def aider(bench: Bench) -> bool:
    program = BUILT / "aider" / "bin" / "aider"
    quiet = ("--no-git", "--yes", "--no-show-model-warnings", "--no-check-update")
    asked = (program, "--model", "openai/any", *quiet, "--message", "hi")
    return SAID in bench.run(*asked, OPENAI_API_BASE=bench.url)


def lm_eval(bench: Bench) -> bool:
    """Odds of answers, asked for in prompts of several at a time."""
    pairs = bench.folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(each) + "\n" for each in PAIRS))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(pairs)}}}
    (bench.folder / "pairs.yaml").write_text(json.dumps(task))  # which is YAML as well
    served = {
        "base_url": f"{bench.url}/completions",
        "model": "any",
        "tokenizer": str(ROOT / "models" / "tiny-moe"),
    }
    given = ",".join(f"{name}={value}" for name, value in served.items())
    program = BUILT / "lm_eval" / "bin" / "lm_eval"
    asked = ("--model", "local-completions", "--batch_size", "2", "--model_args", given)
    told = bench.run(program, *asked, "--include_path", bench.folder, "--tasks", "pairs")
    values = [row.split("|")[7] for row in told.splitlines() if row.startswith("|pairs")]
    return [float(value) for value in values] == [1.0]


def litellm_proxy(bench: Bench) -> bool:
    """A proxy between an Anthropic client, or OpenAI's, and our server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = BUILT / "litellm_proxy" / "bin" / "litellm"
    unkept = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    given = dict(os.environ) | {"HOME": str(bench.folder), "OPENAI_API_KEY": "none"} | unkept
    asked = (program, "--model", "openai/any", "--api_base", bench.url, "--port", str(port))
    proxy = subprocess.Popen(asked, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        root = f"http://127.0.0.1:{port}"
        wait_for(f"{root}/health/liveliness")
        body = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
        told = [post(f"{root}/v1/{route}", body) for route in ("chat/completions", "messages")]
    finally:
        proxy.terminate()
        proxy.wait()
    return all(SAID in each for each in told)


def guidellm(bench: Bench) -> bool:
    """A benchmark of three requests, none of which fails."""
    told = bench.folder / "told.json"
    settings = {
        "backend": f"kind=openai_http,target={bench.root},model=any",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=3",
        "tokenizer": f"kind=hf_auto,model={ROOT / 'models' / 'tiny-moe'}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={told}",
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    bench.run(BUILT / "guidellm" / "bin" / "guidellm", "run", *given, "--disable-console")
    (measured,) = json.loads(told.read_text())["benchmarks"]
    counts = measured["metrics"]["request_totals"]
    return bool(counts["successful"] == 3 and not counts["errored"])


def wait_for(url: str) -> None:
    """Raises TimeoutExpired where nothing answers in time."""
    for _ in range(SECONDS):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise subprocess.TimeoutExpired(url, SECONDS)


def post(url: str, body: dict[str, Any]) -> str:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        told: str = answer.read().decode()
    return told


# The tool that the server's model calls, for programs that need another than their first.
TOOL = {"claude": "Bash", "opencode": "bash"}
RUNS: dict[str, Callable[[Bench], bool]] = {
    **{"llm": llm, "aider": aider, "lm_eval": lm_eval, "litellm_proxy": litellm_proxy},
    "guidellm": guidellm,
    **{"claude": claude, "codex": codex, "opencode": opencode},
}


def node(name: str) -> Path:
    return BUILT / "node" / "node_modules" / ".bin" / name


def install(name: str, packages: tuple[str, ...]) -> Path:
    """An environment with packages; its Python. It is made once."""
    folder, uv = BUILT / name, BUILT / "uv" / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", BUILT / "uv"], check=True)
        pip = (BUILT / "uv" / "bin" / "pip", "install", "-q", "uv==0.13.9")
        subprocess.run(pip, check=True)
    python = folder / "bin" / "python"
    stamp, wanted = folder / "packages.json", json.dumps(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([uv, "venv", "-q", "--clear", "-p", sys.executable, folder], check=True)
        subprocess.run([uv, "pip", "install", "-q", "-p", python, *packages], check=True)
        stamp.write_text(wanted)
    return python


def install_agents() -> None:
    missing = [package for name, package in AGENTS.items() if not node(name).exists()]
    if missing:
        install_node(BUILT / "node", missing)


def install_node(folder: Path, packages: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder))
    subprocess.run([*command, *packages], check=True, stdout=subprocess.DEVNULL)


def install_node_libraries(packages: Sequence[str]) -> Path:
    """A folder with packages; the script of tests/clients within it, which finds them there."""
    folder = BUILT / "node-libraries"
    if not (folder / "node_modules").exists():
        install_node(folder, packages)
    script = folder / "libraries.mjs"
    shutil.copyfile(ROOT / "tests" / "clients" / script.name, script)
    return script


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """The URL that a server prints, which runs within the block."""
    server = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if server.stdout is None or not (url := server.stdout.readline().strip()):
            raise SystemExit(f"{' '.join(command)} did not start")
        yield url
    finally:
        server.terminate()
        server.wait()


def outcomes(wanted: list[str]) -> Iterator[tuple[str, str]]:
    """Names of programs, and what went wrong; nothing where they work."""
    for name, (packages, cells) in LIBRARIES.items():
        asked = [cell for cell in cells if not wanted or cell in wanted]
        if asked:
            script = ROOT / "tests" / "clients" / "libraries.py"
            yield from of_libraries((install(name, packages), script), asked)
    for name, packages in PROGRAMS.items():
        if not wanted or name in wanted:
            install(name, packages)
            yield name, failure_of(name)
    agents = [name for name in AGENTS if not wanted or name in wanted]
    of_node, known = NODE_LIBRARIES
    scripted = [cell for cell in known if not wanted or cell in wanted]
    if (agents or scripted) and shutil.which("npm") is None:
        yield ", ".join([*scripted, *agents]), "npm is not installed"
        return
    if scripted:
        yield from of_libraries(("node", install_node_libraries(of_node)), scripted)
    if agents:
        install_agents()
    for name in agents:
        yield name, failure_of(name)


def of_libraries(
    command: tuple[str | Path, ...], cells: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """command: runs cells, given the server's URL and their names"""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("tests.clients.served_agent", folder) as url,
    ):
        told = Bench(url, Path(folder)).run(*command, url, *cells)
    found: Mapping[str, str] = {
        line.split()[1].rstrip(":"): line for line in told.splitlines() if line[:6] in STATES
    }
    for name in cells:
        line = found.get(name, "it said nothing")
        yield name, "" if line.startswith("works ") else line


STATES = ("works ", "fails ")


def failure_of(name: str) -> str:
    """What went wrong with a program; nothing where it works."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        tool = (TOOL[name],) if name in TOOL else ()
        server = ("tests.clients.served_agent", folder, *tool)
        if name in ("lm_eval", "guidellm"):
            options = "--memory-budget 80MiB --dtype float32 --context-length 512 --port 0"
            server = ("speq", "serve", "models/tiny-moe", *options.split())
        with serving(*server) as url:
            try:
                return "" if RUNS[name](Bench(url, home)) else "its answer is not what was said"
            except subprocess.CalledProcessError as error:
                return f"it ended with {error.returncode}: {(error.output or '')[-400:]}"
            except subprocess.TimeoutExpired:
                return f"it took more than {SECONDS} s"


def main() -> None:
    failed = 0
    for name, wrong in outcomes(sys.argv[1:]):
        print(f"{'fails' if wrong else 'works'}  {name}{'  ' if wrong else ''}{wrong}", flush=True)
        failed += bool(wrong)
    sys.exit(f"{failed} do not work" if failed else 0)


if __name__ == "__main__":
    main()
