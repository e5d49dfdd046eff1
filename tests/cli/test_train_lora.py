"""`tilewright train lora`: an adapter that `--lora` and PEFT read, the merged model, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import tilewright as tw
from cli.conftest import Run as Command
from cli.conftest import interrupt_at
from cli.server_process import process
from parallel.commands import run_together
from tilewright.models import decoder
from tilewright.models.checkpoint import save_params
from tilewright.train.data import read_documents, train_tokenizer
from train.support import TARGET, target_params

LOOP = ["-b", 2, "-n", 6, "--held-out", 0.3, "--evaluate-every", 3, "--learning-rate", 0.02]
CONFIG = replace(TARGET, num_layers=1, vocab_size=264, max_position_embeddings=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"prompt": f"t{n} t{n + 1} ", "response": "t1 t2 t3 t4 t5 t6 " * 4} for n in range(12)]
    path = tmp_path_factory.mktemp("text") / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_params(folder, decoder.config_to_hf(CONFIG), decoder.declare(CONFIG), target_params(CONFIG), jnp.float32)
    train_tokenizer(read_documents([text]), 264).save(str(folder / "tokenizer.json"))
    return folder


def test_an_adapter_is_trained_merged_and_served(run: Command, model: Path, text: Path, tmp_path: Path):
    out = tmp_path / "adapter"
    command = [
        "train",
        "lora",
        model,
        text,
        "--out",
        out,
        *LOOP,
        "-l",
        16,
        "--rank",
        4,
        "--targets",
        "q_proj,mlp.up_proj",
        "--merge",
    ]
    ran = run(*command, "--json", tmp_path / "figures.json")
    assert ran.status == 0, ran.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["held_out_loss_nats_per_token"] < figures["base_held_out_loss_nats_per_token"]
    fields = json.loads((out / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["target_modules"]) == (4, 32, ["mlp.up_proj", "self_attn.q_proj"])
    prompts = ["t1 t2 t3", "t9"]
    sampling = tw.Sampling(8)
    lm = tw.load(model, lora={"mine": out})
    base, ours = (lm.generate(prompts, sampling, lora=[name] * 2) for name in (None, "mine"))
    merged = tw.load(out / "merged").generate(prompts, sampling)
    assert [each.tokens for each in ours] == [each.tokens for each in merged] != [each.tokens for each in base]

    ran = run(*command)
    assert ran.status == 0, "a finished run resumes, and writes the same again"
    rmtree(out / "training")
    assert "a checkpoint to resume, found a model" in " ".join(run(*command).err.split())


def test_a_streamed_run_resumes_where_it_was_interrupted(
    run: Command, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def command(name: str) -> list[object]:
        stream = ["--text", "stream=true,packing=best-fit,shuffle=4", "--save", "every=2"]
        return ["train", "lora", model, text, "--out", tmp_path / name, *LOOP, "-l", 48, *stream]

    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        assert run(*command("parts")).status != 0
    ran = run(*command("parts"), "--json", tmp_path / "figures.json")
    assert ran.status == 0, ran.err
    assert "resuming adapter at step 4 of 6" in ran.out
    assert run(*command("whole")).status == 0
    parts, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("parts", "whole"))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name], tensor)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tokens_read"] == 2 * 2 * 49
    assert figures["held_out_loss_nats_per_token"] < figures["base_held_out_loss_nats_per_token"]


def test_a_trained_adapter_is_served_over_http(run: Command, model: Path, text: Path, tmp_path: Path):
    """`tilewright serve --lora` gives the tokens of `generate` with the adapter, beside those of the base model."""
    ran = run("train", "lora", model, text, "--out", tmp_path / "adapter", *LOOP, "-l", 16)
    assert ran.status == 0, ran.err
    (tmp_path / "shapes.json").write_text(json.dumps({"batches": [1, 2], "capacities": [64], "chunks": [16], "widths": []}))
    shapes = f"shapes={tmp_path / 'shapes.json'}"
    prompt = "t1 t2 t3"
    lm = tw.load(model, lora={"mine": tmp_path / "adapter"}, dtype="float32")
    expected = {
        name: lm.generate([prompt], tw.Sampling(8), lora=[lora])[0] for name, lora in (("base", None), ("mine", "mine"))
    }
    assert expected["base"].tokens != expected["mine"].tokens
    lora = ["--lora", f"mine={tmp_path / 'adapter'}", "--api", "name=base", "--dtype", "float32"]
    with process(model, "--drafter", "none", *lora, "--compile", shapes) as server:
        server.wait_until_ready()
        for name, result in expected.items():
            body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            answer = server.post(body)
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == result.tokens


@pytest.mark.slow
def test_two_processes_train_over_a_mesh_as_one_does(run: Command, model: Path, text: Path, tmp_path: Path):
    def command(name: str) -> list[object]:
        return ["train", "lora", model, text, "--out", tmp_path / name, *LOOP, "-l", 16, "--json", tmp_path / f"{name}.json"]

    ran = run(*command("alone"))
    assert ran.status == 0, ran.err
    together = run_together(*command("together"), "--mesh", "fsdp=2,tp=2", "--merge")
    assert together.returncode == 0, together.stderr
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "together"))
    for name in ("held_out_loss_nats_per_token", "base_held_out_loss_nats_per_token"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)
    ours, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("together", "alone"))
    assert ours.keys() == wanted.keys()
    assert (tmp_path / "together" / "merged" / "model.safetensors.index.json").exists()  # each process writes a part


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            ["--targets", "c_attn"],
            "expected target modules among down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        (["--rank", 0], "expected a rank of at least 1, found 0"),
        (["--mesh", "fsdp=2", "--weights", "int8"], "expected one device for --weights int8, found --mesh fsdp=2"),
        (["-l", 65], "expected sequences of at most the model's context of 64 tokens, found 65"),
    ],
)
def test_what_does_not_fit_is_refused(run: Command, model: Path, text: Path, tmp_path: Path, more: list[Any], expected: str):
    ran = run("train", "lora", model, text, "--out", tmp_path / "out", *LOOP, *more)
    assert ran.status == 2
    assert expected in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()
