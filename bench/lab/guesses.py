"""What guesses of the next layer's experts are worth, made a layer early while decoding plainly.

Three kinds of guesses are replayed through the real scheduler, on links and processors of several
speeds: what the next layer's router says now (as `three-phase` does), a linear map of that which is
fitted to the first half of the tokens, and the truth, which no predictor can beat.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.lab.command import main
from bench.lab.options import BudgetText
from bench.lab.replay import Replay, ReplayScheduling, Times
from speq.generator import Generator
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report, read_prompts
from speq.measure.route_trace import Choice, RouteTrace, TraceStep
from speq.measure.settings import MaxNewTokens, NumPrompts, Prompts
from speq.options.declared import Options
from speq.routing import top_experts
from speq.units import Progress, track

COLUMNS: dict[str, Column] = {
    "compute ms": ("compute_ms", "{:.1f}"),
    "transfer ms": ("transfer_ms", "{:.1f}"),
    "slots/layer": ("slots", "{}"),
    "guess": ("guess", "{}"),
    "recall": ("recall", "{:.1%}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "moved/token": ("experts_moved", "{:.2f}"),
}
PICTURES = (
    Picture(
        *("tpot", "Time per output token", (Axis("guess", "what is guessed"),)),
        (Axis("tpot_ms", "replayed, ms"),),
        (Axis("machine", "machine"),),
        aid="Lower is faster: bars of one colour are a machine.",
    ),
)
# Milliseconds of a layer without its experts, of an expert, and of the link for one.
MACHINES = ((2.0, 1.2, 4.5), (1.5, 0.4, 4.7), (1.5, 0.4, 1.4))
# Shares of the experts that there are slots for.
SHARES = (0.25, 0.5)
# Of the mean square of what the map is fitted to, so much keeps it small.
DAMPING = 0.01


@dataclass(frozen=True, slots=True)
class GuessesSettings(Options):
    """Texts whose routes are recorded."""

    memory_budget: BudgetText
    prompts: Prompts = None
    num_prompts: NumPrompts = 12
    max_new_tokens: MaxNewTokens = 128


# One token's: early, own, topk_ids, topk_weights.
Scored = tuple[Tensor | None, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerScores:
    """Router logits of a layer [N, E]: its own router's of the rows that the layer before it had
    (None: there is none), and those of its own rows. topk_ids [N, K], topk_weights [N, K].
    """

    early: Tensor | None
    own: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    @classmethod
    def of(cls, tokens: list[Scored]) -> "LayerScores":
        early, own, topk_ids, topk_weights = zip(*tokens, strict=True)
        return cls(
            None if early[0] is None else torch.cat(early).float(),
            torch.cat(own).float(),
            torch.cat(topk_ids),
            torch.cat(topk_weights),
        )


def run(model: str, settings: GuessesSettings, progress: Progress | None = None) -> Report:
    """Record and replay."""
    layers = record_scores(model, settings, progress)
    fitted = len(layers[0].own) // 2
    kinds: dict[str, list[Tensor | None]] = {"none": [None] * len(layers)}
    kinds["router"] = [each.early for each in layers]
    kinds["map"] = [mapped(each, fitted) for each in layers]
    kinds["truth"] = [None if each.early is None else each.own for each in layers]
    cells = [(m, share, kind) for m in MACHINES for share in SHARES for kind in kinds]
    rows = [
        row(layers, kinds[kind], kind, machine, share, fitted)
        for machine, share, kind in track("replaying routes", cells, len(cells), progress)
    ]
    return Report("guesses", model, settings.as_json() | {"tokens": fitted}, rows)


def record_scores(
    model: str, settings: GuessesSettings, progress: Progress | None
) -> list[LayerScores]:
    """Scores of every layer for each decoded token."""
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model, settings.memory_budget, draft_length="0", profile="none", progress=progress
    )
    try:
        num_layers = generator.runtime.engine.lookahead.num_layers
        found: list[list[Scored]] = [[] for _ in range(num_layers)]
        for prompt in track("recording scores", prompts, len(prompts), progress):
            for at, _ in enumerate(
                generator.stream(prompt, max_new_tokens=settings.max_new_tokens)
            ):
                if at:  # a step of one token, behind the prompt's
                    early = None
                    for layer, tokens in enumerate(found):
                        route = generator.runtime.engine.lookahead.used[layer]
                        tokens.append((early, route.logits, route.topk_ids, route.topk_weights))
                        early = route.next_router([0]) if route.next_router is not None else None
    finally:
        generator.close()
    return [LayerScores.of(tokens) for tokens in found]


def mapped(layer: LayerScores, fitted: int) -> Tensor | None:
    """Early logits plus what a ridge regression over the first tokens expects them to lack."""
    if layer.early is None:
        return None
    inputs = torch.cat([layer.early, torch.ones(len(layer.early), 1)], dim=1).double()
    known, lacking = inputs[:fitted], (layer.own - layer.early)[:fitted].double()
    gram = known.T @ known
    gram += DAMPING * gram.diagonal().mean() * torch.eye(len(gram))
    return layer.early + (inputs @ torch.linalg.solve(gram, known.T @ lacking)).float()


def row(
    layers: list[LayerScores],
    guesses: list[Tensor | None],
    kind: str,
    machine: tuple[float, float, float],
    share: float,
    fitted: int,
) -> dict[str, Any]:
    """One kind of guesses on one machine, over the tokens that nothing was fitted to."""
    (count, num_experts), top_k = layers[0].own.shape, layers[0].topk_ids.shape[1]
    steps = [step_of(layers, guesses, token) for token in range(fitted, count)]
    trace = RouteTrace("", 0, len(layers), num_experts, top_k, steps)
    layer_s, expert_s, transfer_s = (each / 1e3 for each in machine)
    slots = int(share * num_experts)
    prefetch = "none" if kind == "none" else "three-phase"
    replay = Replay(
        trace,
        Times(0.0, layer_s, expert_s, transfer_s, 3, 1),
        ReplayScheduling(slots * len(layers), "lookahead", prefetch),
    )
    stats = replay.run(len(steps) // 4).stats.summary()
    return {
        "machine": f"{machine[2]:g} ms a transfer, {slots} slots",
        "guess": kind,
        "recall": recall(layers, guesses, fitted),
        "slots": slots,
        "compute_ms": len(layers) * (machine[0] + top_k * machine[1]),
        "transfer_ms": machine[2],
        "tpot_ms": stats["tpot_ms"],
        "experts_moved": stats["moved_bytes_per_token"],
    }


def step_of(layers: list[LayerScores], guesses: list[Tensor | None], token: int) -> TraceStep:
    """A token's step; the guesses of layers that have some, with their margins."""
    top_k = layers[0].topk_ids.shape[1]
    guessed: list[list[Choice]] = []
    for guess in guesses:
        if guess is None:
            guessed.append([])
            continue
        ids, margins = top_experts(guess[token : token + 1], top_k)
        guessed.append([(ids[0].tolist(), margins[0].tolist())])
    used = [[each.topk_ids[token].tolist()] for each in layers]
    weights = [[each.topk_weights[token].tolist()] for each in layers]
    return TraceStep([], used, guessed, [0], weights, [])


def recall(layers: list[LayerScores], guesses: list[Tensor | None], fitted: int) -> float | None:
    """Share of the experts that tokens chose which were guessed, as many as they chose."""
    shares = []
    for each, guess in zip(layers, guesses, strict=True):
        if guess is not None:
            ids = guess.topk(each.topk_ids.shape[1]).indices[fitted:]
            hits = (ids[:, :, None] == each.topk_ids[fitted:, None]).any(1)
            shares.append(hits.float().mean())
    return float(torch.stack(shares).mean()) if shares else None


if __name__ == "__main__":
    main("guesses")
