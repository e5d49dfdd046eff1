"""Denoising against the reference in NumPy float64, token for token and step for step, whatever is asked for.

Eight requests at a time go through one program, so that each of these is a test of mixed batches as well.
"""

from dataclasses import replace
from typing import Any

import pytest

from diffusion import support
from diffusion.support import (
    BACKENDS,
    EOS,
    EXACT,
    PLAIN,
    REPAIRED,
    TABLE,
    asking,
    build,
    compare,
    compare_all,
    needs_native,
    together,
    wanted,
)
from reference.diffusion_cases import PROMPT
from tilewright.diffusion import options
from tilewright.diffusion.options import Denoising, Saliency
from tilewright.diffusion.programs import DiffusionTable
from tilewright.llm.diffusion_model import DiffusionModel

PROMPTS = [PROMPT, [4], [7, 7, 21, 2, 35, 9, 13], [31, 5]]
SPARSE: list[dict[str, Any]] = [
    {"mode": "sparse", "saliency": how}
    for how in (EXACT, PLAIN, REPAIRED, Saliency(0.95, 1, 4, first_layer=True), Saliency(0.995, 3, 2, False, keep_prompt=False))
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
ENDING = {"llada": 47, "dream": 104}
"""Seeds with which some rows end early."""


@pytest.fixture(
    scope="module",
    params=[*BACKENDS[:1], pytest.param(BACKENDS[1].values[0], id=BACKENDS[1].id, marks=pytest.mark.slow), *BACKENDS[2:]],
)
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


SWITCHES: dict[str, list[dict[str, Any]]] = {
    "llada": [
        {"logits_eos_inf": True, "temperature": 1.5, "seed": 47, "ignore_eos": False},
        {"confidence_eos_eot_inf": True, "steps": 6},
        {"confidence_eos_eot_inf": True, "temperature": 1.5, "threshold": 0.3, "mode": "prefix"},
        {"confidence_eos_eot_inf": True, "logits_eos_inf": True, "mode": "dual", "temperature": 0.8},
        {"confidence_eos_eot_inf": True, "mode": "sparse", "saliency": REPAIRED, "top_p": 0.7},
        {"mode": "sparse", "saliency": replace(PLAIN, whole_until=4)},
        {"mode": "sparse", "saliency": replace(PLAIN, full_steps=1, every=4, whole_until=4), "threshold": 0.3},
        {},
    ],
    "dream": [
        {"first_alone": True, "mode": "prefix", "remasking": "maskgit_plus", "threshold": 0.3},
        {"first_alone": True, "mode": "dual", "remasking": "maskgit_plus", "threshold": 0.3},
        {"first_alone": True, "mode": "prefix", "remasking": "entropy", "steps": 9},
        {"first_alone": True, "mode": "dual", "remasking": "entropy"},
        {"first_alone": True, "mode": "dual", "remasking": "maskgit_plus", "threshold": 0.4, "temperature": 0.8},
        {"first_alone": True, "mode": "prefix", "steps": 6, "logits_eos_inf": True},
        {"mode": "sparse", "saliency": replace(PLAIN, full_steps=1, every=4, whole_until=4), "remasking": "entropy"},
        {"mode": "dual", "remasking": "maskgit_plus", "threshold": 0.3},
    ],
}


def test_published_switches_equal_the_reference(made: tuple[DiffusionModel, str]):
    """Which `test_published_diffusion_numpy.py` holds against the published loops."""
    model, family = made
    requests = [asking(**switch) for switch in SWITCHES[family]]
    session = together(model, prompts_for(requests), requests)
    found = compare_all(session, family)
    plain: list[dict[str, Any]] = [{"logits_eos_inf": False, "confidence_eos_eot_inf": False}, {"first_alone": False}]
    others = [replace(each, **plain[family == "dream"]) for each in requests]
    without = together(model, session.prompts[: len(others)], others)
    differ = sum(each.want.tokens != compare(without, row, family).want.tokens for row, each in enumerate(found))
    assert differ >= 2


SAMPLED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.4, "steps": 6},
    {"presence_penalty": -1.5, "mode": "prefix", "threshold": 0.3, "temperature": 0.9},
    {"logit_bias": ((5, 4.0), (9, -100.0)), "mode": "dual", "temperature": 1.3, "top_k": 6},
    {"repetition_penalty": 0.7, "logit_bias": ((7, 3.0),), "mode": "sparse", "saliency": REPAIRED},
    {"top_k": 3, "min_p": 0.1, "top_p": 0.9, "temperature": 1.2, "remasking": "maskgit_plus"},
    {"min_p": 0.3, "remasking": "entropy", "temperature": 0.8, "mode": "prefix"},
    {"min_tokens": 7, "ignore_eos": False, "temperature": 1.5},
    {"frequency_penalty": 2.0, "block_length": 12, "threshold": 0.7},
]


