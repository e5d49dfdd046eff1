"""`tilewright train lm --text stream=true`: data that are read while the model trains."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tilewright as tw
from cli.conftest import Run as Command
from cli.conftest import interrupt_at
from parallel.commands import run_together
from parallel.processes import free_port

SIZES = ["--sizes", "vocab_size=270,hidden_size=32,layers=1,heads=2,kv_heads=1,head_dim=16,intermediate_size=48,context=96"]
LOOP = {"batch-size": 4, "sequence-length": 24, "held-out": 0.2, "evaluate-every": 4, "save": "every=2", "steps": 8}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as data sets lie on disk: Parquet with a description, compressed JSON lines, and text."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("text")
    said = [{"text": f"one two three {n} " * (n % 5 + 1)} for n in range(60)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(said), folder / "a.parquet", row_group_size=20)
    (folder / "README.md").write_text("# not a text to train on")
    lines = [json.dumps({"prompt": "one ", "response": "two three " * 5}) + "\n"] * 30
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "c.txt").write_text("four five six seven " * 20)
    return folder


def command(data: Path, out: Path, **changes: object) -> list[object]:
    options = {**LOOP, **{name.replace("_", "-"): value for name, value in changes.items()}}
    named = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["train", "lm", data, "--out", out, *SIZES, *named]


def test_a_streamed_run_resumes_where_it_was_interrupted(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = "stream=true,packing=best-fit,shuffle=32,shards=2"
    words = command(text, tmp_path / "parts", text=settings)
    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        assert run(*words).status != 0
    other = run(*command(text, tmp_path / "parts", text="stream=true,shuffle=32"))
    assert other.status == 2
    assert "stream.packing: checkpoint 'best-fit', now 'concatenate'; stream.shards: checkpoint 2, now 1" in other.err
    ran = run(*words, "--json", tmp_path / "figures.json")
    assert ran.status == 0, ran.err
    assert "resuming language model at step 4 of 8" in ran.out
    assert "streaming 3 files of" in ran.out
    assert run(*command(text, tmp_path / "whole", text=settings)).status == 0
    parts, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name], tensor)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tokens_read"] == 4 * 4 * 25
    assert 0 < figures["padding_share"] < 0.5
    assert "% padding" in ran.out
    assert len(tw.load(tmp_path / "parts").generate("one two", tw.Sampling(4, ignore_eos=True))[0].tokens) == 4


def test_held_out_documents_may_be_a_file(run: Command, text: Path, tmp_path: Path):
    """With and without a stream, whose held-out losses are the same for the same documents, but for how they are cut."""
    losses = []
    for stream in ("false", "true"):
        settings = {"held_out": text / "c.txt", "text": f"stream={stream}", "learning_rate": 1e-9, "steps": 1}
        ran = run(*command(text, tmp_path / stream, **settings), "--json", "-")
        assert ran.status == 0, ran.err
        losses.append(ran.json["held_out_loss_nats_per_token"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": "packing=best-fit,shards=2"}, "expected --text stream=true with shards, packing, found none"),
        ({"text": "stream=true,shards=3"}, "expected shards that divide the batch size 4, found 3"),
        (
            {"text": "stream=true,packing=worst-fit"},
            "expected packing=concatenate|first-fit|best-fit, found packing=worst-fit",
        ),
        ({"text": "stream=true", "held_out": 1.5}, "expected a held-out share between 0 and 1, found 1.5"),
        ({"text": "stream=true", "held_out": "absent.txt"}, "absent.txt: no such file or folder"),
    ],
)
def test_settings_that_do_not_fit_are_refused(run: Command, text: Path, tmp_path: Path, changes: dict[str, Any], problem: str):
    ran = run(*command(text, tmp_path / "out", **changes))
    assert ran.status == 2
    assert problem in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow(25)
def test_two_processes_read_their_parts_and_one_goes_on(run: Command, text: Path, tmp_path: Path):
    """With shards of their own they train what one process trains, which goes on with their checkpoint, too."""
    options = {"text": "stream=true,shuffle=32,shards=2", "optimizer": "schedule=wsd,cooldown=0", "matmul_dtype": "float32"}
    first = {**options, "text": "stream=true,shuffle=32", "steps": 4, "mesh": "fsdp=4"}
    two = run_together(*command(text, tmp_path / "two", **first))
    assert two.returncode == 0, two.stderr
    assert run(*command(text, tmp_path / "two", **options)).status == 0
    assert run(*command(text, tmp_path / "one", **options)).status == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-3 * np.abs(tensor).max())


PAGE = Path(__file__).parents[2] / "docs" / "first-model.md"


@pytest.mark.slow(60)
@pytest.mark.skipif(which("curl") is None or which("bash") is None, reason="no curl or no bash")
def test_the_commands_of_the_page_about_a_first_model_run(tmp_path: Path):
    """All of them in a shell, in order, where `docs` lies; only the port is a free one."""
    (tmp_path / "docs").symlink_to(PAGE.parent, target_is_directory=True)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    tool = f'set -em\ntilewright() {{ "{sys.executable}" -m tilewright "$@"; }}\n'
    script = tool + "\n".join(blocks).replace("8000", str(free_port()))
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1] / "src"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "of which" in ran.stdout
    assert "resuming language model at step 60 of 80" in ran.stdout
    answer = json.loads(ran.stdout[ran.stdout.index('{"id"') :].splitlines()[0])
    assert answer["choices"][0]["text"]
