"""The host's memory, of a device that has its own: what it holds, and what stays on the disk."""

from dataclasses import dataclass

from speq.experts.host_tier import fewest_records, too_small_error
from speq.experts.packed_copy import CODEC
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget, reading_bytes_of
from speq.planning.model_spec import ModelSpec
from speq.units import format_bytes


@dataclass(frozen=True, slots=True)
class HostPlan:
    """How a host budget is spent.

    budget         bytes; reading_bytes: of it, what threads that read take beside records, and one
                   that writes a packed copy
    records        of `record_bytes` each; experts: of the model, that there could be records for
    """

    budget: int
    reading_bytes: int
    record_bytes: int
    records: int
    experts: int

    @property
    def limit_bytes(self) -> int:
        """What records may take."""
        return self.budget - self.reading_bytes

    @property
    def resident(self) -> bool:
        """True if all experts are held."""
        return self.records == self.experts

    @property
    def nbytes(self) -> int:
        return self.records * self.record_bytes

    def to_dict(self) -> dict[str, int]:
        """The object of `--json`."""
        return {
            "budget_bytes": self.budget,
            "records": self.records,
            "record_bytes": self.nbytes,
            "read_buffer_bytes": self.reading_bytes,
            "on_disk": self.experts - self.records,
        }

    @property
    def sentence(self) -> str:
        room = f"{format_bytes(self.budget)} of host memory"
        if self.resident:
            return f"{room} hold all {self.experts} experts, which take {format_bytes(self.nbytes)}"
        return (
            f"{room} hold {self.records} of {self.experts} experts; the other "
            f"{self.experts - self.records} stay on disk and come through it"
        )


def holds_copied(plan: ResidencyPlan) -> bool:
    """True if host memory holds what a packed copy has: it is filled from one, or one is made."""
    return plan.encoded and plan.codec == CODEC


def host_plan(model_spec: ModelSpec, plan: ResidencyPlan, budget: Budget) -> HostPlan | None:
    """The host's part in a run; None where it has none of its own, or no limit is set.

    Raises SpeqError where too few experts could be held to bring others from disk.
    """
    if budget.beside is None or budget.beside.host_bytes is None:
        return None
    host_bytes = budget.beside.host_bytes
    reading = budget.readers * reading_bytes_of(model_spec, plan)
    reading += model_spec.copying_bytes * holds_copied(plan)
    fitting = max(host_bytes - reading, 0) // plan.slot_bytes
    fewest = fewest_records(budget.readers, model_spec.count)
    if fitting < fewest:
        raise too_small_error(host_bytes - reading, fewest, plan.slot_bytes)
    records = min(fitting, model_spec.count)
    return HostPlan(host_bytes, reading, plan.slot_bytes, records, model_spec.count)
