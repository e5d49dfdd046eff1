"""Compiled training programs hold no array of all pairs of positions, on CPUs and on absent TPUs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.compiled.hlo import read_module
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.models import decoder, dflash, eagle3, mtp
from tilewright.models.config import MaskedBlocks
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.mtp import MtpConfig
from tilewright.models.params import abstract
from tilewright.train.block_diffusion import block_denoiser
from tilewright.train.chain import chain_loss
from tilewright.train.diffusion import Batch, masked_denoiser
from tilewright.train.drafter import DFlashOptions, Frozen, drafter_loss, draw_blocks
from tilewright.train.eagle3 import eagle3_kind
from tilewright.train.lm import language_model
from tilewright.train.mtp import Frozen as MtpFrozen
from tilewright.train.mtp import mtp_kind
from tilewright.train.predictions import Predictor
from tilewright.train.step import TrainingPlacement, cast_loss, data_mesh
from tilewright.train.text import TextOptions
from train.support import DRAFTER, TARGET

LENGTH = 1040
"""Positions, more than two blocks of queries and no multiple of them."""
ROWS = 2
TARGET_PARAMS = abstract(decoder.declare(TARGET))
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def text(length: int = LENGTH) -> tuple[Any, ...]:
    return whole(ROWS, length), jax.ShapeDtypeStruct((ROWS, length), jnp.bool_)


def rows(length: int) -> Batch:
    return Batch(whole(ROWS, length), *(whole(ROWS),) * 3)


def predictor(model: Predictor, batch: Any, ops: Operations) -> Program:
    def loss(params: Any, batch: Any) -> Any:
        return model.loss(ops, params, model.predict(batch, jax.random.key(0)))[0]

    return loss, (abstract(model.specs), batch)


def language(ops: Operations) -> Program:
    return predictor(language_model(TARGET), (*text(LENGTH + 1), whole(ROWS, LENGTH + 1)), ops)


def masked(ops: Operations) -> Program:
    model = masked_denoiser(DiffusionConfig(family="dream", decoder=replace(TARGET, family="qwen2"), mask_token_id=23))
    return predictor(model, rows(LENGTH), ops)


def blocks(ops: Operations) -> Program:
    """Half of the length, since a clean and a noisy copy run side by side."""
    config = replace(TARGET, family="sdar", masked_blocks=MaskedBlocks(23, 4, False, causal=False))
    return predictor(block_denoiser(config), rows(LENGTH // 2), ops)


def mtp_head(ops: Operations) -> Program:
    config = MtpConfig(layer=mtp.layer_config(TARGET), num_target_layers=2, block_size=3)
    loss = partial(chain_loss, mtp_kind(TARGET, config, ops), 0.8)
    frozen = MtpFrozen(TARGET_PARAMS, None)
    return lambda *operands: loss(*operands)[0], (abstract(mtp.declare(config)), frozen, text())


def eagle(ops: Operations) -> Program:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "target_layer_ids")
    same = {name: getattr(DRAFTER, name) for name in sizes}
    config = Eagle3Config(draft_vocab_size=16, target_hidden_size=32, block_size=3, **same)
    loss = partial(chain_loss, eagle3_kind(TARGET, config, ops), 0.8)
    return lambda *operands: loss(*operands)[0], (abstract(eagle3.declare(config)), (TARGET_PARAMS, whole(16)), text())


def block_drafter(ops: Operations) -> Program:
    options = DFlashOptions(anchors=8)

    def loss(params: Any, target: Any, batch: Any) -> Any:
        drawn = draw_blocks(TARGET, DRAFTER, options, batch, jax.random.key(0))
        return drafter_loss(TARGET, DRAFTER, options, ops, params, Frozen(target), batch, drawn)[0]

    return loss, (abstract(dflash.declare(DRAFTER)), TARGET_PARAMS, text())


PROGRAMS = [language, masked, blocks, mtp_head, eagle, block_drafter]


def squares(hlo: str) -> set[tuple[int, ...]]:
    """Returns the shapes in a program with two dims as long as a sequence."""
    arrays = (array for each in read_module(hlo).computations.values() for op in each.ops for array in op.outputs)
    return {array.dims for array in arrays if sum(size >= LENGTH for size in array.dims) > 1}


def text_of(program: Callable[..., Any], *operands: Any) -> str:
    return jax.jit(program).lower(*operands).compile().as_text() or ""


def compiled_here(make: Callable[[Operations], Program]) -> str:
    loss, operands = make(PLAIN)
    return text_of(jax.grad(loss), *operands)


def test_training_of_a_language_model_stores_no_square():
    assert not squares(compiled_here(language))


def test_a_stored_square_is_found():
    found = text_of(lambda x: jnp.exp(x @ x.T) @ x, jax.ShapeDtypeStruct((LENGTH, 8), jnp.float32))
    assert squares(found) == {(LENGTH, LENGTH)}


@pytest.mark.slow
@pytest.mark.parametrize("make", PROGRAMS[1:])
def test_training_of_other_models_stores_no_square(make: Callable[[Operations], Program]):
    assert not squares(compiled_here(make))


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("make", [language, masked, mtp_head])
def test_training_on_a_tpu_stores_no_square(make: Callable[[Operations], Program]):
    loss, operands = make(training_operations("bfloat16", chip="tpu"))
    hlo = compile_for("v5e:1x1", jax.grad(loss), *operands).hlo
    assert "splash_mha_fwd" in hlo
    assert not squares(hlo)


@pytest.mark.slow
@pytest.mark.tpu
def test_the_target_of_a_drafter_over_a_mesh_stores_no_square():
    """XLA's partitioner places the collectives; each device runs the kernel on its rows."""
    mesh = data_mesh({"fsdp": 2, "tp": 2}, tpu_topology("v5e:2x2").devices)
    placement = TrainingPlacement(mesh)
    options = TextOptions(compute_dtype="bfloat16")
    drafting = DFlashOptions(anchors=8)
    ops = placement.ops(options, "tpu")

    def loss(params: Any, target: Any, batch: Any) -> Any:
        drawn = draw_blocks(TARGET, DRAFTER, drafting, batch, jax.random.key(0))
        cast = cast_loss(
            options, lambda params, frozen, drawn: drafter_loss(TARGET, DRAFTER, drafting, ops, params, frozen, *drawn)
        )
        return cast(params, Frozen(target), (batch, drawn))[0]

    def sharded(specs: Any) -> Any:
        return abstract(specs, jnp.float32, placement.shardings(specs))

    batch = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=placement.batch_sharding) for each in text())
    operands = (sharded(dflash.declare(DRAFTER)), sharded(decoder.declare(TARGET)), batch)
    hlo = compile_for("v5e:2x2", jax.grad(loss), *operands).hlo
    assert "splash_mha_fwd" in hlo
    assert not squares(hlo)
