"""Dense diffusion decoding in NumPy against loops written another way, by hand, and against what the methods promise."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import dflash_numpy
from reference.diffusion_cases import DREAM, EXACT, LLADA, MASK, MODELS, PROMPT, one_layer, request, run
from reference.diffusion_model_numpy import Model, attend, checkpoint, dense, rotate, softmax
from reference.diffusion_numpy import (
    DREAM_RULES,
    LLADA_RULES,
    CachedMode,
    Choice,
    Dense,
    Generation,
    Mode,
    Request,
    choose,
    commits,
    ending,
    generate,
    nucleus,
    seeded_noise,
    seeded_uniform,
)
from reference.sampling_numpy import chi_square_excess, warped

# The model.


def test_rotation_and_attention_are_those_of_the_other_reference():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(5, 4, 8))
    k = rng.normal(size=(7, 2, 8))
    v = rng.normal(size=(7, 2, 8))
    np.testing.assert_allclose(rotate(q, np.arange(3, 8), 1e4), dflash_numpy.rotate(q, range(3, 8), 1e4), rtol=1e-12)
    np.testing.assert_allclose(attend(q, k, v), dflash_numpy.attention(q, k, v, np.ones((5, 7), bool)), rtol=1e-12)


def test_a_single_position_by_hand():
    """Attention over one key returns its value for all queries, so the test writes out the rest."""
    model = one_layer(DREAM)
    layer = model.layers[0]
    x = model.embed[4]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt(np.mean(x * x) + 1e-6) * weight

    value = (layer.v @ norm(x, layer.attention_norm) + layer.v_bias).reshape(2, 8)
    x = x + layer.o @ np.concatenate([value[0], value[0], value[1], value[1]])
    h = norm(x, layer.ffn_norm)
    gate = layer.gate @ h
    x = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ h))
    np.testing.assert_allclose(dense(model, [4])[0][0], model.head @ norm(x, model.norm), rtol=1e-12)


@MODELS
def test_attention_goes_both_ways_over_the_length(model: Model):
    tokens = [*PROMPT, 1, 2]
    short = dense(model, PROMPT)[0]
    padded = dense(model, tokens, 5)[0]
    whole = dense(model, tokens)[0]
    np.testing.assert_allclose(padded[:5], short, atol=1e-12)
    assert np.abs(whole[0] - short[0]).max() > 1e-3


@MODELS
def test_a_checkpoint_names_every_tensor(model: Model):
    config, tensors = checkpoint(model, MASK, 0)
    assert len(tensors) == 3 + len(model.layers) * (9 if model.family == "llada" else 12)
    head = "model.transformer.ff_out.weight" if model.family == "llada" else "lm_head.weight"
    down = "model.transformer.blocks.1.ff_out.weight" if model.family == "llada" else "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(tensors[head], model.head)  # float32 holds them exactly
    np.testing.assert_array_equal(tensors[down], model.layers[1].down)
    assert config["mask_token_id"] == MASK


# The choice of tokens and commits.


@given(st.integers(0, 99), st.sampled_from([0.3, 0.7, 0.95, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_probabilities_are_those_after_the_warp(seed: int, top_p: float, temperature: float):
    logits = np.random.default_rng(seed).normal(size=12) * 2
    asked = request(mask=11, remasking="maskgit_plus", temperature=temperature, top_p=top_p)
    without_mask = np.append(logits[:11], -np.inf)
    want = warped(without_mask, temperature or 1, top_p)
    got = choose(logits, asked, 3, 5, seeded_noise(0), None)
    assert got.probability == pytest.approx(want[got.token])
    assert got.probability > 0
    if temperature == 0:
        assert got.token == np.argmax(without_mask)
    plain = choose(logits, replace(asked, remasking="low_confidence"), 3, 5, seeded_noise(0), None)
    assert (plain.token, plain.probability) == (got.token, pytest.approx(softmax(without_mask)[got.token]))


def test_ties_of_the_nucleus_stay_together():
    np.testing.assert_array_equal(np.isfinite(nucleus(np.log([0.4, 0.2, 0.2, 0.2]), 0.5)), [True] * 4)
    np.testing.assert_array_equal(np.isfinite(nucleus(np.log([0.4, 0.3, 0.3]), 0.4)), [True, False, False])


@pytest.mark.parametrize("remasking", ["low_confidence", "maskgit_plus"])
def test_draws_follow_the_warped_distribution(remasking: str):
    logits = np.random.default_rng(4).normal(size=8)
    asked = request(mask=7, remasking=remasking, temperature=0.8, top_p=0.9)
    draws = [choose(logits, asked, step, 2, seeded_noise(0), None).token for step in range(4000)]
    want = warped(np.append(logits[:7], -np.inf), 0.8, 0.9)
    assert chi_square_excess(np.bincount(draws, minlength=8), want) < 1


def test_scores_by_hand():
    logits = np.log([0.5, 0.3, 0.2, 1e-9])
    p = np.array([0.5, 0.3, 0.2])
    scores = {
        name: choose(logits, request(mask=3, remasking=name), 0, 0, None, lambda *_: 0.25).score
        for name in LLADA_RULES + DREAM_RULES
    }
    entropy = float(np.sum(p * np.log(p)))
    want = {"low_confidence": 0.5, "random": 0.25, "origin": 0.25, "maskgit_plus": 0.5, "topk_margin": 0.2, "entropy": entropy}
    assert scores == pytest.approx(want, abs=1e-8)


@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from(["even", "timesteps"]))
def test_quotas_sum_to_the_block(block: int, steps: int, quota: Any):
    asked = request(gen_length=block, block_length=block, steps=steps, quota=quota)
    left = block
    counts = []
    for step in range(steps):
        counts.append(asked.count(step, left))
        left -= counts[-1]
    assert left == 0
    if quota == "even":
        assert counts == sorted(counts, reverse=True)
        assert max(counts) - min(counts) <= 1


def test_the_timesteps_quota_by_hand():
    """The schedule is linear down to eps, so of 8 masks in 4 steps the shares are near 1/4, 1/3, 1/2; eps rounds them down."""
    asked = request(gen_length=8, block_length=8, steps=4, quota="timesteps")
    left = 8
    assert asked.share(0) == pytest.approx(0.999 / 4)
    assert [left := left - asked.count(step, left) for step in range(4)] == [7, 5, 3, 0]


def made(*pairs: tuple[float, float]) -> list[Choice]:
    return [Choice(0, probability, score, 1.0) for probability, score in pairs]


def test_commits_by_hand():
    choices = made((0.9, -1.0), (0.5, -0.5), (0.95, -2.0), (0.4, -0.5))
    asked = request(gen_length=4, block_length=4, steps=2, remasking="entropy", quota="even")
    assert commits(choices, asked, 0) == [1, 3]
    assert commits(choices, replace(asked, steps=4), 0) == [1]  # the lower position of two equal scores
    assert commits(choices, replace(asked, threshold=0.9), 0) == [0, 1, 2]  # the best score, and two probable ones
    assert commits(choices, replace(asked, threshold=0.99), 0) == [1]
    origin = replace(asked, remasking="origin", steps=4)
    assert commits(made((0.1, 0.2), (0.1, 0.3), (0.1, 0.24)), origin, 0) == [0, 2]
    assert commits(made((0.1, 0.2), (0.1, 0.3), (0.1, 0.24)), origin, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    "changes",
    [{"block_length": 5}, {"steps": 10}, {"steps": 0}, {"remasking": "best"}, {"remasking": "origin", "threshold": 0.9}],
)
def test_what_does_not_divide_or_fit_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="expected"):
        request(**changes)


def test_missing_randomness_and_masked_prompts_are_refused():
    for prompt, asked in (([MASK], request()), (PROMPT, request(temperature=1.0)), (PROMPT, request(remasking="random"))):
        with pytest.raises(ValueError, match="expected"):
            generate(LLADA, prompt, asked)


# Dense generation.


def llada_loop(model: Model, asked: Request, steps: int) -> list[int]:
    """LLaDA's loop over whole arrays: confidences of -inf, and a sort of all positions."""
    noise = seeded_noise(1)
    draws = seeded_uniform(2)
    x = np.array(PROMPT + [MASK] * asked.gen_length)
    per_block = steps * asked.block_length // asked.gen_length
    step = 0
    for end in range(len(PROMPT) + asked.block_length, len(x) + 1, asked.block_length):
        quota = [len(part) for part in np.array_split(np.arange(asked.block_length), per_block)]
        for count in quota:
            logits = dense(model, x)[0]
            if asked.cfg_scale:
                without = dense(model, np.where(np.arange(len(x)) < len(PROMPT), MASK, x))[0]
                logits = without + (asked.cfg_scale + 1) * (logits - without)
            logits[:, MASK] = -np.inf
            gumbel = np.array([noise(step, p, len(logits[0])) for p in range(len(x))])
            tokens = (logits + asked.temperature * gumbel).argmax(1)
            confidence = softmax(logits)[np.arange(len(x)), tokens]
            if asked.remasking == "random":
                confidence = np.array([draws(step, p) for p in range(len(x))])
            confidence[(x != MASK) | (np.arange(len(x)) >= end)] = -np.inf
            best = np.argsort(-confidence, kind="stable")[:count]
            x[best] = tokens[best]
            step += 1
    return x.tolist()


