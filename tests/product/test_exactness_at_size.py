"""The keystone at the sizes of published models, where these cost next to nothing: what goes wrong
with a vocabulary, a head's width, a count of experts or a context may do so at real sizes alone.

The oracle is plain transformers' `generate` on the same checkpoint, with no tolerance.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers.cells import Cell, loaded
from tests.helpers.heads import write_random_head
from tests.helpers.often import often
from tests.helpers.published_shapes import SHAPES
from tests.helpers.tiny_models import greedy_tokens, load_plain

NEW_TOKENS = 16
# Draft length 0, 3 and auto; each drafter; two slots and all experts. A head lies beside the model
# from its cell on, so that it is the last.
CELLS = (
    Cell(0, "two slots", "own"),
    Cell(3, "all", "own", prefetch="three-phase"),
    Cell(3, "two slots", "own", prefetch="three-phase", drafter="ngram"),
    Cell(3, "half", "own", cache_policy="lookahead", drafter="cached"),
    Cell(None, "all", "own", cache_policy="lookahead", prefetch="three-phase"),
    Cell(4, "half", "own", trees="small"),
    Cell(3, "all", "own", drafter="head"),
)
# With fewer slots prompts are read in chunks of 16, which takes long contexts some seconds.
OF_ALL = tuple(cell for cell in CELLS if cell.budget == "all")
# In each change, with these of the cells.
ALWAYS = {
    "201,088 tokens, past windows of 128": (0, 1),
    "151,936 tokens, 128 experts, 4 KV heads": (2, 3),
    "512 experts, top 10": (3,),
    "latents of 512, 256 experts in groups": (3, 6),
    "heads of 256 and 512": (0,),
    "48 layers": (1,),
    "4,096 of context, crossed by the text": (1,),
    "windows of 1,024, passed": (1,),
}


def check(name: str, cells: Sequence[Cell], path: Path) -> None:
    """Greedy tokens of a model of this shape in each cell are those of plain transformers."""
    shape = SHAPES[name]
    model = shape.write(path / "model")
    plain = load_plain(model, getattr(torch, shape.dtype))
    expected = greedy_tokens(plain, shape.prompt_token_ids, NEW_TOKENS)
    del plain
    for cell in cells:
        if cell.drafter == "head":
            write_random_head(model, names=True)
        context = shape.prompt + NEW_TOKENS
        generator, experts = loaded(cell, model, "auto", shape.dtype, context)
        if cell.budget != "half":
            slots = generator.runtime.plan.slots
            assert slots == 2 if cell.budget == "two slots" else slots >= experts
        result = generator.generate(
            shape.prompt_token_ids, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        assert result.token_ids == expected, cell
        drafted = result.stats["draft_length_mean"]
        if cell.draft_length == 0:
            assert drafted == 0
        elif cell.draft_length is not None and cell.drafter != "ngram":
            assert drafted > 0
        generator.close()


@pytest.mark.parametrize("name", often(ALWAYS, quick=4, wide=4))
def test_tokens_at_published_sizes(name: str, tmp_path: Path) -> None:
    check(name, [CELLS[at] for at in ALWAYS[name]], tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_at_published_sizes_by_turns(name: str, tmp_path: Path) -> None:
    """Two cells of each shape, other ones with the next."""
    at, cells = list(SHAPES).index(name), OF_ALL if SHAPES[name].long else CELLS
    check(name, [cells[(at + step) % len(cells)] for step in range(2)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_at_published_sizes_in_every_cell(name: str, tmp_path: Path) -> None:
    check(name, CELLS, tmp_path)
