"""The `speq` command: what goes to stdout, what to stderr, and how it ends."""

import errno
import io
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

import speq
from speq.config import SamplingParams
from speq.control_groups import processors
from speq.errors import Broken
from speq.generator import Generator
from speq.models.moe_model import MoEModel
from speq.models.opened import open_model
from tests.helpers.command import PATIENCE_S, Command, Ended, arguments_of
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import drawn_tokens, greedy_tokens, load_plain, write_model

Folder = Callable[[str], Path]

PROMPT = "Once upon a time there was a little dog named"
MEASURED = {
    "new_tokens",
    "ttft_ms",
    "tpot_ms",
    "draft_length_mean",
    "accept_length_mean",
    "acceptance_rate",
    "route_recall",
    "hit_rate",
    "moved_bytes",
    "moved_bytes_per_token",
    "rejected_bytes",
    "used",
    "wasted",
    "layers",
    "link_s",
    "hidden_share",
    "late_s",
    "stall_s",
    "draft_s",
    "verify_s",
    "transfer_s",
    "memory",
}


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        arguments_of(*arguments),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """Tests run in the background of a script inherit that interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Oracle:
    """What plain transformers makes of a prompt on the bundled model, in float32."""

    model: Any
    tokenizer: Any

    def tokens(self, text: str, count: int) -> list[int]:
        return greedy_tokens(self.model, self.tokenizer(text)["input_ids"], count)

    def text(self, text: str, count: int) -> str:
        return str(self.tokenizer.decode(self.tokens(text, count), skip_special_tokens=True))


def ids_of(model: Path, text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(model)(text)["input_ids"])


@pytest.fixture(scope="module")
def oracle(bundled: Path) -> Oracle:
    return Oracle(load_plain(bundled), AutoTokenizer.from_pretrained(bundled))


@pytest.fixture
def short_prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n\n{"prompt": "three"}\n')
    return path


def test_version_and_help(command: Command) -> None:
    shown = command("--version")
    assert shown.code == 0
    assert shown.out.startswith(f"speq {speq.__version__} (Python {platform.python_version()}, ")
    assert f"torch {torch.__version__}, transformers {transformers.__version__};" in shown.out
    assert speq.__version__ == (ROOT / "speq" / "VERSION").read_text().strip()
    for option in ("--help", "-h"):
        shown = command(option)
        assert shown.code == 0
        for name in ("generate", "chat", "prove", "bench"):
            assert f" {name} " in shown.out
    shown = command("generate", "--help")
    assert shown.code == 0
    for option in ("--memory-budget", "--draft-length", "--temperature", "--json"):
        assert option in shown.out


def panels_of(help_text: str) -> dict[str, list[str]]:
    """The headings of a help page in their order, and the first word of each entry below."""
    found: dict[str, list[str]] = {}
    for line in help_text.splitlines():
        if line.startswith("╭"):
            entries = found[line.strip("╭─╮ ")] = []
        elif line.startswith("│ ") and line[2] != " ":
            entries.append(line[2:].split()[0])
    return found


def test_help_is_in_groups(command: Command) -> None:
    commands = panels_of(command("--help").out)
    assert [*commands][1:3] == ["Begin", "Generate text"]
    assert commands["Begin"] == ["demo", "plan", "doctor"]
    assert {"bench", "tune"} <= set(commands["Measure"])
    assert "Commands" not in commands  # none without a heading
    options = panels_of(command("generate", "--help").out)
    assert [*options][:5] == ["Arguments", "Options", "Sampling", "Memory", "Output"]
    assert options["Options"][0] == "--prompt"
    assert options["Memory"] == ["--memory-budget", "--host-budget", "--context-length"]
    assert {"--temperature", "--top-p", "--stop"} <= set(options["Sampling"])
    assert options["Not exact"] == ["--expert-budget"]
    # Switches take no value.
    assert not re.search(r"--(quiet|echo|stats) +<", command("generate", "--help").out)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("chta", "did you mean chat?"),
        ("gen", "did you mean generate?"),
        ("list", "`speq cache list` shows"),
        ("pull", "is given a hub id downloads the model"),
        ("xyzzy", "--help lists the commands"),
        ("", "--help lists the commands"),
    ],
)
def test_a_wrong_command_is_told_the_right_one(command: Command, given: str, hint: str) -> None:
    ended = command(given, "x")
    assert ended.code == 2
    said = " ".join(ended.err.replace("│", " ").split())
    assert f"there is no command '{given}'; " in said
    assert hint in said


def generate_arguments(bundled: Path, *more: object) -> list[object]:
    options = ["--memory-budget", "40MiB", "--dtype", "float32", "--max-new-tokens", 16]
    return ["generate", "--model", bundled, "--prompt", PROMPT, *options, "--ignore-eos", *more]


def test_generate_prints_one_json_object(command: Command, bundled: Path, oracle: Oracle) -> None:
    # A fixed length: on a busy machine `auto` may find that drafts do not pay.
    ended = command(*generate_arguments(bundled, "--json", "-", "--draft-length", 4))
    assert ended.code == 0
    assert ended.out.count("\n") == 1
    answer = json.loads(ended.out)
    assert set(answer) == {"text", "token_ids", "finish_reason", "stats", "seed"}
    assert answer["token_ids"] == oracle.tokens(PROMPT, 16)
    assert answer["text"] == oracle.text(PROMPT, 16)
    assert answer["finish_reason"] == "length"
    stats = answer["stats"]
    assert set(stats) >= MEASURED
    assert stats["new_tokens"] == 16
    assert stats["draft_length_mean"] > 1
    assert 1 <= stats["accept_length_mean"] <= 1 + stats["draft_length_mean"]
    for name in ("acceptance_rate", "route_recall", "hit_rate"):
        assert 0 < stats[name] <= 1
    for name in ("ttft_ms", "tpot_ms", "draft_s", "verify_s"):
        assert stats[name] > 0
    # The first token comes from the prompt, not from decoding.
    assert stats["moved_bytes_per_token"] == pytest.approx(stats["moved_bytes"] / 15)
    # Fetched on demand and read one beside the other, in whole blocks.
    assert stats["transfer_s"] > 0
    assert stats["stall_s"] >= 0
    assert stats["read_bytes"] >= stats["moved_bytes"]
    memory = stats["memory"]
    assert memory.pop("budget") == 40 << 20
    assert set(memory) >= {"non_expert_weights", "draft", "kv_cache", "workspace", "slots"}
    assert all(isinstance(size, int) and size >= 0 for size in memory.values())
    assert memory["draft"] > 0 < memory["slots"]
    assert sum(memory.values()) == 40 << 20


def test_generate_prints_the_text_alone(command: Command, bundled: Path, oracle: Oracle) -> None:
    ended = command(*generate_arguments(bundled))
    assert ended.code == 0
    assert ended.out == f"{oracle.text(PROMPT, 16)}\n"
    for title in ("time per output token", "acceptance rate", "expert hit rate", "memory budget"):
        assert title in ended.err
    assert "40 MiB" in ended.err


def test_generate_echoes_the_prompt_where_asked_and_is_quiet(
    command: Command, bundled: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*args: Any, **kwargs: Any) -> Any:
        logging.getLogger("speq").info("something")
        logging.getLogger("speq").error("something worse")
        return load(*args, **kwargs)

    load = Generator.load
    monkeypatch.setattr(Generator, "load", told)
    written = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("speq").addHandler(handler)
    try:
        loud = command(*generate_arguments(bundled))
        quiet = command(*generate_arguments(bundled, "--echo", "--quiet"))
    finally:
        logging.getLogger("speq").removeHandler(handler)
    assert "time per output token" in loud.err
    assert (quiet.code, quiet.out) == (0, f"{PROMPT}{oracle.text(PROMPT, 16)}\n")
    assert "│" not in quiet.err
    assert written.count("something") == 1
    assert written.count("something worse") == 2


@pytest.mark.parametrize("source", ["file", "stdin"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_generate_reads_prompts_of_any_length(
    source: str, end: str, command: Command, tiny: Folder, tmp_path: Path
) -> None:
    """Longer than an argument may be; the last line end is no part of it."""
    model = tiny("qwen2_moe")
    text, file = "é\n" * 70_000, tmp_path / "prompt.txt"
    file.write_bytes((text + end).encode())
    given = ("--prompt-file", file) if source == "file" else ("--prompt", "-")
    ended = command(
        "generate", "--model", model, "--memory-budget", "2MiB", *given, stdin=text + end
    )
    tokens = 3 * 70_000 - (0 if end else 1) + 128
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"error: the prompt and max_new_tokens need a context of {tokens} tokens and the model's "
        "limit is 512; shorten one of them\n"
    )


def test_generate_takes_a_prompt_from_a_file_or_standard_input(
    command: Command, tiny: Folder, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    model = tiny("qwen2_moe")
    rest = ("--memory-budget", "2MiB", "--max-new-tokens", 6, "--json", "-")
    ids = []
    for given in (("--prompt", "hello"), ("--prompt-file", file), ("--prompt", "-")):
        ended = command("generate", "--model", model, *given, *rest, stdin="hello\n")
        ids.append(json.loads(ended.out)["token_ids"])
    assert ids == [greedy_tokens(load_plain(model), ids_of(model, "hello"), 6)] * 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((), "give one of --prompt and --prompt-file; neither was given"),
        (("--prompt", "a", "--prompt-file", "b"), "give one of --prompt and --prompt-file; both"),
        (("--prompt-file", "{tmp}/none"), "none cannot be read: No such file or directory; give"),
        (("--prompt-file", "{tmp}"), "a folder; give a text file"),
        (("--prompt-file", "{tmp}/latin"), "latin is not in UTF-8 (byte 1); convert it"),
        (("--prompt-file", "{tmp}/empty"), "the prompt is empty; give at least one token"),
        (("--prompt", "-"), "the prompt is empty; give at least one token"),
        (("--prompt", ""), "the prompt is empty; give at least one token"),
        (("--prompt", "a" * 500), "need a context of 628 tokens and the model's limit is 512"),
    ],
)
def test_prompts_are_refused_before_a_model_is_loaded(
    given: tuple[str, ...],
    sentence: str,
    command: Command,
    tiny: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a budget that holds no model at all, which is not what is blamed."""
    monkeypatch.setattr("speq.models.moe_model.load", None)
    (tmp_path / "latin").write_bytes(b"a\xff")
    (tmp_path / "empty").write_bytes(b"\n")
    arguments = [part.replace("{tmp}", str(tmp_path)) for part in given]
    ended = command("generate", "--model", tiny("qwen2_moe"), "--memory-budget", "1KiB", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert sentence in ended.err
    assert ended.err.count("\n") == 1


def test_generate_penalises_and_leaves_out_the_unlikely(command: Command, tiny: Folder) -> None:
    """Options of the command line as those of the library."""
    model = tiny("qwen2_moe")
    options = {
        "temperature": 0.9,
        "top_k": 50,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
        "seed": 3,
    }
    given = [
        part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    ended = command(
        "generate", "--model", model, "--prompt", "hello", "--memory-budget", "2MiB",
        "--max-new-tokens", 12, "--ignore-eos", "--json", "-", *given,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    wanted = drawn_tokens(load_plain(model), ids_of(model, "hello"), 12, SamplingParams(**options))
    assert json.loads(ended.out)["token_ids"] == wanted


def test_generate_samples_as_the_model_says(command: Command, tiny: Folder, tmp_path: Path) -> None:
    """Its own options stand for those that are not given, and the seed is told."""
    model = tmp_path / "model"
    shutil.copytree(tiny("qwen2_moe"), model)
    own = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9}
    (model / "generation_config.json").write_text(json.dumps(own))
    given = (
        "generate", "--model", model, "--prompt", "hello", "--memory-budget", "2MiB",
        "--max-new-tokens", 12, "--ignore-eos",
    )  # fmt: skip
    prompt, plain = ids_of(model, "hello"), load_plain(model)
    first = json.loads(command(*given, "--json", "-").out)
    options = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": first["seed"]}
    assert first["token_ids"] == drawn_tokens(plain, prompt, 12, SamplingParams(**options))
    shown = command(*given, "--seed", first["seed"], "--top-p", 1)
    assert f"sampled at temperature 0.7, top-k 30, seed {first['seed']}" in shown.err
    greedy = json.loads(command(*given, "--temperature", 0, "--json", "-").out)
    assert greedy["token_ids"] == greedy_tokens(plain, prompt, 12)
    assert greedy["seed"] is None


def test_generate_stops_before_a_stop_string(
    command: Command, bundled: Path, oracle: Oracle
) -> None:
    text = oracle.text(PROMPT, 16)
    stop = text.split()[4]
    ended = command(*generate_arguments(bundled, "--stop", "@@", "--stop", stop))
    assert ended.code == 0
    assert ended.out == f"{text[: text.index(stop)]}\n"


def test_generate_samples_by_seed(command: Command, bundled: Path) -> None:
    options = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--seed")
    first, again, other = (
        command(*generate_arguments(bundled, *options, seed)).out for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and signals as POSIX has them")
@pytest.mark.wide
def test_generate_ends_when_nobody_reads_on(tiny: Folder) -> None:
    process = start(
        "generate", "--model", tiny("qwen2_moe"), "--prompt", "hello", "--memory-budget", "2MiB",
        "--max-new-tokens", 500, "--ignore-eos", "--echo",
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"h"
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(PATIENCE_S) == 1
    assert b"Traceback" not in err


@pytest.mark.wide
@pytest.mark.skipif(os.name != "posix", reason="needs pipes and signals as POSIX has them")
def test_generate_ends_at_an_interrupt(bundled: Path) -> None:
    """In a run of many seconds: a machine that is busy may deliver the signal late."""
    process = start(
        "generate", "--model", bundled, "--prompt", "hello", "--memory-budget", "48MiB",
        "--max-new-tokens", 2000, "--ignore-eos", "--echo",
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1) == b"h"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out.startswith(b"ello")
    assert b"Traceback" not in err


def test_a_fault_of_our_own_is_a_sentence(
    command: Command, tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise Broken("settled tokens were given up")

    monkeypatch.setattr(MoEModel, "prefill", broken)
    ended = command("generate", tiny("olmoe"), "--memory-budget", "32MiB", "--prompt", "a")
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == (
        "error: settled tokens were given up; this is a fault of speq: please report it, with the "
        "command"
    )


def test_generate_writes_nothing_before_a_refusal(command: Command, tiny: Folder) -> None:
    ended = command(
        "generate", "--model", tiny("qwen2_moe"), "--prompt", "hello", "--memory-budget", "2MiB",
        "--max-new-tokens", 508,
    )  # fmt: skip
    assert (ended.code, ended.out) == (1, "")
    assert "error: the prompt and max_new_tokens need a context of 513 tokens" in ended.err


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_a_full_disk_behind_stdout(
    name: str, command: Command, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks the loop over a stream must not leave the generator waiting for it."""

    class Full(io.StringIO):
        def flush(self) -> None:
            if self.getvalue():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    given = chat_arguments(bundled) if name == "chat" else generate_arguments(bundled)
    finished: list[Ended] = []
    thread = threading.Thread(
        target=lambda: finished.append(command(*given, stdin=f"{FIRST}\n")), daemon=True
    )
    thread.start()
    thread.join(PATIENCE_S)
    (ended,) = finished
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("error: input or output failed: ")
    assert "No space left on device" in ended.err


# Chat.

FIRST, SECOND = "Name a tree.", "And a bird?"


def chat_arguments(bundled: Path) -> list[object]:
    options = ["--dtype", "float32", "--max-new-tokens", 12, "--stop", "###"]
    return ["chat", "--model", bundled, "--memory-budget", "40MiB", *options]


def reply(oracle: Oracle, text: str) -> str:
    return oracle.text(text, 12).split("###")[0]


@pytest.mark.wide
def test_chat_ends_with_its_input(bundled: Path, oracle: Oracle) -> None:
    first_prompt = f"### Instruction: {FIRST}\n### Response:"
    first = reply(oracle, first_prompt)
    second_prompt = f"{first_prompt} {first.strip()}\n\n### Instruction: {SECOND}\n### Response:"
    second = reply(oracle, second_prompt)
    ended = subprocess.run(
        arguments_of(*chat_arguments(bundled)),
        cwd=ROOT,
        input=f"{FIRST}\n\n{SECOND}\n".encode(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.decode() == f"{first}\n{second}\n"
    opening, sampling, commands, *figures = ended.stderr.decode().splitlines()[-5:]
    assert opening == f"{bundled} within 40 MiB, context 2048 tokens"
    assert sampling == "greedy"
    assert commands == "/help lists commands; Ctrl-C ends an answer; Ctrl-D or /quit leaves"
    assert all(re.match(r"\[\d+ tokens, [\d.]+ ms each", line) for line in figures)
    assert b"Traceback" not in ended.stderr


def test_chat_begins_with_a_system_message_and_ends_at_quit(
    command: Command, bundled: Path, oracle: Oracle
) -> None:
    arguments = [*chat_arguments(bundled), "--system", "Be brief."]
    ended = command(*arguments, stdin=f"{FIRST}\n/quit\n{SECOND}\n")
    wanted = reply(oracle, f"Be brief.\n\n### Instruction: {FIRST}\n### Response:")
    assert (ended.code, ended.out) == (0, f"{wanted}\n")


def test_chat_goes_on_after_an_interrupted_answer(
    command: Command, bundled: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model(bundled).close()  # whose layers are compared with transformers' the first time
    forward, passes = MoEModel.forward, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        if len(passes) == 2:  # the first answer's second pass: one token is out
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(MoEModel, "forward", interrupted)
    # One way to hold the experts, so that no pass of a layer is timed before.
    arguments = [*chat_arguments(bundled), "--codec", "raw", "--draft", "none"]
    ended = command(*arguments, stdin=f"{FIRST}\n{SECOND}\n")
    prompt = f"### Instruction: {FIRST}\n### Response:"
    begun = oracle.text(prompt, 1)
    prompt += f" {begun.strip()}\n\n### Instruction: {SECOND}\n### Response:"
    assert (ended.code, ended.out) == (0, f"{begun}\n{reply(oracle, prompt)}\n")


def test_chat_goes_on_where_a_turn_does_not_fit(
    command: Command, bundled: Path, oracle: Oracle
) -> None:
    """The turn is taken back; what reads the output learns of it by the exit status."""
    arguments = [*chat_arguments(bundled), "--context-length", 48]
    long = "tree " * 60
    ended = command(*arguments, stdin=f"{FIRST}\n{long}\n/new\n{SECOND}\n")
    answers = [reply(oracle, f"### Instruction: {text}\n### Response:") for text in (FIRST, SECOND)]
    assert (ended.code, ended.out) == (1, f"{answers[0]}\n{answers[1]}\n")
    assert re.search(
        r"error: the conversation takes \d+ tokens and the model's context has 48\. The question "
        r"was taken back; /drop forgets the oldest one, /new begins anew\n",
        ended.err,
    )


def test_chat_goes_on_where_the_budget_does_not_suffice(command: Command, tmp_path: Path) -> None:
    """The model's context is long enough, and the budget is not."""
    model = write_model(tmp_path / "long", "qwen2_moe", max_position_embeddings=32_768)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    tokenizer.save_pretrained(model)
    ended = command(
        "chat", "--model", model, "--memory-budget", "3MiB", "--max-new-tokens", 4,
        "--dtype", "float32", stdin=f"one\n{'two ' * 5000}\nthree\n/save {tmp_path}/said.json\n",
    )  # fmt: skip
    assert ended.code == 1
    assert ended.err.count("error: ") == 1
    assert "budget" in ended.err.partition("error: ")[2].partition("The question was taken back")[0]
    said = json.loads((tmp_path / "said.json").read_text())
    assert [message["content"] for message in said[::2]] == ["one", "three"]
    ids = ids_of(model, f"one.{said[1]['content']}.three.")
    assert said[3]["content"] == tokenizer.decode(greedy_tokens(load_plain(model), ids, 4))


def test_chat_input_that_is_no_text(command: Command, bundled: Path, oracle: Oracle) -> None:
    ended = command(*chat_arguments(bundled), stdin=f"tree\udcff\n{FIRST}\n")
    answer = reply(oracle, f"### Instruction: {FIRST}\n### Response:")
    assert (ended.code, ended.out) == (1, f"{answer}\n")
    assert "which is not Unicode text" in ended.err


def test_chat_needs_a_template(command: Command, tiny: Folder) -> None:
    """Said before it is loaded, and before a budget that holds no model at all is blamed."""
    model = tiny("qwen2_moe")
    ended = command("chat", "--model", model, "--memory-budget", "1KiB", stdin="hello\n")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: the model has no chat template; give the prompt as text\n"


# Measurements.


def test_bench_tpot_writes_its_results(
    command: Command, tiny: Folder, tmp_path: Path, short_prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = tmp_path / "results" / "tpot.json"
    arguments = [
        "bench", "tpot", tiny("qwen2_moe"), "--budgets", "1000KiB, 2MiB", "--draft-lengths", "0,2",
        "--prompts", short_prompts, "--num-prompts", 2, "--max-new-tokens", 4, "--rounds", 2,
        "--json", target,
    ]  # fmt: skip
    ended = command(*arguments)
    assert ended.code == 0, ended.err
    for title in ("budget", "TPOT ms", "accepted", "moved/token"):
        assert title in ended.out
    report = json.loads(target.read_text())
    assert set(report) == {
        *("bench", "version", "commit", "machine", "model", "settings", "rows"),
        *("pictures", "notes"),
    }
    assert (report["bench"], report["version"]) == ("tpot", speq.__version__)
    assert report["model"] == str(tiny("qwen2_moe"))
    assert report["settings"]["rounds"] == 2
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["cores"] == processors()
    settings = [(row["budget"], row["draft_length"]) for row in report["rows"]]
    assert settings == [("1000KiB", "0"), ("1000KiB", "2"), ("2MiB", "0"), ("2MiB", "2")]
    for row in report["rows"]:
        assert row["budget_bytes"] == {"1000KiB": 1000 << 10, "2MiB": 2 << 20}[row["budget"]]
        assert row["samples"] == 4
        assert row["tpot_ms"] > 0
        assert (row["draft_bytes"] > 0) == (row["draft_length"] == "2")
        assert (row["acceptance_rate"] is None) == (row["draft_length"] == "0")
    scarce, all_fits = report["rows"][0], report["rows"][2]
    assert scarce["moved_bytes_per_token"] > all_fits["moved_bytes_per_token"]
    assert [path.name for path in target.parent.iterdir()] == ["tpot.json"]

    # Refused before anything is measured.
    measured: list[object] = []
    monkeypatch.setattr(Generator, "from_pretrained", lambda *args, **kwargs: measured.append(args))
    before = target.read_bytes()
    ended = command(*arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {target} exists already; choose another name or add --force\n"
    assert (target.read_bytes(), measured) == (before, [])


def test_force_replaces_results(
    command: Command, tiny: Folder, tmp_path: Path, short_prompts: Path
) -> None:
    target = tmp_path / "tpot.json"
    target.write_text("old")
    ended = command(
        "bench", "tpot", tiny("qwen2_moe"), "--budgets", "2MiB", "--draft-lengths", "0",
        "--prompts", short_prompts, "--num-prompts", 1, "--max-new-tokens", 2, "--rounds", 1,
        "--json", target, "--force",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert json.loads(target.read_text())["bench"] == "tpot"


def test_figures_that_do_not_exist_are_dashes(command: Command, tiny: Folder) -> None:
    """A single token has no time between tokens."""
    ended = command(
        "generate", "--model", tiny("qwen2_moe"), "--prompt", "hello", "--memory-budget", "2MiB",
        "--max-new-tokens", 1,
    )  # fmt: skip
    assert ended.code == 0
    shown = dict(re.findall(r"│ (.+?) +│ (.+?) +│", ended.err))
    assert shown["tokens"] == "1"
    for title in ("time per output token (TPOT)", "acceptance rate", "moved per token"):
        assert shown[title] == "-"
    assert shown["time to first token (TTFT)"].endswith(" ms")


def test_generate_shows_layers_and_writes_a_timeline(
    command: Command, tiny: Folder, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "trace.json"
    arguments: list[object] = [
        "generate", "--model", tiny("qwen3_moe"), "--prompt", "hello", "--memory-budget", "900KiB",
        "--context-length", 64, "--max-new-tokens", 12, "--ignore-eos", "--draft-length", 4,
        "--cache-policy", "lookahead", "--prefetch", "three-phase", "--trace", target,
    ]  # fmt: skip
    ended = command(*arguments, "--stats", "--json", "-")
    assert ended.code == 0, ended.err
    stats = json.loads(ended.out)["stats"]
    assert len(stats["layers"]) == 3
    # A line for each layer and one for all, with the figures of --json.
    rows = [line.split() for line in ended.err.splitlines() if re.match(r" *(\d+|all) +\d", line)]
    assert [row[0] for row in rows] == ["0", "1", "2", "all"]
    for row, layer in zip(rows, stats["layers"], strict=False):
        assert [int(row[1]), int(row[2]), int(row[3])] == [
            layer["requests"], layer["hits"], layer["late"],
        ]  # fmt: skip
        assert row[4] == f"{layer['demand_bytes'] / (1 << 20):.1f}"
        assert row[5] == f"{layer['ahead_bytes'] / (1 << 20):.1f}"
        assert row[6:8] == [str(layer["used"]), str(layer["wasted"])]
    for column, name in ((1, "requests"), (2, "hits"), (3, "late")):
        assert int(rows[3][column]) == sum(layer[name] for layer in stats["layers"])
    hidden = f"{stats['hidden_share']:.1%} of it behind computation"
    assert f"under way for {stats['link_s']:.2f} s, {hidden}" in " ".join(ended.err.split())
    events = json.loads(target.read_text())["traceEvents"]
    assert sum(event["name"].startswith("decode ") for event in events) == stats["steps"]

    # It is not replaced unasked, and that is said before a model is loaded.
    before = target.read_bytes()
    ended = command(*arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {target} exists already; choose another name or add --force\n"
    assert target.read_bytes() == before
    ended = command(*arguments, "--force")
    assert ended.code == 0, ended.err
    assert target.read_bytes() != before
    assert [path.name for path in target.parent.iterdir()] == ["trace.json"]


def test_a_timeline_that_cannot_be_written(command: Command, tiny: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # No rights tell of a folder of the kernel's own that no file can be made in it.
    for target in (tmp_path, tmp_path / "file" / "trace.json", Path("/proc/trace.json")):
        ended = command(
            "generate", "--model", tiny("qwen3_moe"), "--prompt", "hello", "--memory-budget",
            "2MiB", "--trace", target,
        )  # fmt: skip
        assert (ended.code, ended.out) == (1, "")
        assert (
            ended.err == f"error: {target} cannot be written; choose a file in a folder of yours\n"
        )


def test_an_unknown_option_is_a_usage_error(command: Command) -> None:
    for arguments in (["generate", "--nope"], ["--nope"], ["nope"], ["bench", "nope"]):
        ended = command(*arguments)
        assert (ended.code, ended.out) == (2, "")
        assert "nope" in ended.err
        assert "Traceback" not in ended.err


INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "speq.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from speq.__main__ import main
main()
"""


def test_an_interrupt_while_the_command_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
