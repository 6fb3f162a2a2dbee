"""Counts how often each expert was chosen, to predict the experts of the next rows."""

import torch

from speq.routing import Route

# At first all experts are assumed equal, with the weight of this many rows.
PRIOR_ROWS = 8
# An expert is likely if at least one of the rows uses it with this probability.
LIKELY = 0.5


class RouteHistory:
    """Counts of (layer, expert) choices."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self._rows = [0] * num_layers
        self._top_k = 0
        self.num_experts = num_experts

    def observe(self, layer: int, route: Route) -> None:
        """Count the choices of a pass."""
        rows, self._top_k = route.host_ids.shape
        chosen = torch.bincount(route.host_ids.flatten(), minlength=self.num_experts)
        self._counts[layer] += chosen
        self._rows[layer] += rows

    @property
    def chosen(self) -> int:
        """Number of experts, in all layers together, that any row chose."""
        return int((self._counts > 0).sum())

    def likely(self, layer: int, rows: int, used: int) -> list[int]:
        """List the experts that `rows` more rows are likely to use, the likeliest first.

        used  experts that another layer used for them: as many are expected of a layer whose routes
              are not known, and any may be among them

        Rows are assumed independent. If a share p of past rows chose an expert, at least one of n
        rows uses it with probability 1 - (1 - p)^n (MoESD's N(t), expert by expert).
        """
        if not self._rows[layer]:
            return list(range(self.num_experts)) if used >= LIKELY * self.num_experts else []
        prior = PRIOR_ROWS * self._top_k / self.num_experts
        share = (self._counts[layer] + prior) / (self._rows[layer] + PRIOR_ROWS)
        wanted = 1 - (1 - share.clamp(max=1)) ** rows
        order = share.argsort(descending=True, stable=True)
        return [expert for expert in order.tolist() if wanted[expert] >= LIKELY]
