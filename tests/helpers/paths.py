"""Where the checkout keeps its sources, its bundled model, and the tests' own data."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Folders by the name their modules are installed under.
FOLDERS = {
    "speq": ROOT / "speq",
    "speq.scheduler": ROOT / "scheduler",
    "speq.governor": ROOT / "governor",
    "speq.bench": ROOT / "bench",
    "bench.lab": ROOT / "bench" / "lab",
}
BUNDLED = ROOT / "models" / "tiny-moe"
DATA = ROOT / "tests" / "data"
# Routes recorded on the bundled model; `tests/data/README.md` says how.
ROUTES = DATA / "routes-tiny-moe.json"
