"""The Expert Lookahead Buffer (ELB): what a draft says about the experts of the next tokens.

MoE-SpeQ 3.3.1: k x L entries of (expert ids, confidence), filled while drafting. Entries are routes
that the host has read, so that nothing that is asked of the buffer waits for the device.
"""

from dataclasses import dataclass, field

from speq.routing import Route


@dataclass(slots=True)
class LookaheadBuffer:
    """Entry (i, l): the route of the draft's token i (0 is the pending token) in MoE layer l.

    reach  the probability that the draft's tokens stand, up to each: 1 for the pending token
    """

    num_layers: int
    predicted: dict[tuple[int, int], Route] = field(default_factory=dict)
    used: dict[int, Route] = field(default_factory=dict)
    reach: list[float] = field(default_factory=lambda: [1.0])

    def clear(self) -> None:
        """Forget the last draft and the verification that followed it."""
        self.predicted.clear()
        self.used.clear()
        self.reach = [1.0]

    def extend(self, probability: float, parent: int | None = None) -> float:
        """One more token is drafted, which stands with this probability if those before it do.
        Return the probability that all of them do.

        parent  the token before it; None: the last one
        """
        before = self.reach[-1 if parent is None else parent]
        self.reach.append(before * probability)
        return self.reach[-1]

    def reach_of(self, token: int) -> float:
        """Of a token of the draft. Where the drafter gave no probability, that of the last token
        for which it did.
        """
        return self.reach[min(token, len(self.reach) - 1)]

    def record(self, token: int, layer: int, route: Route) -> None:
        """Keep a draft token's route (T = 1)."""
        self.predicted[token, layer] = route

    def observe(self, layer: int, route: Route) -> None:
        """Keep the exact model's route, for all tokens of its pass."""
        self.used[layer] = route

    def expert_ids(self, token: int, layer: int) -> list[int]:
        """Experts the draft named for a token in a layer; empty until the draft has got there."""
        route = self.predicted.get((token, layer))
        return [] if route is None else route.ids[0]

    def union(self, layer: int) -> set[int]:
        """Experts of one layer named by any drafted token so far."""
        tokens = [token for token, at in self.predicted if at == layer]
        return {expert for token in tokens for expert in self.expert_ids(token, layer)}

    def rejected(self, path: list[int]) -> set[tuple[int, int]]:
        """(layer, expert) pairs that the last verification used for rejected nodes only."""
        pairs = set()
        for layer, route in self.used.items():
            kept = {expert for node in path for expert in route.ids[node]}
            pairs |= {(layer, expert) for expert in route.experts if expert not in kept}
        return pairs

    def recall(self, path: list[int]) -> tuple[int, int]:
        """(named, choices): how many of the exact model's choices the draft had named.

        path holds the accepted nodes. Two kinds of tokens do not count: those without a recorded
        route, and rejected ones, whose context the exact model never had.
        """
        found = [self.recall_at(node) for node in path]
        return sum(named for named, _ in found), sum(choices for _, choices in found)

    def recall_at(self, node: int) -> tuple[int, int]:
        """`recall` of one node."""
        named = choices = 0
        for layer, route in self.used.items():
            if (node, layer) in self.predicted:
                actual = set(route.ids[node])
                choices += len(actual)
                named += len(actual & set(self.expert_ids(node, layer)))
        return named, choices
