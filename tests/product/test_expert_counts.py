"""Files of expert counts: what is written is read, and what is none is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from speq.errors import SpeqError
from speq.layers.expert_counts import ExpertCounts

# Three tokens with two of four experts each, in two layers.
COUNTS = ExpertCounts("a model", 3, 2, [[3, 0, 1, 2], [1, 2, 2, 1]])


def test_a_file_gives_back_what_was_counted(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    COUNTS.write(path)
    assert json.loads(path.read_text()) == {
        "format": "speq-expert-counts-1",
        "model": "a model",
        "tokens": 3,
        "top_k": 2,
        "counts": [[3, 0, 1, 2], [1, 2, 2, 1]],
    }
    read = ExpertCounts.read(path)
    assert read == COUNTS
    assert (read.num_layers, read.num_experts) == (2, 4)


def test_experts_are_ranked_by_choices_and_then_by_number() -> None:
    assert COUNTS.ranked(0) == [0, 3, 2, 1]
    assert COUNTS.ranked(1) == [1, 2, 0, 3]


@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 5, 2), (2, 4, 1)])
def test_another_models_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    COUNTS.check_sizes(Path("counts.json"), 2, 4, 2)
    layers, experts, top_k = sizes
    with pytest.raises(SpeqError) as caught:
        COUNTS.check_sizes(Path("counts.json"), layers, experts, top_k)
    assert str(caught.value) == (
        "expert counts counts.json are of a model, with 2 of 4 experts in 2 MoE layers, and this "
        f"model has {top_k} of {experts} in {layers}; count again with "
        "`python -m bench.lab.hit_rate MODEL --counts FILE`"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "speq-routes-2"}, "has the format 'speq-routes-2', and expert counts have"),
        ({"format": None}, "has the format None"),
        ({"more": 1}, r"has the fields \['counts', 'model', 'more', 'tokens', 'top_k'\] beside"),
        ({"model": 7}, "model is 7; it must be a text"),
        ({"tokens": 0}, "tokens is 0; it must be from 1"),
        ({"tokens": 3.0}, "tokens is 3.0; it must be a whole number"),
        ({"top_k": True}, "top_k is True; it must be a whole number"),
        ({"counts": {}}, "counts must be a list of layers"),
        ({"counts": []}, "counts must be a list of layers"),
        ({"counts": [[3, 3], 1]}, "counts must be a list of layers"),
        ({"counts": [[3, 3], [2, 2, 2]]}, "counts have layers of 2, 3 experts; all must have"),
        ({"counts": [[6]]}, "counts have layers of 1 experts; all must have .* at least 2"),
        ({"counts": [[3, 3], [3, "3"]]}, r"counts\[1\]\[1\] is '3'; it must be a whole number"),
        ({"counts": [[3, -1, 4]]}, r"counts\[0\]\[1\] is -1; it must be from 0 to 3"),
        ({"counts": [[3, 2]]}, r"counts\[0\] add up to 5; 3 tokens with 2 experts each make 6"),
    ],
)
def test_other_files_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    COUNTS.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpeqError, match=sentence) as caught:
        ExpertCounts.read(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_field_that_is_missing_is_named_by_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text('{"format": "speq-expert-counts-1", "model": "m"}')
    with pytest.raises(SpeqError, match=r"has the fields \['model'\] besides its format"):
        ExpertCounts.read(path)
    with pytest.raises(SpeqError, match=r"none.json .*; give a file that `python -m bench"):
        ExpertCounts.read(tmp_path / "none.json")
    path.write_text("[1]")
    with pytest.raises(SpeqError, match="holds a JSON list; it must hold an object: count again"):
        ExpertCounts.read(path)
