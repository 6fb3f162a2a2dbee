"""`python -m speq` is the `speq` command."""

from speq.cli import main

main()
