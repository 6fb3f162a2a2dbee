"""What may import what, and what the library never does."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter

import pytest

from tests.helpers.paths import FOLDERS, ROOT

BARE_NAMES = frozenset({"scheduler", "governor", "bench"})
# Benches that are run from a checkout.
LAB = "lab"


@dataclass(frozen=True)
class Layer:
    """Modules (with all below them), the layers they may import, and foreign ones they may not."""

    modules: tuple[str, ...]
    imports: tuple[str, ...]
    never: tuple[str, ...] = ()


LEAVES = (
    "speq.config",
    "speq.control_groups",
    "speq.errors",
    "speq.host_memory",
    "speq.listening",
    "speq.machine",
    "speq.memory_watch",
    "speq.options",
    "speq.registries",
    "speq.routing",
    "speq.stats",
    "speq.units",
    "speq.version",
)
REFERENCES = (
    *("reference", "reference_compact", "reference_decoder", "reference_dense"),
    *("reference_recurrent", "reference_scaled"),
)
BELOW_MODELS = (
    *("leaves", "devices", "reference", "kernels", "files", "experts", "expert counts", "layers"),
)
BELOW_ENGINE = (*BELOW_MODELS, "models", "heads", "scheduler", "governor")
BELOW_LOAD = (*BELOW_ENGINE, "drafts", "engine", "planning costs", "planning")
TABLE = {
    "leaves": Layer(LEAVES, ("leaves",), never=("transformers",)),
    "reference": Layer(
        tuple(f"speq.kernels.{name}" for name in REFERENCES),
        ("leaves", "reference", "kernels"),
        never=("transformers",),
    ),
    "kernels": Layer(
        ("speq.kernels",), ("leaves", "reference", "kernels"), never=("transformers",)
    ),
    "devices": Layer(("speq.devices",), ("leaves", "devices"), never=("transformers",)),
    "files": Layer(("speq.files",), ("leaves", "files"), never=("transformers",)),
    "experts": Layer(
        ("speq.experts",),
        ("leaves", "devices", "kernels", "files", "experts"),
        never=("transformers",),
    ),
    "drafts": Layer(
        ("speq.drafts",),
        ("leaves", "kernels", "files", "experts", "drafts"),
        never=("transformers",),
    ),
    # The one of the layers that lies in a file.
    "expert counts": Layer(
        ("speq.layers.expert_counts",),
        ("leaves", "files", "expert counts"),
        never=("torch", "transformers"),
    ),
    "layers": Layer(
        ("speq.layers",),
        ("leaves", "devices", "kernels", "experts", "expert counts", "layers"),
        never=("transformers",),
    ),
    "models": Layer(("speq.models",), (*BELOW_MODELS, "models")),
    "heads": Layer(("speq.heads",), (*BELOW_MODELS, "models", "heads")),
    "scheduler": Layer(
        ("speq.scheduler",), ("leaves", "devices", "scheduler"), never=("transformers",)
    ),
    "governor": Layer(
        ("speq.governor",), ("leaves", "governor"), never=("torch", "transformers", "numpy")
    ),
    "engine": Layer(("speq.engine",), (*BELOW_ENGINE, "engine")),
    "planning costs": Layer(
        ("speq.planning.cost",),
        ("leaves", "governor", "planning costs"),
        never=("torch", "transformers", "numpy"),
    ),
    "planning": Layer(
        ("speq.planning",),
        (*BELOW_MODELS, "models", "heads", "governor", "drafts", "planning costs", "planning"),
    ),
    "quantizing": Layer(("speq.quantizing",), (*BELOW_MODELS, "models", "drafts", "quantizing")),
    "loading": Layer(("speq.loading",), (*BELOW_LOAD, "loading")),
    "runtime": Layer(
        ("speq.load", "speq.engine_layout", "speq.runtime"), (*BELOW_LOAD, "loading", "runtime")
    ),
    # Options that commands have, which should not wait for torch.
    "stage options": Layer(
        ("speq.pipeline.settings",), ("leaves", "stage options"), never=("torch", "transformers")
    ),
    "pipeline": Layer(("speq.pipeline",), (*BELOW_LOAD, "runtime", "stage options", "pipeline")),
    "conversions": Layer(
        ("speq.quantizing.models",),
        (*BELOW_MODELS, "models", "heads", "drafts", "quantizing", "text"),
    ),
    "text": Layer(("speq.text",), ("leaves", "files", "text")),
    "generator": Layer(
        (
            *("speq.engine.batch", "speq.engine.engine_thread", "speq.engine.token_stream"),
            *("speq.generator", "speq.async_generator"),
        ),
        (
            *("leaves", "devices", "models", "engine", "planning", "runtime"),
            *("stage options", "pipeline", "text", "generator"),
        ),
    ),
    "training": Layer(
        ("speq.training",),
        (*BELOW_LOAD, "runtime", "text", "generator", "training"),
    ),
    "package": Layer(("speq",), ("leaves", "generator", "measure", "conversions", "training")),
    "measure": Layer(
        ("speq.measure",), (*BELOW_LOAD, "runtime", "text", "generator", "package", "measure")
    ),
    "dashboard": Layer(
        ("speq.dashboard",),
        (*BELOW_LOAD, "runtime", "text", "generator", "package", "measure", "dashboard"),
    ),
    "server": Layer(
        ("speq.server",),
        ("leaves", "devices", "files", "text", "engine", "generator", "dashboard", "server"),
    ),
    "offline": Layer(
        ("speq.offline",), ("leaves", "files", "text", "engine", "generator", "server", "offline")
    ),
    "ray options": Layer(
        ("speq.ray.settings",), ("leaves", "ray options"), never=("torch", "transformers")
    ),
    "ray": Layer(
        ("speq.ray",),
        (
            *("leaves", "engine", "generator", "stage options", "pipeline"),
            *("server", "offline", "ray options", "ray"),
        ),
    ),
    "bench": Layer(
        ("speq.bench",),
        (
            *(*BELOW_LOAD, "quantizing", "runtime", "text", "generator", "package", "measure"),
            *("dashboard", "bench"),
        ),
    ),
    LAB: Layer(
        ("bench.lab",),
        (
            *(*BELOW_LOAD, "quantizing", "runtime", "text", "generator", "package", "measure"),
            *("dashboard", "bench", "bench commands", "cli"),
        ),
    ),
    "cli": Layer(
        ("speq.cli", "speq.__main__"),
        (
            *BELOW_LOAD,
            *("runtime", "text", "generator", "package", "quantizing", "conversions", "training"),
            *("measure", "dashboard", "server", "offline", "cli", "bench commands"),
            *("stage options", "pipeline", "ray options", "ray"),
        ),
    ),
    "bench commands": Layer(
        ("speq.cli.bench", "speq.cli.doctor"),
        (
            *("leaves", "devices", "kernels", "measure", "dashboard", "bench", "cli"),
            "bench commands",
        ),
    ),
}
# Modules that even their layer's neighbours leave alone, and the only ones that do not.
OPS = frozenset(
    f"speq.kernels.{name}"
    for name in (
        *("ops", "compact_ops", "decoder_ops", "dense_ops", "scaled_ops"),
        *("records", "checks", "library"),
    )
)
ONLY_BY = {
    "speq.kernels.reference": OPS
    | {f"speq.kernels.reference_{name}" for name in ("compact", "decoder", "dense", "scaled")},
    "speq.kernels.reference_compact": OPS | {"speq.kernels.reference_dense"},
    "speq.kernels.reference_decoder": OPS,
    "speq.kernels.reference_recurrent": OPS,
    "speq.kernels.reference_scaled": OPS,
    "speq.kernels.reference_dense": OPS,
}
# Imports and attributes that execute what they read, or let the environment steer a run.
FORBIDDEN_MODULES = frozenset({"pickle", "cPickle", "dill", "shelve", "marshal", "joblib"})
FORBIDDEN = frozenset(
    {("os", "environ"), ("os", "environb"), ("os", "getenv"), ("os", "putenv"), ("torch", "load")}
)


def library() -> dict[str, str]:
    """Source of every module of ours, by the name it is imported under."""
    sources = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if name.startswith("speq.bench.lab"):
                continue  # not installed: `bench.lab` is its name
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def layer_of(module: str) -> str | None:
    """The layer whose entry is the longest that names `module` or a package above it."""
    entries = {
        entry: layer
        for layer, rule in TABLE.items()
        for entry in rule.modules
        # The package itself stands for nothing below it.
        if module == entry or (entry != "speq" and module.startswith(f"{entry}."))
    }
    return entries[max(entries, key=len)] if entries else None


def imported(module: str, tree: ast.AST, ours: frozenset[str]) -> Iterator[str]:
    """Full names of the modules that `tree`, the source of `module`, imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in ours else base


