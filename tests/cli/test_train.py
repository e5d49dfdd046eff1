"""`tilewright train`: a language model and a drafter for it, from a folder of text to folders that generate."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from safetensors.numpy import load_file

import tilewright as tw
from cli.conftest import Run as Command
from cli.conftest import interrupt_at
from tilewright.train.data import read_documents, train_tokenizer

SIZES = ["--sizes", "vocab_size=270,hidden_size=32,layers=1,heads=2,kv_heads=1,head_dim=16,intermediate_size=48,context=96"]
LOOP = ["--batch-size", 2, "--sequence-length", 24, "--held-out", 0.3, "--evaluate-every", 4, "--save", "every=2"]
FIELDS = {
    "steps",
    "loss_nats_per_token",
    "held_out_loss_nats_per_token",
    "tokens_per_s",
    "seconds",
    "curve",
    "training_tokens",
    "compilations",
    "programs_loaded",
    "compile_seconds",
    "chip",
    "out",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of two kinds."""
    folder = tmp_path_factory.mktemp("text")
    for n in range(6):
        (folder / f"{n}.txt").write_text(f"one two three {n} " * 8)
    records = [{"text": "four five six seven " * 6}, {"prompt": "one ", "response": "two three " * 10}] * 2
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def target(run: Command, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that the command line trained, once for all tests."""
    folder = tmp_path_factory.getbasetemp() / "trained-target"
    if not (folder / "config.json").exists():
        ran = run("train", "lm", text, "--out", folder, *SIZES, *LOOP, "--steps", 8)
        assert ran.status == 0, ran.err
    return folder


def same_weights(a: Path, b: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])


def test_a_trained_model_loads_and_generates(target: Path):
    lm = tw.load(target)
    assert lm.target.vocab_size == 270
    assert lm.target.max_position_embeddings == 96
    result = lm.generate("one two", tw.Sampling(6, ignore_eos=True))[0]
    assert len(result.tokens) == 6
    assert lm.tokenizer.decode(lm.encode("one  two\n")) == "one  two\n"


def test_a_language_model_resumes_where_it_was_interrupted(
    run: Command, text: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ["train", "lm", text, "--out", tmp_path / "lm", *SIZES, *LOOP, "--steps", 8, "--json", tmp_path / "figures.json"]
    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        assert run(*command).status != 0
    assert not (tmp_path / "lm" / "model.safetensors").exists()
    assert not (tmp_path / "figures.json").exists()
    ran = run(*command)
    assert ran.status == 0
    assert "resuming language model at step 4 of 8" in ran.out
    same_weights(tmp_path / "lm", target)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.keys() == FIELDS
    assert [point["step"] for point in figures["curve"]] == [4, 8]
    assert f"held-out loss {figures['held_out_loss_nats_per_token']:.3f} nats/token" in ran.out
    kept = (tmp_path / "lm" / "tokenizer.json").read_bytes()
    at = command.index("--sizes")
    resized = SIZES[1].replace("vocab_size=270", "vocab_size=265")
    other = run(*command[:at], "--sizes", resized, *command[at + 2 :], "--learning-rate", 0.02)
    assert other.status == 2
    assert "learning_rate: checkpoint 0.0006, now 0.02; vocab_size: checkpoint 270, now 265" in " ".join(other.err.split())
    length = command.index("--sequence-length") + 1
    other = run(*command[:length], 97, *command[length + 1 :])
    assert other.status == 2
    assert "expected sequences of at most the model's context of 96 tokens, found 97" in " ".join(other.err.split())
    other = run(*command, "--tokenizer", other_tokenizer(text, tmp_path / "tokenizer"))
    assert other.status == 2
    assert "expected no vocabulary size with --tokenizer, found vocab_size in --sizes" in " ".join(other.err.split())
    unsized = SIZES[1].removeprefix("vocab_size=270,")
    other = run(*command[:at], "--sizes", unsized, *command[at + 2 :], "--tokenizer", tmp_path / "tokenizer")
    assert other.status == 2
    assert "expected --out without a run of another tokenizer" in " ".join(other.err.split())
    assert (tmp_path / "lm" / "tokenizer.json").read_bytes() == kept


def other_tokenizer(text: Path, folder: Path) -> Path:
    folder.mkdir()
    train_tokenizer(read_documents([text])[:3], 265).save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_without_a_checkpoint_is_made_anew(run: Command, text: Path, tmp_path: Path):
    """One that an earlier attempt left, of another size."""
    folder = other_tokenizer(text, tmp_path / "lm")
    assert run("train", "lm", text, "--out", folder, *SIZES, *LOOP, "--steps", 1).status == 0
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 270


def test_a_language_model_goes_on_from_another(run: Command, text: Path, target: Path, tmp_path: Path):
    start = tmp_path / "start"
    copytree(target, start)
    (start / "chat_template.jinja").write_text("{{ messages }}")
    command = ["train", "lm", text, "--out", tmp_path / "more", *LOOP, "--steps", 1, "--learning-rate", 1e-6, "--start"]
    ran = run(*command, start)
    assert ran.status == 0, ran.err
    begun, gone_on = (load_file(folder / "model.safetensors") for folder in (target, tmp_path / "more"))
    assert begun.keys() == gone_on.keys()
    for name, tensor in begun.items():
        np.testing.assert_allclose(gone_on[name], tensor, atol=1e-4)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "more" / name).read_bytes() == (start / name).read_bytes()
    assert "resuming language model at step 1 of 1" in run(*command, start).out
    copytree(target, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ other }}")
    assert "belongs to another run" in " ".join(run(*command, tmp_path / "other", "--sizes", "layers=9").err.split())
    assert (tmp_path / "more" / "chat_template.jinja").read_bytes() == (start / "chat_template.jinja").read_bytes()
    without = run(*command[:-1], *SIZES)
    assert without.status == 2
    assert "belongs to another run (start: checkpoint '" in " ".join(without.err.split())
    for arguments, problem in (
        (
            [start, "--sizes", "heads=2,vocab_size=300"],
            "expected no other sizes than layers and context with --start, found heads, vocab_size in --sizes",
        ),
        ([start, "--sizes", "context=48"], "expected context of at least the model's 96, found 48"),
        ([start, "--tokenizer", start], "expected --start or --tokenizer, found both"),
    ):
        other = run(*command, *arguments)
        assert other.status == 2
        assert problem in " ".join(other.err.split())


def test_a_language_model_grows(run: Command, text: Path, target: Path, tmp_path: Path):
    command = ["train", "lm", text, "--out", tmp_path / "deep", *LOOP, "--steps", 1, "--start", target]
    command += ["--sizes", "layers=3,context=128"]
    ran = run(*command)
    assert ran.status == 0, ran.err
    lm = tw.load(tmp_path / "deep")
    assert (lm.target.num_layers, lm.target.max_position_embeddings) == (3, 128)
    assert "resuming language model at step 1 of 1" in run(*command).out


@pytest.mark.parametrize("regenerated", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_a_drafter_is_trained_for_a_target_and_drafts(
    run: Command, text: Path, target: Path, tmp_path: Path, regenerated: int, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "drafter"
    options = ["--sizes", "block_size=4,layers=1", "--loss", "anchors=4", "--steps", 6]
    source = ["--regenerate", f"count={regenerated},prompt_tokens=4,response_tokens=20"]
    command = ["train", "drafter", text, "--target", target, "--out", out, *options, *source, *LOOP, "--json", "-"]
    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        assert run(*command).status != 0
    ran = run(*command)
    assert ran.status == 0, ran.err
    assert "resuming DFlash drafter at step 2 of 6" in ran.err
    assert ran.json.keys() == FIELDS | {"target", "expected_acceptance"}
    config = json.loads((out / "config.json").read_text())
    assert config["dflash_config"]["expected_acceptance"] == ran.json["expected_acceptance"]
    assert [0 < share < 1 for share in ran.json["expected_acceptance"]] == [True] * 3
    assert (config["block_size"], config["num_hidden_layers"], config["dflash_config"]["target_layer_ids"]) == (4, 1, [0])
    assert config["dflash_config"]["mask_token_id"] == 1, "the tokenizer's own mask token"
    if regenerated:
        lines = (out / "training" / "responses_trained.jsonl").read_text().splitlines()
        assert len(lines) == regenerated
        assert ran.json["training_tokens"] == sum(len(json.loads(line)["response_tokens"]) for line in lines)
    lm = tw.load(target, out)
    speculative, alone = (lm.generate("one two", tw.Sampling(16), speculative=way)[0] for way in (True, False))
    assert speculative.tokens == alone.tokens


def test_a_drafter_goes_on_from_another_of_a_different_block(run: Command, text: Path, target: Path, tmp_path: Path):
    first = tmp_path / "first"
    wider = tmp_path / "wider"
    command = ["train", "drafter", text, "--target", target, "--regenerate", "count=0", "--loss", "anchors=4", *LOOP]
    assert run(*command, "--out", first, "--sizes", "layers=1,block_size=4", "--steps", 3).status == 0
    fields = json.loads((first / "config.json").read_text())
    fields["dflash_config"]["last_tap_before_norm"] = True
    (first / "config.json").write_text(json.dumps(fields))
    hardly = ["--steps", 1, "--learning-rate", 1e-6]
    ran = run(*command, *hardly, "--out", wider, "--sizes", "layers=1,block_size=6", "--start", first)
    assert ran.status == 0, ran.err
    begun, gone_on = (load_file(folder / "model.safetensors") for folder in (first, wider))
    for name, tensor in begun.items():
        np.testing.assert_allclose(gone_on[name], tensor, atol=1e-4)
    written = json.loads((wider / "config.json").read_text())
    assert (written["block_size"], written["dflash_config"]["last_tap_before_norm"]) == (6, True)
    for resumed_from in (["--start", wider], []):
        other = run(*command, *hardly, "--out", wider, "--sizes", "layers=1,block_size=6", *resumed_from)
        assert other.status == 2
        assert "belongs to another run (" in (message := " ".join(other.err.split()))
        assert "start: checkpoint '" in message
    other = run(*command, *hardly, "--out", tmp_path / "x", "--sizes", "layers=1", "--start", "demo-drafter")
    assert other.status == 2
    assert "expected --start to be a drafter of these sizes" in other.err
