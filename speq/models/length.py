"""The cached length of a sequence."""

from speq.models.tree import Tree


class Length:
    """Cached length of one sequence, shared by all layers of its caches.

    count     cached tokens
    settled   of these, tokens that are final: they are never rolled back
    sequence  number of the sequence; it changes when another begins
    tree      tree of the current pass; None: its tokens follow one another
    reading   whether the current pass is a prefill, whose tokens are never rolled back
    """

    def __init__(self) -> None:
        self.count = self.settled = self.sequence = 0
        self.tree: Tree | None = None
        self.reading = False
