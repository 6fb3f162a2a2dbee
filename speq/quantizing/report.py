"""Report on quantised experts, routes and held-out text: quantize_report.json."""

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from speq.quantizing.residual import ResidualCount

# Fewest held-out tokens of experts that are compared with rounding.
JUDGED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Report on one expert.

    tokens           calibration tokens routed to it; held_out_tokens: of the held-out text
    method           "gptq", or "rtn" if it was rounded
    damp             share of the mean of a Hessian's diagonal that was added to it
    squared_error    of its weighted outputs for held-out tokens, summed; rounding_error: that of
                     plain rounding; squared_output: sum of the squared outputs
    residual         of exact weights over the draft; rounding_residual: over plain rounding. None
                     if the model is not in bfloat16
    """

    tokens: int
    held_out_tokens: int
    method: str
    damp: float
    squared_error: float
    rounding_error: float
    squared_output: float
    residual: ResidualCount | None = None
    rounding_residual: ResidualCount | None = None

    @classmethod
    def from_json(cls, entries: dict[str, Any]) -> "ExpertReport":
        """Raises KeyError or TypeError for anything but the output of `asdict`."""
        residuals = {name: entries[name] for name in ("residual", "rounding_residual")}
        counts = {name: count and ResidualCount(**count) for name, count in residuals.items()}
        return cls(**(entries | counts))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Report on one layer.

    experts       reports of its experts; empty if it has none
    route_recall  share of the held-out tokens' experts that the draft also chose, each model with
                  its own hidden states; same_routes: tokens with all experts equal. None without
                  held-out text
    """

    layer: int
    experts: tuple[ExpertReport, ...] = ()
    route_recall: float | None = None
    same_routes: float | None = None

    @classmethod
    def from_json(cls, entries: dict[str, Any]) -> "LayerReport":
        """Raises KeyError, TypeError or ValueError for anything but the output of `asdict`."""
        experts = tuple(ExpertReport.from_json(expert) for expert in entries["experts"])
        return cls(**(entries | {"experts": experts}))

    @property
    def error(self) -> float | None:
        """Root mean square error of the experts' outputs, relative to the outputs."""
        return self._relative([expert.squared_error for expert in self.experts])

    @property
    def rounding_error(self) -> float | None:
        """Root mean square error if all were rounded."""
        return self._relative([expert.rounding_error for expert in self.experts])

    def _relative(self, errors: list[float]) -> float | None:
        total = sum(expert.squared_output for expert in self.experts)
        return math.sqrt(sum(errors) / total) if total > 0 else None

    def summary(self) -> dict[str, Any]:
        """Figures of a row of the table."""
        tokens = [expert.tokens for expert in self.experts]
        judged = [e for e in self.experts if e.held_out_tokens >= JUDGED_TOKENS]
        judged = [expert for expert in judged if expert.method == "gptq"]
        return {
            "layer": self.layer,
            "experts": len(self.experts),
            "tokens_min": min(tokens),
            "tokens_median": median(tokens),
            "tokens_max": max(tokens),
            "rounded": sum(expert.method == "rtn" for expert in self.experts),
            "error": self.error,
            "rounding_error": self.rounding_error,
            "judged": len(judged),
            "better": sum(e.squared_error < e.rounding_error for e in judged),
            "route_recall": self.route_recall,
            "same_routes": self.same_routes,
        } | {lane: count.to_json() for lane, count in self.residuals.items()}

    @property
    def residuals(self) -> dict[str, ResidualCount]:
        """Residuals of exact weights over the draft and over plain rounding; empty unless in
        bfloat16.
        """
        found = {
            "residual": [expert.residual for expert in self.experts],
            "rounding_residual": [expert.rounding_residual for expert in self.experts],
        }
        known = {lane: [c for c in counts if c is not None] for lane, counts in found.items()}
        return {lane: sum(c, ResidualCount()) for lane, c in known.items() if c}


@dataclass(frozen=True, slots=True)
class TextReport:
    """Evaluation of a model on the held-out text, teacher-forced.

    tokens      number of scored tokens
    perplexity  of the text
    same_token  share of tokens whose most likely next token is the exact model's: acceptance of a
                greedy draft
    overlap     mean of sum min(p, q) of its distribution and the exact one's at temperature 1: the
                highest acceptance of any rule (arXiv:2211.17192); shared noise accepts a little
                less (`speq.engine.sampling`)
    divergence  mean Kullback-Leibler divergence from the exact distribution, in nats
    """

    tokens: int
    perplexity: float
    same_token: float
    overlap: float
    divergence: float


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """Report on a whole run.

    text          evaluation by lane, "held out" is the exact model; empty without held-out text

    tokens        calibration tokens; held_out_tokens: of the held-out text
    """

    settings: dict[str, Any]
    tokens: int
    held_out_tokens: int
    layers: tuple[LayerReport, ...]
    text: dict[str, TextReport] = field(default_factory=dict)

    @property
    def moe_layers(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.experts]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [layer.summary() for layer in self.moe_layers]

    def to_json(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "settings": self.settings,
            "tokens": self.tokens,
            "held_out_tokens": self.held_out_tokens,
            "experts": sum(row["experts"] for row in rows),
            "rounded_for_lack_of_tokens": self.rounded,
            "judged": sum(row["judged"] for row in rows),
            "better_than_rounding": sum(row["better"] for row in rows),
            **{lane: count.to_json() for lane, count in self.residuals.items()},
            "text": {lane: asdict(text) for lane, text in self.text.items()},
            "layers": rows,
            "experts_by_layer": {
                layer.layer: [asdict(expert) for expert in layer.experts]
                for layer in self.moe_layers
            },
        }

    @property
    def residuals(self) -> dict[str, ResidualCount]:
        """Residuals of all layers, see `LayerReport.residuals`."""
        found: dict[str, ResidualCount] = {}
        for layer in self.moe_layers:
            for lane, count in layer.residuals.items():
                found[lane] = found.get(lane, ResidualCount()) + count
        return found

    @property
    def rounded(self) -> int:
        """Number of experts that were rounded for lack of tokens."""
        return sum(row["rounded"] for row in self.rows) if self.settings["method"] == "gptq" else 0
