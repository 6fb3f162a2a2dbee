"""Train a small Mixture-of-Experts language model from plain text, in Hugging Face format.

    python tools/train_tiny_moe.py --texts DIR --out DIR [--minutes N | --steps N]

Every `.txt` file in --texts is one source. The result is a folder that transformers loads: a
Qwen2-MoE model in bfloat16, a byte-level BPE tokenizer trained on the same text with a plain chat
template, and `training.json` with the run's figures. The folder appears under --out only once it
is complete; a run that fails or is interrupted leaves nothing there.

The defaults give the shape of the bundled model, `models/tiny-moe`, and train on a CPU. Training
on a GPU (--device cuda, bfloat16 autocast over float32 weights) is written but UNTESTED; keep
`--experts-implementation eager` there, because the grouped product does not follow autocast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM
except ImportError as error:
    sys.exit(
        f"train_tiny_moe: error: the Python package {error.name!r} is missing, and training needs "
        "torch, transformers, tokenizers, safetensors and numpy; install them with pip."
    )

SEPARATOR = "<|endoftext|>"
SEPARATOR_ID = 0  # the only special token, so the BPE trainer numbers it first
BYTE_ALPHABET = 256
HEAD_SIZE = 64
MAX_POSITIONS = 2048
DEFAULT_MINUTES = 90.0

TOKENIZER_SAMPLE_CHARS = 4_000_000  # of each source, so that no large source owns the vocabulary
TOKENIZER_PIECE_CHARS = 20_000
DOCUMENT_CHARS = 50_000  # length of a document where a source has no separators of its own
SHUFFLE_TOKENS = 4096  # sources are interleaved in pieces of this many tokens
EVALUATION_WINDOWS = 20  # per source, spread evenly over its held-out text

WARMUP_STEPS = 50
FINAL_RATE_FRACTION = 0.05
WEIGHT_DECAY = 0.05
GRADIENT_NORM = 1.0
AUX_LOSS_WEIGHT = 0.01

# Pairs as in the instruction text the bundled model saw. The prompt ends at "### Response:" without
# a space, because the tokenizer joins a space to the word after it.
CHAT_TEMPLATE = r"""
{%- set last = namespace(role="") -%}
{%- for message in messages -%}
    {%- if message.content is not string -%}
        {{- raise_exception("The content of a message must be text.") -}}
    {%- endif -%}
    {%- if message.role == "system" and loop.first -%}
        {{- message.content | trim -}}
        {%- set last.role = "system" if message.content | trim else "" -%}
    {%- elif message.role == "user" -%}
        {{- ("\n\n" if last.role else "") ~ "### Instruction: " ~ message.content | trim -}}
        {%- set last.role = "user" -%}
    {%- elif message.role == "assistant" -%}
        {{- "\n" if last.role == "user" else ("\n\n" if last.role else "") -}}
        {{- "### Response: " ~ message.content | trim -}}
        {%- set last.role = "assistant" -%}
    {%- elif message.role == "system" -%}
        {{- raise_exception("A system message must be the first message.") -}}
    {%- else -%}
        {{- raise_exception("Unknown role " ~ message.role ~ "; use system, user or assistant.") -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "\n" if last.role == "user" else ("\n\n" if last.role else "") -}}
    {{- "### Response:" -}}
{%- endif -%}
""".lstrip("\n")


class TrainError(Exception):
    """Something the user can put right, said in one sentence."""


def option(default: Any, text: str, *, kind: type = int, choices: list[str] | None = None) -> Any:
    """One field of TrainSettings together with its command line option."""
    return field(default=default, metadata={"help": text, "type": kind, "choices": choices})


@dataclass(frozen=True)
class TrainSettings:
    """Everything a run depends on; each field after `force` is an option of the same name."""

    texts: Path
    out: Path
    force: bool = False

    minutes: float | None = option(None, "train for this many minutes", kind=float)
    steps: int | None = option(None, "train for this many steps instead")
    seed: int = option(0, "seed of the weights and of the order of the text")
    device: str = option("auto", "where to train", kind=str, choices=["auto", "cpu", "cuda"])
    dtype: str = option(
        "auto",
        "arithmetic: auto is fp32 on a CPU and bf16 (autocast) on a GPU",
        kind=str,
        choices=["auto", "fp32", "bf16"],
    )
    experts_implementation: str = option(
        "eager",
        "how transformers computes the experts; try both for speed",
        kind=str,
        choices=["eager", "grouped_mm"],
    )
    threads: int = option(0, "CPU threads; 0 leaves it to torch")

    vocab_size: int = option(4096, "entries of the tokenizer")
    hidden_size: int = option(256, f"width of the model, a multiple of {HEAD_SIZE}")
    layers: int = option(8, "number of layers")
    experts: int = option(32, "experts in a layer")
    experts_per_token: int = option(4, "experts that a token is routed to")
    expert_width: int = option(64, "inner width of an expert")
    shared_width: int = option(256, "inner width of the shared expert")

    sequence_length: int = option(256, "tokens in a training sequence")
    batch_size: int = option(16, "sequences in a step")
    learning_rate: float = option(2e-3, "highest learning rate of the cosine schedule", kind=float)
    held_out_tokens: int = option(20_000, "tokens kept from the end of each source for evaluation")
    evaluate_every: int = option(400, "steps between evaluations; 0 evaluates only at the end")


@dataclass(frozen=True)
class TextSource:
    """The tokens of one text file."""

    name: str
    train: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class TrainResult:
    """Figures of a finished run."""

    steps: int
    tokens: int
    seconds: float


# --- settings -----------------------------------------------------------------------------------


def parse_settings(arguments: list[str] | None = None) -> TrainSettings:
    """Read the command line; argparse itself refuses what is not a number or not a choice."""
    parser = argparse.ArgumentParser(
        prog="train_tiny_moe", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder of UTF-8 .txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder to make for the model")
    parser.add_argument("--force", action="store_true", help="replace the model folder at --out")
    for setting in fields(TrainSettings):
        if not setting.metadata:
            continue
        known = dict(setting.metadata)
        if setting.name == "minutes":
            known["help"] += f" (default {DEFAULT_MINUTES:g} where --steps is not given)"
        elif setting.default is not None:
            known["help"] += f" (default {setting.default})"
        parser.add_argument(flag(setting.name), default=setting.default, **known)
    return TrainSettings(**vars(parser.parse_args(arguments)))


def flag(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def check_settings(settings: TrainSettings) -> None:
    """Refuse settings that cannot make a model."""
    if settings.minutes is not None and settings.steps is not None:
        raise TrainError("--minutes and --steps were both given; give only one of them.")
    may_be_zero = {"seed", "threads", "evaluate_every"}
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if setting.metadata.get("type") is int and value is not None:
            require_at_least(setting.name, value, 0 if setting.name in may_be_zero else 1)
    for name in ("minutes", "learning_rate"):
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise TrainError(f"{flag(name)} is {value}; give a number above 0.")
    require_at_least("vocab_size", settings.vocab_size, BYTE_ALPHABET + 1)
    require_at_most("vocab_size", settings.vocab_size, 2**16, "token ids are kept in 16 bits")
    require_at_most("sequence_length", settings.sequence_length, MAX_POSITIONS, "its positions")
    require_at_most(
        "experts_per_token", settings.experts_per_token, settings.experts, "the number of experts"
    )
    if settings.hidden_size % HEAD_SIZE:
        raise TrainError(
            f"--hidden-size is {settings.hidden_size}; "
            f"give a multiple of {HEAD_SIZE}, the size of an attention head."
        )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device is cuda but torch finds no CUDA device; use --device cpu.")


def require_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise TrainError(f"{flag(name)} is {value}; give {lowest} or more.")


def require_at_most(name: str, value: int, highest: int, reason: str) -> None:
    if value > highest:
        raise TrainError(f"{flag(name)} is {value}; give {highest} or less ({reason}).")


def check_output(settings: TrainSettings) -> None:
    """Refuse an --out that is in the way, and never let --force remove what is not a model."""
    out, texts = settings.out.resolve(), settings.texts.resolve()
    if not out.name:
        raise TrainError(f"--out is {settings.out}; name a new folder for the model.")
    if texts.is_relative_to(out):
        raise TrainError(f"--out {settings.out} holds the texts; name another folder.")
    if not out.exists():
        return
    if not settings.force:
        raise TrainError(
            f"--out {settings.out} already exists; name a new folder or add --force to replace it."
        )
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise TrainError(
            f"--out {settings.out} is not a model folder (it has no config.json), "
            "so --force does not replace it; name another folder."
        )


# --- text and tokens ----------------------------------------------------------------------------


def read_texts(folder: Path) -> dict[str, str]:
    """The sources by file name, in the order of their names; empty files are left out."""
    if not folder.is_dir():
        raise TrainError(f"--texts {folder} is not a folder; give a folder of .txt files.")
    texts = {}
    for path in sorted(folder.glob("*.txt")):
        try:
            texts[path.name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TrainError(
                f"{path} is not UTF-8 at byte {error.start}; convert it or take it out."
            ) from None
    texts = {name: text for name, text in texts.items() if text.strip()}
    if not texts:
        raise TrainError(f"--texts {folder} holds no text; put at least one .txt file there.")
    return texts


def train_tokenizer(texts: dict[str, str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template; SEPARATOR is bos, eos and pad."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (
        piece
        for text in texts.values()
        for piece in cut_pieces(text[:TOKENIZER_SAMPLE_CHARS], TOKENIZER_PIECE_CHARS)
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        chat_template=CHAT_TEMPLATE,
    )


def cut_pieces(sequence: Any, length: int) -> list[Any]:
    """The sequence in consecutive pieces of `length`, the last one shorter."""
    return [sequence[start : start + length] for start in range(0, len(sequence), length)]


def tokenize_source(
    name: str, text: str, tokenizer: PreTrainedTokenizerFast, held_out_tokens: int
) -> TextSource:
    """Tokenize one source, a separator after each document, and set its tail aside."""
    documents = text.split(SEPARATOR) if SEPARATOR in text else cut_pieces(text, DOCUMENT_CHARS)
    encodings = tokenizer.backend_tokenizer.encode_batch(documents)
    ids = np.concatenate([np.array([*e.ids, SEPARATOR_ID], dtype=np.uint16) for e in encodings])
    held_out = min(held_out_tokens, len(ids) // 4)  # a short source keeps most of its text
    print(f"{name}: {len(ids)} tokens, {held_out} of them held out", flush=True)
    return TextSource(name, train=ids[: len(ids) - held_out], held_out=ids[len(ids) - held_out :])


def interleave(sources: list[TextSource], rng: np.random.Generator) -> np.ndarray:
    """One stream of training tokens, the sources mixed in shuffled pieces."""
    pieces = [piece for source in sources for piece in cut_pieces(source.train, SHUFFLE_TOKENS)]
    return np.concatenate([pieces[i] for i in rng.permutation(len(pieces))])


def window_count(stream: np.ndarray, length: int) -> int:
    """Count the windows of `length` tokens of a stream, each with the token after it."""
    return max(0, (len(stream) - 1) // length)


def stack_windows(
    stream: np.ndarray, indices: np.ndarray, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbered windows of a stream, and the same windows one token on: inputs and targets."""
    rows = np.stack([stream[i * length : (i + 1) * length + 1] for i in indices])
    tokens = torch.from_numpy(rows.astype(np.int64)).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def check_enough_text(
    sources: list[TextSource], stream: np.ndarray, settings: TrainSettings
) -> None:
    """Refuse text that does not fill one batch, or leaves nothing to evaluate on."""
    windows = window_count(stream, settings.sequence_length)
    if windows < settings.batch_size:
        raise TrainError(
            f"--texts {settings.texts} gives {windows} sequences of {settings.sequence_length} "
            f"tokens, fewer than one batch of {settings.batch_size}; add text, or lower "
            "--batch-size or --sequence-length."
        )
    if not any(window_count(source.held_out, settings.sequence_length) for source in sources):
        raise TrainError(
            f"no source has more than {settings.sequence_length} held-out tokens, one sequence; "
            "add text, raise --held-out-tokens or lower --sequence-length."
        )


