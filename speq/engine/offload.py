"""Builds the exact experts' two backends over one arena of slots, and their loader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Processor
from speq.engine.resident_slots import ResidentSlots
from speq.engine.slot_memory import SlotMemory
from speq.experts.expert_store import ExpertStore
from speq.experts.slots import SlotExperts
from speq.files.alignment import release_pages
from speq.kernels.ops import Activation, ExpertBiases
from speq.layers.cached_experts import CachedExperts
from speq.layers.exact_experts import ExactExperts, ExpertServer, HostServer
from speq.layers.expert_budget import ExpertBudget, LayerBudgets, PredictedBudget
from speq.layers.gates import RouterGate
from speq.layers.offloaded_experts import ExpertBackend
from speq.layers.route_reader import DeviceRoutes, HostRoutes, RouteReader
from speq.layers.slot_table import DeviceSlotTable, HostSlotTable, SlotTable
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.routing import Route
from speq.scheduler.eviction import EvictionPolicy, KeepAllPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.layer_stream import LayerStream
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import Prefetcher
from speq.scheduler.route_history import RouteHistory
from speq.scheduler.row_pruning import ExpectedValuePruning, RowPruner
from speq.scheduler.transfer import Fetch, MovedBytes, TransferEngine
from speq.stats import Recorder, Timed

# Makes what serves experts that come into no slot; None: nothing.
Beside = Callable[[ExpertLoader], HostServer | None]


@dataclass(frozen=True, slots=True)
class Offload:
    """The exact experts, and the parts that load them into `slots`.

    target, prefetcher  backend of verifications, and its server
    reader, stream      backend of prefill, and its server
    rows                prunes rows of a verification
    policy_of           makes the policy that evicts from so many slots
    budget              limits the experts of a verification; None: all are allowed
    """

    target: ExpertBackend
    prefetcher: Prefetcher
    reader: ExpertBackend
    stream: LayerStream
    loader: ExpertLoader
    slots: Tensor
    memory: SlotMemory
    rows: RowPruner
    policy_of: Callable[[int], EvictionPolicy]
    budget: ExpertBudget | None = None
    resident: ResidentSlots | None = None

    def limit(self, num_slots: int) -> None:
        """Use the first `num_slots` slots from now on, between steps, and give the memory of the
        others back to the system.
        """
        before, policy = self.loader.cache.policy, self.policy_of(num_slots)
        changes = policy.keeps_all != before.keeps_all
        self.memory.leave()
        self.loader.limit(num_slots, policy if changes else None)
        release_pages(self.slots[num_slots:])


@dataclass(frozen=True, slots=True)
class OffloadPolicies:
    """Names of the policies that fill and empty slots.

    prune_rows  True to prune rows whose experts cost more than their tokens are worth
    budget      of a verification's layers; None: verifications are exact
    """

    cache_policy: str
    prefetch: str
    prune_rows: bool = False
    budget: LayerBudgets | None = None


@dataclass(frozen=True, slots=True)
class MoeSizes:
    """Sizes of the MoE layers.

    num_experts  of each layer
    activations  of the experts, by layer
    biases       of the experts, by layer; empty if they have none
    """

    num_layers: int
    num_experts: int
    activations: Sequence[Activation]
    biases: Sequence[ExpertBiases] = ()


def offload_over(
    slots: Tensor,
    taken: int,
    experts: SlotExperts,
    transfer: TransferEngine,
    sizes: MoeSizes,
    scheduling: OffloadPolicies,
    device: Processor | Accelerator,
    recorder: Recorder,
    timed: Timed,
    beside: Beside = lambda loader: None,
) -> Offload:
    """Build cache, prefetcher and both backends over an arena of slots [S, slot_bytes].

    taken   slots whose memory is there
    beside  makes what computes experts on the host or on further devices
    """
    num_experts = sizes.num_layers * sizes.num_experts

    def policy_of(num_slots: int) -> EvictionPolicy:
        evicting = CACHE_POLICIES[scheduling.cache_policy]
        policy_class = KeepAllPolicy if num_slots >= num_experts else evicting
        return policy_class(num_slots, sizes.num_layers, sizes.num_experts)

    table = torch.full((sizes.num_layers, sizes.num_experts), -1)
    cache = ExpertCache(len(slots), policy_of(len(slots)), table.numpy(), experts.has)
    loader = ExpertLoader(cache, transfer, recorder)
    prefetcher: Prefetcher = PREFETCHERS[scheduling.prefetch](
        loader, LookaheadBuffer(sizes.num_layers)
    )
    row_policy = ExpectedValuePruning(sizes.num_layers) if scheduling.prune_rows else None
    rows = RowPruner(loader, prefetcher.lookahead, row_policy)
    budget = None
    if scheduling.budget is not None:
        rules, gates = scheduling.budget
        budget = ExpertBudget(rules, gates, loader, timed)
        prefetcher.allowance = PredictedBudget(rules, gates, sizes.num_experts)

    def verified(layer: int, route: Route) -> Route:
        loader.runs_rows(len(route.topk_ids))
        if budget is not None:
            route = budget.serve(layer, route, rows.active_rows)
        rows.observe(layer, route)
        prefetcher.observe(layer, route)
        return route

    resident = None
    if budget is None and isinstance(device, Processor):
        resident = ResidentSlots(loader, prefetcher, rows, recorder, table)

    history = RouteHistory(sizes.num_layers, sizes.num_experts)
    stream = LayerStream(loader, history, sizes.num_layers)

    def read(layer: int, route: Route) -> Route:
        stream.observe(layer, route)
        return route

    def backend(
        server: ExpertServer,
        on_route: Callable[[int, Route], Route],
        resident: ResidentSlots | None = None,
    ) -> ExactExperts:
        table, routes = host_side(device, sizes.num_experts)
        activations, biases = sizes.activations, sizes.biases
        return ExactExperts(
            server, experts, table, routes, activations, timed, on_route, biases, resident, host
        )

    host = beside(loader)
    return Offload(
        target=backend(prefetcher, verified, resident),
        prefetcher=prefetcher,
        reader=backend(stream, read),
        stream=stream,
        loader=loader,
        slots=slots,
        memory=SlotMemory(slots, taken, cache),
        rows=rows,
        policy_of=policy_of,
        budget=budget,
        resident=resident,
    )


def residents_of(
    loader: ExpertLoader,
    experts: SlotExperts,
    gates: Sequence[RouterGate],
    sizes: MoeSizes,
    device: Processor | Accelerator,
) -> CachedExperts:
    """Build the backend of drafts that use only resident experts.

    gates  of the MoE layers, in order
    """
    table, routes = host_side(device, sizes.num_experts)
    return CachedExperts(loader, experts, table, routes, gates, sizes.activations, sizes.biases)


def host_side(device: Processor | Accelerator, num_experts: int) -> tuple[SlotTable, RouteReader]:
    """Build the slot table and route reader between a backend's device and the host."""
    if isinstance(device, Processor):
        return HostSlotTable(num_experts), HostRoutes()
    return DeviceSlotTable(num_experts, device), DeviceRoutes(device)


def fetch_from(source: ExpertStore) -> Fetch:
    """Make a read function that keeps only the source alive."""

    def fetch(key: ExpertKey, slot: Tensor) -> int:
        return source.read(key.layer, key.expert, slot)

    return fetch


def moved_from(source: ExpertStore) -> MovedBytes:
    """Make a function that returns the bytes of such a read."""

    def moved_bytes(key: ExpertKey) -> int:
        return source.moved_bytes(key.layer, key.expert)

    return moved_bytes
