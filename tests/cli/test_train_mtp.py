"""`tilewright train drafter --kind mtp`: from a folder of text to a head on disk; which options go with it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.conftest import Run
from tilewright.models import decoder, mtp

LOOP = ["--batch-size", 2, "--sequence-length", 16, "--held-out", 0.3, "--steps", 4, "--evaluate-every", 2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of the random target's words."""
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(f"t{n} t1 t2 t3 " * 16)
    return tmp_path


def test_a_head_is_trained_and_written(run: Run, text: Path, folders: tuple[Path, Path]):
    out = text / "drafter"
    sizes = ["--sizes", "block_size=3,draft_vocab=12", "--dtype", "bfloat16"]
    ran = run("train", "drafter", text, "-m", folders[0], "--out", out, "--kind", "mtp", *sizes, *LOOP, "--json", "-")
    assert ran.status == 0, ran.err
    assert len(ran.json["agreement"]) == len(ran.json["expected_acceptance"]) == 2
    target = decoder.config_from_hf(json.loads((folders[0] / "config.json").read_text()))
    config, params = mtp.load(out, target, jnp.float32)
    assert (config.block_size, config.draft_vocab_size) == (3, 12)
    assert list(config.expected_acceptance) == ran.json["expected_acceptance"]
    assert {0, 1, 2, 3} <= set(params.vocab.ids.tolist()), "the frequent words, and the token between documents"
    stored = load_file(out / "model.safetensors")
    assert stored["d2t"].dtype == np.int64
    assert stored["mtp.fc.weight"].dtype == jnp.bfloat16
    assert "lm_head.weight" not in stored


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "taps=0,1"], "--sizes of --kind mtp with keys among block_size, draft_vocab, found taps (for dflash, "),
        (["--loss", "gamma=3"], "among decay, found gamma (for dflash, dflash2, dspark, lilicorr)"),
        (["--start", "demo-eagle3"], "with a kind that drafts blocks, found --kind mtp"),
        (["--loss", "decay=0"], "expected a decay above 0 and at most 1, found 0.0"),
        (["--sizes", "draft_vocab=41"], "draft_vocab_size 41 exceeds vocab_size 40"),
        (["--sizes", "block_size=1"], "block_size must be at least 2, found 1"),
    ],
)
def test_options_of_another_kind_or_out_of_range_end_with_status_2(
    run: Run, text: Path, folders: tuple[Path, Path], arguments: list[object], problem: str
):
    ran = run("train", "drafter", text, "--target", folders[0], "--out", text / "drafter", "-k", "mtp", *arguments, *LOOP)
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not (text / "drafter").exists()
