"""`tilewright train drafter --kind dflash2`: from a folder of text to a drafter on disk that drafts with either walk."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tilewright as tw
from cli.conftest import Run
from tilewright.train.records import Records

LOOP = ["--batch-size", 2, "--sequence-length", 16, "--held-out", 0.3, "--evaluate-every", 2]
ANCHORS = ["--loss", "anchors=4"]
SIZES = ["--kind", "dflash2", "--sizes", "block_size=4,layers=1,selector_rank=6,selector_top_k=5,conv_group=8"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of the random target's words."""
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(f"t{n} t1 t2 t3 " * 16)
    return tmp_path


def test_a_drafter_is_trained_and_drafts(run: Run, text: Path, folders: tuple[Path, Path]):
    """Also on the backbone of a DFlash drafter."""
    target = folders[0]
    out = text / "drafter"
    command = ["train", "drafter", text, "--target", target, *LOOP, *ANCHORS]
    ran = run(*command, *SIZES, "--out", out, "--steps", 2, "--json", "-")
    assert ran.status == 0, ran.err
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2}.items() <= config["dflash_config"].items()
    alone = tw.load(target).generate("t1 t2", tw.Sampling(12, temperature=1.0, seed=0))[0]
    lm = tw.load(target, out, block_size=4)
    assert lm.generate("t1 t2", tw.Sampling(12, temperature=1.0, seed=0))[0].tokens == alone.tokens
    shown = run("generate", "t1 t2", "--model", target, "--drafter", out, "--max-new-tokens", 4)
    assert shown.status == 0, shown.err
    first = text / "first"
    second = text / "second"
    assert run(*command, "--sizes", "block_size=4,layers=1", "--out", first, "--steps", 1).status == 0
    ran = run(*command, *SIZES, "--out", second, "--steps", 1, "--learning-rate", 1e-6, "--start", first)
    assert ran.status == 0, ran.err
    begun, gone_on = (load_file(folder / "model.safetensors") for folder in (first, second))
    for name, tensor in begun.items():
        np.testing.assert_allclose(gone_on[name], tensor, atol=1e-4)
    assert gone_on.keys() > begun.keys()


def test_a_drafter_is_trained_on_a_file_of_records_with_kept_taps(run: Run, text: Path, folders: tuple[Path, Path]):
    """A second run finds the target's states where the first one left them."""
    rng = np.random.default_rng(0)
    made = [(rng.integers(1, 30, 4).tolist(), rng.integers(1, 30, 8 + n % 3).tolist()) for n in range(20)]
    data = text / "some.npz.xz"
    kept = text / "taps"
    Records.from_pairs(made).save(data)
    command = ["train", "drafter", data, "--target", folders[0], *LOOP, *ANCHORS, *SIZES, "--steps", 2, "--keep-taps", kept]
    runs = []
    for name in ("first", "second"):
        ran = run(*command, "--out", text / name, "--json", "-")
        assert ran.status == 0, ran.err
        runs.append((ran.json["curve"], np.fromfile(kept / "trained.there", np.uint8).sum()))
    assert runs[0] == runs[1]
    assert runs[0][1] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--sizes", "selector_rank=4"],
            "expected --sizes of --kind dflash with keys among block_size, draft_vocab, taps, layers, mask_token_id, "
            "found selector_rank (for dflash2)",
        ),
        (
            [*SIZES, "--loss", "decay=0.5"],
            "--kind dflash2 with keys among anchors, gamma, dpace, selector_weight, found decay (for eagle3, mtp)",
        ),
        ([*SIZES, "--loss", "selector_weight=-1"], "expected a selector weight of at least 0, found -1.0"),
        (["--kind", "dflash2", "--sizes", "conv_group=7"], "conv_group_size 7 does not divide hidden_size 32"),
        (["--kind", "dflash2", "--sizes", "selector_top_k=41"], "selector_top_k 41 exceeds the 40 tokens that can be proposed"),
    ],
)
def test_options_of_another_kind_or_out_of_range_end_with_status_2(
    run: Run, text: Path, folders: tuple[Path, Path], arguments: list[object], problem: str
):
    ran = run("train", "drafter", text, "--target", folders[0], "--out", text / "drafter", *LOOP, "--steps", 2, *arguments)
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not (text / "drafter").exists()


def test_a_walk_that_does_not_go_with_the_drafter_ends_with_status_2(run: Run, folders: tuple[Path, Path]):
    command = ["bench", "speculative", "--model", folders[0], "--drafter", folders[1], "--walk"]
    for walk, problem in (("random", "expected the walk to be greedy or sampled"), ("greedy", "this is a DFlash one")):
        ran = run(*command, walk)
        assert ran.status == 2
        assert problem in " ".join(ran.err.split())
