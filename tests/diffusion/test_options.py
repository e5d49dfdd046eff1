"""What a request may ask for, the numbers that follow from it, and what is said of one that may not be asked for."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.diffusion_numpy import Request
from tilewright.diffusion.options import ALWAYS, MODES, REMASKING, Denoising, Saliency, row_options
from tilewright.diffusion.programs import DiffusionTable

RULES = st.sampled_from([rule for rule in REMASKING if rule != "origin"])


BLOCKS = st.integers(1, 40).flatmap(lambda block: st.tuples(st.just(block), st.integers(1, block), st.integers(1, 6)))
"""A block's length and steps, and how many there are."""


def in_blocks(sizes: tuple[int, int, int], rule: Any) -> Denoising:
    block, steps, blocks = sizes
    return Denoising(block * blocks, steps * blocks, block, remasking=rule)


@given(BLOCKS, RULES)
def test_quotas_sum_to_the_block_and_are_those_of_the_reference(sizes: tuple[int, int, int], rule: Any):
    asked = in_blocks(sizes, rule)
    found = asked.quotas()
    request = Request(0, asked.new_tokens, asked.block, asked.steps or 0, asked.remasking)
    assert len(found) == asked.block_steps == request.block_steps
    assert found.sum() == asked.block
    left = asked.block
    for number, count in enumerate(found):
        assert count == request.count(number, left)
        left -= count


@given(BLOCKS, RULES)
def test_a_first_position_alone_leaves_the_rest_to_the_other_steps(sizes: tuple[int, int, int], rule: Any):
    block, steps, _ = sizes
    if (steps == 1) != (block == 1):
        return
    asked = replace(in_blocks(sizes, rule), mode="dual", first_alone=True)
    request = Request(0, asked.new_tokens, block, asked.steps or 0, rule, first_alone=True)
    found = asked.quotas()
    assert (found[0], found.sum(), len(found)) == (1, block, steps)
    left = block - 1
    for number, count in enumerate(found[1:], 1):
        assert count == request.count(number, left)
        left -= count


@given(BLOCKS)
def test_shares_grow_up_to_all_that_is_left(sizes: tuple[int, int, int]):
    asked = in_blocks(sizes, "origin")
    shares = asked.shares()
    assert shares.dtype == np.float64
    request = Request(0, asked.new_tokens, asked.block, asked.steps or 0, "origin")
    np.testing.assert_array_equal(shares, [request.share(number) for number in range(asked.block_steps)])
    assert (np.diff(shares) > 0).all()
    assert shares[-1] == 1


@pytest.mark.parametrize(
    ("fields", "block", "steps"),
    [
        ({}, 128, 128),
        ({"new_tokens": 64, "block_length": 8}, 8, 8),
        ({"new_tokens": 64, "block_length": 8, "steps": 16}, 8, 2),
        ({"new_tokens": 64, "block_length": 8, "threshold": 0.9}, 8, 8),
        ({"new_tokens": 64, "steps": 1}, 64, 1),
        ({"new_tokens": 1}, 1, 1),
    ],
)
def test_blocks_and_their_steps(fields: dict[str, Any], block: int, steps: int):
    asked = Denoising(**fields)
    assert (asked.block, asked.block_steps) == (block, steps)


