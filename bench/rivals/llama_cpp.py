"""llama.cpp over a BF16 GGUF file, mapped into memory as its users have it.

Its weights are read from the page cache, so that a cap on the process's memory is its budget. torch
is left out of the process, unless the file has yet to be written: it would take of that memory.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.packages import rival_package
from speq.control_groups import processors
from speq.errors import CheckpointError, DependencyError
from speq.files.json_file import read_json
from speq.units import Progress

# Of what is written into a file: another number has all of them written anew.
FORMAT = 1
SOURCES = ("*.safetensors", "*.json")
BATCH_TOKENS = 512  # of a prompt at a time: llama.cpp's default
KV_BYTES = 2  # of a number in the cache: float16, llama.cpp's default
KV_TOKENS = 256  # that a cache grows by


class LlamaCpp:
    """A model that llama.cpp has loaded. Its tokenizer is never asked: token ids in and out."""

    def __init__(
        self, library: Any, model: Any, settled: dict[str, Any], temperature: float = 0.0
    ) -> None:
        self._library, self._model, self._settled = library, model, settled
        self._temperature = temperature

    def stream(self, prompt_token_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        from numpy.random import default_rng

        self._model.reset()
        draws = default_rng(0)
        tokens = prompt_token_ids
        for _ in range(max_new_tokens):
            self._model.eval(tokens)
            logits = self._logits()
            if self._temperature:  # the largest with Gumbel noise is a draw of the softmax
                logits = logits / self._temperature + draws.gumbel(size=logits.shape)
            tokens = [int(logits.argmax())]
            yield tokens[0]

    def figures(self) -> dict[str, Any]:
        """None: llama.cpp counts nothing that goes by speq's names."""
        return {}

    def choices(self, prompt_token_ids: list[int], continuation: list[int]) -> list[int]:
        """Of a model loaded for the task `choices`, whose logits are kept for every token."""
        self._model.reset()
        self._model.eval([*prompt_token_ids, *continuation[:-1]])
        first = len(prompt_token_ids) - 1
        scores = self._model.scores[first : first + len(continuation)]
        return [int(token) for token in scores.argmax(axis=1)]

    def settled(self) -> dict[str, Any]:
        return self._settled

    def close(self) -> None:
        self._model.close()

    def _logits(self) -> Any:
        """Those behind the last token evaluated, as they lie in llama.cpp's memory."""
        from numpy.ctypeslib import as_array

        logits = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return as_array(logits, shape=(self._model.n_vocab(),))


def prepare(job: RivalJob, progress: Progress | None) -> None:
    """Write the job's model as GGUF, unless it is there. Raises SpeqError where that cannot be."""
    rival_package("llama_cpp")
    gguf_of(job.model, job.scratch_path, progress)


def load(job: RivalJob) -> LlamaCpp:
    """Load the job's model, its GGUF file written first where there is none.

    Raises SpeqError where llama-cpp-python is not installed, or was built for no GPU and the job
    is for one; and where the model cannot be written as GGUF, or llama.cpp refuses it.
    """
    library = rival_package("llama_cpp")
    if job.device == "cuda" and not library.llama_supports_gpu_offload():
        raise DependencyError(
            "llama-cpp-python was built without CUDA and the device is cuda; install it with "
            "CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall llama-cpp-python"
        )
    file = gguf_of(job.model, job.scratch_path)
    gpu_layers = 0
    if job.device == "cuda":
        gpu_layers = layers_that_fit(*gpu_bytes(file, job), job.memory_bytes)
    threads = job.threads or processors()
    try:
        model = library.Llama(
            str(file),
            n_gpu_layers=gpu_layers,
            use_mmap=True,
            use_mlock=False,
            n_ctx=job.context,
            n_batch=BATCH_TOKENS,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=job.task == "choices",
            verbose=False,
        )
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"llama.cpp does not load {file}: {error}; remove that file, and run this again"
        ) from error
    return LlamaCpp(
        library,
        model,
        {
            "version": library.__version__,
            "file": file.name,
            "file_bytes": file.stat().st_size,
            "threads": threads,
            "gpu_layers": gpu_layers,
        },
        job.temperature,
    )


def gguf_of(model: str, folder: Path, progress: Progress | None = None) -> Path:
    """The GGUF file of a model in `folder`, written unless it is there.

    Its name has a digest of the model's files as they are now, so that no other model's file and no
    older one is taken for it. Raises SpeqError where the model cannot be written as one.
    """
    source = _folder_of(model)
    digest = hashlib.sha256(f"{FORMAT} {source.resolve()}".encode())
    for path in sorted(path for pattern in SOURCES for path in source.glob(pattern)):
        found = path.stat()
        digest.update(f" {path.name} {found.st_size} {found.st_mtime_ns}".encode())
    file = folder / f"{source.resolve().name}-{digest.hexdigest()[:12]}.gguf"
    if not file.exists():
        from speq.bench.rivals.gguf_file import write
        from speq.files.checkpoint import Checkpoint

        checkpoint = Checkpoint(source)
        try:
            write(checkpoint, file, progress)
        finally:
            checkpoint.close()
    return file


def _folder_of(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from speq.files.checkpoint import locate

    return locate(model)


def gpu_bytes(file: Path, job: RivalJob) -> tuple[list[int], int]:
    """What each layer takes of a GPU, with its KV cache, and what the head takes, with logits."""
    gguf = rival_package("gguf")
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors}
    config = read_json(_folder_of(job.model) / "config.json")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    entry = 2 * config["num_key_value_heads"] * head_dim * KV_BYTES
    cache = -(-job.context // KV_TOKENS) * KV_TOKENS * entry
    layers = [cache] * config["num_hidden_layers"]
    for name, nbytes in tensors.items():
        block, _, rest = name.partition(".")
        if block == "blk":
            layers[int(rest.partition(".")[0])] += nbytes
    logits = BATCH_TOKENS * config["vocab_size"] * 4
    return layers, tensors["output.weight"] + tensors["output_norm.weight"] + logits


def layers_that_fit(layers: list[int], head: int, memory_bytes: int) -> int:
    """llama.cpp's n_gpu_layers: it counts the head first, and then layers from the last one on.

    layers, head  bytes of each layer and of the head
    """
    taken, count = 0, 0
    for nbytes in (head, *reversed(layers)):
        taken += nbytes
        if taken > memory_bytes:
            break
        count += 1
    return count
