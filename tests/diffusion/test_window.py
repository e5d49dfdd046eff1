"""Passes over windows, layer by layer: which positions are salient, how far contexts turned, and the logits that come of it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.support import BACKENDS, EXACT, PLAIN, REPAIRED, TABLE, asking, build, decided, request_of, wanted
from reference.diffusion_cases import PROMPT
from tilewright.diffusion.options import Denoising, Saliency
from tilewright.diffusion.state import DiffusionState, plan
from tilewright.diffusion.steps import Denoiser, candidates, predicted, run_pass, step_span
from tilewright.diffusion.window import bucket_sizes, on_picked, pick
from tilewright.kernels.select import PLAIN as OPERATIONS
from tilewright.llm.diffusion_model import DiffusionModel

PROMPTS = [PROMPT, [4], [7, 7, 21, 2, 35, 9, 13], [31, 5]]
SIZED = replace(TABLE, batches=(4,))


class Seen(NamedTuple):
    """A step: the logits of each block's positions, which of them are masked, how the pass went, and what was reported."""

    logits: Any
    masked: Any
    trace: Any
    committed: Any
    salient: Any


@partial(jax.jit, static_argnums=0)
def watched(how: Denoiser, params: Any, state: DiffusionState) -> tuple[DiffusionState, Seen]:
    """A step of the whole sequence, which rows of all kinds may take."""
    what = plan(state, how.config.shifted)
    x, begin, _, trace = run_pass(how, "whole", params, state, what)
    positions, masked = candidates(state, how)
    logits = predicted(how, params, x, begin, what.first, positions)
    after, info = step_span(how, "whole", params, state)
    return after, Seen(logits, masked, trace, info.committed, info.salient)


def follow(model: DiffusionModel, requests: list[Denoising], **changes: Any) -> Iterator[tuple[np.ndarray, Seen]]:
    """The tokens before each step, and the step."""
    prompts = PROMPTS[: len(requests)]
    shape = replace(model.table.shape(len(prompts), [len(prompt) for prompt in prompts], requests), narrow=True)
    programs = model.programs_of(shape)
    how = replace(programs.denoiser(shape), **changes)
    state = programs.batch(replace(shape, dense=how.dense), prompts, requests)
    while not np.asarray(state.done).all():
        before = np.asarray(state.tokens)
        state, seen = watched(how, programs.params, state)
        yield before, jax.tree.map(np.asarray, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_finds_the_positions_that_the_reference_finds(backend: tuple[str, str]):
    """Exactly those, before and after its attention; with cosines and logits to within rounding."""
    family = backend[0]
    model = build(*backend, SIZED)
    ways = [PLAIN, REPAIRED, Saliency(0.95, 1, 4, first_layer=True), Saliency(0.97, 1, 2, False, keep_changed=False)]
    requests = [asking(mode="sparse", saliency=how, steps=steps) for how, steps in zip(ways, (12, 12, 6, 12), strict=True)]
    wants = [wanted(family, prompt, each) for prompt, each in zip(PROMPTS, requests, strict=True)]
    open_rows = set(range(4))
    compared = 0
    for number, (_, seen) in enumerate(follow(model, requests)):
        for row in sorted(open_rows):
            asked = requests[row]
            if number >= len(wants[row].steps) or not decided(wants[row].steps[number], asked, request_of(asked, family)):
                open_rows.discard(row)
                continue
            step = wants[row].steps[number]
            length = len(PROMPTS[row]) + asked.new_tokens
            np.testing.assert_allclose(seen.logits[row][seen.masked[row]], step.logits, atol=2e-4, err_msg=f"{row}, {number}")
            for n, layer in enumerate(step.layers):
                assert np.flatnonzero(seen.trace.incoming[n, row]).tolist() == layer.incoming.tolist()
                assert np.flatnonzero(seen.trace.salient[n, row]).tolist() == layer.salient.tolist()
                found = seen.trace.cosine[n, row, length - len(layer.cosine) : length]
                np.testing.assert_allclose(found, layer.cosine, atol=2e-5)
                compared += 1
    assert compared >= 36, "of 2 layers of at most 9 + 9 + 5 + 11 sparse steps"


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[3]])
def test_sparse_steps_with_everything_salient_are_dense(backend: tuple[str, str]):
    """Tokens exactly, logits to within rounding, whatever commits them."""
    model = build(*backend, SIZED)
    rules: list[dict[str, Any]] = [{}, {"threshold": 0.3}, {"steps": 6}, {"temperature": 0.9, "seed": 3}]
    sparse = list(follow(model, [asking(mode="sparse", saliency=EXACT, **rule) for rule in rules]))
    dense = list(follow(model, [asking(**rule) for rule in rules], dense=True))
    assert len(sparse) == len(dense)
    for (tokens, one), (same_tokens, other) in zip(sparse, dense, strict=True):
        np.testing.assert_array_equal(tokens, same_tokens)
        np.testing.assert_array_equal(one.masked, other.masked)
        np.testing.assert_allclose(one.logits[one.masked], other.logits[other.masked], atol=1e-5)
        np.testing.assert_array_equal(one.committed, other.committed)