NAN = float("nan")
BAD: list[tuple[dict[str, Any], str]] = [
    ({"new_tokens": 0}, "new_tokens of at least 1, found 0"),
    ({"new_tokens": -8, "block_length": 8}, "new_tokens of at least 1, found -8"),
    ({"new_tokens": 12, "block_length": 0}, "a block_length of at least 1, found 0"),
    ({"new_tokens": 12, "block_length": -4}, "a block_length of at least 1, found -4"),
    ({"new_tokens": 12, "block_length": 5}, "new_tokens that are a multiple of the block_length 5, found 12"),
    ({"new_tokens": 12, "block_length": 24}, "new_tokens that are a multiple of the block_length 24, found 12"),
    ({"new_tokens": 12, "block_length": 4, "steps": 7}, "steps that are a multiple of the 3 blocks, found 7"),
    ({"new_tokens": 12, "block_length": 4, "steps": 0}, "steps that are a multiple of the 3 blocks, found 0"),
    ({"new_tokens": 12, "steps": -1}, "steps that are a multiple of the 1 blocks, found -1"),
    ({"new_tokens": 12, "block_length": 4, "steps": 15}, "steps of at most one a token, 12, found 15"),
    ({"threshold": 0.0}, "a threshold above 0, up to 1, found 0.0"),
    ({"threshold": 1.5}, "a threshold above 0, up to 1, found 1.5"),
    ({"threshold": NAN}, "a threshold above 0, up to 1, found nan"),
    ({"threshold": 0.9, "steps": 128}, "steps or a threshold, not both, found 128"),
    ({"threshold": 0.9, "remasking": "random"}, "no threshold with random, which ranks by chance, found 0.9"),
    ({"threshold": 0.9, "remasking": "origin"}, "no threshold with origin, which ranks by chance, found 0.9"),
    (
        {"remasking": "random", "confidence_eos_eot_inf": True},
        "remasking low_confidence with confidence_eos_eot_inf, found random",
    ),
    ({"first_alone": True}, "the mode prefix or dual with first_alone, found dense"),
    (
        {"new_tokens": 8, "block_length": 4, "steps": 2, "mode": "dual", "first_alone": True},
        "at least 2 steps a block with first_alone, found 2",
    ),
    ({"guidance": -0.5}, "guidance of at least 0, found -0.5"),
    ({"guidance": NAN}, "guidance of at least 0, found nan"),
    ({"guidance": float("inf")}, "guidance of at least 0"),
    ({"temperature": -1.0}, "a temperature of 0, or from 1e-06 to 1e+06, found -1.0"),
    ({"temperature": NAN}, "a temperature of 0, or from 1e-06 to 1e+06, found nan"),
    ({"top_p": -0.1}, "top_p from 0 to 1, found -0.1"),
    ({"top_p": 1.1}, "top_p from 0 to 1, found 1.1"),
    ({"seed": 2**63}, "a seed that is an integer from -2**63 to 2**63 - 1, found 9223372036854775808"),
]


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[f"{n}-{'-'.join(fields)}" for n, (fields, _) in enumerate(BAD)])
def test_what_cannot_be_asked_for_is_said(fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.escape(f"expected {said}")):
        Denoising(**fields)


@pytest.mark.parametrize(
    ("name", "value", "known"), [("mode", "fast", MODES), ("remasking", "lowest", REMASKING), ("remasking", 3, REMASKING)]
)
def test_a_mode_or_rule_that_is_none_is_said(name: str, value: Any, known: tuple[str, ...]):
    asked = Denoising()
    object.__setattr__(asked, name, value)  # the tests' type checker keeps it out otherwise
    with pytest.raises(ValueError, match=f"expected {name} to be one of {', '.join(known)}, found {value!r}"):
        asked.__post_init__()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tau": 0.0}, "a saliency threshold above 0, up to 2, found 0.0"),
        ({"tau": 2.5}, "a saliency threshold above 0, up to 2, found 2.5"),
        ({"tau": -0.1}, "a saliency threshold above 0, up to 2, found -0.1"),
        ({"tau": NAN}, "a saliency threshold above 0, up to 2, found nan"),
        ({"full_steps": 0}, "at least 1 full step, which fills the caches, found 0"),
        ({"full_steps": 2**31}, "at most 2147483647 full steps, found 2147483648"),
        ({"every": 2**31}, "whole-sequence steps every 2147483647 steps or less, found 2147483648"),
        ({"every": 0}, "whole-sequence steps every 1 step or more, found 0"),
        ({"whole_until": -1}, "whole_until from 0 to 2147483647, found -1"),
    ],
)
def test_what_no_sparse_step_can_be(fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"expected {re.escape(said)}"):
        Saliency(**fields)


def test_a_request_that_draws_gets_a_seed_and_others_none():
    ways: list[dict[str, Any]] = [{"temperature": 0.5}, {"remasking": "random"}, {"remasking": "origin"}]
    for fields in ways:
        asked = Denoising(**fields)
        assert asked.seeded().seed is not None
        assert asked.seeded().seed != asked.seeded().seed
        assert Denoising(**fields, seed=5).seeded().seed == 5
    assert Denoising().seeded().seed is None


