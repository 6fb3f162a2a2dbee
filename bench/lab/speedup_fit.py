"""Algorithm 1 of MoESD (Huang et al., NeurIPS 2025): speed-ups by batch size, fitted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from speq.errors import DependencyError, SpeqError
from speq.governor.speedup_model import activated_experts


class Measurement(NamedTuple):
    """One measured setting of Algorithm 1.

    batch, draft_length, top_k, num_experts  B, gamma, K, E
    accepted_share  sigma: emitted tokens of a step over the most it could emit, gamma + 1
    speedup         measured T_AR / T_SD
    """

    batch: int
    draft_length: int
    top_k: int
    num_experts: int
    accepted_share: float
    speedup: float


@dataclass(frozen=True, slots=True)
class SpeedupParameters:
    """The parameters that Algorithm 1 fits. Times are in any one unit: a speed-up is a ratio.

    bias, token, expert, load  of a pass: constant; by its tokens, as `roofline_time` counts them;
                    by the experts it reads; by the tokens of an expert (k_1, k_2, k_3)
    draft_bias, draft_token    of a drafted token
    reject_bias, reject_token  of acceptance
    ridge           lambda RP: tokens at which arithmetic takes as long as reading weights
    sharpness       s: how sharply time turns from constant to rising there
    """

    bias: float = 1.0
    token: float = 0.1
    expert: float = 0.1
    load: float = 0.1
    draft_bias: float = 0.1
    draft_token: float = 0.01
    reject_bias: float = 0.01
    reject_token: float = 0.001
    ridge: float = 32.0
    sharpness: float = 1.05

    def values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]


def roofline_time(tokens: float, ridge: float, sharpness: float) -> float:
    """G(t; lambda RP, s): about constant below the ridge, and proportional to tokens above it.

    Below the ridge a pass waits for memory. The slides name G without a formula; this is ridge +
    the integral of a logistic step, smooth for least squares: ln_s(s^ridge + s^t).
    """
    log = math.log(sharpness)
    longer, shorter = max(tokens, ridge), min(tokens, ridge)
    return longer + math.log1p(math.exp((shorter - longer) * log)) / log


def modelled_speedup(parameters: SpeedupParameters, setting: Measurement) -> float:
    """ComputeSpeedup of Algorithm 1: gamma drafted tokens and their verification.

    A verification has gamma + 1 rows of each sequence here, with the pending token's; the slides
    count gamma.
    """
    p = parameters

    def pass_time(tokens: int) -> float:
        experts = activated_experts(setting.num_experts, setting.top_k, tokens)
        each = tokens * setting.top_k / experts
        return (
            p.bias
            + p.token * roofline_time(tokens, p.ridge, p.sharpness)
            + p.expert * experts
            + p.load * roofline_time(each, p.ridge, p.sharpness)
        )

    plain = pass_time(setting.batch)
    verify = pass_time(setting.batch * (setting.draft_length + 1))
    draft = p.draft_bias + p.draft_token * roofline_time(setting.batch, p.ridge, p.sharpness)
    reject = p.reject_bias + p.reject_token * setting.batch
    emitted = setting.accepted_share * (setting.draft_length + 1)
    return emitted * plain / (setting.draft_length * draft + verify + reject)


def fit_speedup(measurements: Sequence[Measurement]) -> SpeedupParameters:
    """Fit the parameters to measured speed-ups by least squares.

    Raises SpeqError for fewer measurements than parameters, and without scipy.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise DependencyError(
            "fitting speed-ups needs scipy, which is not installed; pip install scipy"
        ) from error

    start = SpeedupParameters()
    names = [field.name for field in fields(SpeedupParameters)]
    # A ratio of times has no unit, so `bias` is not fitted.
    if len(measurements) < len(names) - 1:
        raise SpeqError(
            f"{len(measurements)} measurements were given; the speed-up model has "
            f"{len(names) - 1} parameters and needs at least as many"
        )

    def parameters(logs: Sequence[float]) -> SpeedupParameters:
        # Logarithms keep times positive, and the sharpness above 1.
        times = [math.exp(log) for log in logs]
        times[-1] += 1
        return replace(start, **dict(zip(names[1:], times, strict=True)))

    def residuals(logs: Sequence[float]) -> list[float]:
        fitted = parameters(logs)
        return [modelled_speedup(fitted, m) - m.speedup for m in measurements]

    first = [math.log(value) for value in start.values()[1:-1]]
    first.append(math.log(start.sharpness - 1))
    bounds = ([value - 8 for value in first], [value + 8 for value in first])
    found = least_squares(residuals, first, bounds=bounds, max_nfev=400)
    return parameters(found.x.tolist())
