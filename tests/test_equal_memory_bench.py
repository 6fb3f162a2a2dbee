"""`speq bench equal-memory`: its engine part, what codecs cost, and the command as a whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

from speq.bench.candidates import Candidate, Outcome, candidates_of
from speq.bench.equal_memory_engine import EngineRuns
from speq.bench.schedule import budget_for

Folder = Callable[[str], Path]
LRU_RAW = Candidate("raw", 0, "lru", "none")
DRAFT_RAW = Candidate("raw", 2, "lookahead", "three-phase")


def engine_runs(model: Path, rounds: int = 1) -> EngineRuns:
    return EngineRuns({"raw": str(model)}, ["one two", "three"], "four", 10, rounds, 2)


def test_the_engine_takes_turns_and_tries_on_another_text(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round of a system takes 10 ms longer than its trial, the next ones 20 and 30."""
    trial_ms = {c: 50.0 + at for at, c in enumerate(candidates_of([2, 4])["auto"])}
    fast = Candidate("residual", 4, "lookahead", "three-phase")
    trial_ms[fast] = 40.0
    calls: list[tuple[Candidate, list[str], bool]] = []

    def measured(
        self: EngineRuns, candidate: Candidate, budget: int, context: int, texts: list[str],
        warm_up: bool,
    ) -> Outcome:  # fmt: skip
        calls.append((candidate, texts, warm_up))
        rounds = sum(call == calls[-1] for call in calls) if warm_up else 0
        return Outcome(5, trial_ms[candidate] + 10 * rounds, 0.0, 0.0, 0.0, 0.0, None)

    monkeypatch.setattr(EngineRuns, "_measure", measured)
    systems = candidates_of([2, 4])
    done: list[tuple[int, int]] = []
    standings = engine_runs(tiny("qwen3_moe"), rounds=3).compete(
        systems, 0.5, lambda label, at, total: done.append((at, total))
    )
    every = systems["auto"]
    assert calls[: len(every)] == [(candidate, ["four"], False) for candidate in every]
    chosen = [LRU_RAW, Candidate("lossless", 0, "lru", "none"), DRAFT_RAW, fast, fast]
    assert [standing.candidate for standing in standings.values()] == chosen
    rounds = calls[len(every) :]
    assert all(texts == ["one two", "three"] and warm for _, texts, warm in rounds)
    order = [candidate for candidate, _, _ in rounds]
    assert order == [*chosen, *chosen[1:], chosen[0], *chosen[2:], *chosen[:2]]
    assert [o.tpot_ms for o in standings["LRU raw"].outcomes] == [60, 70, 80]
    assert done == [(at, len(every) + 15) for at in range(1, len(every) + 16)]


def test_the_engine_at_one_budget(tiny: Folder) -> None:
    """Of a small model, whose passes take more memory than its experts do."""
    runs = engine_runs(tiny("qwen3_moe"))
    standings = runs.compete({"LRU raw": [LRU_RAW], "draft + raw": [DRAFT_RAW]}, 8.0)
    # The longer prompt has 7 tokens, and 10 are generated.
    assert runs.context == 17
    assert budget_for(str(tiny("qwen3_moe")), 8.0, 17) > 8 * 24 * 24576
    (lru,), (drafting,) = (standing.outcomes for standing in standings.values())
    assert lru.acceptance_rate is None
    assert drafting.acceptance_rate is not None and 0 < drafting.acceptance_rate <= 1
    for found in (lru, drafting):
        assert 2 <= found.slots <= 24
        assert 0 < found.compute_ms <= found.tpot_ms
