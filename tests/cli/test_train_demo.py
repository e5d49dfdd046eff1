"""`tilewright train demo`: SmolLM2's drafter by its recipe, in small; and what the demo's own training is told."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App

from cli.conftest import Run, interrupt_at
from tilewright.cli import train_demo
from tilewright.cli.common import PACKAGED_DRAFTERS
from tilewright.cli.train_drafter import drafter
from tilewright.models.hub import PACKAGED
from tilewright.train.records import Records

CARD = PACKAGED[train_demo.SMOLLM2] / "MODEL_CARD.md"
SMALL = {
    "kind": "dflash2",
    "layers": 1,
    "block-size": 4,
    "taps": (0, 1),
    "selector-rank": 6,
    "selector-top-k": 5,
    "conv-group": 8,
    "anchors": 4,
    "batch-size": 4,
    "sequence-length": 16,
    "held-out": 0.3,
    "schedule": "wsd",
    "dtype": "bfloat16",
    "steps": 9,
}


@pytest.fixture
def records(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 24 records, of which the first part of a small recipe takes 16, and the second 8 and 6 of these again."""
    rng = np.random.default_rng(0)
    made = [(rng.integers(1, 30, 4).tolist(), rng.integers(1, 30, 8 + n % 3).tolist()) for n in range(24)]
    Records.of(made).save(tmp_path / "some.npz.xz")
    monkeypatch.setattr(train_demo, "RECIPE", {"target": folders[0], **SMALL})
    monkeypatch.setattr(train_demo, "SECOND", {"learning-rate": "1e-4", "block-size": 3, "steps": 7})
    monkeypatch.setattr(train_demo, "FIRST_RECORDS", 16)
    monkeypatch.setattr(train_demo, "AGAIN", 6)
    return tmp_path / "some.npz.xz"


def test_the_model_card_has_the_recipe():
    """The command of each part, how many records it is given, and the steps."""
    card = CARD.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(block.replace("\\\n", "")) for block in blocks if "--kind dflash2" in block]
    first = train_demo.RECIPE
    second = {**first, **train_demo.SECOND, "start": "DIR/training/first"}
    begin = ["tilewright", "train", "drafter"]
    assert commands == [
        [
            *begin,
            "DIR/training/first/training/smollm2-records.npz.xz",
            "--out",
            "DIR/training/first",
            *train_demo.command_line(first),
        ],
        [*begin, "DIR/training/smollm2-records.npz.xz", "--out", "DIR", *train_demo.command_line(second)],
    ]
    assert f"the first {train_demo.FIRST_RECORDS:,} records of `{train_demo.RECORDS}`" in card
    assert f"and {train_demo.AGAIN:,} of the first" in card
    for part in (first, second):
        assert f"{part['steps']:,} steps of {part['batch-size']} answers" in card


def test_the_recipe_makes_a_drafter_of_the_packaged_sizes():
    words = ["RECORDS", "--out", "DIR", *train_demo.command_line(train_demo.RECIPE)]
    _, taken, _ = App(default_command=drafter).parse_args(words, exit_on_error=False)
    sizes = taken.arguments["sizes"]
    kinds = taken.arguments["of_kinds"]
    config = json.loads((PACKAGED[train_demo.SMOLLM2] / "config.json").read_text(encoding="utf-8"))
    own = config["dflash_config"]
    assert PACKAGED_DRAFTERS[taken.arguments["target"]] == {taken.arguments["kind"]: train_demo.SMOLLM2}
    assert list(sizes.taps) == own["target_layer_ids"]
    assert (sizes.draft_vocab, kinds.dflash.mask_token_id) == (own["draft_vocab_size"], own["mask_token_id"])
    assert (kinds.dflash.layers, kinds.dflash2.selector_rank) == (config["num_hidden_layers"], own["selector_rank"])
    assert taken.arguments["dtype"] == config["torch_dtype"]


