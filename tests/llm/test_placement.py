"""Decoding over several devices: the tokens of one, by every schedule, drafter and kind of row, without another compile."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from llm.support import prompts
from products import cases
from reference.dflash2_numpy import as_dflash2
from reference.dflash_numpy import Pair, as_folders, random_pair
from reference.dspark_numpy import as_dspark
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.lilicorr_numpy import as_lilicorr
from reference.mtp_numpy import add_head, random_head
from tilewright.compiled.ledger import no_compile_guard
from tilewright.kernels.bundles.tpu import TPU
from tilewright.kernels.paged.pallas_tpu import in_rows
from tilewright.llm.language_model import LanguageModel, load
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.layout import Layout
from tilewright.runtime.placement import cache_specs, compile_allocate, placement_over
from tilewright.runtime.programs import allocate_caches
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import Target

NEW = 16
EOS = 21
PROMPTS = prompts(0, [9, 3, 14])
PROMPTS[1] = [5, 6, 7, 5, 6, 7, 5, 6]
SAMPLING = {
    "greedy": [Sampling(NEW)] * 3,
    "mixed": [
        Sampling(NEW, temperature=1.0, top_p=0.9, seed=3),
        Sampling(NEW, ignore_eos=True),
        Sampling(NEW, temperature=0.7, repetition_penalty=1.2, seed=2**32 - 1),
    ],
}
PAIR = random_pair(0, block_size=4, target_layers=2, drafter_layers=1, taps=[0, 1], eos_token_id=EOS)
WALKERS = {"dflash2": as_dflash2(PAIR, window=6, sliding=[0]), "dspark": as_dspark(PAIR), "lilicorr": as_lilicorr(PAIR)}
KINDS = [*(f"qwen3-{kind}" for kind in ("none", "dflash", *WALKERS, "eagle3", "mtp")), "llama-ngram"]
"""Families of the target, and what drafts."""


def of_family(family: str) -> Pair:
    """The pair with a target of this family: a Llama's heads have no norms."""
    if family == "qwen3":
        return PAIR
    kept = {name: value for name, value in PAIR.target_tensors.items() if "q_norm" not in name and "k_norm" not in name}
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    kept.pop("lm_head.weight")
    return replace(PAIR, target_config=PAIR.target_config | changes, target_tensors=kept)


def build(family: str, drafter: str, rows: int = 3, **settings: Any) -> LanguageModel:
    """A model whose table has a single shape."""
    table = ShapeTable(batches=(rows,), capacities=(64,), chunks=(8,))
    with TemporaryDirectory() as name:
        target, dflash = as_folders(Path(name), of_family(family))
        eagle3 = as_folder(Path(name) / "eagle3", *random_eagle3(0, PAIR.target_config, taps=[0, 1, 1]))
        walkers = {kind: as_folders(Path(name) / kind, pair)[1] for kind, pair in WALKERS.items()}
        sources = {"none": None, "dflash": dflash, **walkers, "eagle3": eagle3, "mtp": "mtp", "ngram": "ngram"}
        add_head(target, random_head(0, PAIR.target_config))
        source = sources.get(drafter, [dflash, "ngram"])
        return load(target, source, table=table, block_size=None if source is None else 4, **settings)


def over(devices: int, schedule: str | None = None) -> dict[str, Any]:
    return {"mesh": make_mesh({"tp": devices}), "schedule": schedule}


def outcomes(lm: LanguageModel, sampling: str, rows: int) -> list[tuple[list[int], str | None, list[int]]]:
    """Tokens, why they end, and how many each round committed, with every compile before."""
    inputs = PROMPTS[:rows]
    each = SAMPLING[sampling][:rows]
    lm.warm()
    with no_compile_guard("fail"):
        return [(one.tokens, one.finish_reason, one.acceptance_lengths) for one in lm.generate(inputs, each)]


def programs_of(lm: LanguageModel) -> set[Any]:
    """Those that were compiled."""
    return {(kept, key) for kept, programs in lm.programs.items() for key in programs.compiled}


@cache
def on_one(family: str, drafter: str, kernels: Any, rows: int) -> LanguageModel:
    return build(family, drafter, rows, kernels=kernels)


@cache
def alone(family: str, drafter: str, kernels: Any, sampling: str, rows: int) -> tuple[Any, set[Any]]:
    """What one device says, and the programs that it took."""
    lm = on_one(family, drafter, kernels, rows)
    return outcomes(lm, sampling, rows), programs_of(lm)


QUICK = [
    ("qwen3-dflash", "sequence", 4, "auto", 3),
    ("llama-ngram", "ring", 2, "auto", 3),
    ("qwen3-none", "sync", 2, "xla", 1),
]
"""Of the product of kinds, schedules, devices, kernels and numbers of rows."""
EVERY = list(cases(QUICK, KINDS, ("sync", "sequence", "ring"), (2, 4), ("auto", "xla"), (1, 3)))


@pytest.mark.parametrize("kind, schedule, devices, kernels, rows", EVERY)
def test_several_devices_decode_what_one_does(kind: str, schedule: str, devices: int, kernels: Any, rows: int):
    family, drafter = kind.split("-")
    lm = build(family, drafter, rows, kernels=kernels, **over(devices, schedule))
    for sampling in SAMPLING:
        found = outcomes(lm, sampling, rows)
        wanted, programs = alone(family, drafter, kernels, sampling, rows)
        assert found == wanted
        assert programs_of(lm) == programs
        if (family, sampling, rows) == ("qwen3", "greedy", 3):
            assert {end for _, end, _ in found} == {"eos", "length"}
        if drafter == "ngram":
            assert max(most for _, _, lengths in found for most in lengths) > 1, "some drafts are accepted"


