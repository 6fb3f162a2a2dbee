"""The Expert Lookahead Buffer (ELB): routes of drafted tokens (MoE-SpeQ 3.3.1).

It has k x L entries of (expert ids, confidence), filled while drafting. Entries are routes that the
host has read, so that no query waits for the device.

The requests of a batch share a buffer. Token numbers alternate: with B requests, node n of the
draft of request r is token n * B + r.
"""

from dataclasses import dataclass, field

from speq.routing import Route


@dataclass(slots=True)
class LookaheadBuffer:
    """Routes by (token, MoE layer); token 0 is the pending one.

    batch_size   requests that draft together
    accept_prob  by request, the probability that all tokens up to a node are accepted; 1 for the
                 pending token
    rows         token of each row of the verification; None: row n is token n
    """

    num_layers: int
    predicted: dict[tuple[int, int], Route] = field(default_factory=dict)
    used: dict[int, Route] = field(default_factory=dict)
    batch_size: int = 1
    accept_prob: list[list[float]] = field(default_factory=lambda: [[1.0]])
    rows: list[int] | None = None

    def clear(self, batch_size: int = 1) -> None:
        """Forget the last draft and its verification; `batch_size` requests draft next."""
        self.predicted.clear()
        self.used.clear()
        self.batch_size = batch_size
        self.accept_prob = [[1.0] for _ in range(batch_size)]
        self.rows = None

    def token(self, sequence: int, node: int) -> int:
        """Return the token number of a request's node."""
        return node * self.batch_size + sequence

    def node(self, token: int) -> int:
        """Return the node number of a token."""
        return token // self.batch_size

    def scored(self, nodes: list[int]) -> None:
        """Set the rows of the verification: `nodes` counts each request's, one after another."""
        if self.batch_size > 1:
            self.rows = [
                self.token(sequence, node)
                for sequence, count in enumerate(nodes)
                for node in range(count)
            ]

    def token_of(self, row: int) -> int:
        """Return the token in a row of the verification."""
        return row if self.rows is None else self.rows[row]

    def extend(self, probability: float, parent: int | None = None, sequence: int = 0) -> float:
        """Add a drafted token; return the probability that it and all before it are accepted.

        probability  that it is accepted if those before it are
        parent       the node before it; None: the last one
        """
        accept_prob = self.accept_prob[sequence]
        accept_prob.append(accept_prob[-1 if parent is None else parent] * probability)
        return accept_prob[-1]

    def accept_prob_of(self, token: int) -> float:
        """Return a token's acceptance probability, or that of the last token that has one."""
        node, sequence = divmod(token, self.batch_size)
        accept_prob = self.accept_prob[sequence]
        return accept_prob[min(node, len(accept_prob) - 1)]

    def record(self, token: int, layer: int, route: Route) -> None:
        """Keep a draft token's route (T = 1)."""
        self.predicted[token, layer] = route

    def knows(self, token: int, layer: int) -> bool:
        """Tell whether a router chose the token's experts in that layer."""
        route = self.predicted.get((token, layer))
        return route is not None and route.from_router

    def observe(self, layer: int, route: Route) -> None:
        """Keep the exact model's route for all tokens of its pass."""
        self.used[layer] = route

    def expert_ids(self, token: int, layer: int) -> list[int]:
        """List the experts that the draft named for a token in a layer; empty if none yet."""
        route = self.predicted.get((token, layer))
        return [] if route is None else route.ids[0]

    def union(self, layer: int) -> set[int]:
        """Return the experts of a layer that any drafted token named so far."""
        tokens = [token for token, at in self.predicted if at == layer]
        return {expert for token in tokens for expert in self.expert_ids(token, layer)}

    def rejected(self, path: list[int]) -> set[tuple[int, int]]:
        """Return (layer, expert) pairs that the last verification used for rejected rows only.

        path  the accepted rows
        """
        pairs = set()
        for layer, route in self.used.items():
            kept = {expert for node in path for expert in route.ids[node]}
            pairs |= {(layer, expert) for expert in route.experts if expert not in kept}
        return pairs

    def recall(self, path: list[int]) -> tuple[int, int]:
        """Count (named, choices): the exact model's choices, and those that the draft had named.

        Tokens without a recorded route do not count, nor do rejected tokens, whose context the
        exact model never had.

        path  the accepted rows
        """
        found = [self.recall_at(node) for node in path]
        return sum(named for named, _ in found), sum(choices for _, choices in found)

    def recall_at(self, row: int) -> tuple[int, int]:
        """Count `recall` of one row."""
        named = choices = 0
        token = self.token_of(row)
        for layer, route in self.used.items():
            if (token, layer) in self.predicted:
                actual = set(route.ids[row])
                choices += len(actual)
                named += len(actual & set(self.expert_ids(token, layer)))
        return named, choices
