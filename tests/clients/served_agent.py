"""A server whose model is `AgentEngine`, for programs that know nothing of Python.

    python -m tests.clients.served_agent FOLDER [TOOL]

It prints its URL, and ends where its standard input does. TOOL: what it calls, of several.
"""

import sys
from pathlib import Path

from tests.helpers.agent_engine import TEMPLATE, AgentEngine
from tests.helpers.api_server import api_server
from tests.helpers.scripted_engine import pieces, with_template

# Agents begin with 20,000 tokens, and more by this tokenizer.
CONTEXT = 1 << 18


def main() -> None:
    model = with_template(Path(sys.argv[1]) / "model", TEMPLATE, CONTEXT)
    wanted = sys.argv[2] if len(sys.argv) > 2 else None
    engine = AgentEngine(pieces("a"), wanted=wanted, model=model)
    with api_server(engine, model, max_body=64 << 20) as rig:
        print(rig.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