def violations(sources: dict[str, str]) -> list[str]:
    """One sentence for each breach of the table or of the rules below it."""
    found = []
    ours = frozenset(sources) | frozenset(library())
    for module, source in sources.items():
        tree = ast.parse(source)
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module} belongs to no layer")
            continue
        for target in imported(module, tree, ours):
            found += _breaches(module, layer, target)
        found += [f"{module}: {what}" for what in _dangers(tree)]
    return found


def _breaches(module: str, layer: str, target: str) -> Iterator[str]:
    root = target.partition(".")[0]
    if root in BARE_NAMES and not (layer == LAB and layer_of(target) == LAB):
        yield f"{module} imports the bare name {target}"
    if root in FORBIDDEN_MODULES:
        yield f"{module} imports {target}"
    if root in TABLE[layer].never:
        yield f"{module} imports {target}, foreign to {layer}"
    if root != "speq":
        return
    if layer_of(target) not in TABLE[layer].imports:
        yield f"{module} imports {target}: {layer} may not import {layer_of(target)}"
    if target in ONLY_BY and module not in ONLY_BY[target]:
        yield f"{module} imports {target}, which is not for it"


def _dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        used = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom):
            used = [(node.module or "", alias.name) for alias in node.names]
        yield from (f"uses {owner}.{name}" for owner, name in used if (owner, name) in FORBIDDEN)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            if not refused:
                yield "does not set trust_remote_code to False"
        # `python -O` leaves these out, and with them what they guard.
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__"):
            yield "guards something under python without -O alone"