def test_requests_as_rows():
    requests = [
        Denoising(12, 6, 4, "entropy", mode="sparse", saliency=Saliency(0.5, 2, 3, False, False, False, False, 4), seed=9),
        Denoising(5, threshold=0.25, mode="dual", guidance=1.5, ignore_eos=True, temperature=0.5, top_p=0.75, first_alone=True),
    ]
    rows = row_options(requests, 8)
    assert rows.quotas.shape == rows.shares.shape == (2, 8)
    assert rows.quotas[0].tolist() == [1, 3, 0, 0, 0, 0, 0, 0]
    assert rows.threshold.tolist() == [ALWAYS, 0.25]
    assert [MODES[n] for n in rows.mode] == ["sparse", "dual"]
    assert [REMASKING[n] for n in rows.rule] == ["entropy", "low_confidence"]
    for name, values in {
        "block": [4, 5],
        "tau": [0.5, np.float32(0.99)],
        "full_steps": [2, 4],
        "every": [3, 4],
        "first_layer": [False, True],
        "keep_changed": [False, True],
        "keep_prompt": [False, True],
        "boundary": [False, True],
        "whole_until": [4, 0],
        "first_alone": [False, True],
        "guidance": [0, 1.5],
        "ignore_eos": [False, True],
    }.items():
        assert getattr(rows, name).tolist() == values, name
    assert rows.sampling.temperature.tolist() == [0, 0.5]
    assert rows.sampling.top_p.tolist() == [1, 0.75]
    assert rows.sampling.key.tolist() == [[0, 9], [0, 0]]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batches": ()}, "batches to be sizes of at least 1 in ascending order, found ()"),
        ({"batches": (4, 1)}, "batches to be sizes of at least 1 in ascending order, found (4, 1)"),
        ({"positions": (64, 64)}, "positions to be sizes of at least 1 in ascending order, found (64, 64)"),
        ({"responses": (0, 64)}, "responses to be sizes of at least 1 in ascending order, found (0, 64)"),
        ({"blocks": (-1,)}, "blocks to be sizes of at least 1 in ascending order, found (-1,)"),
        ({"buckets": (64, 32)}, "buckets to be sizes of at least 1 in ascending order, found (64, 32)"),
        ({"positions": (256,), "responses": (64, 256)}, "responses shorter than the most positions 256, found 256"),
    ],
)
def test_a_table_that_is_none_is_refused(fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=re.escape(f"expected {said}")):
        DiffusionTable(**fields)


SMALL = DiffusionTable((1, 2), (32, 64), (8, 16), (4, 16), ())


@pytest.mark.parametrize(
    ("lengths", "request_fields", "said"),
    [
        ([5, 5, 5], {"new_tokens": 8}, "rows of at most 2, the largest declared, found 3"),
        ([5], {"new_tokens": 17}, "responses of at most 16, the largest declared, found 17"),
        ([60], {"new_tokens": 8}, "prompt and response together of at most 64, the largest declared, found 68"),
    ],
)
def test_what_no_shape_holds_is_said(lengths: list[int], request_fields: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=f"expected {said}"):
        SMALL.shape(len(lengths), lengths, [Denoising(**request_fields)] * len(lengths))


def test_blocks_beyond_the_longest_are_said():
    table = DiffusionTable((1,), (64,), (32,), (4, 16), ())
    with pytest.raises(ValueError, match="expected blocks of at most 16, the largest declared, found 32"):
        table.shape(1, [5], [Denoising(32)])


SHAPED = DiffusionTable((1, 4), (16, 64, 96), (6, 40), (4, 8, 48), ())


@given(
    st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 4),
            st.sampled_from([1, 4, 5, 8, 10]),
            st.sampled_from(MODES),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([None, 2]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(20, 90),
    st.booleans(),
    st.booleans(),
)
def test_what_a_table_declares_is_all_that_its_requests_need(drawn: list[Any], context: int, guided: bool, windows: bool):
    rows = [
        (
            length,
            Denoising(
                blocks * block,
                None,
                block,
                mode=mode,
                guidance=guidance if guided else 0.0,
                suffix_window=window if windows else None,
            ),
        )
        for length, blocks, block, mode, guidance, window in drawn
        if blocks * block <= 40 and length + blocks * block <= context
    ]
    if not rows:
        return
    modes = sorted({asked.mode for _, asked in rows})
    declared = set(SHAPED.shapes(context, modes, guided, windows))
    for part in (rows, *([row] for row in rows)):
        assert SHAPED.shape(len(part), [length for length, _ in part], [asked for _, asked in part]) in declared
