"""The target's states that are kept on disk: equal to those of the target, computed once, and of no other target or text."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models.dspark import DSparkConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.mtp import MtpConfig, layer_config
from tilewright.train import taps
from tilewright.train.drafter import DFlashOptions, train_drafter
from tilewright.train.dspark import DSparkOptions, train_dspark
from tilewright.train.eagle3 import Eagle3Options, train_eagle3
from tilewright.train.lilicorr import LiLiCorrOptions, train_lilicorr
from tilewright.train.mtp import MtpOptions, train_mtp
from tilewright.train.records import Records
from tilewright.train.step import TrainingPlacement, data_mesh
from train.support import DRAFTER, TARGET, counting_stream, drafter_params, options, silent, target_params

TARGET_PARAMS = target_params()


def records(count: int = 9, seed: int = 0) -> Records:
    """Some short and some long, some of which lose their ends."""
    rng = np.random.default_rng(seed)
    return Records.from_pairs(
        [(rng.integers(1, 23, 2).tolist(), rng.integers(1, 23, 3 + n % 2 * 8 + n // 6 * 6).tolist()) for n in range(count)]
    )


MADE = records()
HELD = records(4, seed=1)
OPTIONS = options(batch_size=2, sequence_length=16, evaluate_every=100, matmul_dtype="float32")


def rows_in(folder: Path, tapped: tuple[int, ...] = (0, 1), target: str = "this one") -> taps.RowsWithStates:
    made = taps.batches_with_states(MADE, HELD, OPTIONS, folder, TARGET, TARGET_PARAMS, tapped, target, sharded=False)
    assert isinstance(made, taps.RowsWithStates)
    return made


def counted(rows: taps.RowsWithStates) -> tuple[taps.RowsWithStates, list[int]]:
    """The rows, and the shapes that the target ran on."""
    ran: list[int] = []

    def run(tokens: np.ndarray) -> Any:
        ran.append(tokens.shape[1])
        return rows.run(tokens)

    return replace(rows, run=run), ran


def check(batch: Any) -> None:
    """A batch's states are the target's streams over its tokens."""
    tokens, in_loss, kept = batch
    streams = taps.streams(TARGET, PLAIN, (0, 1), TARGET_PARAMS, jnp.asarray(tokens))
    for row, flags in enumerate(in_loss):
        size = np.flatnonzero(flags)[-1] + 1
        expected = np.concatenate([np.asarray(stream[row, :size]) for stream in streams], axis=-1)
        np.testing.assert_allclose(kept[row, :size].astype(np.float32), expected, rtol=2**-7, atol=1e-6)
        assert not kept[row, size:].astype(np.float32).any()


def test_states_are_the_targets_and_computed_once(tmp_path: Path):
    rows, ran = counted(rows_in(tmp_path / "new"))
    epochs = rows.batches(0)
    steps = sum(len(places) // 2 for places in rows.group_by_length(MADE).values())
    for _ in range(3 * steps):
        check(next(epochs))
    assert steps <= len(ran) <= steps + 2  # a record that its epoch leaves over comes up in a later one
    again, ran = counted(rows_in(tmp_path / "new"))  # as a resumed run has it
    batches = again.batches(steps)
    for _ in range(2 * steps):
        check(next(batches))
    assert not ran
    for batch in again.held_out_batches():
        check(batch)
    assert ran


def test_a_skipped_step_costs_nothing(tmp_path: Path):
    rows, ran = counted(rows_in(tmp_path))
    next(rows.batches(3))
    assert len(ran) == 1


DSPARK = DSparkConfig(**{**vars(DRAFTER), "sample_from_anchor": True}, markov_rank=6, candidate_top_k=3)
LILICORR = LiLiCorrConfig(
    **vars(DRAFTER),
    candidate_top_k=5,
    lattice_size=12,
    lattice_layers=1,
    lattice_heads=3,
    mlp_ratio=1.5,
    vector_size=8,
    vector_eps=1e-4,
    logit_scale=8.0,
)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
EAGLE3 = Eagle3Config(
    **{name: vars(DRAFTER)[name] for name in SIZES},
    draft_vocab_size=DRAFTER.vocab_size,
    target_hidden_size=TARGET.hidden_size,
    target_layer_ids=(0, 1),
    block_size=4,
)
MTP = MtpConfig(layer=layer_config(TARGET), num_target_layers=TARGET.num_layers, draft_vocab_size=12)
KINDS = {
    "dflash": (train_drafter, DRAFTER, DFlashOptions(anchors=4)),
    "dspark": (train_dspark, DSPARK, DSparkOptions(anchors=4)),
    "lilicorr": (train_lilicorr, LILICORR, LiLiCorrOptions(anchors=4)),
    "eagle3": (lambda *arguments: train_eagle3(*arguments)[0], EAGLE3, Eagle3Options()),
    "mtp": (lambda *arguments: train_mtp(*arguments)[0], MTP, MtpOptions()),
}


@pytest.mark.parametrize(
    ("kind", "taps_of"),
    [
        ("dflash", (0, 1)),
        ("dspark", (0,)),
        ("eagle3", (0,)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("lilicorr", (0, 1)), ("mtp", None))),
    ],
)
def test_training_on_kept_states_is_training(tmp_path: Path, kind: str, taps_of: tuple[int, ...] | None):
    """Also where the loss reads what the target's last layer gives, whether or not that is tapped."""
    train, config, drafter_options = KINDS[kind]
    if taps_of is not None:
        config = replace(config, target_layer_ids=taps_of)
    chosen = replace(OPTIONS, steps=4)
    curves = []
    for keep in (None, tmp_path / "taps"):
        arguments = (TARGET, TARGET_PARAMS, config, MADE, HELD, chosen, replace(drafter_options, keep_taps=keep))
        curves.append(train(*arguments, tmp_path / f"out{keep is None}", silent()).curve)
    for name in ("loss", "held_out_loss"):
        np.testing.assert_allclose(curves[0][name], curves[1][name], rtol=5e-3)


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows_in(tmp_path / "taps")
    with pytest.raises(ValueError, match="expected states of this target and text, found another target"):
        rows_in(tmp_path / "taps", target="another")
    with pytest.raises(ValueError, match="found another taps, width"):
        rows_in(tmp_path / "taps", tapped=(1,))
    rows_in(tmp_path / "taps")

    def trained(source: Any, placement: TrainingPlacement = TrainingPlacement()) -> None:
        drafter_options = DFlashOptions(anchors=4, keep_taps=tmp_path / "other")
        out = tmp_path / "out"
        train_drafter(
            TARGET, TARGET_PARAMS, DRAFTER, source, source, OPTIONS, drafter_options, out, silent(), drafter_params(), placement
        )

    with pytest.raises(ValueError, match="expected whole records for --keep-taps"):
        trained(counting_stream())
    with pytest.raises(ValueError, match="expected --keep-taps or --mesh, found both"):
        trained(MADE, TrainingPlacement(data_mesh({"fsdp": 2})))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10))
    with pytest.raises(ValueError, match=r"expected 0.0 GB of free disk space for states, found 0.0 GB"):
        trained(MADE)
    assert not (tmp_path / "other" / taps.FINGERPRINT_FILE).exists()


def test_nothing_flows_back_into_the_target():
    batch = jnp.asarray(np.arange(1, 9)[None], jnp.int32), jnp.ones((1, 8), bool)

    def total(params: Any) -> jax.Array:
        states = taps.target_states(TARGET, (0,), PLAIN, params, batch, whole=True)
        assert states.stream is not None
        return jnp.sum(states.stream) + jnp.sum(states.taps[0])

    assert all(not np.asarray(x).any() for x in jax.tree.leaves(jax.grad(total)(TARGET_PARAMS)))
