"""DyLLM's and Fast-dLLM's steps in NumPy: when they are dense decoding, what they touch, and what each switch changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.diffusion_cases import DREAM, EXACT, LLADA, MASK, MODELS, PROMPT, assert_same, distance, one_layer, request, run
from reference.diffusion_model_numpy import Caches, Model, attend, dense, random_model
from reference.diffusion_numpy import (
    DREAM_RULES,
    LLADA_RULES,
    CachedMode,
    Call,
    Request,
    Sparse,
    SparseMode,
    cosines,
    generate,
)


def uniform_attention(model: Model) -> Model:
    """No queries: every context is the mean of the values."""
    layers = [replace(x, q=np.zeros_like(x.q), q_bias=None) for x in model.layers]
    return replace(model, layers=layers)


def walk(model: Model, mode: SparseMode, steps: int, gen_length: int = 12) -> tuple[Sparse, list[int]]:
    """Runs `steps` steps that each commit one token of a script, front to back; the commit of the last one is not run."""
    stream = Sparse(model, mode, len(PROMPT))
    tokens = [*PROMPT, *[MASK] * gen_length]
    changed = np.array([], np.int64)
    for step in range(steps):
        if step:
            changed = np.array([len(PROMPT) + step - 1])
            tokens[changed[0]] = (7 * step) % 31
        stream.forward(tokens, Call(step, step, len(PROMPT), len(PROMPT) + gen_length, changed))
    return stream, tokens


# Sparse denoising.


@MODELS
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.8, "top_p": 0.9}, {"remasking": "entropy", "threshold": 0.4}, {"cfg_scale": 0.7, "steps": 6}],
)
def test_all_salient_from_a_full_first_layer_is_dense(model: Model, changes: dict[str, Any]):
    asked = request(**changes)
    want = run(model, asked)
    for full_steps in (1, 4):
        got = run(model, asked, replace(EXACT, num_full_steps=full_steps))
        assert_same(got, want)
        assert {step.kind for step in got.steps[full_steps:]} == {"whole"}
    approximate = run(model, asked, replace(EXACT, first_layer_full=False))
    assert distance(approximate, want) > 1e-3


@given(st.data())
def test_all_salient_is_dense_at_any_size(data: st.DataObject):
    family: Any = data.draw(st.sampled_from(["llada", "dream"]))
    heads = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    layers = data.draw(st.integers(1, 3))
    model = random_model(data.draw(st.integers(0, 9)), family, 12, 16, layers, *heads, 8)
    length, blocks, steps = (data.draw(st.integers(1, 4)) for _ in range(3))
    asked = Request(11, length * blocks, length, steps * blocks, data.draw(st.sampled_from(LLADA_RULES + DREAM_RULES)))
    prompt = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=7))
    switches = {name: data.draw(st.booleans()) for name in ("keep_prompt_updates", "keep_updated", "shift_boundary")}
    mode = replace(EXACT, num_full_steps=data.draw(st.integers(1, 3)), **switches)
    assert_same(run(model, asked, mode, prompt), run(model, asked, prompt=prompt))


def test_the_schedule():
    kinds = {"full": "f", "whole": "w", "response": "r"}
    for mode, want in (
        (SparseMode(0.9), "ffffrrrwrrrw"),
        (SparseMode(0.9, num_full_steps=2), "ffwwrrrwrrrw"),
        (SparseMode(0.9, num_full_steps=6), "ffffffrwrrrw"),
        (SparseMode(0.9, every=8), "ffffrrrwrrrr"),
        (SparseMode(0.9, num_full_steps=2, whole_until=6), "ffwwwwrwrrrw"),
        (SparseMode(0.9, num_full_steps=1, every=3, whole_until=0), "frwrrwrrwrrw"),
        (EXACT, "fwwwwwwwwwww"),
    ):
        assert "".join(kinds[step.kind] for step in run(LLADA, request(), mode).steps) == want
    with pytest.raises(ValueError, match="at least 1"):
        SparseMode(0.9, num_full_steps=0)


@MODELS
def test_above_1_everything_is_salient_whatever_rounding_says(model: Model):
    """The first step commits nothing, so that the second has contexts that don't change, with cosines around 1."""
    asked = request(block_length=12, quota="timesteps")
    got = run(model, asked, SparseMode(float(np.nextafter(1, 2)), num_full_steps=1))
    assert not len(got.steps[0].committed)
    np.testing.assert_allclose(got.steps[1].layers[0].cosine, 1, atol=1e-12)
    assert not len(run(model, asked, SparseMode(0.999, num_full_steps=1)).steps[1].layers[2].salient)
    for layer in (layer for step in got.steps for layer in step.layers):
        assert len(layer.salient) == len(layer.cosine)


