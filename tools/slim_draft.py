"""Reduces a GPTQ folder to what a draft needs: quantised tensors, routers and settings.

speq uses the routers to find the draft's model. Loaders of whole models need the rest.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SETTINGS = ("config.json", "quantize_config.json")
PARTS = (".qweight", ".qzeros", ".scales", ".g_idx", ".gate.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="folder that `speq quantize` wrote")
    parser.add_argument("target", type=Path, help="folder to make")
    options = parser.parse_args()
    slim(options.source, options.target)


def slim(source: Path, target: Path) -> None:
    """Write `target`, which must not be there."""
    target.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for file in sorted(source.glob("*.safetensors")):
        tensors = {n: t for n, t in load_file(file).items() if n.endswith(PARTS)}
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name in SETTINGS:
        shutil.copy(source / name, target / name)


if __name__ == "__main__":
    main()
