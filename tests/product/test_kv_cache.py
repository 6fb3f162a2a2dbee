"""The KV cache and its masks, against lists and an exhaustive rule."""

import random

import pytest
import torch
from torch import Tensor

from speq.engine.draft import Draft
from speq.errors import Broken
from speq.models.kv_cache import KVCache, attention_mask, causal_mask
from speq.models.tree import Tree

SHAPES = ((2, 6), (3, 4))
LAYERS = 3


def new_cache(capacity: int = 24, dtype: torch.dtype = torch.float32, number: int = 0) -> KVCache:
    return KVCache(LAYERS, SHAPES, capacity, dtype, torch.device("cpu"), number)


def entries(tokens: list[int], layer: int, part: int) -> Tensor:
    """[1, heads, T, width]: what a token's key (part 0) or value (1) is in a layer."""
    heads, width = SHAPES[part]
    ids = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None]
    places = torch.arange(heads * width, dtype=torch.float32).view(1, heads, 1, width)
    return 1000 * ids + 100 * layer + 50 * part + places


def write(cache: KVCache, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Write a pass's tokens in every layer, as attention does; what each layer gets to see."""
    return [
        cache.update(entries(tokens, layer, 0), entries(tokens, layer, 1), layer)
        for layer in range(LAYERS)
    ]


def assert_holds(cache: KVCache, tokens: list[int]) -> None:
    """The cache holds exactly these tokens in every layer."""
    assert cache.length == len(tokens)
    for at, layer in enumerate(cache.layers):
        for part, held in enumerate((layer.keys, layer.values)):
            assert torch.equal(held[:, :, : len(tokens)], entries(tokens, at, part))


def test_entries_go_behind_the_length() -> None:
    cache = new_cache()
    write(cache, [1, 2, 3])
    assert_holds(cache, [])
    cache.advance(3)
    assert_holds(cache, [1, 2, 3])
    cache.keep_path([])
    seen = write(cache, [7, 8])
    assert_holds(cache, [1, 2, 3])
    for at, layer in enumerate(seen):
        for part, got in enumerate(layer):
            assert torch.equal(got, entries([1, 2, 3, 7, 8], at, part))
    cache.advance(2)
    assert_holds(cache, [1, 2, 3, 7, 8])


def test_rewind_forgets_the_last_entries() -> None:
    cache = new_cache()
    write(cache, [1, 2, 3, 4])
    cache.advance(4)
    cache.rewind(3)
    assert_holds(cache, [1])
    write(cache, [9])
    cache.advance(1)
    assert_holds(cache, [1, 9])
    cache.clear()
    assert_holds(cache, [])
    with pytest.raises(Broken):
        cache.rewind(1)


def test_erased_entries_are_numbers() -> None:
    cache = new_cache()
    write(cache, [1, 2])
    cache.advance(2)
    cache.layers[1].values[:, :, 2:] = float("nan")
    cache.erase()
    assert cache.length == 0
    assert not any(tensor.any() for tensor in cache.tensors())


def test_capacity_cannot_be_passed() -> None:
    cache = new_cache(capacity=3)
    write(cache, [1, 2, 3])
    with pytest.raises(Broken):
        cache.advance(4)
    cache.advance(3)
    with pytest.raises(Broken):
        write(cache, [7])


def test_kept_paths_of_random_trees() -> None:
    """Against lists: two texts side by side, each with trees and a path of its own."""
    rng = random.Random(61)
    for _ in range(60):
        caches = [new_cache(number=number) for number in range(2)]
        held: list[list[int]] = [[], []]
        fresh = iter(range(1, 1000))
        for _ in range(8):
            at = rng.choice([0, 1])
            nodes = rng.randint(1, 24 - len(held[at])) if len(held[at]) > 18 else rng.randint(1, 6)
            tokens = [next(fresh) for _ in range(nodes)]
            write(caches[at], tokens)
            path = [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1)))]
            caches[at].keep_path(path)
            held[at] += [tokens[node] for node in path]
            if rng.random() < 0.3:
                count = rng.randint(0, len(held[at]))
                caches[at].rewind(count)
                held[at] = held[at][: len(held[at]) - count]
            for cache, tokens in zip(caches, held, strict=True):
                assert_holds(cache, tokens)
            if max(map(len, held)) == 24:
                break


def test_storage_never_moves() -> None:
    cache = new_cache()
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    write(cache, [1, 2, 3])
    cache.keep_path([0, 2])
    cache.rewind(0)
    cache.clear()
    assert before == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_storage(dtype: torch.dtype) -> None:
    cache = new_cache(capacity=7, dtype=dtype)
    assert cache.nbytes == LAYERS * 7 * (2 * 6 + 3 * 4) * dtype.itemsize


def test_lengths_as_transformers_asks_for_them() -> None:
    cache = new_cache()
    write(cache, [1, 2])
    cache.advance(2)
    assert cache.get_seq_length() == 2
    assert cache.get_mask_sizes(3, 0) == (5, 0)
    assert cache.layers[0].get_max_cache_shape() == 24


