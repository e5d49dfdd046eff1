"""The published loops beside the reference: the same tokens, over lengths, blocks, steps, thresholds and temperatures."""

from typing import Any

import numpy as np
import pytest

from reference.diffusion_cases import DREAM, LLADA, MASK, request, run
from reference.diffusion_model_numpy import random_model
from reference.diffusion_numpy import CachedMode, SparseMode, generate, seeded_noise, seeded_uniform
from reference.published_diffusion_numpy import fast_dllm_dream, llada

CASES = 200


def sizes(rng: np.random.Generator) -> dict[str, int]:
    block = int(rng.integers(2, 6))
    blocks = int(rng.integers(1, 4))
    return {"gen_length": block * blocks, "block_length": block, "steps": blocks * int(rng.integers(2, block + 1))}


@pytest.mark.parametrize("eos_inf", [False, True])
@pytest.mark.parametrize("eot_inf", [False, True])
def test_llada(eos_inf: bool, eot_inf: bool):
    """The most frequent tokens of random weights serve as ends, so that the switches change most texts."""
    rng = np.random.default_rng(0)
    changed = 0
    for _ in range(CASES // 4):
        prompt = rng.integers(0, MASK, rng.integers(1, 7)).tolist()
        temperature = float(rng.choice([0.0, 0.7]))
        remasking = "low_confidence" if eot_inf else str(rng.choice(["low_confidence", "random"]))
        asked = sizes(rng)
        plain = run(LLADA, request(temperature=temperature, remasking=remasking, **asked), prompt=prompt)
        eos, eot = plain.output[:2]
        want = llada(
            LLADA,
            prompt,
            MASK,
            **asked,
            temperature=temperature,
            remasking=remasking,
            logits_eos_inf=eos_inf,
            confidence_eos_eot_inf=eot_inf,
            eos=eos,
            eot=eot,
            noise=seeded_noise(1),
            uniform=seeded_uniform(2),
        )
        late = (eot,) if temperature else (eot, eos)
        switches: dict[str, Any] = {"forbid": (eos,) if eos_inf else (), "unranked": late if eot_inf else ()}
        found = run(LLADA, request(temperature=temperature, remasking=remasking, **asked, **switches), prompt=prompt)
        assert found.tokens == want
        changed += found.tokens != plain.tokens
    assert (changed > CASES // 16) == (eos_inf or eot_inf)


@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_fast_dllm_on_dream(kind: Any, threshold: float | None):
    rng = np.random.default_rng(1)
    differs = 0
    for _ in range(CASES // 4):
        prompt = rng.integers(0, MASK, rng.integers(1, 7)).tolist()
        drawn: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.7])), "top_p": float(rng.choice([1.0, 0.8]))}
        asked = sizes(rng)
        want, forwards = fast_dllm_dream(
            DREAM, prompt, MASK, **asked, dual=kind == "dual", threshold=threshold, **drawn, noise=seeded_noise(1)
        )
        rule = "entropy" if threshold is None else "maskgit_plus"
        fields = {**asked, **drawn, "remasking": rule, "threshold": threshold}
        found = run(DREAM, request(**fields, first_alone=True), CachedMode(kind, shift_boundary=False), prompt)
        assert found.tokens == want
        assert len(found.steps) == forwards
        differs += run(DREAM, request(**fields), CachedMode(kind), prompt).tokens != want
    assert differs > CASES // 16


def test_fast_dllm_leaves_masks_after_a_single_step_a_block():
    """So that the switch needs two."""
    tokens, forwards = fast_dllm_dream(DREAM, [1, 2], MASK, 8, 4, 2, dual=False)
    assert [token == MASK for token in tokens[2:]] == [False, True, True, True] * 2
    assert forwards == 2


def test_dyllm_computes_whole_sequences_up_to_step_4():
    """Whatever the number of full steps: so says the published code, while the engine's steps may start earlier."""
    kinds = [SparseMode(0.9, 1, 4, whole_until=until) for until in (4, 1)]
    assert [kinds[0].kind(step) for step in range(9)] == ["full", *["whole"] * 3, *["response"] * 3, "whole", "response"]
    assert [kinds[1].kind(step) for step in range(9)] == [
        "full",
        *["response"] * 2,
        "whole",
        *["response"] * 3,
        "whole",
        "response",
    ]
    model = random_model(5, "llada")
    texts = [generate(model, [3, 17, 8], request(), each).tokens for each in kinds]
    assert texts[0] != texts[1]