def test_sampling_options_equal_the_reference(made: tuple[DiffusionModel, str]):
    model, family = made
    seed = {"seed": ENDING[family]}
    requests = [asking(**way, **seed) for way in SAMPLED]
    session = together(model, prompts_for(requests), requests)
    differ = 0
    for row, each in enumerate(compare_all(session, family)):
        plain = {name: getattr(Denoising(), name) for name in SAMPLED[row] if name in options.SAMPLED and name != "temperature"}
        other = wanted(family, session.prompts[row], replace(requests[row], **plain))
        differ += other.tokens != each.want.tokens
    assert differ >= 5


def test_tokens_that_end_a_response(made: tuple[DiffusionModel, str]):
    """By the model, by the request, and neither of them too early."""
    model, family = made
    (plain,) = together(model, [PROMPT], [asking()]).results()[:1]
    third = plain.tokens[2]
    ways: list[dict[str, Any]] = [
        {"stop_token_ids": (third,)},
        {"stop_token_ids": (third,), "min_tokens": 12},
        {"logit_bias": ((EOS[family], 100.0),), "ignore_eos": False},
        {"logit_bias": ((EOS[family], 100.0),), "ignore_eos": False, "min_tokens": 5},
    ]
    stopped, late, ended, least = together(model, [PROMPT] * 4, [asking(**way) for way in ways]).results()[:4]
    assert (stopped.tokens, stopped.finish_reason) == (plain.tokens[: plain.tokens.index(third)], "stop")
    assert stopped.stop_reason == third
    assert third not in late.tokens
    assert (len(late.tokens), late.finish_reason) == (12, "length")
    assert (ended.tokens, ended.finish_reason) == ([], "eos")
    assert (len(least.tokens), least.finish_reason) == (5, "eos")


LONG = DiffusionTable(batches=(8,), positions=(256,), responses=(200,), buckets=(64,))


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.slow), "dream"])
def test_a_block_may_be_as_long_as_the_response(family: str, monkeypatch: pytest.MonkeyPatch):
    """In every mode, beside shorter ones: LLaDA's tables have blocks of up to 1,024, Dream has no others.

    Of 200 positions some two are always close to one another: here they count as apart as soon as float32 tells them apart.
    """
    monkeypatch.setattr(support, "MARGIN", 3e-6)
    model = build(family, "xla", LONG)
    long = {"new_tokens": 200, "block_length": None, "steps": 8}
    ways: list[dict[str, Any]] = [
        {},
        {"remasking": "maskgit_plus"},
        {"temperature": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"remasking": "origin"},
        {"block_length": 50},
    ]
    modes = [*MODES[:2], {"mode": "dual"}, {"mode": "sparse", "saliency": REPAIRED}, {"mode": "sparse", "saliency": EXACT}]
    requests = [asking(**mode, **{**long, **way}) for mode, way in zip(modes, ways, strict=True)]
    session = together(model, prompts_for(requests), requests)
    assert session.shape.block == 200
    compare_all(session, family)


def test_what_lies_far_behind_the_block_is_as_if_it_were_not_there(made: tuple[DiffusionModel, str]):
    model, family = made
    ways: list[dict[str, Any]] = [{}, {"steps": 6}, {"threshold": 0.3}]
    windows = [0, 3, 100]
    requests = requests_for([{"suffix_window": window, **way} for window, way in zip(windows, ways, strict=True)])
    session = together(model, prompts_for(requests), requests)
    compare_all(session, family)
    whole = together(model, session.prompts[:-1], [replace(each, suffix_window=None) for each in requests])
    same = [a == b for a, b in zip(session.tokens(), whole.tokens(), strict=True)]
    assert not all(same[row] for row, each in enumerate(requests) if each.suffix_window == 0)


