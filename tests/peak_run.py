"""Run by a test in a process of its own: generate, then print the peak resident set in bytes."""

import resource
import sys

from speq import Generator


def main() -> None:
    model, budget, draft_length, prompt_tokens, new_tokens = sys.argv[1:]
    generator = Generator.from_pretrained(model, budget, draft_length=int(draft_length))
    prompt = [(17 * i) % 250 for i in range(int(prompt_tokens))]
    generator.generate(prompt, max_new_tokens=int(new_tokens), ignore_eos=True)
    items = generator.runtime.plan.items
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(peak, items["slots"], items["draft"])


main()
