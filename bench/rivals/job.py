"""What a system's process is asked to do: one JSON object on its standard input."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# time: generate, and tell when each token came. tokens: generate, untimed, for comparison.
# choices: run each text whole, and tell the likeliest token behind each of its last tokens.
Task = Literal["time", "tokens", "choices"]


@dataclass(frozen=True, slots=True)
class RivalJob:
    """system: its name; model: the folder as published; all texts are token ids.

    stores        the model packed, by codec
    scratch       a folder for files a system makes of the model; they stay for its next process
    memory_bytes  for weights, caches and activations; beside it a process has room for its code
    dtype         what is computed in: "auto", or "float32" to compare tokens
    options       of the run, for those of speq's
    threads       that compute
    temperature   texts are drawn at this temperature where a system draws; 0: greedy
    continuations the tokens that follow each prompt: of the task `choices` only
    finish_copy   wait, before the texts, until a published model's packed copy is whole
    text_s        a text ends after so long, once `least_tokens` are out
    """

    task: Task
    system: str
    model: str
    memory_bytes: int
    prompts: list[list[int]]
    max_new_tokens: int
    stores: dict[str, str] = field(default_factory=dict)
    scratch: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    temperature: float = 0.0
    continuations: list[list[int]] = field(default_factory=list)
    warm_up_tokens: int = 0
    finish_copy: bool = False
    text_s: float = float("inf")
    least_tokens: int = 8

    @property
    def context(self) -> int:
        """Tokens of KV cache in which every text has room."""
        following = max([self.max_new_tokens, *map(len, self.continuations)])
        return max(map(len, self.prompts)) + following

    @property
    def scratch_path(self) -> Path:
        return Path(self.scratch)
