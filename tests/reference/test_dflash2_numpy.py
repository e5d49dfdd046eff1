"""The NumPy reference of DFlash 2 against that of DFlash, and against what the method says."""

import numpy as np
import pytest

from reference.dflash2_numpy import as_dflash2, block_losses, build2
from reference.dflash_numpy import random_pair, speculative_greedy

PAIR = random_pair(0, vocab_size=20, target_layers=2, taps=[0, 1], block_size=5)


def test_without_convolutions_and_selector_it_is_dflash():
    silent = as_dflash2(PAIR, strength=0.0, top_k=3)
    silent.drafter_tensors["candidate_selector.successor_codebook"][:] = 0
    target, second = build2(silent)
    first = PAIR.build()[1]
    want = speculative_greedy(target, first, [3, 1, 4], 12)
    got = speculative_greedy(target, second, [3, 1, 4], 12)
    assert [r.block for r in got.rounds] == [r.block for r in want.rounds]


def test_a_slot_reads_the_slots_before_it_and_no_later_ones():
    _, drafter = build2(as_dflash2(PAIR, kernel=3))
    kernels = drafter.kernels("layers.0.mlp_conv", np.ones((5, 32)))
    y = np.random.default_rng(0).normal(size=(5, 32))
    before = drafter.convolve(kernels, 0, y)
    for slot in range(5):
        other = y.copy()
        other[slot] += 1
        changed = np.abs(drafter.convolve(kernels, 0, other) - before).max(axis=1) > 1e-9
        assert changed.tolist() == [slot <= n < slot + 3 for n in range(5)]


def test_channels_of_a_group_share_what_a_slot_adds():
    _, drafter = build2(as_dflash2(PAIR, group=8))
    h = np.random.default_rng(0).normal(size=(2, 32))
    added = drafter.kernels("layers.1.attention_conv", h) - drafter.tensor("layers.1.attention_conv.base_kernel")
    groups = added.reshape(2, 2, 2, 4, 8)
    np.testing.assert_allclose(groups, np.repeat(groups[..., :1], 8, axis=-1), atol=1e-12)
    assert np.abs(np.diff(groups[..., 0], axis=-1)).min() > 1e-6


@pytest.mark.parametrize("start", [0, 3, 9])
def test_a_window_hides_what_is_far_from_each_row(start: int):
    _, drafter = build2(as_dflash2(PAIR, window=6, sliding=[1]))
    block = range(start, start + 5)
    seen = drafter.visible(1, range(start), block)
    assert drafter.visible(0, range(start), block).all()
    assert seen[:, start:].all()
    assert [int(row[:start].sum()) for row in seen] == [min(start, 5 - slot) for slot in range(5)]


def test_the_greedy_walk_is_the_likeliest_step_by_step():
    _, drafter = build2(as_dflash2(PAIR, top_k=3))
    hidden = np.random.default_rng(2).normal(size=(2, 32))
    walks = drafter.walk_distribution(hidden, 7, 1.0)
    assert len(walks) == 9
    assert sum(walks.values()) == pytest.approx(1)
    cold = drafter.walk_distribution(hidden, 7, 1e-3)
    best = max(cold, key=lambda walk: cold[walk])
    first, scores = drafter.choices(hidden[0], drafter.logits(hidden)[0], 7)
    assert best[0] == first[int(np.argmax(scores))]


def test_losses_of_a_silent_selector_are_those_of_the_candidates():
    silent = as_dflash2(PAIR, top_k=20)
    silent.drafter_tensors["candidate_selector.successor_codebook"][:] = 0
    _, drafter = build2(silent)
    hidden = np.random.default_rng(3).normal(size=(4, 32))
    losses = block_losses(drafter, hidden, [1, 2, 3, 4, 5], [True, True, False, True], 4.0)
    assert losses.backbone == pytest.approx(losses.selector), "all tokens are candidates"
    assert losses.weight == pytest.approx(1 + np.exp(-1 / 4) + np.exp(-3 / 4))
