"""What progress was told."""


class Told:
    """A callable that keeps what it was told: (what, done, total)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        self.calls.append((what, done, total))

    def steps(self, what: str) -> int:
        """Steps that `what` took, of which none was left out and the last one ended it."""
        told = [call[1:] for call in self.calls if call[0] == what]
        total = told[-1][1]
        assert told == [(done, total) for done in range(total + 1)]
        return total

    @property
    def unfinished(self) -> set[str]:
        last = {what: (done, total) for what, done, total in self.calls}
        return {what for what, (done, total) in last.items() if done < total}
