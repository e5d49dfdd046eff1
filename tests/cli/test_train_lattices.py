"""`tilewright train drafter --kind dspark` and `--kind lilicorr`: from a folder of text to a drafter that drafts."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import tilewright as tw
from cli.conftest import Run
from tilewright.speculation.drafters.load import DrafterOptions

LOOP = ["--batch-size", 2, "--sequence-length", 16, "--held-out", 0.3, "--evaluate-every", 2]
ANCHORS = ["--loss", "anchors=4"]
SIZES = {
    "dspark": "block_size=4,layers=1,markov_rank=6,markov_top_k=5",
    "lilicorr": "block_size=4,layers=1,lattice_top_k=4,lattice_heads=2",
}
MORE = {"dspark": "", "lilicorr": ",lattice_conv=true"}
LOSS = {"dspark": "anchors=4,l1_weight=0.5", "lilicorr": "anchors=4"}
SAVED = {
    "dspark": {"architectures": ["Qwen3DSparkModel"], "block_size": 3, "markov_rank": 6, "candidate_top_k": 5},
    "lilicorr": {"architectures": ["LiLiCorrDraftModel"], "block_size": 4},
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten documents of the random target's words."""
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(f"t{n} t1 t2 t3 " * 16)
    return tmp_path


@pytest.mark.parametrize("kind", SIZES)
def test_a_drafter_is_trained_and_drafts(run: Run, text: Path, folders: tuple[Path, Path], kind: str):
    """Also on from where another one ended, and with a draft vocabulary."""
    target = folders[0]
    out = text / "drafter"
    sizes = ["--kind", kind, "--sizes", f"{SIZES[kind]}{MORE[kind]},draft_vocab=12", "--loss", LOSS[kind]]
    command = ["train", "drafter", text, "--target", target, *LOOP, *sizes]
    ran = run(*command, "--out", out, "--steps", 2, "--json", "-")
    assert ran.status == 0, ran.err
    config = json.loads((out / "config.json").read_text())
    assert SAVED[kind].items() <= config.items()
    assert (config if kind == "dspark" else config["dflash_config"])["draft_vocab_size"] == 12
    sampling = tw.Sampling(12, temperature=1.0, seed=0)
    alone = tw.load(target).generate("t1 t2", sampling)[0]
    for walk in ("sampled", "greedy"):
        plain = tw.load(target)
        lm = plain.with_drafter(*plain.load_drafter(str(out), DrafterOptions(block_size=4, walk=walk)))
        assert lm.generate("t1 t2", sampling)[0].tokens == alone.tokens
    shown = run("generate", "t1 t2", "--model", target, "--drafter", out, "--max-new-tokens", 4)
    assert shown.status == 0, shown.err
    on = text / "on"
    more = ["--out", on, "--steps", 1, "--learning-rate", 1e-6, "--start", out]
    ran = run(*command, *more)
    assert ran.status == 0, ran.err
    begun, gone_on = (load_file(folder / "model.safetensors") for folder in (out, on))
    assert gone_on.keys() == begun.keys()
    for name, tensor in begun.items():
        np.testing.assert_allclose(gone_on[name], tensor, atol=1e-4)


@pytest.mark.parametrize("kind", SIZES)
def test_a_dflash_drafter_as_backbone(run: Run, text: Path, folders: tuple[Path, Path], kind: str):
    """Of LiLiCorr, which has its slots; not of DSpark, whose slots draft other positions."""
    command = ["train", "drafter", text, "--target", folders[0], *LOOP, *ANCHORS, "--learning-rate", 1e-6, "--steps", 1]
    first = text / "first"
    second = text / "second"
    ran = run(*command, "--sizes", "block_size=5,layers=1", "--out", first)
    assert ran.status == 0, ran.err
    ran = run(*command, "--kind", kind, "--sizes", SIZES[kind], "--out", second, "--start", first)
    if kind == "dspark":
        assert ran.status == 2
        assert "expected --start to be a drafter of these sizes: DSparkConfig" in " ".join(ran.err.split())
        return
    assert ran.status == 0, ran.err
    begun, gone_on = (load_file(folder / "model.safetensors") for folder in (first, second))
    for name, tensor in begun.items():
        np.testing.assert_allclose(gone_on[name], tensor, atol=1e-4)
    assert gone_on.keys() > begun.keys()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "markov_rank=4"], "mask_token_id, found markov_rank (for dspark)"),
        (["--kind", "dspark", "--sizes", "lattice_size=8"], "markov_top_k, found lattice_size (for lilicorr)"),
        (["--kind", "lilicorr", "--sizes", "selector_rank=8"], "lattice_conv, found selector_rank (for dflash2)"),
        (
            ["--kind", "lilicorr", "--sizes", "lattice_heads=2,lattice_size=7"],
            "lilicorr_num_heads 2 does not divide lilicorr_hidden_size 7",
        ),
        (["--kind", "dspark", "--loss", "l1_weight=2"], "expected an L1 weight from 0 to 1, found 2.0"),
        (["--kind", "lilicorr", "--loss", "penalty_weight=-1"], "expected a penalty weight of at least 0, found -1.0"),
        (["--kind", "lilicorr", "--sizes", "lattice_top_k=5"], "expected lattice_top_k to be a power of two up to 16, found 5"),
        (["--kind", "dspark", "--sizes", "markov_top_k=41"], "candidate_top_k 41 exceeds the 40 tokens that can be proposed"),
    ],
)
def test_options_of_another_kind_or_out_of_range_end_with_status_2(
    run: Run, text: Path, folders: tuple[Path, Path], arguments: list[object], problem: str
):
    ran = run("train", "drafter", text, "--target", folders[0], "--out", text / "drafter", *LOOP, "--steps", 2, *arguments)
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not (text / "drafter").exists()
