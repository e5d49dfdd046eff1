"""`tilewright train diffusion`: from problems and texts to a folder that loads, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.conftest import Run as Command
from cli.conftest import interrupt_at
from tilewright.cli import train_diffusion as cli
from tilewright.models.checkpoint import load_decoder
from tilewright.models.diffusion import load_diffusion
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.data import MASK
from tilewright.train.loop import TrainingRun

SIZES = ["--sizes", "vocab_size=290,hidden_size=32,layers=1,heads=2,kv_heads=1,intermediate_size=48,context=256"]
LOOP = ["--batch-size", 2, "--sequence-length", 240, "--evaluate-every", 2, "--save", "every=1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    records = [{"prompt": f"say {n}\n", "response": "so and so " * 4} for n in range(20)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "long.txt").write_text("".join(f"line {n}\n" for n in range(200)))
    return folder


def test_a_streamed_run_resumes_where_it_was_interrupted(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def command(name: str) -> list[object]:
        loop = ["-b", 4, "-l", 48, "--evaluate-every", 2, "--save", "every=2", "-n", 4, "--held-out", 0.2]
        return ["train", "diffusion", text, "--out", tmp_path / name, *SIZES, *loop, "--text", "stream=true,shuffle=8"]

    with monkeypatch.context() as patched:
        interrupt_at(3, patched)
        assert run(*command("parts")).status != 0
    ran = run(*command("parts"), "--json", tmp_path / "figures.json")
    assert ran.status == 0, ran.err
    assert "resuming diffusion model at step 2 of 4" in ran.out
    assert run(*command("whole")).status == 0
    parts, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name], tensor)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tokens_read"] == 2 * 4 * 48
    assert 0 < figures["padding_share"] < 1


def test_a_model_is_trained_resumed_and_gone_on_from(run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    advance = TrainingRun.advance
    command = [
        "train",
        "diffusion",
        text,
        "--out",
        out,
        "--arithmetic",
        0.5,
        *SIZES,
        *LOOP,
        "--steps",
        3,
        "--dtype",
        "bfloat16",
    ]

    def interrupted(self: TrainingRun, batch: Any) -> None:
        if self.step == 2:
            raise KeyboardInterrupt
        advance(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "advance", interrupted)
        assert run(*command).status != 0
    ran = run(*command, "--json", tmp_path / "figures.json")
    assert ran.status == 0, ran.err
    assert "resuming diffusion model at step 2 of 3" in ran.out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [point["step"] for point in figures["curve"]] == [2, 3]
    assert figures["training_texts"] > 20
    config, params = load_diffusion(out, jnp.bfloat16)
    bpe = load_tokenizer(out)
    assert (config.family, config.decoder.head_dim, config.decoder.vocab_size) == ("llada", 16, bpe.get_vocab_size())
    assert (config.mask_token_id, config.pad_token_id, params.head) == (bpe.token_to_id(MASK), 0, None)
    assert len(bpe.encode("12345").ids) == 5
    more = ["train", "diffusion", "--out", tmp_path / "more", "--arithmetic", 1, *LOOP, "--steps", 1, "--start", out]
    assert run(*more).status == 0
    assert (tmp_path / "more" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    sized = run(*more, "--sizes", "layers=2")
    assert sized.status == 2
    assert "expected no sizes with --start, found layers in --sizes" in sized.err
    bpe.add_special_tokens(["<|another|>"])
    bpe.save(str(tmp_path / "more" / "tokenizer.json"))
    assert (
        f"expected --out without a run of another tokenizer, found one in {tmp_path / 'more'}" in run(*more, columns=1000).err
    )
    assert load_tokenizer(tmp_path / "more").to_str() == bpe.to_str()


def test_a_model_with_blocks_is_trained_from_a_masked_one_and_gone_on_from(run: Command, tmp_path: Path):
    """Its layers are those of the masked model. Every form of it loads as a decoder."""
    command = ["train", "diffusion", "--arithmetic", 1, *LOOP, "--steps", 1]
    masked, blocks, more, new = (tmp_path / name for name in ("masked", "blocks", "more", "new"))
    assert run(*command, "--out", masked, *SIZES).status == 0
    assert run(*command, "--out", blocks, "--start", masked, "--block-causal", "--block-length", 8).status == 0
    assert run(*command, "--out", more, "--start", blocks, "--block-causal").status == 0
    assert run(*command, "--out", new, "--block-causal", *SIZES).status == 0
    for folder, length in ((blocks, 8), (more, 8), (new, 16)):
        config, _ = load_decoder(folder, jnp.float32)
        assert config.family == "nemotron_labs_diffusion"
        assert config.masked_blocks is not None
        assert config.masked_blocks.mask_token_id == load_tokenizer(folder).token_to_id(MASK)
        assert config.masked_blocks.length == length
        assert config.num_layers == 1
    for flags, expected in (
        (["--block-length", 8], "expected --block-length with --block-causal, found it alone"),
        (["--block-causal", "--block-length", 1], "expected a block length of at least 2, found 1"),
        (["--start", blocks], "model_type"),
    ):
        ran = run(*command, "--out", tmp_path / "refused", *flags)
        assert ran.status == 2
        assert expected in " ".join(ran.err.split())
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "expected files or folders to train on, or --arithmetic 1"),
        ({"--arithmetic": 1.2}, "expected a share of arithmetic from 0 to 1, found 1.2"),
        ({"--arithmetic": 1, "--sizes": "hidden_size=33,heads=2"}, "expected heads that make up the hidden size"),
        ({"--arithmetic": 1, "--sizes": "context=128"}, "sequences of at most the model's context of 128 tokens, found 240"),
        ({"--arithmetic": 1, "--sequence-length": 20}, "expected sequences longer than a problem's"),
    ],
)
def test_what_is_refused(run: Command, tmp_path: Path, changes: dict[str, Any], expected: str):
    given = {**dict(zip(SIZES[::2], SIZES[1::2], strict=True)), **dict(zip(LOOP[::2], LOOP[1::2], strict=True)), **changes}
    ran = run("train", "diffusion", "--out", tmp_path / "out", *(word for pair in given.items() for word in pair))
    assert ran.status == 2
    assert expected in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()


def test_a_mesh_is_handed_on_and_what_does_not_fit_is_refused(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`tests/train/test_sharded_diffusion.py` has the step."""
    given: list[Any] = []

    def caught(*arguments: Any) -> Any:
        given.extend(arguments)
        raise ValueError("caught")

    monkeypatch.setattr(cli, "train_diffusion", caught)
    command = ["train", "diffusion", text, "--out", tmp_path / "out", *SIZES, *LOOP]
    assert "caught" in run(*command, "--mesh", "fsdp=2,tp=2").err
    assert dict(given[-1].mesh.shape) == {"fsdp": 2, "kv": 1, "group": 2}
    ran = run(*command, "--mesh", "fsdp=4")
    assert (ran.status, "that fsdp=4 divides, found 2" in " ".join(ran.err.split())) == (2, True), ran.err


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives(run: Command, text: Path, tmp_path: Path):
    curves = []
    for name, more in (("alone", []), ("mesh", ["--mesh", "fsdp=2,tp=2", "--sharding", "prefetch_distance=0,1"])):
        command = [
            "train",
            "diffusion",
            text,
            "--out",
            tmp_path / name,
            *SIZES,
            *LOOP,
            "--steps",
            4,
            "--matmul-dtype",
            "float32",
        ]
        ran = run(*command, *more, "--json", tmp_path / f"{name}.json")
        assert ran.status == 0, ran.err
        points = json.loads((tmp_path / f"{name}.json").read_text())["curve"]
        curves.append([[point["loss_nats_per_token"], point["held_out_loss_nats_per_token"]] for point in points])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    config, _ = load_diffusion(tmp_path / "mesh", jnp.float32)
    assert config.decoder.num_layers == 1