def test_single_blocks_and_blocks_of_one(made: tuple[DiffusionModel, str]):
    model, family = made
    requests = [asking(block_length=block, mode=mode) for block in (None, 1) for mode in ("dense", "prefix", "dual")]
    compare_all(together(model, prompts_for(requests), requests), family)


def test_an_end_of_sequence_token_ends_a_row_unless_it_is_to_be_ignored(made: tuple[DiffusionModel, str]):
    """Of the same requests, each with and without; what ends one does not end the others."""
    model, family = made
    ways: list[dict[str, Any]] = [
        {"mode": "dense"},
        {"mode": "sparse", "saliency": REPAIRED},
        {"mode": "prefix", "threshold": 0.2},
    ]
    drawn = {"temperature": 1.5, "seed": ENDING[family]}
    requests = [asking(**way, **drawn, ignore_eos=ignore) for way in ways for ignore in (False, True)]
    session = together(model, [PROMPT] * 6, requests)
    compared = compare_all(session, family)
    results = session.results()
    for row, each in enumerate(compared):
        stopped = EOS[family] in each.want.output and not requests[row].ignore_eos
        assert results[row].finish_reason == ("eos" if stopped else "length")
        if each.all:
            assert results[row].tokens == (each.want.output[:-1] if stopped else each.want.output)
            assert results[row].steps == each.steps
    stops = [result.finish_reason == "eos" for result in results[:6:2]]
    assert any(stops)
    assert results[0].steps < results[1].steps


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        pytest.param("llada", "auto", marks=[needs_native, pytest.mark.slow]),
        pytest.param("dream", "auto", marks=[needs_native, pytest.mark.slow]),
        pytest.param("llada", "xla", marks=pytest.mark.slow),
        pytest.param("dream", "xla", marks=pytest.mark.slow),
    ],
)
def test_guidance_in_every_mode_equals_the_reference(family: Any, kernels: str):
    """Rows of a batch are guided by different amounts, one of them not at all."""
    model = build(family, kernels, replace(TABLE, batches=(6,)))
    ways: list[dict[str, Any]] = [
        {"mode": "dense", "guidance": 1.5},
        {"mode": "prefix", "guidance": 0.5, "presence_penalty": 0.7, "repetition_penalty": 1.3},
        {"mode": "dual", "guidance": 3.0},
        {"mode": "sparse", "saliency": REPAIRED, "guidance": 1.0},
        {"mode": "sparse", "saliency": REPAIRED},
    ]
    for rule in ({}, {"threshold": 0.3, "temperature": 0.7}):
        requests = [asking(**way, **rule) for way in ways]
        session = together(model, prompts_for(requests), requests)
        assert session.shape.guided
        compare_all(session, family)


QUICK = {("dense", "auto", "llada"), ("sparse", "auto", "llada")}


def alone(mode: str, backend: Any) -> Any:
    family, kernels = backend.values[0]
    slow = () if (mode, kernels, family) in QUICK else (pytest.mark.slow,)
    return pytest.param(mode, (family, kernels), id=f"{mode}-{backend.id}", marks=[*backend.marks, *slow])


@pytest.mark.parametrize(
    ("mode", "backend"), [alone(mode, backend) for mode in ("dense", "prefix", "dual", "sparse") for backend in BACKENDS]
)
def test_a_mode_by_itself_in_a_program_of_its_own(mode: Any, backend: tuple[str, str]):
    model = build(*backend, replace(TABLE, batches=(1,)))
    for extra in ({}, {"threshold": 0.3}, {"steps": 6, "remasking": "topk_margin"}):
        session = together(model, [PROMPT], [asking(mode=mode, saliency=REPAIRED, **extra)], filler=False)
        assert (session.shape.dense, session.shape.narrow) == (mode == "dense", mode == "dual")
        compare(session, 0, backend[0])


def test_guidance_of_a_dense_program():
    model = build("dream", "xla", replace(TABLE, batches=(2,)))
    requests = [asking(guidance=2.0), asking(guidance=0.7, threshold=0.4)]
    session = together(model, PROMPTS[:2], requests, filler=False)
    assert session.shape.dense
    compare_all(session, "dream", 0.5)
