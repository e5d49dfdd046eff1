"""`tilewright bench diffusion`: which prompts it asks, what it writes, and what it refuses."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from reference.diffusion_folder import write_folder
from report.reading import Page, check_self_contained
from tilewright.llm.diffusion_model import DiffusionModel

SMALL = ["--new-tokens", 8, "--denoising", "block_length=4", "--problems", 2, "--timed", 1, "--repetitions", 1]
PROMISED = set(
    "name mode threshold tau accuracy token_agreement argmax_agreement logit_kl_nats logit_kl_nats_by_step "
    "salient_share_by_layer salient_share_by_step_and_layer tokens_per_s tokens_per_forward seconds_per_step speedup "
    "compilations peak_bytes host_synchronisations_per_step compilations_while_timed".split()
)
"""The fields that a row of `--json` always has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("t1 t2 t3", "t9", "t4 t4")))
    return path


@pytest.mark.slow
def test_every_mode_gets_its_figures(run: Run, folder: Path, prompts: Path, tmp_path: Path):
    files = ["--csv", tmp_path / "figures.csv", "--html", tmp_path / "page.html", "--json", tmp_path / "figures.json"]
    ways = ["--modes", "dense", "sparse", "--tau", 0.99, 0.9, "--denoising", "block_length=4,full_steps=8", "--beside", 1]
    ran = run("bench", "diffusion", "--model", folder, "--prompt-file", prompts, *SMALL[:2], *SMALL[4:], *ways, *files)
    assert ran.status == 0, ran.err
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = ["dense", "sparse τ0.99", "sparse τ0.9"]
    assert [row["name"] for row in figures["data"]] == names
    assert all(set(row) >= PROMISED for row in figures["data"])
    assert [row["responses"] for row in figures["data"]] == [2] * 3
    assert (figures["task"], figures["new_tokens"], figures["block_length"], figures["full_steps"]) == ("prompts", 8, 4, 8)
    assert all(row["accuracy"] is None for row in figures["data"])
    assert figures["data"][1]["compared_positions"] == 2 * (4 + 3 + 2 + 1)
    assert all(name in ran.out for name in [*names, "denoising side by side", "programs"])
    assert [line["name"] for line in csv.DictReader((tmp_path / "figures.csv").read_text().splitlines())] == names
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert "2 prompts, responses of 8 tokens in blocks of 4." in page.text


def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the benchmark asks a model to encode; nothing runs."""
    found: list[Any] = []

    def noted(self: DiffusionModel, prompt: Any) -> list[int]:
        found.append(prompt)
        raise ValueError("enough")

    monkeypatch.setattr(DiffusionModel, "encode", noted)
    return found


def test_a_card_names_the_task(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encoded = seen(monkeypatch)
    folder = write_folder(tmp_path / "model")
    (folder / "README.md").write_text("---\ntask: arithmetic\n---\nA model.\n")
    run("bench", "diffusion", "--model", folder, *SMALL)
    assert encoded[0].startswith("a=")
    (folder / "README.md").unlink()
    run("bench", "diffusion", "--model", folder, "--task", "arithmetic", *SMALL)
    assert encoded[1] == encoded[0], "the same held-out problems"
    (folder / "chat_template.jinja").write_text("t9 {{ messages[0]['content'] }} t8")
    ran = run("bench", "diffusion", "--model", folder, "--task", "arithmetic", "--chat", *SMALL)
    assert (ran.status, len(encoded)) == (2, 2)
    assert "expected --prompt-file with --chat: arithmetic problems have no chat template" in ran.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected --prompt-file, or --task arithmetic for problems with checked answers"),
        (["--task", "prompts"], "expected --prompt-file, or --task arithmetic"),
        (
            ["--task", "arithmetic", "--new-tokens", 10],
            "expected new_tokens that are a multiple of the block_length 4, found 10",
        ),
        (
            ["--task", "arithmetic", "--denoising", "block_length=4,steps=3"],
            "expected steps that are a multiple of the 2 blocks, found 3",
        ),
        (["--task", "arithmetic", "--threshold", 2], "expected a threshold above 0, up to 1, found 2"),
        (["--task", "arithmetic", "--tau", 3], "expected a saliency threshold above 0, up to 2, found 3"),
        (["--task", "arithmetic", "--tau", 0.9, 0.9], "expected different tau, found 0.9, 0.9"),
        (
            ["--task", "arithmetic", "--modes", "dual", "--denoising", "every=3"],
            "expected --modes sparse with every, found dual",
        ),
        (["--task", "arithmetic", "--modes", "dense", "dense"], "expected different modes, found dense, dense"),
        (["--task", "arithmetic", "--denoising", "mode=dual"], "--denoising: expected --modes, which takes several values"),
        (["--task", "arithmetic", "--modes", "fast"], "fast"),
        (["--task", "arithmetic", "--problems", 0], "expected problems of at least 1, found 0"),
        (["--task", "arithmetic", "--beside", -1], "expected beside of at least 0, found -1"),
        (["--task", "arithmetic", "--new-tokens", 4096], "leaves room for"),
        (["--task", "arithmetic", "--prompt-file", "x.jsonl"], "expected --task arithmetic, which has its own problems, or"),
        (["--prompt-file", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--task", "arithmetic", "--html", "absent/page.html"], "--html absent/page.html: its folder does not exist"),
        (["--task", "arithmetic", "--chat"], "--chat needs a model with a chat template"),
    ],
)
def test_what_is_refused(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, problem: str):
    monkeypatch.chdir(tmp_path)
    given = set(arguments[::2]) | set(arguments)
    default = [part for n in range(0, len(SMALL), 2) if SMALL[n] not in given for part in SMALL[n : n + 2]]
    default += ["--kernels", "xla"]  # with others a line says why heads of 8 do without them
    ran = run("bench", "diffusion", *arguments, "--model", folder, *default)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert not list(tmp_path.iterdir())
