"""Trees of drafts: their growth against a heap, the path of the target's tokens against a walk in Python."""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.models.dflash2 import walk
from tilewright.runtime.trees import DraftTree, accepted_nodes, chains, path_of
from tilewright.speculation.trees import best_first, log_probs

SLOTS, TOP_K, VOCAB = 4, 3, 9
grow = jax.jit(best_first, static_argnames="nodes")
walked = jax.jit(walk)
probable = jax.jit(log_probs)


def drawn_case(seed: int, rows: int = 2) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Last tokens, candidates, and scores of pairs; the first slot's rows are equal."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([[rng.permutation(VOCAB)[:TOP_K] for _ in range(SLOTS)] for _ in range(rows)]).astype(np.int32)
    scores = rng.normal(size=(rows, SLOTS, TOP_K, TOP_K)).astype(np.float32) * 2
    scores[:, 0] = scores[:, 0, :1]
    return rng.integers(0, VOCAB, rows).astype(np.int32), tokens, scores


def by_heap(tokens: NDArray[np.int32], logs: NDArray[np.float32], nodes: int) -> list[tuple[int, int, int]]:
    """Token, parent and depth of each node but the root, in the order of a heap of paths."""
    order = itertools.count()
    found = [(-1, -1, 0)]
    heap = [(-logs[0, 0, c], 0, c, next(order)) for c in range(TOP_K)]
    heapq.heapify(heap)
    while heap and len(found) < nodes:
        cost, parent, candidate, _ = heapq.heappop(heap)
        slot = found[parent][2]
        found.append((int(tokens[slot, candidate]), parent, slot + 1))
        if slot + 1 < SLOTS:
            for c in range(TOP_K):
                path = np.float32(-cost) + logs[slot + 1, candidate, c]
                heapq.heappush(heap, (-path, len(found) - 1, c, next(order)))
    return found[1:]


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 16, 64]))
def test_a_tree_has_the_most_probable_paths(seed: int, nodes: int):
    last, tokens, scores = drawn_case(seed)
    logs = np.asarray(probable(scores))
    tree = jax.tree.map(np.asarray, grow(last, tokens, logs, nodes=nodes))
    for row in range(2):
        want = by_heap(tokens[row], logs[row], nodes)
        found = list(zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.depths[row].tolist(), strict=True))
        assert found[0] == (last[row], -1, 0)
        assert found[1 : 1 + len(want)] == want
        assert all(node[1:] == (-1, 0) for node in found[1 + len(want) :]), "no path is left"
        for node in range(nodes):
            above, at = [node], node
            while (at := int(tree.parents[row, at])) >= 0:
                above.append(at)
            assert np.flatnonzero(tree.ancestors[row, node]).tolist() == sorted(above)
            assert len(above) == tree.depths[row, node] + 1


@given(st.integers(0, 2**32 - 1))
def test_a_tree_begins_with_smaller_trees_and_holds_the_chain(seed: int):
    """The most probable child of each node is the walk's, for rows that draw, too."""
    last, tokens, scores = drawn_case(seed)
    rng = np.random.default_rng(seed)
    temperature = np.asarray([0.0, 0.7], np.float32)
    noise = rng.gumbel(size=(2, SLOTS, TOP_K)).astype(np.float32)
    large, small = (grow(last, tokens, probable(scores, temperature, noise), nodes=nodes) for nodes in (64, 8))
    for one, other in zip(large[:3], small[:3], strict=True):
        np.testing.assert_array_equal(one[:, :8], other)
    chain = np.asarray(walked(scores, tokens, temperature, noise))
    parents, drafts = np.asarray(large.parents), np.asarray(large.tokens)
    for row in range(2):
        at = 0
        for token in chain[row].tolist():
            children = np.flatnonzero(parents[row] == at).tolist()
            if not children:
                break
            at = children[0]  # the first one that was added
            assert drafts[row, at] == token


def follow(tree: DraftTree, drawn: NDArray[np.int32], row: int) -> list[int]:
    """The nodes that the target's tokens lead to."""
    path = [0]
    while True:
        behind = drawn[row, path[-1]]
        children = [n for n in np.flatnonzero(tree.parents[row] == path[-1]) if tree.tokens[row, n] == behind]
        if not children:
            return path
        path.append(int(children[0]))


@pytest.mark.parametrize("seed", range(3))
def test_the_path_is_that_of_the_targets_tokens(seed: int):
    last, tokens, scores = drawn_case(seed, rows=32)
    tree = jax.tree.map(np.asarray, grow(last, tokens, probable(scores), nodes=16))
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (32, 16)).astype(np.int32)
    behind = np.where(np.arange(32)[:, None] % 2 == 0, drawn, 0)
    for node in range(1, 16):  # every other row accepts much
        parent = tree.parents[:, node]
        rows = np.flatnonzero((np.arange(32) % 2 == 1) & (parent >= 0))
        behind[rows, parent[rows]] = tree.tokens[rows, node]
    on_path = accepted_nodes(tree, jnp.asarray(behind))
    paths = np.asarray(path_of(tree, on_path, SLOTS + 1))
    lengths = set()
    for row in range(32):
        want = follow(tree, behind, row)
        lengths.add(len(want))
        assert np.flatnonzero(on_path[row]).tolist() == sorted(want)
        assert paths[row, : len(want)].tolist() == want
    assert len(lengths) > 3


def test_a_chain_is_a_tree():
    block = jnp.asarray([[5, 1, 2, 3], [6, 1, 2, 3], [7, 1, 2, 3]])
    tree = jax.tree.map(np.asarray, chains(block, jnp.asarray([3, 0, 2]), 6))
    assert tree.parents.tolist() == [[-1, 0, 1, 2, -1, -1], [-1] * 6, [-1, 0, 1, -1, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 0, 0], [0] * 6, [0, 1, 2, 0, 0, 0]]
    assert tree.tokens[:, :4].tolist() == block.tolist()
    assert tree.ancestors.sum(axis=2).tolist() == [[1, 2, 3, 4, 1, 1], [1] * 6, [1, 2, 3, 1, 1, 1]]
    cut = chains(block, jnp.asarray([3, 0, 2]), 3)
    assert np.asarray(cut.drafts).tolist() == [2, 0, 2]
