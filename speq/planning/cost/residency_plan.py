"""A way to hold a model's exact experts in a budget: the one type that is proposed, planned,
weighed and chosen.
"""

from dataclasses import dataclass, replace

from speq.errors import present
from speq.governor.roofline import StepEstimate


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Exact experts in slots by one codec, and who drafts beside them.

    codec        of the experts in slots
    drafter      "int4" with the copy held beside the slots, "none", or another one by name
    slot_bytes   of one slot
    moved_bytes  moved for a miss: a record, or the words that one is encoded from
    read_bytes   read to compute with one: the record, and the codes it is read over
    draft_bytes  of the draft, the INT4 copy of experts and codes of other layers, or of what
                 records are read over
    draft_experts  of each layer that the INT4 copy holds; None: all
    draft_covers   share of what tokens choose that is of these, of the texts that were counted
    draft_on_host  whether a GPU's host has the draft's experts and computes them: planned alone
    needs_draft  whether records are read over that copy, which then cannot be left out
    dense_base   whether dense layers are read over the draft's codes of them, as above
    encoded      whether experts are encoded from published words as they are read
    estimated    whether slot_bytes is what such experts usually take, not what these do
    copied_share  of encoded experts' misses, those that are to find a record in a packed copy
    encode_s     added to a miss by encoding, beyond its reading; 0 where records are moved
    slots        for exact experts, of all layers together; 0: not planned yet
    peers        exact experts of each layer on each further GPU; empty: there is none
    expected     a step at the best draft length; None: not weighed yet
    """

    codec: str
    drafter: str
    slot_bytes: int
    moved_bytes: int
    read_bytes: int
    draft_bytes: int = 0
    draft_experts: int | None = None
    draft_covers: float = 1.0
    draft_on_host: bool = False
    needs_draft: bool = False
    dense_base: bool = False
    encoded: bool = False
    estimated: bool = False
    copied_share: float = 0.0
    encode_s: float = 0.0
    slots: int = 0
    peers: tuple[int, ...] = ()
    expected: StepEstimate | None = None

    @property
    def drafts(self) -> bool:
        return self.drafter != "none"

    @property
    def holds_int4(self) -> bool:
        """True if an INT4 copy is held: of no experts it may take no bytes."""
        return self.drafter == "int4" or self.draft_bytes > 0

    @property
    def can_drop_draft(self) -> bool:
        """True if the INT4 copy only drafts, so that a run goes on without it."""
        return self.holds_int4 and not self.needs_draft and not self.dense_base

    @property
    def without_draft(self) -> "ResidencyPlan":
        """The same without the INT4 copy: nobody drafts."""
        return replace(self, drafter="none", draft_bytes=0, draft_experts=None, draft_covers=1.0)

    @property
    def name(self) -> str:
        encoded = " encoded as read," if self.encode_s else ""
        drafter = {"none": "without a draft", "head": "with a head"}
        held = drafter.get(self.drafter, "with a draft")
        if self.draft_on_host:
            held += " on the host"
        if self.draft_experts is not None:
            held += f" of {self.draft_experts} experts a layer"
        return f"{self.codec}{encoded} {held}"

    @property
    def step(self) -> StepEstimate:
        """The expected step, of a plan that was weighed."""
        return present(self.expected, "a residency plan has no estimate of its step")

    @property
    def tpot_s(self) -> float:
        """Expected time per token."""
        return self.step.token_s

    @property
    def moved_bytes_per_token(self) -> float:
        return self.step.moved_bytes / self.step.tokens
