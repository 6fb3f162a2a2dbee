"""What `speq tune` measures of a model on this machine: the offline half of MoE-SpeQ 3.2.2.

The link by size of a read; what a first expert takes; drafts and verifications of several lengths,
from generations under the budget; and how fast each codec's experts are computed with, and
published ones encoded, on random experts of the model's shape.
"""

import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Unpack

from speq.devices.named import device_named
from speq.errors import SpeqError, checked_int
from speq.experts.codec import codec_of, codecs_for
from speq.experts.expert_store import mean_moved_bytes
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.governor.draft_length import LONGEST
from speq.governor.profile import Profile
from speq.governor.roofline import Points
from speq.layers.expert_counts import ExpertCounts
from speq.measure import link
from speq.measure.codec_speed import compute_bytes_per_s, encode_bytes_per_s
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
from speq.units import Clock, Progress, no_progress, tracked

# Draft lengths that are measured; those between are interpolated.
DRAFT_LENGTHS = (0, 1, 2, 4, 8, LONGEST)


@dataclass(frozen=True, slots=True)
class Tuned:
    """A profile, and the file that it is kept in.

    counts_path  where counts of the experts are kept; None: nowhere
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
) -> Tuned:
    """Measure a model on this machine under a budget, and keep the profile that runs go by, and how
    often each expert was used, which `draft_experts` goes by.

    force     replace the file `out`
    progress  told (what, done, total)
    options   of TuneSettings, and of RunConfig what a run has as well; see docs/options.md

    Raises SpeqError for a budget that is too small, and where there is no place for the profile,
    before anything is measured.
    """
    settings = build(TuneSettings, {"memory_budget": memory_budget, **options})
    return tuned(model, settings, force, progress)


def tuned(
    model: str | Path, settings: TuneSettings, force: bool = False, tell: Progress = no_progress
) -> Tuned:
    """As `tune`."""
    path = place_of(model, settings, force)
    profile, counts = measured(model, settings, tell)
    profiles.write(profile, path)
    with closing(open_model(model)) as opened:
        counts_path = used_experts.write_counts(counts, opened.checkpoint)
    return Tuned(profile, path, counts_path)


def place_of(model: str | Path, settings: TuneSettings, force: bool) -> Path:
    """The file for the profile. Raises SpeqError where there can be none."""
    if settings.out is not None:
        check_target(settings.out, force)
        return settings.out
    with closing(open_model(model)) as opened:
        device = device_named(settings.run.get("device", "auto")).torch.type
        path = profiles.profile_path(profiles.key_of(opened, device, settings.memory_budget))
    if path is None:
        raise SpeqError("this user has no home to keep the profile in; name a file with --out")
    check_target(path, force=True)
    return path


def measured(
    model: str | Path,
    settings: TuneSettings,
    tell: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> tuple[Profile, ExpertCounts]:
    """A profile, and how often the texts' tokens chose each expert.

    Raises SpeqError for nonsense settings and budgets that are too small.
    """
    # Room for a cycle of each length.
    checked_int("max_new_tokens", settings.max_new_tokens, sum(k + 1 for k in DRAFT_LENGTHS))
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        draft_length="auto",
        profile="none",
        drafter="int4",  # asked for by name: held, to be timed, wherever it fits
        progress=tell,
        **settings.run,
    )
    try:
        runtime = generator.runtime
        cycles, routes = measured_steps(generator, prompts, settings.max_new_tokens, tell)
        points, first_fetch_s = measured_link(runtime, tell, clock)
        shape = runtime.opened.store.codec.shape
        names = codecs_for(shape)
        codecs = {
            name: compute_bytes_per_s(
                codec_of(name, shape), runtime.shape, runtime.device, runtime.dtype, clock
            )
            for name in tracked("timing kernels of each codec", names, len(names), tell)
        }
        others = encodable(runtime)
        encoders = {
            name: encode_bytes_per_s(codec_of(name, shape), runtime.config.reader_threads, clock)
            for name in tracked("timing what encodes", others, len(others), tell)
        }
        key = key_of(runtime.opened, runtime.device.type, runtime.config.memory_budget)
        expert_bytes = mean_bytes(runtime)
        codec = runtime.opened.store.codec.name
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
        codec=codec,
        routes=distinct,
        **figures_of(cycles),
    )
    return profile, counts


def measured_steps(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    tell: Progress,
) -> tuple[dict[int, list[StepStats]], list[list[list[int]]]]:
    """Cycles by draft length, of as many lengths as the budget's draft allows; and expert ids by
    layer and token, of all tokens that were emitted.

    Lengths take turns within each text, so that a machine that changes favours none; what their
    slots hold is then of all lengths, which is why stalls are taken off and not measured here.
    """
    runtime = generator.runtime
    cycles = defaultdict[int, list[StepStats]](list)
    routes: list[list[list[int]]] = [[] for _ in range(runtime.model.num_moe_layers)]
    done, total = 0, len(prompts) * (max_new_tokens - 1)

    def fewest_cycles() -> int:
        lengths = DRAFT_LENGTHS if runtime.draft_bank is not None else DRAFT_LENGTHS[:1]
        return min(lengths, key=lambda k: (len(cycles[k]), k))

    tell("measuring drafts and verifications", done, total)
    for step in steps_of(generator, prompts, max_new_tokens, fewest_cycles):
        cycles[step.draft_length].append(step)
        used = runtime.engine.lookahead.used
        for layer, chosen in enumerate(routes):  # a chain is accepted from the front
            chosen += used[layer].ids[: step.accepted + 1]
        done += step.emitted
        tell("measuring drafts and verifications", done, total)
    return {k: cycles[k] for k in DRAFT_LENGTHS if cycles[k]}, routes


def figures_of(cycles: dict[int, list[StepStats]]) -> dict[str, Any]:
    """The fields of a profile that cycles tell."""
    verify = tuple(
        (k + 1.0, lower_quartile([step.verify_s - step.stall_s for step in steps]))
        for k, steps in cycles.items()
    )
    distinct = tuple(
        (k + 1.0, fmean(step.requests for step in steps)) for k, steps in cycles.items()
    )
    drafts = [(k, median(step.draft_s for step in steps)) for k, steps in cycles.items() if k]
    base_s, token_s = line_through(drafts)
    tried = sum(min(s.accepted + 1, s.draft_length) for steps in cycles.values() for s in steps)
    stood = sum(step.accepted for steps in cycles.values() for step in steps)
    return {
        "verify": verify,
        "distinct": distinct,
        "draft_base_s": base_s,
        "draft_token_s": token_s,
        "acceptance": stood / tried if tried else None,
    }


def lower_quartile(values: list[float]) -> float:
    """The value that a quarter of them are below.

    Threads that read take the processor from the pass beside them, and no pass is without misses in
    a small budget: what is left of a pass's time without its stalls is too long, in most of them.
    """
    return sorted(values)[len(values) // 4]


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares, neither of them negative; (0, 0) without points."""
    if not points:
        return 0.0, 0.0
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if not 0 < slope * mean_x <= mean_y:
        return 0.0, mean_y / mean_x
    return mean_y - slope * mean_x, slope


def mean_bytes(runtime: Runtime) -> int:
    """What moves for an expert."""
    return round(mean_moved_bytes(runtime.opened.store))


def encodable(runtime: Runtime) -> list[str]:
    """Codecs by which a run on the CPU can encode these experts as it reads them."""
    source = runtime.opened.store.source
    if runtime.device.type != "cpu" or not source.published:
        return []
    return [name for name in codecs_for(source.codec.shape) if name != source.codec.name]


def measured_link(runtime: Runtime, tell: Progress, clock: Clock) -> tuple[Points, float]:
    """Bytes per second by size, experts last, and seconds until a first expert is there."""
    if runtime.device.type == "cuda":
        expert_bytes = mean_bytes(runtime)
        points = link.copies_by_size(expert_bytes, runtime.device, clock)
        return points, link.first_copy_s(expert_bytes, runtime.device, clock)
    store, readers = runtime.opened.store.source, runtime.config.reader_threads
    points = link.link_by_size(store, readers, tell, clock)
    return points, link.first_fetch_s(store, readers, clock)
