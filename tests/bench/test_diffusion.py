"""The benchmark of denoising: ways, figures by hand, and quality beside dense passes on a small model."""

import csv
import io
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from reference.diffusion_folder import write_folder
from reference.diffusion_model_numpy import softmax
from tilewright.bench.diffusion import (
    DenoisingRun,
    denoise,
    fitted_table,
    make_variants,
    mean_by_step,
    measure,
    rows,
    rows_in_all,
    run_figures,
    scalars_as_csv,
)
from tilewright.bench.diffusion_quality import beside, compare_with_dense, token_agreement
from tilewright.bench.diffusion_replay import denoising_replay, plain
from tilewright.diffusion.options import Denoising, Saliency
from tilewright.llm.diffusion_model import Denoised, DiffusionModel, StepReport, load

BASE = Denoising(16, block_length=8, seed=0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [9, 4, 7, 7, 5], [11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, quick_compiles: None) -> DiffusionModel:
    found = load(write_folder(tmp_path_factory.mktemp("diffusion"), "dream"))
    return found.with_table(fitted_table(PROMPTS, BASE, 2))


def test_ways_are_told_apart_and_plain_dense_comes_first():
    ways = make_variants(replace(BASE, steps=8), ("dual", "sparse"), (0.99, 0.5), (0.9,))
    assert [*ways] == ["dense", "dual", "sparse τ0.99", "sparse τ0.5", "dual p≥0.9", "sparse τ0.99 p≥0.9", "sparse τ0.5 p≥0.9"]
    assert [request.steps for request in ways.values()] == [8] * 4 + [None] * 3
    assert [request.threshold for request in ways.values()] == [None] * 4 + [0.9] * 3
    assert ways["sparse τ0.5 p≥0.9"].saliency.tau == 0.5
    assert [*make_variants(BASE, ("dense", "prefix"))] == ["dense", "prefix"]
    ways = make_variants(BASE, ("dual",), thresholds=(0.9,), suffixes=(32,))
    assert [*ways] == ["dense", "dual", "dual p≥0.9", "dual +32", "dual p≥0.9 +32"]
    assert [request.suffix_window for request in ways.values()] == [None, None, None, 32, 32]


def test_a_table_is_no_larger_than_what_it_holds():
    table = fitted_table(PROMPTS, BASE, 2)
    assert (table.batches, table.positions, table.responses, table.blocks) == ((2,), (32,), (16,), (8,))


def run_by_hand() -> DenoisingRun:
    """Two rows of 10 and 20 positions and two layers; the first is done after two steps of three."""
    reports = [
        StepReport("whole", np.asarray([2, 1]), np.asarray([[10, 10], [20, 20]])),
        StepReport("response", np.asarray([3, 1]), np.asarray([[5, 0], [10, 5]])),
        StepReport("response", np.asarray([-1, 4]), np.asarray([[0, 0], [0, 20]])),
    ]
    results = [Denoised("", [1] * 5, [2, 3], "length", 1), Denoised("", [1] * 4, [1, 1, 4], "eos", 1)]
    return DenoisingRun(results, [reports], [[10, 20]], 0.5, 1, computed_all=False)


def test_figures_of_a_run():
    figures = run_figures(run_by_hand())
    assert (figures["responses"], figures["tokens"], figures["committed_tokens"], figures["steps"]) == (2, 9, 11, 3)
    assert figures["tokens_per_forward"] == pytest.approx(11 / 5)
    assert figures["tokens_per_forward_by_step"] == [1.5, 2, 4]
    assert figures["spans"] == {"whole": 1, "response": 2}
    assert figures["host_synchronisations_per_step"] == pytest.approx(1 / 3)
    assert figures["salient_share_by_step_and_layer"] == [[1, 1], [0.5, 0.125], [0, 1]]
    assert figures["salient_share_by_step"] == [1, 0.3125, 0.5]
    assert figures["salient_share_by_layer"] == pytest.approx([(1 + 1 + 0.5 + 0.5 + 0) / 5, (1 + 1 + 0 + 0.25 + 1) / 5])
    assert run_figures(replace(run_by_hand(), computed_all=True))["salient_share"] == 1


def test_means_are_over_the_rows_that_took_a_step():
    assert [x.tolist() for x in mean_by_step([np.asarray([[1.0], [3.0]]), np.asarray([[2.0]])])] == [[1.5], [3.0]]
    assert mean_by_step([]) == []


def test_token_agreement():
    assert token_agreement([[1, 2, 3], [4]], [[1, 9, 3], [4, 5]]) == 3 / 5
    assert token_agreement([[]], [[]]) == 1


def test_logits_beside_dense_ones_against_numpy():
    rng = np.random.default_rng(0)
    dense, sparse = (rng.normal(size=(2, 3, 7)).astype(np.float32) for _ in range(2))
    masked = np.asarray([[True, False, True], [False, False, True]])
    found = beside(jnp.asarray(dense), jnp.asarray(sparse), jnp.asarray(masked), mask_token_id=4)
    kept = np.delete(np.arange(7), 4)
    p, q = (softmax(x[..., kept].astype(np.float64)) for x in (dense, sparse))
    kl = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(found.kl, (kl * masked).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(found.agreeing, ((p.argmax(-1) == q.argmax(-1)) & masked).sum(1))
    np.testing.assert_array_equal(found.masked, [2, 1])


def test_steps_in_which_all_is_salient_are_dense_ones(model: DiffusionModel):
    """The comparison itself: a step that computes everything differs from dense in rounding alone, one that skips in more."""
    exact = replace(BASE, mode="sparse", saliency=Saliency(2.0, every=1, first_layer=True))
    same = compare_with_dense(model, PROMPTS[:2], exact, 2).figures()
    assert same["compared_positions"] == 2 * 2 * sum(range(1, 9)), "of two rows and two blocks, what is masked at each step"
    assert same["argmax_agreement"] == 1
    assert same["logit_kl_nats"] == pytest.approx(0, abs=1e-8)
    assert len(same["logit_kl_nats_by_step"]) == 16  # type: ignore[arg-type]
    skipping = compare_with_dense(model, PROMPTS[:2], replace(BASE, mode="sparse", saliency=Saliency(0.5)), 2).figures()
    assert skipping["logit_kl_nats_by_step"][:4] == pytest.approx([0] * 4, abs=1e-8)  # type: ignore[index]
    assert skipping["logit_kl_nats"] > 1e-4  # type: ignore[operator]
    assert compare_with_dense(model, PROMPTS, BASE, 2).figures()["compared_positions"] == 0, "dense is dense"


def test_dense_passes_beside_steps_look_at_everything(model: DiffusionModel):
    """What a suffix window leaves out, and what the wrong position predicts where a response's window has no boundary."""
    no_boundary = replace(BASE, mode="sparse", saliency=Saliency(2.0, full_steps=1, every=8, boundary=False))
    window, shifted = (
        compare_with_dense(model, PROMPTS[2:], options, 2).figures()
        for options in (replace(BASE, suffix_window=0), no_boundary)
    )
    assert window["compared_positions"] == 2 * sum(range(1, 9))
    assert window["logit_kl_nats"] > 1e-3  # type: ignore[operator]
    assert shifted["logit_kl_nats_by_step"][1] > 0.05, "the first narrow step"  # type: ignore[index]


def test_dense_steps_with_a_suffix_window_compute_what_is_visible(model: DiffusionModel):
    figures = run_figures(denoise(model, PROMPTS[:1], replace(BASE, suffix_window=2), 2, lambda _: None))
    assert figures["salient_share_by_step"] == pytest.approx([(3 + 8 + 2) / 19] * 8 + [1] * 8)


def test_ways_are_measured_in_turns_and_nothing_compiles_meanwhile(model: DiffusionModel):
    ways = make_variants(BASE, ("sparse",), (0.5,), (0.05,))
    row_counts = []
    found = measure(model, ways, PROMPTS, batch_size=2, timed=2, compared=0, repetitions=2, on_row=row_counts.append)
    assert sum(row_counts) == rows_in_all(3, 3, timed=2, compared=0, repetitions=2) == 3 * (3 + 2 * 2)
    figures = rows(found, lambda n, text: n == 0)
    assert [row["name"] for row in figures] == ["dense", "sparse τ0.5", "sparse τ0.5 p≥0.05"]
    assert [row["compilations_while_timed"] for row in figures] == [0] * 3
    assert [row["accuracy"] for row in figures] == pytest.approx([1 / 3] * 3)
    assert figures[0]["token_agreement"] is None
    assert 0 <= figures[1]["token_agreement"] <= 1
    assert figures[0]["speedup"] == figures[0]["step_speedup"] == 1
    assert figures[2]["steps"] < figures[1]["steps"] == 32, "two batches, a token a step"
    assert all(row["tokens"] == 48 for row in figures)
    assert all(row["host_synchronisations_per_step"] <= 1 / 4 for row in figures[:2])
    assert all(row["peak_bytes"] > 0 for row in figures)
    assert all(len(run.timed) == 2 for run in found)
    read = list(csv.DictReader(io.StringIO(scalars_as_csv(figures))))
    assert [row["name"] for row in read] == [row["name"] for row in figures]
    assert "salient_share_by_layer" not in read[0]
    assert float(read[1]["salient_share"]) == pytest.approx(figures[1]["salient_share"])


def test_a_replay_has_every_commit_once(model: DiffusionModel):
    request = replace(BASE, mode="sparse", threshold=0.05)
    steps: list[Any] = []
    shown = denoising_replay(model, "small", [("one", PROMPTS[1])], [request], lambda: steps.append(1))
    want = model.generate([PROMPTS[1]], request)[0]
    (passage,) = shown.passages
    assert passage.prompt == "t9 t4 t7 t7 t5"
    placed = sorted((each.position, each.token.id) for step in passage.rounds for each in step.committed)
    assert placed == list(enumerate(want.tokens))
    texts = {each.position: each.token.text for step in passage.rounds for each in step.committed}
    assert "".join(texts[place] for place in sorted(texts)) == want.text
    assert [len(step.committed) for step in passage.baseline] == [1] * 16
    assert (steps, shown.about["tau"], shown.about["threshold"]) == ([1], 0.99, 0.05)
    assert plain(request) == plain(replace(request, suffix_window=4)) == BASE
