"""Makes the checkpoints of this folder with gptqmodel; see README.md. No test runs this.

    GPTQMODEL_CPU_WORKERS=2 python make.py FOLDER

FOLDER is to hold a small model, made by `tests/helpers/tiny_models.py`; results go to subfolders
of here.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

HERE = Path(__file__).parent
SETTINGS = {
    "v1": {"desc_act": False, "format": "gptq"},
    "v2-desc-act": {"desc_act": True, "format": "gptq_v2"},
}
KEPT = ("config.json", "quantize_config.json", "model.safetensors")


def calibration(rows: int = 32, length: int = 96) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * length} for row in ids]


def quantize(source: Path, scratch: Path, settings: dict[str, object]) -> None:
    # Otherwise what it offloads is named, with this machine's paths, in what it writes.
    config = QuantizeConfig(bits=4, group_size=32, sym=True, offload_to_disk=False, **settings)
    model = GPTQModel.load(str(source), config)
    model.quantize(calibration(), batch_size=1)
    model.save(str(scratch))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each expert's weights [N, K] in float16, as gptqmodel dequantises them."""
    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    found = {}
    for name, module in model.model.named_modules():
        if ".mlp.experts." in name and hasattr(module, "dequantize_weight"):
            weight = module.dequantize_weight().t().contiguous()
            assert weight.dtype == torch.float16
            assert weight.shape == (module.out_features, module.in_features)
            found[name] = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return dict(sorted(found.items()))


def main(source: Path) -> None:
    for name, settings in SETTINGS.items():
        scratch = source.parent / f"{source.name}-{name}"
        quantize(source, scratch, settings)
        target = HERE / name
        target.mkdir(exist_ok=True)
        for file in KEPT:
            shutil.copy(scratch / file, target / file)
        (target / "digests.json").write_text(json.dumps(digests(scratch), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
