"""`python -m speq` and the command `speq`."""

import sys


def main() -> None:
    """Run the command line. An interrupt while it is imported ends it as one later on does."""
    try:
        from speq.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
