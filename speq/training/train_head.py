"""The command `speq train-head`: from a model and a folder of texts to a head and a report.

A work folder holds the journal, the features and the last saved state until the head is complete.
The same command continues from there, to the same bits.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Unpack

import torch

from speq.errors import FileError, NoRoom, OptionError
from speq.files.alone import lock_folder
from speq.files.atomic_file import make_folder, remove_abandoned, write_whole, writing
from speq.files.checkpoint import locate
from speq.files.journal import Journal
from speq.generator import Generator
from speq.heads.head_file import NAME, head_path, model_digest, write_head
from speq.heads.head_shape import HeadShape
from speq.heads.moe_head import MoEHead
from speq.host_memory import available_bytes
from speq.options.declared import split
from speq.options.typed import TrainHeadOptions
from speq.text.tokenizer import tokens_of
from speq.training.acceptance import DRAFT_LENGTH, NUM_PROMPTS, PROMPT_TOKENS, measure_acceptance
from speq.training.features import (
    FEATURES,
    ROUTES,
    TOKENS,
    FeatureFile,
    HeldOut,
    Window,
    held_out_of,
    window_of,
)
from speq.training.routes import HELD_OUT, STEPS, Recalls, fit, recalls, with_predictions
from speq.training.settings import HeadSettings, TrainingSettings
from speq.training.texts import Texts
from speq.training.trainer import STATE, WARMUP_STEPS, Trainer, TrainingVocabulary
from speq.units import Progress, format_bytes, no_progress
from speq.version import __version__

FORMAT = "speq-train-head-1"
WORK, JOURNAL, REPORT = "training", "training.journal", "report.json"
# Shares of the time: for features, and for what follows the last step.
FEATURES_SHARE, END_SHARE = 0.25, 0.05
# Windows written at a time, and seconds between saved states.
GROUP, SAVE_S = 16, 30.0
# Share of the machine's free memory used without a budget.
DEFAULT_SHARE = 1 / 2
# Weights, gradients and two moments.
COPIES = 4
REMEDY = "finished work is kept: run the same command to continue"


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """The output folder, and the content of its report."""

    folder: Path
    report: dict[str, Any]


def train_head(
    model: str | Path,
    texts: str | Path,
    *,
    progress: Progress = no_progress,
    **options: Unpack[TrainHeadOptions],
) -> TrainedHead:
    """Train a draft head for a model, on the model's own hidden states over texts.

    texts     folder of text files
    options   of HeadSettings and TrainingSettings; see docs/options.md
    progress  called with (what, done, total)

    Experts are loaded into slots as in a run, so the model may be larger than memory. If
    interrupted, it leaves a folder that no run opens, and the same call continues from there.
    Raises SpeqError if the model, the texts, the budget, the folder or the disk does not allow it.
    """
    given = {"texts": texts, **options}
    settings, training = split(given, HeadSettings, TrainingSettings)
    return train(model, settings, training, progress)


def train(
    model: str | Path,
    settings: HeadSettings,
    training: TrainingSettings,
    progress: Progress = no_progress,
) -> TrainedHead:
    """Train a head with parsed settings; otherwise as `train_head`."""
    texts = Texts.of_folder(training.texts)
    run = HeadRun(model, settings, training, texts, progress)
    folder = run.folder()
    make_folder(folder / WORK)
    with writing(folder, REMEDY):
        another = (
            f"another process trains a head in {folder / WORK}; wait for its end, or give another "
            "--out"
        )
        with lock_folder(folder / WORK, another):
            return run.run(folder)


@dataclass(slots=True)
class HeadRun:
    """One run of the training command."""

    model: str | Path
    settings: HeadSettings
    training: TrainingSettings
    texts: Texts
    progress: Progress
    start_s: float = field(default_factory=lambda: monotonic())
    journal: Journal = field(init=False)

    def folder(self) -> Path:
        return self.training.out or head_path(locate(self.model)).parent

    def run(self, folder: Path) -> TrainedHead:
        work = folder / WORK
        remove_abandoned(work)
        recorded = header_in(work / JOURNAL)
        budget = self.training.memory_budget or recorded.get("memory_budget")
        budget = budget or int(DEFAULT_SHARE * available_bytes())
        # A sum of floats depends on the number of threads.
        torch.set_num_threads(int(recorded.get("threads") or torch.get_num_threads()))
        with closing(self._generator(budget, "none")) as generator:
            header = self._header(generator, budget)
            self.journal = Journal(work / JOURNAL, header, is_ours)
            if self.journal.header != header:
                raise FileError(
                    f"{work} has a training with other texts or options; give the same to continue "
                    "it, or remove the folder to start again"
                )
            features = self._features(generator, work)
            held_out = self._held_out(generator)
            vocabulary = vocabulary_of(generator)
            digest, dtype = header["model"], features.dtype
            prompts = self.texts.prompts(
                lambda text: tokens_of(generator.tokenizer, text), PROMPT_TOKENS, NUM_PROMPTS
            )
            num_experts = generator.runtime.shape.experts.num_experts
        trainer = self._trainer(features, vocabulary, num_experts)
        losses = self._train(trainer, work)
        head, found = self._naming(trainer, features, vocabulary, num_experts, held_out)
        write_head(folder / NAME, head, digest, dtype)
        acceptance = self._acceptance(folder / NAME, prompts, budget)
        # Write it again, now with the measured acceptance rates.
        head.acceptance_rates = expected_acceptance(acceptance)
        write_head(folder / NAME, head, digest, dtype)
        report = {
            "format": FORMAT,
            "speq": __version__,
            "model": digest,
            "texts": sorted(self.texts.texts),
            "settings": asdict(self.settings),
            "memory_budget": budget,
            "threads": torch.get_num_threads(),
            "windows": len(features),
            "tokens": len(features) * features.length,
            "steps": trainer.taken,
            "head_bytes": head.shape.nbytes(dtype),
            "losses": losses,
            "draft_length": DRAFT_LENGTH,
            "acceptance": acceptance,
            "routes": None if found is None else found.to_json(),
            "named_layers": list(head.predicted_layers),
            "seconds": monotonic() - self.start_s,
        }
        write_whole(folder / REPORT, json.dumps(report, indent=1).encode() + b"\n")
        shutil.rmtree(work)
        return TrainedHead(folder, report)

    def _generator(self, budget: int, drafter: str, **options: Any) -> Generator:
        drafts = {"draft_length": 0} if drafter == "none" else {}
        return Generator.from_pretrained(
            self.model,
            budget,
            device=self.training.device,
            draft="none",
            drafter=drafter,
            profile="none",
            packed_copy="none",
            progress=self.progress,
            **(drafts | options),
        )

    def _header(self, generator: Generator, budget: int) -> dict[str, Any]:
        """Settings and inputs that the result depends on."""
        runtime = generator.runtime
        opened, longest = runtime.opened, runtime.shape.max_context
        if self.settings.sequence_length >= longest:
            raise OptionError(
                f"sequence_length is {self.settings.sequence_length}; the model's limit is "
                f"{longest - 1}: give a shorter --sequence-length"
            )
        return {
            "format": FORMAT,
            "speq": __version__,
            "model": model_digest(opened.checkpoint, opened.family.names),
            "texts": self.texts.digest(),
            "settings": asdict(self.settings),
            "windows": self.training.windows,
            "steps": self.training.steps,
            "dtype": str(runtime.dtype),
            "device": runtime.device.type,
            "memory_budget": budget,
            "threads": torch.get_num_threads(),
        }

    def _left_s(self, share: float) -> float:
        """Seconds until this share of the time is over."""
        return self.start_s + share * self.training.minutes * 60 - monotonic()

    def _features(self, generator: Generator, work: Path) -> FeatureFile:
        """Compute the windows that are missing; return all."""
        runtime, length = generator.runtime, self.settings.sequence_length
        shape = runtime.shape
        routed = (len(shape.experts.layers), shape.top_k)
        features = FeatureFile(work, self.journal, length, shape.hidden_size, runtime.dtype, routed)
        if any("windows" in entry for entry in self.journal.entries):
            return features
        windows = self._windows(generator, self.texts)
        for _ in range(len(features)):
            next(windows)
        wanted = self.training.windows
        group: list[Window] = []
        while wanted is None or len(features) + len(group) < wanted:
            if wanted is None and self._left_s(FEATURES_SHARE) < 0 and len(features):
                break
            token_ids = next(windows, None)
            if token_ids is None:
                break
            group.append(window_of(runtime, token_ids))
            if len(group) == GROUP:
                features.append(group)
                group = []
            self.progress("making features", len(features) + len(group), wanted or 0)
        if group:
            features.append(group)
        if not len(features):
            raise OptionError(
                f"the texts have fewer than {length} tokens to train on; give more text or a "
                "shorter --sequence-length"
            )
        self.journal.add({"windows": len(features)})
        return features

    def _windows(self, generator: Generator, texts: Texts) -> Iterator[torch.Tensor]:
        tokenizer, settings = generator.tokenizer, self.settings
        return texts.windows(
            lambda text: tokens_of(tokenizer, text),
            settings.sequence_length,
            tokenizer.eos_token_id,
            settings.seed,
        )

    def _held_out(self, generator: Generator) -> list[HeldOut]:
        """Held-out windows for evaluating predicted experts; empty if they are not trained or texts
        are short.
        """
        if self.settings.routes == "off":
            return []
        windows = self._windows(generator, self.texts.ends)
        some = zip(range(HELD_OUT), windows, strict=False)
        return [held_out_of(generator.runtime, token_ids) for _, token_ids in some]

    def _naming(
        self,
        trainer: Trainer,
        features: FeatureFile,
        vocabulary: TrainingVocabulary,
        num_experts: int,
        held_out: list[HeldOut],
    ) -> tuple[MoEHead, Recalls | None]:
        """Build the final head, which predicts experts in the layers where that is worth it."""
        head, steps = trainer.head, min(trainer.taken, STEPS)
        if not held_out:
            return head, None
        seed = self.settings.seed
        weight = fit(head, features, vocabulary, num_experts, steps, seed, self.progress)
        found = recalls(head, weight, held_out, vocabulary)
        return with_predictions(head, weight, found.won(), features.routed[1]), found

    def _trainer(
        self, features: FeatureFile, vocabulary: TrainingVocabulary, num_experts: int
    ) -> Trainer:
        settings, hidden_size = self.settings, features.hidden_size
        shape = HeadShape(
            hidden_size,
            settings.width or hidden_size,
            settings.branches,
            settings.contrasts,
            settings.sequence_length,
        )
        routes = features.routed[0] * num_experts * 2 * hidden_size * torch.float32.itemsize
        held = shape.nbytes(torch.float32) + (routes if settings.routes == "on" else 0)
        needed = COPIES * held + vocabulary.nbytes
        if vocabulary.table.is_cpu and needed > available_bytes():
            raise NoRoom(
                f"training takes {format_bytes(needed)} for the head and the vocabulary and "
                f"{format_bytes(available_bytes())} are free; give a smaller --width, or --routes "
                "off"
            )
        head = MoEHead.random(shape, settings.seed).to(vocabulary.table.device)
        return Trainer(head, features, vocabulary, settings)

    def _train(self, trainer: Trainer, work: Path) -> list[dict[str, Any]]:
        """Take all remaining steps. Return the losses of saved states."""
        steps = self.training.steps
        noted = [entry["steps"] for entry in self.journal.entries if "steps" in entry]
        steps = noted[-1] if noted else steps
        if steps is not None and not noted:
            self.journal.add({"steps": steps})
        trainer.resume(work)
        saved_s = begun_s = monotonic()
        begun, recent = trainer.taken, []
        while steps is None or trainer.taken < steps:
            recent.append(trainer.step(steps))
            now_s = monotonic()
            if steps is None and trainer.taken >= WARMUP_STEPS:
                step_s = (now_s - begun_s) / (trainer.taken - begun)
                more = int(self._left_s(1 - END_SHARE) / step_s)
                steps = trainer.taken + max(more, 0)
                self.journal.add({"steps": steps})
            if now_s - saved_s > SAVE_S or trainer.taken == steps:
                trainer.save(work)
                self.journal.add({"taken": trainer.taken, "loss": means(recent)})
                saved_s, recent = now_s, []
            self.progress("training", trainer.taken, steps or 0)
        known = {e["taken"]: e["loss"] for e in self.journal.entries if "taken" in e}
        return [{"taken": taken} | known[taken] for taken in sorted(known)]

    def _acceptance(self, head: Path, prompts: list[list[int]], budget: int) -> dict[str, Any]:
        """Measure the acceptance of chains, greedy and at temperature 1; empty without held-out
        texts.
        """
        if not prompts:
            return {}
        generator = self._generator(budget, "head", head=head, draft_length=DRAFT_LENGTH)
        with closing(generator):
            return {
                name: measure_acceptance(generator, prompts, temperature, self.progress).to_json()
                for name, temperature in (("greedy", 0.0), ("drawn", 1.0))
            }


def vocabulary_of(generator: Generator) -> TrainingVocabulary:
    """Load the vocabulary in float32, where the head is trained."""
    model = generator.runtime.model
    words, bias = model.head_words()
    table = model.embed([*range(generator.runtime.shape.vocab_size)])
    # Inference tensors cannot be used in training.
    held = words.float().clone()
    same = table.shape == words.shape and torch.equal(table.to(words.dtype), words)
    return TrainingVocabulary(
        held if same else table.float().clone(),
        held,
        None if bias is None else bias.float().clone(),
    )


def expected_acceptance(acceptance: dict[str, Any]) -> tuple[float, ...]:
    """Acceptance rates to expect at any temperature: the lesser of each depth."""
    return (
        tuple(map(min, *(each["by_depth"] for each in acceptance.values()))) if acceptance else ()
    )


def means(losses: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in losses) / len(losses) for name in losses[0]}


def header_in(path: Path) -> dict[str, Any]:
    """Read a journal's header; empty if there is none or it is incomplete."""
    if not os.path.exists(path):
        return {}
    header = Journal(path, {}, is_ours).header
    if not header:
        path.unlink()
    return header


def is_ours(name: str) -> bool:
    return name in (JOURNAL, TOKENS, FEATURES, ROUTES, STATE)