def test_it_is_train_drafter_in_two_parts(run: Run, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted run goes on; `train drafter` knows the finished ones for its own, and writes the same."""
    out = tmp_path / "out"
    first = out / "training" / "first"
    said = ["--drafter-steps", 4, "--batch-size", 2, "--save-every", 2]
    command = ["train", "demo", train_demo.SMOLLM2, "--records", records, "--out", out, *said]
    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        assert run(*command).status != 0
    ran = run(*command, "--json", "-")
    assert ran.status == 0, ran.err
    assert "resuming DFlash 2 drafter at step 2 of 4" in ran.err
    fields = json.loads((out / "config.json").read_text())
    mine = fields["dflash_config"]["expected_acceptance"]
    packaged = json.loads((CARD.parent / "config.json").read_text())["dflash_config"]["expected_acceptance"]
    assert ran.json["expected_acceptance"] == mine
    for name, rates in (("this run", mine), ("packaged", packaged)):
        assert f"{name}, % accepted by position: {' '.join(f'{100 * rate:2.0f}' for rate in rates)}\n" in ran.err
    assert max(map(len, ran.err.splitlines()[-2:])) < 80
    assert len(mine) == 2, "of blocks of 3"
    assert fields["block_size"] == SMALL["block-size"], "as wide as the first part's"
    all_of_them = Records.load(records)
    again = np.sort(np.random.default_rng(0).permutation(16)[:6])
    for folder, taken in ((first, np.arange(16)), (out, np.concatenate([np.arange(16, 24), again]))):
        read = Records.load(folder / "training" / "smollm2-records.npz.xz")
        assert read.fingerprint == all_of_them.take(taken).fingerprint
    parts = ((first, train_demo.RECIPE), (out, {**train_demo.RECIPE, **train_demo.SECOND, "start": first}))
    for folder, part in parts:
        written = (folder / "model.safetensors").read_bytes()
        options = train_demo.command_line({**part, "batch-size": 2, "steps": 4})
        ran = run("train", "drafter", folder / "training" / "smollm2-records.npz.xz", "--out", folder, *options)
        assert ran.status == 0, ran.err
        assert "resuming DFlash 2 drafter at step 4 of 4" in ran.out, "the same run"
        assert written == (folder / "model.safetensors").read_bytes()
    for path in (*out.glob("*.*"), *(out / "training").glob("state*")):
        path.unlink()
    ran = run(*command[:-6], "--drafter-steps", 3, "--batch-size", 2)
    assert ran.status == 2
    assert str(first) in ran.err, "a first part of other steps is none to go on from"


def test_a_finished_model_is_not_written_over(run: Run, records: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    ran = run("train", "demo", train_demo.SMOLLM2, "--records", records, "--out", tmp_path / "out")
    assert ran.status == 2
    assert "it holds a model and no run to go on with" in ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected --gsm8k with a file of GSM8K's training questions, found none"),
        (["--records", "FILE"], "train demo demo does not take --records (for smollm2-dflash2)"),
        (["--gsm8k", "FILE", "--save-every", 9, "--batch-size", 1], "does not take --batch-size, --save-every (for smollm2"),
        (["--gsm8k", "FILE", "--drafter-steps", 0], "expected drafter_steps of at least 1, found 0"),
        (["--gsm8k", "FILE", "--steps", 0], "expected steps of at least 1, found 0"),
        (["smollm2", "--gsm8k", "FILE"], "smollm2-dflash2"),
        (["smollm2-dflash2"], "of the repository, which the package lacks; no file benchmarks/training/smollm2-records.npz.xz"),
        (["smollm2-dflash2", "--records", "FILE"], "expected at least 9,617 records, found 24"),
        (["smollm2-dflash2", "--records", "FOLDER"], "expected --records with benchmarks/training/smollm2-records.npz.xz of"),
        (["smollm2-dflash2", "--records", "FILE", "--drafter-steps", 0], "expected drafter_steps of at least 1, found 0"),
        (["smollm2-dflash2", "--records", "FILE", "--batch-size", -1], "expected batch_size of at least 1, found -1"),
        (["smollm2-dflash2", "--records", "FILE", "--save-every", 0], "expected save_every of at least 1, found 0"),
        (["smollm2-dflash2", "--gsm8k", "FILE", "--steps", 9], "does not take --gsm8k, --steps (for demo)"),
    ],
)
def test_what_is_missing_or_does_not_belong(
    run: Run, records: Path, tmp_path: Path, arguments: list[Any], problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_demo, "FIRST_RECORDS", 9617)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {"FILE": records, "FOLDER": tmp_path}
    ran = run("train", "demo", *(places.get(argument, argument) for argument in arguments))
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not list((tmp_path / "here").iterdir()), "nothing is written"


@pytest.mark.parametrize(("given", "asked"), [([], (1200, None)), (["--steps", 7, "--drafter-steps", 5], (7, 5))])
def test_the_demo_is_trained_as_told(
    run: Run, tmp_path: Path, given: list[Any], asked: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    calls: list[tuple[Any, ...]] = []
    held_out = {"library": {"loss_nats_per_token": 4.0, "bits_per_byte": 1.5, "distinct_4gram_ratio": 0.25}}

    def trained(gsm8k: Path, out: Path, tokenizer: Any, console: Any, *options: Any) -> dict[str, Any]:
        calls.append((gsm8k, out, *options))
        return {"target": {"held_out": held_out}}

    monkeypatch.setattr(train_demo, "train_demo", trained)
    monkeypatch.chdir(tmp_path)
    ran = run("train", "demo", "--gsm8k", "questions.jsonl", *given)
    assert ran.status == 0, ran.err
    assert calls == [(Path("questions.jsonl"), Path("runs/demo"), *asked)]
    assert "held-out library: 4.000 nats a token, 1.500 bits a byte, 25% distinct 4-grams in greedy text\n" in ran.out
    assert "wrote runs/demo/target, runs/demo/drafter" in ran.out
