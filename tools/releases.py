"""Runs the exactness tests on other releases of transformers than the installed one.

    python -m tools.releases newest                  a short run, on the newest of the index
    python -m tools.releases --whole oldest newest   every family in every kind of pass; `oldest`
                                                     is the oldest supported

Each release has its own environment next to this one, such as `.venv-newest`, which is kept. It
shares all packages of this one except those that the release needs in other versions.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from speq.version import TESTED_TRANSFORMERS, is_tested

ROOT = Path(__file__).parent.parent
RELEASES = {
    "oldest": f"transformers=={TESTED_TRANSFORMERS[0]}",
    "pinned": f"transformers=={TESTED_TRANSFORMERS[1]}",
    "newest": "transformers",
}
EXACTNESS = "tests/product/test_exactness.py"
# Tests that depend on the interface of transformers' layers.
LAYERS = tuple(
    f"tests/product/test_{name}.py"
    for name in (
        *("self_test", "families", "short_conv", "delta", "mtp", "gemma4", "gpt_oss"),
        *("text_part", "kv_cache", "fused_decoder", "stages"),
    )
)
# One family of the fused decoder, and one of each kind with recurrent state.
SHORT = tuple(
    f"{EXACTNESS}::test_greedy_tokens_are_the_exact_models[{family}]"
    for family in ("mixtral", "qwen3_next", "lfm2_moe")
)


def packages_of(folder: Path) -> Path:
    """Return the folder of an environment's packages."""
    places = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "venv", places))


def environment(name: str) -> Path:
    """Return the interpreter of an environment with that release. Exits if it cannot be fetched."""
    folder = Path(f"{sys.prefix}-{name}")
    python, shared = folder / "bin" / "python", packages_of(folder) / "shared.pth"
    # Its own packages come first; .pth files of the shared ones count too, such as speq's.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    if not python.exists() or not shared.exists() or shared.read_text(encoding="utf-8") != line:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, symlinks=True)
        shared.write_text(line, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--upgrade"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", RELEASES[name]], capture_output=True, text=True
    )
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        sys.exit(f"releases: {RELEASES[name]} ({name}) cannot be fetched: {errors[-1]}")
    return python


def version_in(python: Path) -> str:
    """Return the version of transformers that an interpreter imports."""
    program = "import json, transformers; print(json.dumps(transformers.__version__))"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"releases: {python} cannot import transformers:\n{done.stderr[-2000:]}")
    version: str = json.loads(done.stdout.splitlines()[-1])
    return version


def tests_of(whole: bool) -> list[str]:
    """Return the arguments of pytest. Tests that are marked full are products of settings, which do
    not depend on the release: they run on the pinned one alone.
    """
    return ["-m", "not full and not gpu", *LAYERS, *([EXACTNESS] if whole else SHORT)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run the exactness tests on releases of transformers."
    )
    parser.add_argument("releases", nargs="+", choices=RELEASES)
    parser.add_argument("--whole", action="store_true", help="every family in every kind of pass")
    given = parser.parse_args()
    failed = []
    for name in given.releases:
        python = environment(name)
        version = version_in(python)
        print(f"exactness on transformers {version} ({name})", flush=True)
        workers = ["-n", "auto", "--dist", "worksteal", "-q"]
        command = [str(python), "-m", "pytest", *workers, *tests_of(given.whole)]
        if subprocess.run(command, cwd=ROOT, env=os.environ).returncode:
            failed.append(version)
        elif not is_tested(version):
            print(f"{version} passes: add it to speq/version.py and pyproject.toml", flush=True)
    if failed:
        sys.exit(f"releases: exactness fails on transformers {', '.join(failed)}")


if __name__ == "__main__":
    main()
