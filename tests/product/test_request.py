"""What ends a sequence, and which tokens it takes."""

import pytest

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.request import Request

EOS = 9


class Stops:
    """A text in which a stop string is complete at one place."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen: list[tuple[int, bool]] = []

    def write(self, token_id: int, last: bool) -> bool:
        self.seen.append((token_id, last))
        return self.at == len(self.seen) - 1


@pytest.mark.parametrize(
    ("tokens", "stop_at", "appended", "reason"),
    [
        ([1, 2, 3], None, [1, 2, 3], None),
        ([1, EOS, 3], None, [1, EOS], "eos"),
        ([1, 2, 3, 4, 5], None, [1, 2, 3, 4], "length"),
        ([1, 2, 3, EOS], None, [1, 2, 3, EOS], "eos"),
        ([1, 2, 3], 1, [1, 2], "stop"),
        ([1, EOS, 3], 1, [1, EOS], "stop"),
        ([1, 2, 3, 4], 3, [1, 2, 3, 4], "stop"),
    ],
)
def test_what_ends_a_sequence(
    tokens: list[int], stop_at: int | None, appended: list[int], reason: str | None
) -> None:
    text = Stops(stop_at)
    sampling = SamplingParams(max_new_tokens=4)
    request = Request([5, 6], sampling, frozenset({EOS}), text)
    assert request.extend(tokens) == appended == request.output_token_ids
    assert request.finish_reason == reason
    ends = {"eos", "length"} if stop_at is None else set()
    last = reason in ends or appended[-1] == EOS or len(appended) == 4
    assert text.seen == [(token, False) for token in appended[:-1]] + [(appended[-1], last)]


def test_tokens_come_in_several_parts() -> None:
    request = Request([5], SamplingParams(max_new_tokens=3))
    assert request.pending_id == 5
    assert request.extend([7]) == [7]
    assert (request.pending_id, request.position, request.remaining) == (7, 1, 2)
    assert request.extend([8, 9, 10]) == [8, 9]
    assert (request.output_token_ids, request.finish_reason) == ([7, 8, 9], "length")


def test_a_chain_is_a_tree_of_one_path() -> None:
    draft = Draft.chain([4, 4, 2])
    assert draft.tree.depths() == [0, 1, 2, 3]
    assert [draft.children(node) for node in range(4)] == [[1], [2], [3], []]
    assert Draft.chain([]) == Draft()
