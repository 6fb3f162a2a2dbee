"""Two banks of exact experts over one arena of slots, and what fills it."""

from dataclasses import dataclass

from torch import Tensor

from speq.experts.expert_store import ExpertStore
from speq.experts.host_tier import HostTier
from speq.layers.offloaded_experts import ExpertBank
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.layer_stream import LayerStream
from speq.scheduler.prefetch import Prefetcher
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import Fetch, MovedBytes


def fetch_from(source: ExpertStore | HostTier) -> Fetch:
    """Reads of one source, which holds on to nothing else."""

    def fetch(key: ExpertKey, slot: Tensor) -> int:
        return source.read(key.layer, key.expert, slot)

    return fetch


def moved_from(source: ExpertStore | HostTier) -> MovedBytes:
    """What such reads move."""

    def moved_bytes(key: ExpertKey) -> int:
        return source.moved_bytes(key.layer, key.expert)

    return moved_bytes


@dataclass(frozen=True, slots=True)
class Offload:
    """The exact experts, and what brings them into `slots` in time.

    target, prefetcher  the bank of verifications, and what serves it
    reader, stream      the bank that reads prompts, and what serves that
    """

    target: ExpertBank
    prefetcher: Prefetcher
    reader: ExpertBank
    stream: LayerStream
    supply: ExpertSupply
    slots: Tensor