@pytest.mark.slow
def test_results_do_not_depend_on_buckets():
    """Whether one holds the salient positions, none does, or the next larger one has to."""
    model = build("dream", "xla", SIZED)
    requests = [asking(mode="sparse", saliency=how) for how in (PLAIN, REPAIRED, replace(REPAIRED, tau=0.97), EXACT)]
    whole = list(follow(model, requests, buckets=()))
    counts = {int(seen.trace.salient[n].sum()) for _, seen in whole for n in range(2)}
    assert len({min(n for n in (20, 30, 999) if n >= count) for count in counts}) == 3, counts
    for (tokens, one), (same_tokens, other) in zip(follow(model, requests, buckets=(20, 30)), whole, strict=True):
        np.testing.assert_array_equal(tokens, same_tokens)
        np.testing.assert_array_equal(one.salient, other.salient)
        np.testing.assert_allclose(one.logits[one.masked], other.logits[other.masked], atol=1e-5)


MASKS = st.lists(st.booleans(), min_size=12, max_size=12).map(lambda mask: np.asarray(mask).reshape(2, 6))


@given(MASKS)
def test_picked_positions_come_in_order_and_their_places_too(mask: np.ndarray):
    picked = jax.jit(pick, static_argnums=0)(OPERATIONS, mask)
    count = int(picked.number)
    assert count == mask.sum()
    assert picked.indices[:count].tolist() == np.flatnonzero(mask).tolist()
    places = np.asarray(picked.among(jnp.arange(100, 112).reshape(2, 6)))
    assert places.tolist() == [*(np.flatnonzero(mask) + 100), *[-1] * (12 - count)]


def test_programs_are_made_for_the_buckets_below_all_rows_and_for_all():
    assert bucket_sizes((4, 8, 24), 12) == (4, 8, 12)
    assert bucket_sizes((4, 8), 8) == (4, 8)
    assert bucket_sizes((), 7) == (7,)
    assert bucket_sizes((32,), 7) == (7,)


@partial(jax.jit, static_argnums=(0, 1))
def in_buckets(buckets: tuple[int, ...], counts: bool, mask: Any, x: Any) -> Any:
    def tripled(rows: jax.Array, count: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        assert (count is None) != counts
        return 3 * rows, jnp.full((len(rows), 1), float(len(rows)))

    return on_picked(replace(OPERATIONS, skips_uncounted=counts), buckets, tripled, pick(OPERATIONS, mask), x)


@pytest.mark.parametrize(("buckets", "counts"), [((3, 8), False), ((), False), ((1, 2, 3, 4, 5), False), ((3,), True)])
@given(MASKS)
def test_the_smallest_bucket_that_holds_them_runs(buckets: tuple[int, ...], counts: bool, mask: np.ndarray):
    x = np.arange(24.0, dtype=np.float32).reshape(12, 2)
    rows, size = in_buckets(buckets, counts, mask, x)
    picked = x[mask.reshape(-1)]
    np.testing.assert_array_equal(rows[: len(picked)], 3 * picked)
    assert rows.shape == (12, 2)
    sizes = (12,) if counts else bucket_sizes(buckets, 12)
    assert size[0, 0] == next(each for each in sizes if each >= len(picked))
