"""The Expert Lookahead Buffer (ELB): what a draft says about the experts of the next tokens.

MoE-SpeQ 3.3.1: k x L entries of (expert ids, confidence), filled while drafting. Entries are routes
that the host has read, so that nothing that is asked of the buffer waits for the device.

Several texts that draft side by side share a buffer. Their tokens have numbers that alternate: of B
texts, token n of the draft of text t is token n * B + t of the buffer. Of one text they are n.
"""

from dataclasses import dataclass, field

from speq.routing import Route


@dataclass(slots=True)
class LookaheadBuffer:
    """Entry (i, l): the route of the draft's token i (0 is the pending token) in MoE layer l.

    texts  that draft side by side
    reach  of each text, the probability that its tokens stand, up to each: 1 for the pending token
    rows   of the verification, the token in each; None: they are the tokens, in their order
    """

    num_layers: int
    predicted: dict[tuple[int, int], Route] = field(default_factory=dict)
    used: dict[int, Route] = field(default_factory=dict)
    batch_size: int = 1
    accept_prob: list[list[float]] = field(default_factory=lambda: [[1.0]])
    rows: list[int] | None = None

    def clear(self, batch_size: int = 1) -> None:
        """Forget the last draft and the verification that followed it; so many texts draft next."""
        self.predicted.clear()
        self.used.clear()
        self.batch_size = batch_size
        self.accept_prob = [[1.0] for _ in range(batch_size)]
        self.rows = None

    def token(self, sequence: int, node: int) -> int:
        """The number of a text's token."""
        return node * self.batch_size + sequence

    def node(self, token: int) -> int:
        """The number of a token in the draft of its text."""
        return token // self.batch_size

    def scored(self, nodes: list[int]) -> None:
        """A verification follows whose rows are so many nodes of each text, text behind text."""
        if self.batch_size > 1:
            self.rows = [
                self.token(sequence, node)
                for sequence, count in enumerate(nodes)
                for node in range(count)
            ]

    def token_of(self, row: int) -> int:
        """The token in a row of the verification."""
        return row if self.rows is None else self.rows[row]

    def extend(self, probability: float, parent: int | None = None, sequence: int = 0) -> float:
        """One more token is drafted, which stands with this probability if those before it do.
        Return the probability that all of them do.

        parent  the node before it; None: the last one
        """
        accept_prob = self.accept_prob[sequence]
        accept_prob.append(accept_prob[-1 if parent is None else parent] * probability)
        return accept_prob[-1]

    def accept_prob_of(self, token: int) -> float:
        """Of a token of the draft. Where the drafter gave no probability, that of the last token of
        its text for which it did.
        """
        node, sequence = divmod(token, self.batch_size)
        accept_prob = self.accept_prob[sequence]
        return accept_prob[min(node, len(accept_prob) - 1)]

    def record(self, token: int, layer: int, route: Route) -> None:
        """Keep a draft token's route (T = 1)."""
        self.predicted[token, layer] = route

    def knows(self, token: int, layer: int) -> bool:
        """Whether a router has said what the token wants there: no guess is better."""
        route = self.predicted.get((token, layer))
        return route is not None and route.from_router

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
        """(layer, expert) pairs that the last verification used for rejected rows only.

        path  the accepted ones
        """
        pairs = set()
        for layer, route in self.used.items():
            kept = {expert for node in path for expert in route.ids[node]}
            pairs |= {(layer, expert) for expert in route.experts if expert not in kept}
        return pairs

    def recall(self, path: list[int]) -> tuple[int, int]:
        """(named, choices): how many of the exact model's choices the draft had named.

        path holds the accepted rows. Two kinds of tokens do not count: those without a recorded
        route, and rejected ones, whose context the exact model never had.
        """
        found = [self.recall_at(node) for node in path]
        return sum(named for named, _ in found), sum(choices for _, choices in found)

    def recall_at(self, row: int) -> tuple[int, int]:
        """`recall` of one row."""
        named = choices = 0
        token = self.token_of(row)
        for layer, route in self.used.items():
            if (token, layer) in self.predicted:
                actual = set(route.ids[row])
                choices += len(actual)
                named += len(actual & set(self.expert_ids(token, layer)))
        return named, choices