@pytest.mark.slow
def test_exact_sums_over_one_device_and_over_several():
    """`tests/parallel/test_exact.py` holds that their logits are the same to the last bit."""
    wanted, _ = alone("llama", "ngram", "xla", "mixed", 3)
    for devices in (1, 4):
        assert outcomes(build("llama", "ngram", kernels="xla", **over(devices, "exact")), "mixed", 3) == wanted


@pytest.mark.slow
def test_micro_batches_take_turns():
    lm = build("llama", "ngram", 2, **over(2, "domino"))
    assert outcomes(lm, "mixed", 2) == alone("llama", "ngram", "auto", "mixed", 2)[0]


def test_columns_in_parts_need_plain_products():
    wanted = alone("llama", "none", "xla", "greedy", 1)[0]
    assert outcomes(build("llama", "none", 1, kernels="xla", **over(2, "column")), "greedy", 1) == wanted


def test_what_auto_takes_is_said():
    """No figures of links between these devices."""
    lm = build("llama", "none", 1, **over(2, "auto"))
    assert outcomes(lm, "greedy", 1) == alone("llama", "none", "auto", "greedy", 1)[0]
    assert lm.placement is not None
    assert "sync for 8 rows: the bandwidth of the links" in (lm.placement.why(8) or "")
    assert build("llama", "none", 1, **over(2, "ring")).placement.why(8) is None  # type: ignore[union-attr]


def test_one_row_cannot_take_turns():
    with pytest.raises(ValueError, match="expected a batch that 2 micro-batches divide, found 1 rows"):
        build("llama", "none", 1, **over(2, "domino")).warm()


def test_exact_sums_need_plain_products():
    with pytest.raises(ValueError, match="expected operations on matrices as they are, kernels 'xla'"):
        build("llama", "none", **over(2, "exact")).warm()


@pytest.mark.slow
def test_a_team_over_several_devices():
    """Whichever drafter's round is next, by what rounds take, the tokens are those of plain decoding."""
    lm = build("qwen3", "team", **over(2, "ring"))
    found = [tokens for tokens, _, _ in outcomes(lm, "mixed", 3)]
    assert found == [tokens for tokens, _, _ in alone("qwen3", "none", "auto", "mixed", 3)[0]]


def test_each_device_holds_its_part():
    """Of weights and caches; two of four devices share a key/value head. The drafter is whole everywhere."""
    lm = build("qwen3", "dflash", **over(4))
    session = lm.start(PROMPTS, Sampling(NEW))
    session.prefill()
    state = session.engine.runner.state
    assert state is not None

    def share(x: Any) -> int:
        return x.size // x.addressable_shards[0].data.size

    models = lm.model.models
    assert share(models.target.embed) == 4
    assert {share(cache.pool.k) for cache in state.target_cache} == {2}  # type: ignore[attr-defined]
    assert share(state.draft_cache[0].pool.k) == share(models.drafter.norm) == 1
    assert share(models.target.norm) == 1


def test_each_device_packs_its_own_heads_into_a_tpus_pages():
    """Two heads of 64 would share one of the kernel's; over two devices each has one of its own."""
    config = replace(build("qwen3", "none").target, head_dim=64)
    placement = placement_over(config, make_mesh({"tp": 2}), None)
    assert placement is not None
    target = Target(config, TPU, placement.schedule, placement.mesh)
    allocate = partial(allocate_caches, layout=Layout(1, 64, 4, 32), drafter=None, dtype=jnp.bfloat16)
    caches, _ = compile_allocate(target, allocate)()
    specs, _ = cache_specs(target, allocate)
    new = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 40, 64)), jnp.bfloat16)

    def write(held: Any, new: Any) -> Any:
        table = jnp.asarray([[3, 0]], jnp.int32)
        pool = replace(held, table=table).append(TPU, new, -new, jnp.zeros(1, jnp.int32), jnp.full(1, 40)).pool
        return in_rows(pool, table)

    heads = PartitionSpec(None, "kv")
    over_both = jax.shard_map(write, mesh=placement.mesh, in_specs=(specs[0], heads), out_specs=heads, check_vma=False)
    k, v = jax.jit(over_both)(caches[0], new)
    np.testing.assert_array_equal(k[:, :, :40], new)
    np.testing.assert_array_equal(v[:, :, :40], -new)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"compiler_options": True}, "expected a mesh of several devices for compiler options, found none"),
        ({"schedule": "ring"}, "expected a mesh of several devices for the schedule 'ring', found none"),
        (over(2, "star"), "expected a schedule among sync, sequence, ring, domino, column, exact, auto, found 'star'"),
        ({"mesh": make_mesh({"dp": 2, "tp": 2})}, "expected a mesh of one axis, found 2: dp, tp"),
        (
            over(3),
            "expected devices that divide 4 heads, 40 tokens of the vocabulary, 48 MLP columns, and that divide 2 key/value "
            "heads or are a multiple of them: 1, 2, 4; found 3",
        ),
        (over(8), "1, 2, 4; found 8"),
        (
            over(2) | {"drafter_dtype": "bfloat16"},
            "expected a drafter in float32, the dtype of the output head over a mesh, found another",
        ),
    ],
)
def test_what_cannot_be_divided(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build("qwen3", "dflash", **settings)