@MODELS
@pytest.mark.parametrize("keep_updated", [False, True])
def test_salient_rows_pass_from_layer_to_layer(model: Model, keep_updated: bool):
    mode = SparseMode(0.6, num_full_steps=2, keep_updated=keep_updated)
    got = run(model, request(), mode)
    dropped = 0
    for before, step in zip(got.steps[1:], got.steps[2:], strict=False):
        first = 0 if step.kind == "whole" else len(PROMPT)
        np.testing.assert_array_equal(step.layers[0].incoming, before.committed)
        for layer, following in zip(step.layers, [*step.layers[1:], None], strict=True):
            want = first + np.flatnonzero(layer.cosine < mode.tau)
            dropped += len(np.setdiff1d(before.committed, want))
            np.testing.assert_array_equal(layer.salient, np.union1d(want, before.committed) if keep_updated else want)
            assert following is None or following.incoming is layer.salient
            assert len(layer.cosine) == len(PROMPT) + 12 - first
    assert dropped > 0  # so that the switch makes a difference here


def snapshot(caches: Sequence[Caches]) -> list[Caches]:
    return [Caches(x.k.copy(), x.v.copy(), x.c.copy(), x.f.copy(), x.base.copy()) for x in caches]


@MODELS
def test_a_step_touches_only_its_rows(model: Model):
    stream, tokens = walk(model, SparseMode(0.97, num_full_steps=2, whole_until=2), 5)
    before = snapshot(stream.caches)
    changed = np.array([len(PROMPT) + 4])
    tokens[changed[0]] = 30
    done = stream.forward(tokens, Call(5, 5, len(PROMPT), len(tokens), changed))
    assert (done.kind, done.first) == ("response", len(PROMPT))
    everything = np.arange(len(tokens))
    for old, new, trace in zip(before, stream.caches, done.layers, strict=True):
        others = np.setdiff1d(everything, trace.incoming)
        rest = np.setdiff1d(everything, trace.salient)
        np.testing.assert_array_equal(new.k[others], old.k[others])
        np.testing.assert_array_equal(new.v[others], old.v[others])
        np.testing.assert_array_equal(new.f[rest], old.f[rest])
        assert len(trace.salient)
        assert np.abs(new.f - old.f)[trace.salient].max(1).min() > 0
        np.testing.assert_array_equal(new.c[: len(PROMPT)], old.c[: len(PROMPT)])
        np.testing.assert_array_equal(new.base, old.base)
        window = slice(len(PROMPT), None)
        np.testing.assert_allclose(trace.cosine, cosines(old.c[window], new.c[window]), rtol=1e-12)


def test_layer_0_by_hand():
    """Layer 0 reads embeddings, so that all of its update can be written with weights of attention over all keys."""
    stream, tokens = walk(LLADA, SparseMode(0.97, num_full_steps=2), 2)
    old = snapshot(stream.caches)[0]
    changed = np.array([len(PROMPT) + 1])
    tokens[changed[0]] = 30
    stream.forward(tokens, Call(2, 2, len(PROMPT), len(tokens), changed))
    fresh = dense(LLADA, tokens)[1][0]
    got = stream.caches[0]
    np.testing.assert_allclose(got.k[changed], fresh.k[changed], rtol=1e-12)
    layer = LLADA.layers[0]
    rows = np.arange(len(tokens))
    q = LLADA.queries(layer, LLADA.embed[tokens], rows)
    for row in rows:
        for head in range(4):
            weights = np.exp(got.k[:, head] @ q[row, head] / np.sqrt(8))
            weights /= weights.sum()
            part = slice(8 * head, 8 * head + 8)
            want = old.c[row, part] + weights[changed[0]] * (got.v[changed[0], head] - old.v[changed[0], head])
            if row == changed[0]:
                want = weights @ got.v[:, head]
            np.testing.assert_allclose(got.c[row, part], want, rtol=1e-9, atol=1e-12)