@pytest.mark.parametrize("remasking", LLADA_RULES)
@pytest.mark.parametrize("temperature, cfg_scale, steps", [(0, 0, 12), (0.7, 0, 6), (0, 1.5, 9), (1.3, 0.5, 3)])
def test_llada_is_its_loop(remasking: str, temperature: float, cfg_scale: float, steps: int):
    asked = request(remasking=remasking, temperature=temperature, cfg_scale=cfg_scale, steps=steps)
    got = run(LLADA, asked)
    assert got.tokens == llada_loop(LLADA, asked, steps)
    assert len(got.steps) == steps
    assert got.output == got.tokens[len(PROMPT) :]


def dream_loop(model: Model, asked: Request) -> list[int]:
    """Dream's loop, one block, without temperature: shifted logits of the whole sequence, one quota after another."""
    x = np.array(PROMPT + [MASK] * asked.gen_length)
    times = np.linspace(1, 1e-3, asked.steps + 1)
    draws = seeded_uniform(2)
    for step, (t, s) in enumerate(pairwise(times)):
        if not len(masked := np.flatnonzero(x == MASK)):
            break
        logits = dense(model, x)[0]
        logits = np.concatenate([logits[:1], logits[:-1]])[masked]
        logits[:, MASK] = -np.inf
        p = np.array([warped(row, 1, asked.top_p) for row in logits])
        down = np.sort(p, axis=1)[:, ::-1]
        last = step == asked.steps - 1
        if asked.remasking == "origin":
            taken = np.flatnonzero([last or draws(step, int(q)) < 1 - s / t for q in masked])
        else:
            log_p = np.log(p + 1e-10)
            scores = {"maskgit_plus": down[:, 0], "topk_margin": down[:, 0] - down[:, 1], "entropy": (p * log_p).sum(1)}
            count = len(masked) if last else int(len(masked) * (1 - s / t))
            taken = np.argsort(-scores[asked.remasking], kind="stable")[:count]
        x[masked[taken]] = logits[taken].argmax(1)
    return x.tolist()


