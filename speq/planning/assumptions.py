"""What expected times rest on: a machine's bandwidths, or what was measured; routes; acceptance."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from speq.governor.profile import Profile
from speq.governor.roofline import Link
from speq.models.shape import ModelShape
from speq.planning.cost.locality import Locality, RouteCurve, nearest_curve
from speq.planning.cost.peers import ALONE, Peers
from speq.planning.cost.planner import Outlook, PassBytes, Speeds
from speq.planning.cost.presets import Rates
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey

# Acceptance of tokens drafted by INT4 experts, where it was never measured: "over 90 %" in MoE-SpeQ
# 4.5; 0.92 to 0.98 on the bundled model.
DEFAULT_ACCEPTANCE = 0.9
# Of an expert, read one after another.
MATRICES = 3


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What expected times rest on.

    machine  bandwidths, or what was measured of this model: in a profile, or at load
    link     in place of the machine's; None: the machine's
    host     bandwidth of the host's memory, whose processor computes missing experts for a card;
             None: as a profile has measured it; 0: it computes none
    peers    further GPUs of the same kind
    """

    machine: Rates | Profile | Survey
    locality: Locality
    acceptance: float
    link_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    peers: Peers = ALONE

    @classmethod
    def of_profile(cls, profile: Profile, shape: ModelShape) -> "Assumptions":
        """What was measured of this model; others' routes and an acceptance where none were."""
        experts = shape.experts
        curve = routes_of(profile, shape) or nearest_curve(experts.num_experts)
        return cls(
            profile,
            Locality(experts.num_experts, shape.top_k, curve),
            DEFAULT_ACCEPTANCE if profile.acceptance is None else profile.acceptance,
        )

    @classmethod
    def of_survey(cls, survey: Survey, shape: ModelShape) -> "Assumptions":
        """What was measured at load; routes and acceptance of other models."""
        count = shape.experts.num_experts
        return cls(survey, Locality(count, shape.top_k, nearest_curve(count)), DEFAULT_ACCEPTANCE)

    @property
    def link(self) -> Link:
        machine = self.machine
        link = machine.slow_tier if isinstance(machine, Profile) else Link(machine.link_bytes_per_s)
        given = self.link_bytes_per_s
        return link if given is None else Link(given, link.overhead_s, link.first_fetch_s)

    @property
    def on_host_bytes_per_s(self) -> float:
        """Bandwidth that copies and the host's kernels have together: as given, or as a profile
        has measured both; 0: the host computes no experts.
        """
        given, machine = self.host_bytes_per_s, self.machine
        if given is None and isinstance(machine, Profile) and machine.host:
            kernels = machine.expert_bytes / machine.host_expert_s
            return self.link.bandwidth_bytes_per_s + kernels
        return given or 0.0

    @property
    def source(self) -> str:
        machine = self.machine
        if isinstance(machine, Rates):
            return machine.source
        if isinstance(machine, Survey):
            day = time.strftime("on %Y-%m-%d", time.localtime(machine.measured_at))
            when = day if machine.measured_at else "just now"
            return f"measured on this machine {when}; acceptance {self.acceptance:.0%} assumed"
        given = "" if self.link_bytes_per_s is None else ", link as given"
        return f"profile measured on {machine.key.device}{given}"

    @property
    def drafted(self) -> bool:
        """True if it is known how fast drafts are."""
        return not isinstance(self.machine, Profile) or self.machine.drafted

    @property
    def encode_bytes_per_s(self) -> dict[str, float]:
        """Speed of each codec whose encoding was timed, by name."""
        return {} if isinstance(self.machine, Rates) else self.machine.encode_bytes_per_s

    def knows_encoding(self, plan: ResidencyPlan, on_cpu: bool) -> bool:
        """True if it is known how fast published words are encoded, or a plan needs no such. On a
        GPU host memory holds them encoded already: a miss moves records.
        """
        return not plan.encoded or (on_cpu and plan.codec in self.encode_bytes_per_s)

    def with_encoding_cost(
        self, plan: ResidencyPlan, words_bytes: int, on_cpu: bool
    ) -> ResidencyPlan:
        """The plan with the time that encoding adds to a miss that finds no record.

        words_bytes  of one expert as published
        """
        if not (plan.encoded and on_cpu and plan.codec in self.encode_bytes_per_s):
            return plan
        encode_s = words_bytes / self.encode_bytes_per_s[plan.codec]
        read_s = self.link.transfer_s(words_bytes)
        # Each matrix is encoded while the next one is read, which hides all but one of the shorter
        # times. The processor has it to spare: the layer waits.
        whole_s = max(encode_s, read_s) + min(encode_s, read_s) / MATRICES
        return replace(plan, encode_s=(1 - plan.copied_share) * (whole_s - read_s))

    def outlook(
        self,
        num_layers: int,
        sizes: PassBytes,
        plans: Iterable[ResidencyPlan],
        head_acceptance: tuple[float, ...] = (),
    ) -> Outlook:
        """head_acceptance: by depth, acceptance of the model's head; empty: not measured"""
        machine, locality = self.machine, self.locality
        if isinstance(machine, Profile):
            speeds = Speeds.of_profile(
                machine, sizes, lambda rows: num_layers * locality.distinct(rows), plans
            )
        elif isinstance(machine, Survey):
            speeds = Speeds.of_survey(machine, sizes, plans)
        else:
            speeds = Speeds.of_rates(machine, sizes, plans)
        return Outlook(
            num_layers,
            locality,
            speeds,
            self.link,
            self.acceptance,
            head_acceptance=head_acceptance,
            host_bytes_per_s=self.on_host_bytes_per_s,
            draft_token_bytes=sizes.draft_token_bytes,
            peers=self.peers,
        )


def routes_of(profile: Profile, shape: ModelShape) -> RouteCurve | None:
    """The model's own, where they were recorded for long enough."""
    if len(profile.routes) < 2:
        return None
    source = "this model, recorded with the profile"
    return RouteCurve(source, shape.experts.num_experts, shape.top_k, profile.routes)
