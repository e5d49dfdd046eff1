"""Drafters over a mesh, whose step the compiler divides, against one device; on over another mesh, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.dspark import DSparkConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.experts import Mixture
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.mtp import MtpConfig, layer_config
from tilewright.train.checkpoint import CHECKPOINTS
from tilewright.train.dflash2 import DFlash2Options, train_dflash2
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.dspark import DSparkOptions, train_dspark
from tilewright.train.eagle3 import Eagle3Options, train_eagle3
from tilewright.train.lilicorr import LiLiCorrOptions, train_lilicorr
from tilewright.train.loop import TrainingRun, TrainResult
from tilewright.train.mtp import MtpOptions, train_mtp
from tilewright.train.step import TrainingPlacement, data_mesh
from train.support import DRAFTER, TARGET, options, random_stream, silent, target_params

DSPARK = DSparkConfig(**{**vars(DRAFTER), "sample_from_anchor": True}, markov_rank=8, candidate_top_k=4)
KINDS: dict[str, Any] = {
    "dflash": (train_drafter, DRAFTER, DFlashOptions(anchors=3)),
    "dflash2": (
        train_dflash2,
        DFlash2Config(**vars(DRAFTER), conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=4),
        DFlash2Options(anchors=3),
    ),
    "dspark": (train_dspark, DSPARK, DSparkOptions(anchors=3)),
    "lilicorr": (
        train_lilicorr,
        LiLiCorrConfig(
            **vars(DRAFTER),
            candidate_top_k=4,
            lattice_size=8,
            lattice_layers=2,
            lattice_heads=2,
            mlp_ratio=2.0,
            vector_size=8,
            vector_eps=1e-4,
            logit_scale=8.0,
        ),
        LiLiCorrOptions(anchors=3),
    ),
    "eagle3": (
        train_eagle3,
        Eagle3Config(
            **{**TARGET.sizes(), "num_layers": 1},
            draft_vocab_size=16,
            target_hidden_size=32,
            target_layer_ids=(0, 0, 1),
            block_size=3,
        ),
        Eagle3Options(),
    ),
    "mtp": (
        train_mtp,
        MtpConfig(layer=layer_config(TARGET), num_target_layers=TARGET.num_layers, block_size=3, draft_vocab_size=16),
        MtpOptions(),
    ),
}


def trained(kind: str, out: Path, target: DecoderConfig = TARGET, **axes: int) -> TrainResult:
    train, config, drafter_options = KINDS[kind]
    placement = TrainingPlacement(data_mesh(axes) if axes else None)
    params = target_params(target)
    if placement.mesh is not None:
        params = jax.device_put(params, placement.shardings(decoder.declare(target)))
    chosen = options(batch_size=4, steps=4, evaluate_every=2, save_every=2, matmul_dtype="float32")
    texts = random_stream(600), random_stream(300, seed=9)
    result = train(target, params, config, *texts, chosen, drafter_options, out, silent(), placement=placement)
    return result[0] if isinstance(result, tuple) else result


def stopped(self: TrainingRun, batch: Any, advance: Any = TrainingRun.advance) -> None:
    if self.step == 3:
        raise KeyboardInterrupt
    advance(self, batch)


@pytest.mark.parametrize(
    ("kind", "stops"), [("dflash", False), *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_a_drafter_over_a_mesh_is_that_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stops: bool):
    """Also where it stops on one mesh and goes on over another one."""
    wanted = trained(kind, tmp_path / "alone")
    if stops:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(TrainingRun, "advance", stopped)
            trained(kind, tmp_path / "mesh", fsdp=4, tp=2)
        assert (tmp_path / "mesh" / CHECKPOINTS / "2").is_dir()
    found = trained(kind, tmp_path / "mesh", fsdp=2, tp=2)
    for name in ("loss", "held_out_loss"):
        np.testing.assert_allclose(found.curve[name], wanted.curve[name], rtol=1e-4)
    divided = 0
    for (path, ours), alone in zip(jax.tree.leaves_with_path(found.params), jax.tree.leaves(wanted.params), strict=True):
        if not jnp.issubdtype(ours.dtype, jnp.floating):
            continue
        divided += ours.ndim == 2 and ours.addressable_shards[0].data.size == ours.size // 4
        if "qkv.bias" in jax.tree_util.keystr(path):
            # A softmax sees no bias of keys that are not rotated: its gradient is rounding, of which Adam makes whole steps.
            ours, alone = (np.delete(np.split(np.asarray(each), 3), 1, axis=0) for each in (ours, alone))
        np.testing.assert_allclose(ours, alone, rtol=0, atol=2e-3 * float(np.max(np.abs(alone))), err_msg=str(path))
    assert divided >= 4


@pytest.mark.slow
def test_the_target_may_have_experts(tmp_path: Path):
    """Over a mesh, the losses of one device."""
    target = replace(TARGET, family="qwen3_moe", mixture=Mixture(4, 2, 16))
    wanted = trained("dflash", tmp_path / "alone", target)
    found = trained("dflash", tmp_path / "mesh", target, fsdp=2, tp=2)
    for name in ("loss", "held_out_loss"):
        np.testing.assert_allclose(found.curve[name], wanted.curve[name], rtol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params) if jnp.issubdtype(leaf.dtype, jnp.floating))


def test_what_a_mesh_does_not_divide_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expected a batch that fsdp=8 divides, found 4"):
        trained("dflash", tmp_path, fsdp=8)
    with pytest.raises(ValueError, match="expected the axes dp, fsdp and tp, found pp"):
        data_mesh({"pp": 2})
    assert not list(tmp_path.iterdir())