def visible(length: int, draft: Draft, query: int, entry: int, window: int | None) -> bool:
    """Whether a node of a tree behind `length` tokens may see an entry, by following parents."""
    depths = draft.tree.depths()
    if entry < length:
        position = entry
    else:
        node = entry - length
        if node >= draft.nodes:
            return False
        above = query
        while above not in (node, 0):
            above = draft.parents[above - 1]
        if above != node:
            return False
        position = length + depths[node]
    return window is None or length + depths[query] - position < window


def random_draft(rng: random.Random, kind: str) -> Draft:
    nodes = rng.randint(0, 7)
    if kind == "chain":
        parents = list(range(nodes))
    else:
        parents = [rng.randint(0, node) for node in range(nodes)]
    return Draft([rng.randrange(9) for _ in range(nodes)], parents)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_mask_matches_the_rule(kind: str, window: int | None, rows: int) -> None:
    rng = random.Random(62)
    for _ in range(25):
        draft = random_draft(rng, kind)
        lengths = [rng.randint(0, 9) for _ in range(rows)]
        end = max(lengths) + draft.nodes
        depths, above = torch.tensor(draft.tree.depths()), draft.tree.visible()
        mask = attention_mask(torch.tensor(lengths), depths, above, end, window)
        assert mask.dtype == torch.bool
        assert mask.shape == (rows, 1, draft.nodes, end)
        wanted = [
            [
                [visible(length, draft, query, entry, window) for entry in range(end)]
                for query in range(draft.nodes)
            ]
            for length in lengths
        ]
        assert mask[:, 0].tolist() == wanted


@pytest.mark.parametrize("window", [None, 2])
def test_later_nodes_see_what_they_would_in_a_whole_tree(window: int | None) -> None:
    """A pass of a tree's last nodes has the last rows of the mask of all."""
    rng = random.Random(65)
    for _ in range(25):
        draft = random_draft(rng, "tree")
        roots = torch.tensor([rng.randint(0, 9) for _ in range(2)])
        depths = torch.tensor(draft.tree.depths())
        end = int(roots.max()) + draft.nodes
        whole = attention_mask(roots, depths, draft.tree.visible(), end, window)
        rows = rng.randint(1, draft.nodes)
        later = Tree.of(draft.parents, rows)
        assert later.first == draft.nodes - rows
        mask = attention_mask(roots, depths, later.visible(), end, window)
        assert torch.equal(mask, whole[:, :, -rows:])


def test_mask_of_a_chain_is_causal() -> None:
    draft = Draft([1, 2, 3], [0, 1, 2])
    steps = torch.tensor(draft.tree.depths())
    mask = attention_mask(torch.tensor([2]), steps, draft.tree.visible(), 6, None)
    assert torch.equal(mask[0, 0], torch.ones(4, 6, dtype=torch.bool).tril(2))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_causal_mask_is_that_of_a_chain(window: int | None) -> None:
    """The trees' rule over a chain, with entries behind it that nobody sees."""
    rng = random.Random(64)
    for _ in range(25):
        chain = random_draft(rng, "chain")
        lengths = torch.tensor([rng.randint(0, 9) for _ in range(2)])
        steps = torch.tensor(chain.tree.depths())
        end = int(lengths.max()) + chain.nodes + rng.randint(0, 3)
        wanted = attention_mask(lengths, steps, chain.tree.visible(), end, window)
        assert torch.equal(causal_mask(lengths[:, None] + steps, end, window), wanted)


def test_placed_entries_are_those_of_the_cache() -> None:
    """One at a time, where a tensor says: the views see them, and so does the cache itself."""
    plain, cache = new_cache(), new_cache()
    place = torch.tensor([0])
    placed = cache.placed(place, 6)
    for at, token in enumerate([3, 1, 4, 1, 5]):
        wanted = write(plain, [token])
        place.fill_(at)
        for layer, (keys, values) in enumerate(wanted):
            got = placed.update(entries([token], layer, 0), entries([token], layer, 1), layer)
            assert [tensor.shape[2] for tensor in got] == [6, 6]
            assert torch.equal(got[0][:, :, : at + 1], keys)
            assert torch.equal(got[1][:, :, : at + 1], values)
        plain.advance(1)
    cache.advance(5)
    assert_holds(cache, [3, 1, 4, 1, 5])


def test_every_query_sees_itself() -> None:
    """A row of nothing but hidden entries would make softmax undefined."""
    rng = random.Random(63)
    for _ in range(50):
        draft = random_draft(rng, "tree")
        lengths = torch.tensor([rng.randint(0, 9) for _ in range(2)])
        end = int(lengths.max()) + draft.nodes
        depths, above = torch.tensor(draft.tree.depths()), draft.tree.visible()
        mask = attention_mask(lengths, depths, above, end, 1)
        for row, length in enumerate(lengths.tolist()):
            for node in range(draft.nodes):
                assert mask[row, 0, node].nonzero().flatten().tolist() == [length + node]