# Updates of prompt contexts that response-only steps leave behind.


@MODELS
@pytest.mark.parametrize("tau", [-1.0, 0.9, 0.999, 2.0])
@pytest.mark.parametrize("keep", [False, True])
def test_under_uniform_attention_no_update_is_lost(model: Model, tau: float, keep: bool):
    """Every dV enters every context with weight 1/n, so the sum of updates is exact if none is missing: contexts are the mean
    of the cached values, after every whole-sequence step, in all rows and layers, whatever is salient."""
    model = uniform_attention(model)
    mode = SparseMode(tau, num_full_steps=2, whole_until=2, keep_prompt_updates=keep)

    def missing(steps: int, rows: slice) -> float:
        stream, _ = walk(model, mode, steps)
        group = model.layers[0].q.shape[0] // model.layers[0].k.shape[0]
        means = [np.repeat(cache.v.mean(0), group, axis=0).reshape(1, -1) for cache in stream.caches]
        return max(float(np.abs(cache.c[rows] - mean).max()) for cache, mean in zip(stream.caches, means, strict=True))

    prompt = slice(None, len(PROMPT))
    response = slice(len(PROMPT), None)
    assert [mode.kind(step) for step in (2, 3, 6, 7)] == ["response", "whole", "response", "whole"]
    for steps in (3, 4, 7, 8, 11, 12):
        assert missing(steps, response) < 1e-12
    assert missing(3, prompt) > 1e-3  # behind, for now
    for steps in (4, 8, 12):
        assert (missing(steps, prompt) < 1e-12) == keep


@MODELS
@pytest.mark.parametrize("shift_boundary", [False, True])
def test_the_lost_update_is_what_attention_gives_it(model: Model, shift_boundary: bool):
    """Layer 0 has the same queries, keys and values with and without the switch; steps 2 to 6 are response-only, 7 is whole."""
    mode = SparseMode(0.97, num_full_steps=2, every=8, whole_until=2, shift_boundary=shift_boundary)
    streams = [walk(model, replace(mode, keep_prompt_updates=keep), 7)[0] for keep in (False, True)]
    before = snapshot([stream.caches[0] for stream in streams])
    ends = [walk(model, replace(mode, keep_prompt_updates=keep), 8) for keep in (False, True)]
    (off, tokens), (on, _) = ends
    window = len(PROMPT) - (model.shift if shift_boundary else 0)
    rows = np.arange(len(tokens))
    q = model.queries(model.layers[0], model.embed[tokens], rows)
    lost = attend(q, on.caches[0].k, before[1].v - before[1].base)
    np.testing.assert_allclose(before[0].v, before[1].v, atol=1e-12)
    got = on.caches[0].c - off.caches[0].c
    np.testing.assert_allclose(got[:window], lost[:window], atol=1e-12)
    np.testing.assert_allclose(got[window:], 0, atol=1e-12)
    assert np.abs(lost[:window]).max() > 1e-2
    np.testing.assert_array_equal(on.caches[0].base, on.caches[0].v)


# Windows, and Dream's row before them.


