"""Denoising against the reference in NumPy float64, token for token and step for step, whatever is asked for.

Eight requests at a time go through one program, so that each of these is a test of mixed batches as well.
"""

from typing import Any

import pytest

from decode.diffusion.support import BACKENDS, EXACT, PLAIN, REPAIRED, asking, build, compare_all, together
from reference.diffusion_cases import PROMPT
from tilewright.decode.diffusion.model import DiffusionModel
from tilewright.decode.diffusion.options import Denoising, Saliency

PROMPTS = [PROMPT, [4], [7, 7, 21, 2, 35, 9, 13], [31, 5]]
SPARSE: list[dict[str, Any]] = [
    {"mode": "sparse", "saliency": how}
    for how in (EXACT, PLAIN, REPAIRED, Saliency(0.95, 1, 4, first_layer=True), Saliency(0.995, 3, 2, keep_prompt=False))
]
MODES: list[dict[str, Any]] = [{"mode": "dense"}, {"mode": "prefix"}, *SPARSE]
RULES: dict[str, list[dict[str, Any]]] = {
    "one-a-step": [{}],
    "quotas": [{"steps": 6}, {"remasking": "topk_margin", "steps": 3}, {"remasking": "maskgit_plus", "steps": 9}],
    "thresholds": [{"threshold": 0.3}, {"threshold": 0.15, "remasking": "entropy"}, {"threshold": 0.9, "block_length": 12}],
    "chance": [{"remasking": "random"}, {"remasking": "origin", "steps": 6}, {"remasking": "random", "steps": 6, "seed": 8}],
    "drawn": [{"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.7, "seed": 3}, {"temperature": 0.4, "threshold": 0.4}],
    "filtered": [{"remasking": "maskgit_plus", "temperature": 1.2, "top_p": 0.6}, {"remasking": "entropy", "top_p": 0.8}],
}


@pytest.fixture(scope="module", params=BACKENDS)
def made(request: pytest.FixtureRequest) -> tuple[DiffusionModel, str]:
    family, kernels = request.param
    return build(family, kernels), family


def requests_for(rules: list[dict[str, Any]], modes: list[dict[str, Any]] = MODES) -> list[Denoising]:
    """Each mode with one of the rules, in turn."""
    return [asking(**mode, **rules[n % len(rules)]) for n, mode in enumerate(modes)]


def prompts_for(requests: list[Denoising], offset: int = 0) -> list[list[int]]:
    return [PROMPTS[(n + offset) % len(PROMPTS)] for n in range(len(requests))]


@pytest.mark.parametrize("rules", RULES)
def test_every_mode_equals_the_reference(made: tuple[DiffusionModel, str], rules: str):
    model, family = made
    requests = requests_for(RULES[rules])
    session = together(model, prompts_for(requests, len(rules)), requests)
    compare_all(session, family)


def test_single_blocks_and_blocks_of_one(made: tuple[DiffusionModel, str]):
    model, family = made
    requests = [asking(block_length=block, mode=mode) for block in (None, 1) for mode in ("dense", "prefix", "dual")]
    compare_all(together(model, prompts_for(requests), requests), family)