@pytest.mark.parametrize("remasking", DREAM_RULES)
@pytest.mark.parametrize("steps, top_p", [(12, 1.0), (5, 0.8)])
def test_dream_is_its_loop(remasking: str, steps: int, top_p: float):
    asked = request(remasking=remasking, block_length=12, steps=steps, top_p=top_p)
    assert run(DREAM, asked).tokens == dream_loop(DREAM, asked)


@MODELS
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.sampled_from(LLADA_RULES + DREAM_RULES), st.integers(0, 9))
def test_every_block_fills_in_order(model: Model, length: int, blocks: int, steps: int, remasking: str, seed: int):
    asked = request(gen_length=length * blocks, block_length=length, steps=steps * blocks, remasking=remasking, temperature=0.5)
    prompt = np.random.default_rng(seed).integers(0, MASK, 1 + seed).tolist()
    got = run(one_layer(model), asked, prompt=prompt)
    assert MASK not in got.tokens
    assert [step.block for step in got.steps] == sorted(step.block for step in got.steps)
    committed = np.concatenate([step.committed for step in got.steps])
    assert sorted(committed.tolist()) == list(range(len(prompt), len(prompt) + length * blocks))
    assert len(got.steps) <= steps * blocks


@MODELS
@pytest.mark.parametrize("remasking", ["low_confidence", "maskgit_plus", "topk_margin", "entropy"])
def test_a_threshold_commits_one_or_what_reaches_it(model: Model, remasking: str):
    sizes = set()
    for threshold in (0.2, 0.5, 2.0):
        got = run(model, request(remasking=remasking, threshold=threshold, steps=1))
        assert MASK not in got.tokens
        for step in got.steps:
            score = np.array([choice.score for choice in step.choices])
            reach = {int(p) for p, choice in zip(step.candidates, step.choices, strict=True) if choice.probability >= threshold}
            assert set(step.committed.tolist()) == reach | {int(step.candidates[score.argmax()])}
            sizes.add(len(step.committed))
        assert threshold < 2 or len(got.steps) == 12
    assert len(sizes) > 1