def test_all_folders_are_read() -> None:
    modules = library()
    for name in ("speq", "speq.engine.engine", "speq.experts.codec", "speq.cli.generate"):
        assert name in modules
    for folder in ("speq.scheduler", "speq.governor", "speq.bench"):
        assert sum(name.startswith(f"{folder}.") for name in modules) >= 1


def test_library_keeps_to_the_table() -> None:
    assert violations(library()) == []


@pytest.mark.parametrize(
    ("module", "source", "sentence"),
    [
        ("speq.stats", "import speq.kernels.ops", "leaves may not import kernels"),
        ("speq.errors", "from speq.engine import engine", "leaves may not import engine"),
        ("speq.experts.int4", "from speq.kernels.reference import ACTIVATIONS", "not for it"),
        ("speq.runtime", "from speq.kernels import reference", "which is not for it"),
        ("speq.kernels.ops", "from speq.experts import codec", "kernels may not import experts"),
        ("speq.files.shards", "from speq.experts import codec", "files may not import experts"),
        ("speq.experts.codec", "from speq.models import shape", "may not import models"),
        ("speq.experts.codec", "from ..models.shape import DTYPES", "may not import models"),
        ("speq.experts.codec", "from speq.drafts import kinship", "may not import drafts"),
        ("speq.scheduler.prefetch", "import speq.layers.x", "scheduler may not import layers"),
        ("speq.scheduler.prefetch", "import transformers", "foreign to scheduler"),
        ("speq.governor.draft_length", "from torch import Tensor", "foreign to governor"),
        ("speq.governor.draft_length", "import speq.scheduler", "may not import scheduler"),
        ("speq.layers.draft_experts", "from speq.files import shards", "may not import files"),
        ("speq.models.shape", "from speq.engine import drafter", "may not import engine"),
        ("speq.engine.drafter", "from speq.planning import memory", "may not import planning"),
        ("speq.planning.memory", "from speq.engine import engine", "may not import engine"),
        ("speq.planning.memory", "from speq.runtime import Runtime", "may not import runtime"),
        ("speq.quantizing.gptq", "from speq.runtime import Runtime", "may not import runtime"),
        ("speq.runtime", "from speq.quantizing import gptq", "runtime may not import quantizing"),
        ("speq.engine.sampling", "def f():\n    import speq.text", "may not import text"),
        ("speq.generator", "from speq.measure import report", "may not import measure"),
        ("speq.generator", "from speq.cli import options", "generator may not import cli"),
        ("speq.measure.tune", "from speq.bench import widen", "measure may not import bench"),
        ("speq.cli.tune", "from speq.bench import widen", "cli may not import bench"),
        ("speq.bench.runs.tpot", "from speq.cli import options", "bench may not import cli"),
        ("speq.server.service", "from speq.cli import options", "server may not import cli"),
        ("speq.server.service", "from speq.planning import memory", "may not import planning"),
        ("speq.dashboard.page", "from speq.server import server", "may not import server"),
        ("speq.quantizing.gptq", "import speq.text", "quantizing may not import text"),
        ("speq.planning.profiles", "from speq import __version__", "may not import package"),
        ("speq.runtime", "from scheduler.lookahead import x", "bare name scheduler.lookahead"),
        ("speq.runtime", "import bench", "bare name bench"),
        ("speq.bench.runs.tpot", "import bench.lab.step", "bare name bench.lab.step"),
        ("speq.novelty", "import math", "belongs to no layer"),
        ("speq.runtime", "import os\nos.environ.get('A')", "uses os.environ"),
        ("speq.runtime", "from os import getenv", "uses os.getenv"),
        ("speq.runtime", "import pickle", "imports pickle"),
        ("speq.runtime", "import torch\ntorch.load('x')", "uses torch.load"),
        ("speq.runtime", "load(trust_remote_code=True)", "trust_remote_code"),
        ("speq.runtime", "load(trust_remote_code=wanted)", "trust_remote_code"),
        ("speq.models.kv_cache", "def f(a):\n    assert a", "without -O alone"),
        ("speq.scheduler.transfer", "if __debug__:\n    check()", "without -O alone"),
    ],
)
def test_checker_catches(module: str, source: str, sentence: str) -> None:
    found = violations({module: source})
    assert any(sentence in violation for violation in found), found