# --- model and training -------------------------------------------------------------------------


def build_model(settings: TrainSettings, device: torch.device) -> Qwen2MoeForCausalLM:
    """A model with fresh float32 weights."""
    heads = settings.hidden_size // HEAD_SIZE
    config = Qwen2MoeConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=settings.shared_width,
        moe_intermediate_size=settings.expert_width,
        shared_expert_intermediate_size=settings.shared_width,
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        router_aux_loss_coef=AUX_LOSS_WEIGHT,
        output_router_logits=False,
        bos_token_id=SEPARATOR_ID,
        eos_token_id=SEPARATOR_ID,
        pad_token_id=SEPARATOR_ID,
        experts_implementation=settings.experts_implementation,
    )
    return Qwen2MoeForCausalLM(config).to(device)


def build_optimizer(model: Qwen2MoeForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def arithmetic(device: torch.device, dtype: str) -> torch.autocast:
    """The precision the forward pass runs in; weights and optimizer stay float32 in any case."""
    enabled = dtype == "bf16" or (dtype == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per token."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def learning_rate_at(step: int, progress: float, highest: float) -> float:
    """Linear warm-up, then a cosine from `highest` down; `progress` runs from 0 to 1."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest * warmup * (FINAL_RATE_FRACTION + (1.0 - FINAL_RATE_FRACTION) * cosine)


def progress_of(settings: TrainSettings, step: int, seconds: float) -> float:
    """The part of the run that is done, 0 to 1, by steps where they are set and else by time."""
    if settings.steps is not None:
        return step / settings.steps
    return seconds / (60.0 * (settings.minutes or DEFAULT_MINUTES))


def batches(
    stream: np.ndarray, settings: TrainSettings, device: torch.device, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches without end; every window comes once before any comes again."""
    while True:
        order = rng.permutation(window_count(stream, settings.sequence_length))
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            indices = order[start : start + settings.batch_size]
            yield stack_windows(stream, indices, settings.sequence_length, device)


@torch.no_grad()
def evaluate(
    model: Qwen2MoeForCausalLM, sources: list[TextSource], settings: TrainSettings
) -> dict[str, float]:
    """Mean loss, in nats per token, on evenly spread held-out windows of each source."""
    length, losses = settings.sequence_length, {}
    model.eval()
    for source in sources:
        count = window_count(source.held_out, length)
        if count == 0:
            continue
        spread = np.unique(np.linspace(0, count - 1, EVALUATION_WINDOWS).astype(int))
        total = 0.0
        for indices in cut_pieces(spread, settings.batch_size):
            inputs, targets = stack_windows(source.held_out, indices, length, model.device)
            with arithmetic(model.device, settings.dtype):
                logits = model(inputs, use_cache=False).logits
            total += cross_entropy(logits, targets).item() * len(indices)
        losses[source.name] = total / len(spread)
    model.train()
    return losses


def mean(losses: dict[str, float]) -> float:
    """The sources' losses at equal weight."""
    return sum(losses.values()) / len(losses)


def train(
    model: Qwen2MoeForCausalLM,
    stream: np.ndarray,
    sources: list[TextSource],
    settings: TrainSettings,
    rng: np.random.Generator,
) -> TrainResult:
    """Train until the steps or the minutes are used up."""
    optimizer = build_optimizer(model, settings.learning_rate)
    model.train()
    step, tokens, smoothed, start = 0, 0, None, time.monotonic()
    for inputs, targets in batches(stream, settings, model.device, rng):
        progress = progress_of(settings, step, time.monotonic() - start)
        if progress >= 1.0:
            break
        rate = learning_rate_at(step, progress, settings.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = train_step(model, optimizer, inputs, targets, settings)
        step, tokens = step + 1, tokens + inputs.numel()
        if not math.isfinite(loss):
            raise TrainError(f"the loss became {loss} at step {step}; lower --learning-rate.")
        smoothed = loss if smoothed is None else 0.98 * smoothed + 0.02 * loss
        if step % 20 == 0:
            speed = tokens / (time.monotonic() - start)
            print(
                f"step {step}: {tokens / 1e6:.2f} M tokens, loss {smoothed:.3f}, "
                f"rate {rate:.1e}, {speed:.0f} tokens/s",
                flush=True,
            )
        if settings.evaluate_every and step % settings.evaluate_every == 0:
            losses = evaluate(model, sources, settings)
            print(f"step {step}: held-out loss {mean(losses):.3f}", flush=True)
    return TrainResult(step, tokens, time.monotonic() - start)


def train_step(
    model: Qwen2MoeForCausalLM,
    optimizer: torch.optim.AdamW,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    settings: TrainSettings,
) -> float:
    """One update of the weights; returns the loss without the router's balance term."""
    with arithmetic(model.device, settings.dtype):
        output = model(inputs, output_router_logits=True, use_cache=False)
    loss = cross_entropy(output.logits, targets)
    (loss + AUX_LOSS_WEIGHT * output.aux_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


# --- output -------------------------------------------------------------------------------------


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write in, moved to `out` at the end or removed on any failure."""
    out = out.resolve()
    stage = out.with_name(f".{out.name}.partial-{os.getpid()}")
    stage.mkdir(parents=True)
    try:
        yield stage
        replace_folder(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def replace_folder(new: Path, out: Path) -> None:
    """Move `new` to `out`; what was there stays until the new folder is in its place."""
    if not out.exists():
        new.rename(out)
        return
    old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)


def save_model(
    folder: Path, model: Qwen2MoeForCausalLM, losses: dict[str, float], result: TrainResult
) -> None:
    """Write the weights in bfloat16 with their configuration, and the run's figures."""
    model.to(torch.bfloat16).save_pretrained(folder)
    figures = {
        "steps": result.steps,
        "tokens": result.tokens,
        "val_loss": mean(losses),
        "val_loss_by_source": losses,
        "minutes": result.seconds / 60.0,
    }
    (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def run(settings: TrainSettings) -> None:
    """Make the model that the settings describe."""
    check_settings(settings)
    check_output(settings)
    texts = read_texts(settings.texts)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)

    with staged_folder(settings.out) as stage:
        tokenizer = train_tokenizer(texts, settings.vocab_size)
        tokenizer.save_pretrained(stage)
        sources = [
            tokenize_source(name, text, tokenizer, settings.held_out_tokens)
            for name, text in texts.items()
        ]
        stream = interleave(sources, rng)
        check_enough_text(sources, stream, settings)

        model = build_model(settings, pick_device(settings.device))
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters / 1e6:.1f} M parameters, {len(stream)} training tokens", flush=True)
        result = train(model, stream, sources, settings, rng)
        losses = evaluate(model, sources, settings)
        save_model(stage, model, losses, result)
    print(f"{settings.out}: {result.steps} steps, held-out loss {mean(losses):.3f}")


def main() -> None:
    settings = parse_settings()
    try:
        run(settings)
    except (TrainError, OSError, SafetensorError) as error:
        sys.exit(f"train_tiny_moe: error: {error}")
    except torch.OutOfMemoryError:
        sys.exit("train_tiny_moe: error: the GPU's memory is full; lower --batch-size.")
    except KeyboardInterrupt:
        print(f"train_tiny_moe: stopped; {settings.out} was not written.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
