"""Slots that experts do not leave, whose layers run without asking the host."""

from collections.abc import Sequence

from torch import Tensor

from speq.layers.cut_backend import PassedLayer
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.row_pruning import RowPruner
from speq.stats import Recorder, TimeSpan


class ResidentSlots:
    """Takes note of layers that ran over experts in slots, as the prefetcher and the loader do of
    others. See `exact_experts.FixedSlots`.

    rows   prunes rows, which a layer's experts are asked for
    table  [layers, experts] int64, the slot of each expert; kept by the loader's cache
    """

    def __init__(
        self,
        loader: ExpertLoader,
        lookahead: LookaheadBuffer,
        rows: RowPruner,
        recorder: Recorder,
        table: Tensor,
    ) -> None:
        self._loader, self._lookahead, self._rows = loader, lookahead, rows
        self._recorder = recorder
        self.tables: Sequence[Tensor] = table.unbind()

    @property
    def straight(self) -> bool:
        keeps_all = self._loader.cache.policy.keeps_all  # until slots are given back
        return keeps_all and not self._loader.unsettled and self._rows.policy is None

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        recorder = self._recorder
        for layer, route, start_s, end_s in layers:
            self._lookahead.observe(layer, route)
            experts = route.ids[0] if len(route.ids) == 1 else route.experts
            self._loader.cache.count_used(layer, experts)
            recorder.served(layer, requests=len(experts), hits=len(experts))
            recorder.add(TimeSpan("layer", start_s, end_s, layer))