def test_checker_leaves_good_code_alone() -> None:
    good = {
        "speq.models.shape": "from speq.kernels.ops import ACTIVATIONS",
        "speq.models.moe_model": "load(trust_remote_code=False)",
        "speq.cli.options": "from speq.measure import report\nimport speq.generator",
        "speq.cli.bench": "from speq.bench.runs import tpot",
        "bench.lab.step": "from bench.lab.command import main\nimport speq.cli",
        "speq.experts.codec": "from speq.experts import int4\nfrom . import packed_store",
    }
    assert violations(good) == []


@pytest.mark.parametrize(
    "module",
    [
        "speq",
        "speq.governor.draft_length",
        "speq.planning.cost.planner",
        "speq.stats",
        "speq.config",
        "speq.planning.memory",
        "speq.scheduler.expert_cache",
        "speq.cli",
    ],
)
def test_module_is_imported_without_torch(module: str) -> None:
    code = (
        f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def room_of(module: str) -> str:
    """The folder of a module, or the module itself where it lies flat in the package, or above the
    runtime, beside the engine that the runtime makes.
    """
    package, _, _ = module.rpartition(".")
    above = module in TABLE["generator"].modules
    return module if package in ("", "speq") or above else package


def test_rooms_have_no_circle() -> None:
    """Folders import each other one way; the package itself only hands names on."""
    sources = library()
    ours = frozenset(sources)
    below: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = {room_of(t) for t in imported(module, ast.parse(source), ours) if t in ours}
        below.setdefault(room_of(module), set()).update(targets - {room_of(module), "speq"})
    below.pop("speq")
    graph = TopologicalSorter(below)
    graph.prepare()  # raises CycleError, with the circle
    assert len(below) > 20


def test_references_share_no_code_with_what_they_judge() -> None:
    """They import numpy, the standard library and one another: not even torch."""
    files = sorted((ROOT / "tests" / "reference").glob("*.py"))
    assert len(files) > 5
    allowed = {"numpy", "tests.reference", *sys.stdlib_module_names}
    for path in files:
        found = set(
            imported(f"tests.reference.{path.stem}", ast.parse(path.read_text()), frozenset())
        )
        strange = {
            name for name in found if not any(f"{name}.".startswith(f"{each}.") for each in allowed)
        }
        assert strange == set(), path.name


def test_no_test_imports_another() -> None:
    """What several use is in `tests/helpers`."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    found = {
        f"{path}: {name}"
        for path, source in sources.items()
        for name in imported("tests", ast.parse(source), frozenset())
        if ".test_" in name
    }
    assert len(sources) > 100 and found == set()
