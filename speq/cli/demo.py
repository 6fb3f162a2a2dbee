"""`speq demo`: text from a small model, in less memory than the model takes."""

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from speq.cli import options as opt
from speq.cli.generate import GenerateSettings, generate
from speq.cli.sampling import AskedSampling
from speq.config import RunConfig
from speq.errors import FileError
from speq.pipeline.settings import StagesSettings
from speq.ray.settings import RaySettings

# Package of the model, and where a checkout has it.
PACKAGE, FOLDER = "speq_demo_model", Path("models") / "tiny-moe"
PROMPT = "Once upon a time there was a little dog named"
# Arguments of commands to try next, after the model.
NEXT = (
    ("chat", "--memory-budget 32MiB --stop '###'"),
    ("generate", "--memory-budget 32MiB --prompt 'def main(argv):' --stats"),
    ("prove", "--memory-budget 32MiB"),
    ("bench tpot", "--budgets 20MiB,26MiB,32MiB"),
)


def demo(output: Annotated[opt.Output, opt.ON_SCREEN]) -> None:
    """Write text with a small model that speq brings along, and say what to try next."""
    model = demo_model()
    output.note(
        "The demonstration's model takes 34 MiB. It runs here within 18 MiB: its experts are read "
        "from the disk."
    )
    generate(
        str(model),
        GenerateSettings(prompt=PROMPT, echo=True),
        RunConfig(memory_budget=18 << 20),
        AskedSampling({"max_new_tokens": 96, "temperature": 0.7, "top_p": 0.9, "seed": 1}),
        StagesSettings(),
        RaySettings(),
        output,
    )
    output.note("\nNext:")
    program = called()
    for command, arguments in NEXT:
        output.note(f"  {program} {command} {shlex.quote(shown(model))} {arguments}")
    output.note(f"  {program} plan OWNER/NAME   whether a model of the hub runs here, and how fast")


def demo_model() -> Path:
    """The folder of the model. Raises FileError where it is not installed."""
    spec = find_spec(PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    in_checkout = Path(__file__).resolve().parents[2] / FOLDER
    if in_checkout.is_dir():
        return in_checkout
    raise FileError(
        "the demonstration's model is not installed; install the package speq-moe-demo (27 MB), or "
        "run a model that you have: speq generate FOLDER --prompt TEXT"
    )


def called() -> str:
    """This program as a reader would call it: by its name, or by its place if it is not found."""
    own = Path(sys.argv[0])
    return "speq" if own.name != "speq" or shutil.which("speq") else shown(own.absolute())


def shown(path: Path) -> str:
    """A path as a reader would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