def test_an_end_needs_all_before_it():
    asked = request(eos=(1, 2))
    assert ending([1, 5, MASK, 1], 1, asked) is None
    assert ending([1, 5, 2, 1, MASK], 1, asked) == 2
    assert ending([1, 5, 6], 1, asked) is None


def replayed(free: Generation, eos: int) -> tuple[int, list[int], list[int]]:
    """Returns the steps, tokens and output of a generation without EOS after cutting it at the token `eos`."""
    tokens = [*PROMPT, *[MASK] * (len(free.tokens) - len(PROMPT))]
    prompt = len(PROMPT)
    for count, step in enumerate(free.steps, 1):
        for position in step.committed:
            tokens[position] = free.tokens[position]
        if eos in tokens[prompt:] and MASK not in (output := tokens[prompt : tokens.index(eos, prompt) + 1]):
            return count, tokens, output
    return len(free.steps), tokens, tokens[prompt:]


@MODELS
@pytest.mark.parametrize("mode", [Dense, EXACT, CachedMode("dual")])
def test_eos_stops_as_soon_as_nothing_before_it_is_masked(model: Model, mode: Mode):
    early = 0
    for changes in ({"block_length": 12, "steps": 6}, {"steps": 12}, {"threshold": 0.3}):
        free = run(model, request(**changes), mode)
        for eos in set(free.output):
            got = run(model, request(**changes, eos=(eos,)), mode)
            assert (len(got.steps), got.tokens, got.output) == replayed(free, eos)
            early += len(got.steps) < len(free.steps)
    assert early > 1


@MODELS
def test_forbidden_tokens_never_come(model: Model):
    asked = request(temperature=3.0, forbid=range(20))
    assert min(run(model, asked).output) >= 20
    assert min(run(model, replace(asked, forbid=())).output) < 20


@MODELS
def test_margins_tell_how_close_a_choice_was(model: Model):
    for asked in (request(), request(threshold=0.5), request(remasking="origin", steps=6), request(temperature=1.0)):
        margins = [step.margin(asked) for step in run(model, asked).steps]
        assert min(margins) >= 0
        assert np.isfinite(margins).all()
