"""Measures a model's profile on this machine for `speq tune` (offline part of MoE-SpeQ 3.2.2).

It measures the link by size of a read, the time of a first expert, and drafts and verifications of
several lengths in generations under the budget. On random experts of the model's shape it measures
how fast each codec computes and encodes, and on a GPU's host how long an expert takes there.
"""

import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Unpack

from speq.devices.named import find_device
from speq.errors import OptionError, checked_int
from speq.experts.codec import codec_of, codecs_for
from speq.experts.expert_store import mean_moved_bytes
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.governor.draft_length import LONGEST
from speq.governor.profile import Profile
from speq.governor.roofline import Points
from speq.kernels.library import has_cpu_library
from speq.layers.expert_counts import ExpertCounts
from speq.measure import link
from speq.measure.codec_speed import (
    compute_bytes_per_s,
    encode_bytes_per_s,
    host_expert_points,
)
from speq.measure.report import read_prompts
from speq.measure.routes import distinct_points, expert_counts
from speq.measure.runs import steps_of
from speq.measure.settings import TuneSettings
from speq.models.opened import open_model
from speq.options.declared import build
from speq.options.typed import TuneOptions
from speq.planning import profiles, used_experts
from speq.planning.profiles import key_of
from speq.runtime import Runtime
from speq.stats import StepStats
from speq.units import Clock, Progress, no_progress, track

# Draft lengths that are measured; those between are interpolated.
DRAFT_LENGTHS = (0, 1, 2, 4, 8, LONGEST)


@dataclass(frozen=True, slots=True)
class TuneResult:
    """A profile, and the file that it was written to.

    counts_path  file of the experts' counts; None: they were not written
    """

    profile: Profile
    path: Path
    counts_path: Path | None


def tune(
    model: str | Path,
    memory_budget: str | int,
    *,
    force: bool = False,
    progress: Progress = no_progress,
    **options: Unpack[TuneOptions],
) -> TuneResult:
    """Measure a model on this machine under a budget, and write the profile that runs use.

    It also writes how often each expert was used, for `draft_experts`.

    force     replace the file `out`
    progress  called with (what, done, total)
    options   of TuneSettings and RunConfig; see docs/options.md

    Raises SpeqError for a budget that is too small, and if the profile cannot be written, before
    anything is measured.
    """
    settings = build(TuneSettings, {"memory_budget": memory_budget, **options})
    return tune_with(model, settings, force, progress)


def tune_with(
    model: str | Path, settings: TuneSettings, force: bool = False, tell: Progress = no_progress
) -> TuneResult:
    """Tune as `tune` does, with the options in one object."""
    path = place_of(model, settings, force)
    profile, counts = measure_profile(model, settings, tell)
    profiles.write(profile, path)
    with closing(open_model(model)) as opened:
        counts_path = used_experts.write_counts(counts, opened.checkpoint)
    return TuneResult(profile, path, counts_path)


def place_of(model: str | Path, settings: TuneSettings, force: bool) -> Path:
    """Choose the file for the profile. Raises SpeqError if it cannot be written."""
    if settings.out is not None:
        check_target(settings.out, force)
        return settings.out
    with closing(open_model(model)) as opened:
        device = find_device(settings.run.get("device", "auto")).torch.type
        path = profiles.profile_path(profiles.key_of(opened, device, settings.memory_budget))
    if path is None:
        raise OptionError("this user has no home folder for the profile; name a file with --out")
    check_target(path, force=True)
    return path


def measure_profile(
    model: str | Path,
    settings: TuneSettings,
    tell: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> tuple[Profile, ExpertCounts]:
    """Measure a profile, and count how often the prompts' tokens chose each expert.

    Raises SpeqError for invalid settings and budgets that are too small.
    """
    # Room for a step of each length.
    checked_int("max_new_tokens", settings.max_new_tokens, sum(k + 1 for k in DRAFT_LENGTHS))
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        draft_length="auto",
        profile="none",
        drafter="int4",  # by name, so that it is loaded and timed wherever it fits
        progress=tell,
        **settings.run,
    )
    try:
        runtime = generator.runtime
        runtime.finish_copy()  # later runs read it, and are what is measured
        by_length, routes = measure_steps(generator, prompts, settings.max_new_tokens, tell)
        points, first_fetch_s = measure_link(runtime, tell, clock)
        shape = runtime.opened.store.codec.shape
        names = codecs_for(shape)
        codecs = {
            name: compute_bytes_per_s(
                codec_of(name, shape), runtime.shape, runtime.device, runtime.dtype, clock
            )
            for name in track("timing kernels of each codec", names, len(names), tell)
        }
        encodings = encodable(runtime)
        encoders = {
            name: encode_bytes_per_s(codec_of(name, shape), runtime.readers, clock)
            for name in track("timing encoders", encodings, len(encodings), tell)
        }
        host: Points = ()
        held = runtime.opened.store.codec
        if runtime.device.type == "cuda" and has_cpu_library() and not held.needs_draft:
            tell("timing experts on the host", 0, 1)
            host = host_expert_points(held, runtime.shape, runtime.dtype, clock)
        key = key_of(runtime.opened, runtime.device.type, runtime.config.memory_budget)
        expert_bytes = mean_bytes(runtime)
        distinct = distinct_points(routes, runtime.shape.experts.num_experts)
        counts = expert_counts(str(model), routes, runtime.shape.experts.num_experts)
    finally:
        generator.close()
    profile = Profile(
        key=key,
        link=points,
        transfer_overhead_s=max(first_fetch_s - expert_bytes / points[-1][1], 0.0),
        first_fetch_s=first_fetch_s,
        expert_bytes=expert_bytes,
        decode_bytes_per_s=codecs,
        encode_bytes_per_s=encoders,
        codec=held.name,
        routes=distinct,
        host=host,
        **figures_of(by_length),
    )
    return profile, counts


