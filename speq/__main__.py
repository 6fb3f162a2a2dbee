"""`python -m speq` and the command `speq`."""

import gc
import sys


def main() -> None:
    """Run the command line. An interrupt while it is imported ends it as one later on does."""
    # Torch and transformers are 400,000 objects that stay: six collections would look through all
    # there are while they are imported, which takes half a second.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    try:
        from speq.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
