"""Options in a text, in the types that a run's options take."""

import pytest

from speq.bench.written_options import written_options
from speq.config import RunConfig
from speq.errors import SpeqError


def test_texts_become_what_options_take() -> None:
    parts = ["draft-nodes=8", "prune-rows=off", "verify-reads=true", "expert_floor=0.03"]
    found = written_options("variant 'v'", [*parts, "expert-budget=50%", "draft-length=auto"])
    assert found == {
        **{"draft_nodes": 8, "prune_rows": "off", "verify_reads": True, "expert_floor": 0.03},
        **{"expert_budget": "50%", "draft_length": "auto"},
    }
    config = RunConfig.of("1GiB", **found)
    assert (config.draft_nodes, config.draft_length, config.expert_budget) == (8, None, 0.5)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("draft-nodes", "variant 'v' has 'draft-nodes'; give options as name=value"),
        ("=8", "variant 'v' has '=8'; give options as name=value"),
        ("draft-nodes=many", "draft-nodes takes a number"),
        ("verify-reads=perhaps", "verify-reads takes true or false"),
    ],
)
def test_what_is_no_option(part: str, sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        written_options("variant 'v'", [part])


def test_names_that_a_run_does_not_have_are_for_others_to_refuse() -> None:
    assert written_options("system 's'", ["colour=1"]) == {"colour": "1"}
