"""Run by a test in a process of its own: generate, then print the peak resident set in bytes."""

import re
import sys
from pathlib import Path

from speq import Generator


def main() -> None:
    model, budget, draft_length, dtype, prompts = sys.argv[1:]
    generator = Generator.from_pretrained(
        model, budget, dtype=dtype, draft_length=int(draft_length)
    )
    for tokens in map(int, prompts.split(",")):
        prompt = [(17 * i) % 250 for i in range(tokens)]
        generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
    items = generator.runtime.plan.items
    # Not getrusage: its peak is that of the process this one was forked from, if that was larger.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(int(peak[1]) * 1024, items["slots"], items["draft"])


main()
