"""What the live page and the server need beside speq's own dependencies."""

import importlib.util

from speq.errors import DependencyError

SERVE = ("fastapi", "uvicorn", "prometheus_client")


def check_serve(names: tuple[str, ...] = SERVE) -> None:
    """Raise SpeqError where packages of the extra `serve` are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"pages and answers are served by {', '.join(missing)}, not installed here; "
            f"pip install {' '.join(missing).replace('_', '-')}"
        )
