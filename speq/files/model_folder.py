"""Recognition of folders that are not a readable model."""

import os
from fnmatch import fnmatch
from pathlib import Path

CONVERT = "download the model's safetensors, or convert it to those (transformers: save_pretrained)"
# Where huggingface_hub keeps unfinished downloads to a folder.
HUB_DOWNLOADS = Path(".cache", "huggingface", "download")
# File name patterns, what such files are, and what to do; the first match counts.
KINDS = (
    (
        ("*.incomplete", "*.part", "*.partial", "*.crdownload", "*.aria2"),
        "an unfinished download",
        "let it finish",
    ),
    (
        ("adapter_config.json", "adapter_model.*"),
        "a LoRA adapter, which is not a model by itself",
        "merge it into its model (peft: merge_and_unload), save that and give its folder",
    ),
    (("snapshots",), "a hub cache's folder", "give the folder below its snapshots"),
    (("consolidated*", "params.json"), "weights in their publisher's own layout", CONVERT),
    (("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"), "pickles, which speq does not open", CONVERT),
    (("*.onnx", "onnx"), "ONNX", CONVERT),
    (("*.h5", "*.msgpack"), "weights of TensorFlow or JAX", CONVERT),
    (("*.gguf",), "GGUF", CONVERT),
)


def recognise(folder: Path) -> tuple[str, str] | None:
    """Recognise what a folder has in place of a model, and what to do about it; None: nothing
    known.
    """
    names = sorted(os.listdir(folder))
    if os.path.isdir(folder / HUB_DOWNLOADS):
        names += [str(HUB_DOWNLOADS / name) for name in sorted(os.listdir(folder / HUB_DOWNLOADS))]
    for patterns, what, remedy in KINDS:
        for name in names:
            if any(fnmatch(name.lower(), pattern) for pattern in patterns):
                return f"{name} ({what})", remedy
    return None