def measure_steps(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    tell: Progress,
) -> tuple[dict[int, list[StepStats]], list[list[list[int]]]]:
    """Measure steps by draft length, and the expert ids of emitted tokens by layer and token.

    Lengths take turns within each sequence, so that a changing machine favours none. Slots then
    hold experts of all lengths, so stalls and the host's time beside them are subtracted
    and not measured here.
    """
    runtime = generator.runtime
    by_length = defaultdict[int, list[StepStats]](list)
    routes: list[list[list[int]]] = [[] for _ in range(runtime.model.num_moe_layers)]
    done, total = 0, len(prompts) * (max_new_tokens - 1)

    def least_measured() -> int:
        lengths = DRAFT_LENGTHS if runtime.draft_backend is not None else DRAFT_LENGTHS[:1]
        return min(lengths, key=lambda k: (len(by_length[k]), k))

    tell("measuring drafts and verifications", done, total)
    for step in steps_of(generator, prompts, max_new_tokens, least_measured):
        by_length[step.draft_length].append(step)
        used = runtime.engine.lookahead.used
        for layer, chosen in enumerate(routes):  # a chain is accepted from the front
            chosen += used[layer].ids[: step.accepted + 1]
        done += step.emitted
        tell("measuring drafts and verifications", done, total)
    return {k: by_length[k] for k in DRAFT_LENGTHS if by_length[k]}, routes


def figures_of(by_length: dict[int, list[StepStats]]) -> dict[str, Any]:
    """Compute the fields of a profile that depend on steps, given by draft length."""
    verify = tuple(
        (k + 1.0, lower_quartile([s.verify_s - max(s.stall_s, s.host_s) for s in steps]))
        for k, steps in by_length.items()
    )
    distinct = tuple(
        (k + 1.0, fmean(step.requests for step in steps)) for k, steps in by_length.items()
    )
    drafts = [(k, median(step.draft_s for step in steps)) for k, steps in by_length.items() if k]
    base_s, token_s = line_through(drafts)
    all_steps = [step for steps in by_length.values() for step in steps]
    tried = sum(min(step.accepted + 1, step.draft_length) for step in all_steps)
    accepted = sum(step.accepted for step in all_steps)
    return {
        "verify": verify,
        "distinct": distinct,
        "draft_base_s": base_s,
        "draft_token_s": token_s,
        "acceptance": accepted / tried if tried else None,
    }


def lower_quartile(values: list[float]) -> float:
    """Return the value that a quarter of them are below.

    Reader threads take processor time from a pass. In a small budget every pass has misses, so its
    time without stalls is too long in most of them.
    """
    return sorted(values)[len(values) // 4]


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit intercept and slope by least squares, neither negative; (0, 0) without points."""
    if not points:
        return 0.0, 0.0
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if not 0 < slope * mean_x <= mean_y:
        return 0.0, mean_y / mean_x
    return mean_y - slope * mean_x, slope


def mean_bytes(runtime: Runtime) -> int:
    """Mean bytes that loading an expert moves."""
    return round(mean_moved_bytes(runtime.opened.store))


def encodable(runtime: Runtime) -> list[str]:
    """List the codecs that a run on the CPU can encode these experts with while it reads them."""
    source = runtime.opened.store.source
    if runtime.device.type != "cpu" or not source.published:
        return []
    return [name for name in codecs_for(source.codec.shape) if name != source.codec.name]


def measure_link(runtime: Runtime, tell: Progress, clock: Clock) -> tuple[Points, float]:
    """Measure bytes per second by size, an expert's last, and the time of a first expert."""
    if runtime.device.type == "cuda":
        expert_bytes = mean_bytes(runtime)
        points = link.copies_by_size(expert_bytes, runtime.device, clock)
        return points, link.first_copy_s(expert_bytes, runtime.device, clock)
    store, readers = runtime.opened.store.source, runtime.readers
    points = link.link_by_size(store, readers, tell, clock)
    return points, link.first_fetch_s(store, readers, clock)