@MODELS
@pytest.mark.parametrize("mode", [SparseMode(2, 1, 5, 0, True), CachedMode("prefix"), CachedMode("dual")])
def test_one_layer_in_a_window_is_dense_but_for_the_boundary(model: Model, mode: Any):
    """Keys and values of one layer depend on nothing but tokens, so no cache is stale."""
    model = one_layer(model)
    asked = request(block_length=12)
    want = run(model, asked)
    assert_same(run(model, asked, replace(mode, shift_boundary=True)), want)
    without = run(model, asked, replace(mode, shift_boundary=False))
    if model.family == "llada":
        assert_same(without, want)
        return
    step = without.steps[1]
    dense_step = want.steps[1]
    assert step.candidates[0] == len(PROMPT)  # the first position of the window is still masked
    np.testing.assert_allclose(step.logits[1:], dense_step.logits[1:], atol=1e-9)
    tokens = [*PROMPT, *[MASK] * 12]
    for position in want.steps[0].committed:
        tokens[position] = want.tokens[position]
    own = dense(model, tokens)[0]
    np.testing.assert_allclose(step.logits[0], own[len(PROMPT)], atol=1e-9)
    np.testing.assert_allclose(dense_step.logits[0], own[len(PROMPT) - 1], atol=1e-9)
    assert np.abs(own[len(PROMPT)] - own[len(PROMPT) - 1]).max() > 1e-2


def test_position_0_keeps_its_own_logits():
    """A response without a prompt: the row before it doesn't exist."""
    asked = request(gen_length=3, block_length=3, steps=3)
    step = generate(DREAM, [], asked).steps[0]
    np.testing.assert_array_equal(step.logits, dense(DREAM, [MASK] * 3)[0][[0, 0, 1]])


# Fast-dLLM's caches.


@MODELS
@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_later_steps_see_kept_keys_outside_their_rows(model: Model, kind: Any):
    start = 9
    end = 13
    tokens = [*PROMPT, 1, 2, 3, 4, *[MASK] * 8]
    stream = CachedMode(kind)(model, len(PROMPT))
    stream.forward(tokens, Call(4, 0, start, end, np.array([8])))
    kept = snapshot(stream.caches)
    tokens[10] = 12
    got = stream.forward(tokens, Call(5, 1, start, end, np.array([10])))
    first = start - model.shift
    last = end if kind == "dual" else len(tokens)
    assert (got.kind, got.first, len(got.logits)) == (kind, first, last - first)
    x = model.embed[tokens[first:last]]
    rows = np.arange(first, last)
    for layer, cache in zip(model.layers, kept, strict=True):
        fresh = model.keys_values(layer, x, rows)
        k, v = (np.concatenate([a[:first], b, a[last:]]) for a, b in zip((cache.k, cache.v), fresh, strict=True))
        x = x + attend(model.queries(layer, x, rows), k, v) @ layer.o.T
        x = x + model.ffn(layer, x)
    np.testing.assert_allclose(got.logits, model.logits(x), atol=1e-9)
    assert np.abs(got.logits - dense(model, tokens)[0][first:last]).max() > 1e-3
    stream.forward(tokens, Call(6, 0, end, end + 4, np.array([], np.int64)))  # the next block's first step
    for cache, fresh in zip(stream.caches, dense(model, tokens)[1], strict=True):
        np.testing.assert_array_equal(cache.k, fresh.k)


@MODELS
@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("changes", [{}, {"steps": 6, "temperature": 0.8}, {"threshold": 0.4}, {"remasking": "entropy"}])
def test_caches_commit_from_the_first_step_of_each_block(model: Model, kind: Any, changes: dict[str, Any]):
    asked = request(**changes)
    got = run(model, asked, CachedMode(kind))
    want = run(model, asked)
    assert MASK not in got.tokens
    assert all(step.kind == ("full" if step.block_step == 0 else kind) for step in got.steps)
    assert all(len(step.committed) for step in got.steps if "remasking" not in changes)
    np.testing.assert_array_equal(got.steps[0].committed, want.steps[0].committed)
    assert distance(got, want) > 1e-3


@MODELS
def test_one_step_a_block_needs_no_cache(model: Model):
    asked = request(steps=3)
    for kind in ("prefix", "dual"):
        assert_same(run(model, asked, CachedMode(kind)), run(model, asked))


@given(st.sampled_from(["prefix", "dual"]), st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 0.3]), st.booleans())
def test_one_layer_with_caches_is_dense_at_any_size(kind: Any, length: int, blocks: int, threshold: float | None, dream: bool):
    model = one_layer(DREAM if dream else LLADA)
    asked = request(gen_length=length * blocks, block_length=length, steps=2 * blocks, threshold=threshold, temperature=0.6)
    assert_same(run(model, asked, CachedMode(kind)), run(model, asked))
