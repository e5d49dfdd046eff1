"""`benchmarks/smollm2_drafter.py`: its options are those of the model card, and it resumes and repeats in small."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App

from cli.conftest import Run, folders, interrupt_at, run  # noqa: F401 (fixtures)
from tilewright.cli.common import PACKAGED_DRAFTERS
from tilewright.cli.train_drafter import drafter
from tilewright.models.hub import PACKAGED
from tilewright.train.records import Records

script: Any = importlib.import_module("smollm2_drafter")

NAME = "smollm2-dflash2"
CARD = PACKAGED[NAME] / "MODEL_CARD.md"
SMALL: dict[str, Any] = {
    "kind": "dflash2",
    "sizes": {"layers": 1, "block_size": 4, "taps": "0,1", "selector_rank": 6, "selector_top_k": 5, "conv_group": 8},
    "loss": {"anchors": 4},
    "batch-size": 4,
    "sequence-length": 16,
    "held-out": 0.3,
    "optimizer": {"schedule": "wsd"},
    "dtype": "bfloat16",
    "steps": 9,
}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def records(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A file of 24 records: the first part of a small recipe has 16, the second the other 8 and 6 of the 16."""
    rng = np.random.default_rng(0)
    made = [(rng.integers(1, 30, 4).tolist(), rng.integers(1, 30, 8 + n % 3).tolist()) for n in range(24)]
    Records.from_pairs(made).save(tmp_path / "some.npz.xz")
    first = {"target": folders[0], **SMALL}
    second = {**first, "learning-rate": "1e-4", "sizes": {**SMALL["sizes"], "block_size": 3}, "steps": 7}
    for name, value in {"FIRST": first, "SECOND": second, "FIRST_RECORDS": 16, "REPEATED": 6}.items():
        monkeypatch.setattr(script, name, value)
    return tmp_path / "some.npz.xz"


def test_the_model_card_has_the_recipe():
    """The command of each part, the number of records, and the steps."""
    card = CARD.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(block.replace("\\\n", "")) for block in blocks if "--kind dflash2" in block]
    first = script.FIRST
    second = {**script.SECOND, "start": "DIR/training/first"}
    begin = ["tilewright", "train", "drafter"]
    file = script.RECORDS.name
    assert commands == [
        [*begin, f"DIR/training/first/training/{file}", "--out", "DIR/training/first", *script.command_line(first)],
        [*begin, f"DIR/training/{file}", "--out", "DIR", *script.command_line(second)],
    ]
    assert f"the first {script.FIRST_RECORDS:,} records of `benchmarks/training/{file}`" in card
    assert f"and {script.REPEATED:,} of the first" in card
    for part in (first, second):
        assert f"{part['steps']:,} steps of {part['batch-size']} answers" in card


def test_the_recipe_makes_a_drafter_of_the_packaged_sizes():
    words = ["RECORDS", "--out", "DIR", *script.command_line(script.FIRST)]
    _, bound, _ = App(default_command=drafter).parse_args(words, exit_on_error=False)
    sizes = bound.arguments["sizes"]
    config = json.loads((PACKAGED[NAME] / "config.json").read_text(encoding="utf-8"))
    dflash_fields = config["dflash_config"]
    assert PACKAGED_DRAFTERS[bound.arguments["target"]] == {bound.arguments["kind"]: NAME}
    assert list(sizes.taps) == dflash_fields["target_layer_ids"]
    assert (sizes.draft_vocab, sizes.mask_token_id) == (dflash_fields["draft_vocab_size"], dflash_fields["mask_token_id"])
    assert (sizes.layers, sizes.selector_rank) == (config["num_hidden_layers"], dflash_fields["selector_rank"])
    assert bound.arguments["dtype"] == config["torch_dtype"]


def test_it_is_train_drafter_in_two_parts(
    run: Run,  # noqa: F811
    records: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """An interrupted run resumes; `train drafter` recognises the finished ones, and writes the same."""
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    out = tmp_path / "out"
    first = out / "training" / "first"
    changes = {"records": records, "steps": 4, "batch_size": 2, "save_every": 2}
    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        with pytest.raises(KeyboardInterrupt):
            script.train(out, **changes)
    capsys.readouterr()
    script.train(out, **changes, json_file="-")
    printed = capsys.readouterr()
    assert "resuming DFlash 2 drafter at step 2 of 4" in printed.err
    fields = json.loads((out / "config.json").read_text())
    mine = fields["dflash_config"]["expected_acceptance"]
    packaged = json.loads((CARD.parent / "config.json").read_text())["dflash_config"]["expected_acceptance"]
    assert json.loads(printed.out)["expected_acceptance"] == mine
    for name, rates in (("this run", mine), ("packaged", packaged)):
        assert f"{name}, % accepted by position: {' '.join(f'{100 * rate:2.0f}' for rate in rates)}\n" in printed.err
    assert max(map(len, printed.err.splitlines()[-2:])) < 80
    assert len(mine) == 2, "of blocks of 3"
    assert fields["block_size"] == SMALL["sizes"]["block_size"], "as wide as the first part's"
    every = Records.load(records)
    repeated = np.sort(np.random.default_rng(0).permutation(16)[:6])
    for folder, chosen in ((first, np.arange(16)), (out, np.concatenate([np.arange(16, 24), repeated]))):
        read = Records.load(folder / "training" / script.RECORDS.name)
        assert read.fingerprint == every.take(chosen).fingerprint
    for folder, part in ((first, script.FIRST), (out, {**script.SECOND, "start": first})):
        written = (folder / "model.safetensors").read_bytes()
        options = script.command_line({**part, "batch-size": 2, "steps": 4})
        ran = run("train", "drafter", folder / "training" / script.RECORDS.name, "--out", folder, *options)
        assert ran.status == 0, ran.err
        assert "resuming DFlash 2 drafter at step 4 of 4" in ran.out, "the same run"
        assert written == (folder / "model.safetensors").read_bytes()
    for path in (*out.glob("*.*"), *(out / "training").glob("state*")):
        path.unlink()
    with pytest.raises(ValueError, match=re.escape(str(first))):  # a first part of other steps
        script.train(out, records=records, steps=3, batch_size=2)


def test_a_finished_model_is_not_overwritten(records: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="expected --out without a model, or with a checkpoint to resume"):
        script.train(tmp_path / "out", records=records)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "expected at least 9,617 records, found 24"),
        ({"steps": 0}, "expected steps of at least 1, found 0"),
        ({"batch_size": -1}, "expected batch-size of at least 1, found -1"),
        ({"save_every": 0}, "expected save-every of at least 1, found 0"),
    ],
)
def test_impossible_options(
    records: Path, tmp_path: Path, changes: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script, "FIRST_RECORDS", 9617)
    with pytest.raises(ValueError, match=problem):
        script.train(tmp_path / "out", records=records, **changes)
    assert not (tmp_path / "out").exists()
