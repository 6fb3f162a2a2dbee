"""How much of a text its caches hold."""

from speq.models.tree import Tree


class Length:
    """Of one text; all layers of its caches share it.

    count    entries that are kept
    settled  of these, entries that will not be given up as long as the text lasts
    text     a number of the text, which changes with it
    tree     the nodes of the pass under way; None: its tokens follow one another
    reading  whether all tokens of that pass stay, as those of a prompt do; others may be given up
    """

    def __init__(self) -> None:
        self.count = self.settled = self.sequence = 0
        self.tree: Tree | None = None
        self.reading = False
