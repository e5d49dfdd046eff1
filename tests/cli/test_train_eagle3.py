"""`tilewright train drafter --kind eagle3`: from a folder of text to a drafter on disk; which options go with which kind."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.conftest import Run
from tilewright.models import decoder, eagle3

LOOP = ["--batch-size", 2, "--sequence-length", 16, "--held-out", 0.3, "--steps", 4, "--evaluate-every", 2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of the random target's words."""
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(f"t{n} t1 t2 t3 " * 16)
    return tmp_path


def test_a_chain_is_trained_and_written(run: Run, text: Path, folders: tuple[Path, Path]):
    out = text / "drafter"
    sizes = ["--sizes", "block_size=4,draft_vocab=12", "--dtype", "bfloat16"]
    command = ["train", "drafter", text, "--target", folders[0], "--out", out, "--kind", "eagle3", *sizes, *LOOP, "--json", "-"]
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert len(ran.json["agreement"]) == 3
    assert all(0 <= share <= 1 for share in ran.json["agreement"])
    assert "agreement with the target, by draft step: " in ran.err
    target = decoder.config_from_hf(json.loads((folders[0] / "config.json").read_text()))
    config, params = eagle3.load(out, target, jnp.float32)
    assert (config.block_size, config.draft_vocab_size, config.target_layer_ids) == (4, 12, (0, 1))
    assert {0, 1, 2, 3} <= set(params.target_ids.tolist()), "the frequent words, and the token between documents"
    stored = load_file(out / "model.safetensors")
    assert stored["d2t"].dtype == np.int64
    assert stored["lm_head.weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--kind", "eagle3", "--sizes", "layers=2"],
            "--sizes of --kind eagle3 with keys among block_size, draft_vocab, taps, found layers (for dflash, ",
        ),
        (
            ["--kind", "eagle3", "--loss", "gamma=3"],
            "among decay, found gamma (for dflash, dflash2, dspark, lilicorr)",
        ),
        (
            ["--kind", "eagle3", "--start", "demo-eagle3"],
            "with a kind that drafts blocks, found --kind eagle3",
        ),
        (
            ["--loss", "decay=0.5"],
            "--kind dflash with keys among anchors, gamma, dpace, found decay (for eagle3, mtp)",
        ),
        (["--kind", "eagle3", "--loss", "decay=0"], "expected a decay above 0 and at most 1, found 0.0"),
        (["--kind", "eagle3", "--sizes", "draft_vocab=41"], "draft_vocab_size 41 exceeds vocab_size 40"),
        (["--kind", "eagle3", "--sizes", "block_size=1"], "block_size must be at least 2, found 1"),
        (["--kind", "eagle3", "--sizes", "taps=0,5"], "target_layer_ids [5] lie outside the target's 2 layers"),
    ],
)
def test_options_of_another_kind_or_out_of_range_end_with_status_2(
    run: Run, text: Path, folders: tuple[Path, Path], arguments: list[object], problem: str
):
    ran = run("train", "drafter", text, "--target", folders[0], "--out", text / "drafter", *arguments, *LOOP)
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not (text / "drafter").exists()
