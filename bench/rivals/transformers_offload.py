"""Plain Transformers, where what does not fit in memory is offloaded as accelerate does it.

On the CPU the rest lies on disk, on a GPU in the host's memory and beyond that on disk. A module
that is offloaded is brought whole before it computes, all experts of a layer together: Transformers
has them in one tensor, which it writes into the offload folder when it loads the model.
"""

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.packages import rival_package
from speq.control_groups import processors
from speq.errors import CheckpointError, NoRoom
from speq.files.checkpoint import Checkpoint
from speq.host_memory import available_bytes
from speq.layers.arguments import cache_name
from speq.models.moe_model import quiet_transformers
from speq.models.opened import Opened, open_model
from speq.units import format_bytes

OFFLOADED = "transformers-offloaded"
# Beside a GPU: of the host's free memory, as Transformers itself takes it.
HOST_SHARE = 0.9


class TransformersOffload:
    """A model that Transformers has loaded, and the folder of what is offloaded of it."""

    def __init__(self, model: Any, device: str, folder: Path, settled: dict[str, Any]) -> None:
        self._model, self._device = model, torch.device(device)
        self._folder, self._settled = folder, settled

    def stream(self, prompt_token_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        cache = DynamicCache(config=self._model.config)
        tokens = prompt_token_ids
        for _ in range(max_new_tokens):
            tokens = self._likeliest(tokens, cache, 1)
            yield tokens[0]

    def figures(self) -> dict[str, Any]:
        """None: Transformers counts nothing that goes by speq's names."""
        return {}

    def choices(self, prompt_token_ids: list[int], continuation: list[int]) -> list[int]:
        return self._likeliest([*prompt_token_ids, *continuation[:-1]], None, len(continuation))

    def settled(self) -> dict[str, Any]:
        return self._settled

    def close(self) -> None:
        self._model = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _likeliest(self, tokens: list[int], cache: DynamicCache | None, count: int) -> list[int]:
        """The tokens of the largest logits behind the last `count` tokens; one forward pass."""
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                use_cache=cache is not None,
                logits_to_keep=count,
                **{cache_name(type(self._model).forward): cache},
            )
        chosen: list[int] = output.logits[0].argmax(dim=-1).tolist()
        return chosen


def load(job: RivalJob) -> TransformersOffload:
    """Load the job's model, within its memory as far as accelerate keeps to it.

    Raises SpeqError where accelerate is not installed, the memory has no room for what stands
    beside the weights, or Transformers refuses the model.
    """
    accelerate = rival_package("accelerate")
    torch.set_num_threads(job.threads or processors())
    opened = open_model(job.model)
    try:
        path = opened.checkpoint.path
        weights_bytes = bytes_in(opened.checkpoint, job.dtype)
        room = job.memory_bytes - working_bytes(opened, job)
    finally:
        opened.close()
    if room <= 0:
        raise NoRoom(
            f"Transformers has {format_bytes(job.memory_bytes)} of memory and takes "
            f"{format_bytes(job.memory_bytes - room)} beside the weights; give more memory, or "
            "shorter texts"
        )
    folder = job.scratch_path / OFFLOADED
    # Of a process that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=job.dtype if job.dtype == "auto" else getattr(torch, job.dtype),
                # accelerate would keep a layer's room free where nothing is offloaded as well.
                device_map={"": job.device} if weights_bytes <= room else "auto",
                max_memory=memory_by_device(job.device, room),
                offload_folder=str(folder),
                trust_remote_code=False,
                local_files_only=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"Transformers does not load {path}: {' '.join(str(error).split())[:300]}; compare "
            "without it"
        ) from error
    model.eval()
    held = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    return TransformersOffload(
        model,
        job.device,
        folder,
        {
            "version": transformers.__version__,
            "accelerate": accelerate.__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "held_bytes": held,
            "offloaded_bytes": sum(weight.nbytes for weight in model.parameters()) - held,
        },
    )


def memory_by_device(device: str, room: int) -> dict[int | str, int]:
    """accelerate's max_memory: `room` bytes of the device, and on a GPU what the host has free."""
    if device == "cpu":
        return {"cpu": room}
    return {0: room, "cpu": int(HOST_SHARE * available_bytes())}


def bytes_in(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of a checkpoint's weights once they are of a dtype."""
    infos = [info for _, info in checkpoint.tensors.values()]
    if dtype == "auto":
        return sum(info.nbytes for info in infos)
    itemsize: int = getattr(torch, dtype).itemsize
    return sum(prod(info.shape) * itemsize for info in infos)


def working_bytes(opened: Opened, job: RivalJob) -> int:
    """Bytes of the KV cache and of activations, for which Transformers keeps no room by itself."""
    infos = [info for _, info in opened.checkpoint.tensors.values()]
    published = max(infos, key=lambda info: info.nbytes).dtype
    dtype = published if job.dtype == "auto" else getattr(torch, job.dtype)
    scored = max([1, *map(len, job.continuations)])
    rows = max(map(len, job.prompts)) + scored
    cache = opened.shape.kv_elements_per_token * dtype.itemsize * job.context
    return cache + opened.shape.activation_bytes(rows, scored, job.context, dtype)
