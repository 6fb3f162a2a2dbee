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
# Metadata of published models lies here where whoever runs the tests has it: beside the checkout,
# or beside the folder of its worktrees.
BESIDE = [above / "shared" / "data" / "published" for above in (ROOT.parent, ROOT.parent.parent)]
METADATA = next((each for each in BESIDE if each.is_dir()), BESIDE[0])
# Routes recorded on the bundled model; `tests/data/README.md` says how.
ROUTES = DATA / "routes-tiny-moe.json"
