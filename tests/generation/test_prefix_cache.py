"""Prefixes that are not computed again: what they give, what they cost, what they leave alone."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MESHED, write
from reuse import CHUNK, EVERY, PLACES, cache_of, ids, load, same

import kimi_jax as kj
from kimi_jax.generation.prefix_cache import ChunkTree
from kimi_jax.parallel.helix import Stripes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(MESHED, tmp_path_factory.mktemp("prefixes") / "model")


@pytest.fixture(scope="module", params=PLACES)
def model(request, folder):
    return load(folder, request.param)


@pytest.fixture(scope="module")
def one(folder):
    return load(folder)


def test_warm_equals_cold_bit_for_bit(model):
    """Whatever of a prompt is known: nothing, some chunks, all of it."""
    long = ids(53)
    prompts = [long, long[:32], [*long[:40], *ids(9, 1)], [*long[:17], *ids(20, 2)], ids(18, 3)]
    cold = [model.generate([prompt], **EVERY)[0] for prompt in prompts]
    cache = cache_of(model, 20)
    same(model.generate([long], prefix_cache=cache, **EVERY)[0], cold[0])
    for prompt, wanted, known in zip(prompts, cold, (48, 32, 32, 16, 0), strict=True):
        (warm,) = model.generate([prompt], prefix_cache=cache, **EVERY)
        same(warm, wanted)
        assert (warm.usage.cached_tokens, warm.usage.prompt_tokens) == (known, len(prompt))
    assert cache.stats.hits == 4 and cache.stats.tokens == 128


def test_prompts_of_one_batch_share_what_they_begin_with(one):
    shared = ids(35)
    prompts = [[*shared, *ids(4, n)] for n in range(1, 6)]
    cache = cache_of(one, 20)
    outs = one.generate(prompts, prefix_cache=cache, slots=2, **EVERY)
    assert [out.usage.cached_tokens for out in outs] == [0, 32, 32, 32, 32]
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.tokens == one.generate([prompt], **EVERY)[0].tokens
    assert cache.stats == kj.CacheStats(2, cache.stats.bytes, cache.stats.limit, 5, 4, 128, 0)


def test_a_prefix_that_comes_back_leaves_other_rows_alone(model):
    """Prompts are restored beside one that is being prefilled, of another data rank too."""
    cache, known = cache_of(model, 20), ids(40)
    prompts = [ids(3, 1), ids(120, 2), known, known[:33], ids(4, 3)]
    cold = [model.generate([prompt], **EVERY)[0].tokens for prompt in prompts]
    model.generate([known], prefix_cache=cache, **EVERY)
    warm = model.generate(prompts, prefix_cache=cache, slots=4, **EVERY)
    assert [out.usage.cached_tokens for out in warm] == [0, 0, 32, 32, 0]
    assert [out.tokens for out in warm] == cold


def test_a_snapshot_is_immutable(one):
    cache, long = cache_of(one, 20), ids(40)
    one.generate([long], prefix_cache=cache, **EVERY)
    arrays = [x for entry in cache._tree.chunks for x in jax.tree.leaves(entry.copy)]
    before = [np.array(x) for x in arrays]
    for n in range(3):
        one.generate([[*long[:33], *ids(9, n)], ids(20, n)], prefix_cache=cache, **EVERY)
    for x, bits in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(np.array(x), bits)


def test_an_entry_counts_the_bytes_that_it_takes_of_a_device(model):
    cache = cache_of(model, 5)
    model.generate([ids(40)], prefix_cache=cache, max_new_tokens=1)
    device = model.mesh.devices.flat[0]
    held = sum(
        part.data.nbytes
        for entry in cache._tree.chunks
        for x in jax.tree.leaves(entry.copy)
        for part in x.addressable_shards
        if part.device == device
    )
    assert held == cache.stats.bytes and cache.stats.entries == 2


def test_streams_share_prefixes_too(one):
    cache, long = cache_of(one, 20), ids(40)
    one.generate([long], prefix_cache=cache, **EVERY)
    events = list(one.stream(long, prefix_cache=cache, max_new_tokens=5, stop_tokens=[]))
    assert [e.token for e in events] == one.generate([long], **EVERY)[0].tokens
    assert events[-1].usage.cached_tokens == 32
    assert [e.usage.generated_tokens for e in events] == [1, 2, 3, 4, 5]


def test_what_does_not_fit_is_refused(one, folder):
    least = one.program.row_bytes(CHUNK)
    for bytes in (0, least - 1, True):
        with pytest.raises(ValueError, match=f"at least {least:,}.*{bytes!r}"):
            kj.PrefixCache(one, bytes)
    for bytes in (10**400, 10**5000, 2**63):
        with pytest.raises(ValueError, match="bytes must be a whole number"):
            kj.PrefixCache(one, bytes)
    with pytest.raises(ValueError, match=r"bytes=9,0.*more than the .* of a device"):
        kj.PrefixCache(one, 9 * 10**15)
    cache = cache_of(one, 1)
    for other in (dataclasses.replace(one, chunk=8), dataclasses.replace(one, params={})):
        with pytest.raises(kj.PromptError, match="another model"):
            other.generate([[1]], prefix_cache=cache)


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=25), st.integers(1, 5))
@settings(max_examples=80)
def test_a_tree_gives_the_longest_prefix_that_it_holds(prompts, limit):
    """And only such as it was given; it never holds more than it may, and forgets ends first."""
    tree = ChunkTree(2, limit)
    for prompt in prompts:
        held = {chunk.copy for chunk in tree.chunks}
        chain = tree.lookup(prompt)
        known = 2 * len(chain)
        assert [chunk.copy for chunk in chain] == [
            tuple(prompt[:n]) for n in range(2, known + 1, 2)
        ]
        prefixes = [tuple(prompt[:n]) for n in range(2, len(prompt) + 1, 2)]
        assert known == 2 * sum(prefix in held for prefix in prefixes)
        for prefix in prefixes[len(chain) :]:
            tree.add(prefix, lambda first, prefix=prefix: prefix)
        held = {chunk.copy for chunk in tree.chunks}
        assert len(held) == len(tree.chunks) <= limit
        assert all(len(seen) == 2 or seen[:-2] in held for seen in held)
        assert not prefixes or prefixes[0] in held  # the latest prompt's beginning is kept


def test_the_least_recently_used_makes_room():
    tree = ChunkTree(2, 3)
    for prompt in ([1, 1], [2, 2], [3, 3]):
        tree.add(prompt, lambda first: first)
    tree.lookup([1, 1, 9])
    tree.add([4, 4], lambda first: first)
    assert {n: len(tree.lookup([n, n])) for n in (1, 2, 3, 4)} == {1: 1, 2: 0, 3: 1, 4: 1}
    assert (len(tree.chunks), tree.evicted) == (3, 1)
    tree.clear()
    assert tree.lookup([1, 1]) == tree.chunks == []


def test_what_lost_its_beginning_is_not_kept():
    """Two prompts in turns, one of which has to make room."""
    tree, first, second = ChunkTree(2, 2), [1, 1, 2, 2], [3, 3, 4, 4]
    for prompt in (first[:2], second[:2], first, second):
        tree.add(prompt, lambda first: first)
    assert [len(tree.lookup(ids)) for ids in (first, second, second[2:])] == [2, 0, 0]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=50)
def test_a_window_holds_what_any_rank_gets_of_a_chunk(block, ranks, size):
    stripes = Stripes(block, ranks)
    owner = stripes.owner(np.arange(size * block * ranks))
    chunks = owner.reshape(-1, size)
    most = max((chunks == rank).sum(1).max() for rank in range(ranks))
    assert stripes.window(size) == most
