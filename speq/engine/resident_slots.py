"""Layers that run without asking the host, since their experts are in slots."""

from collections.abc import Sequence

from torch import Tensor

from speq.layers.cut_backend import PassedLayer
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.prefetch import Prefetcher
from speq.scheduler.row_pruning import RowPruner
from speq.stats import Recorder, TimeSpan


class ResidentSlots:
    """Takes note of layers that ran over experts in slots, as the prefetcher and the loader do of
    others. See `exact_experts.FoundSlots`.

    rows   prunes rows, which a layer's experts are asked for
    table  [layers, experts] int64, the slot of each expert; kept by the loader's cache
    """

    def __init__(
        self,
        loader: ExpertLoader,
        prefetcher: Prefetcher,
        rows: RowPruner,
        recorder: Recorder,
        table: Tensor,
    ) -> None:
        self._loader, self._prefetcher, self._rows = loader, prefetcher, rows
        self._recorder = recorder
        self.tables: Sequence[Tensor] = table.unbind()

    @property
    def keeps_all(self) -> bool:
        """True if experts never leave their slots: until slots are given back."""
        return self._loader.cache.policy.keeps_all and not self._loader.unsettled

    @property
    def straight(self) -> bool:
        loader, decides = self._loader, self._rows.policy is not None
        if loader.unsettled or decides or loader.share is not None or loader.peers is not None:
            return False
        return loader.cache.policy.keeps_all or self._prefetcher.rests

    def passed(self, layers: Sequence[PassedLayer]) -> None:
        recorder = self._recorder
        for layer, route, start_s, end_s in layers:
            self._prefetcher.passed(layer, route)
            recorder.add(TimeSpan("layer", start_s, end_s, layer))
