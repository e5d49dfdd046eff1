"""`tilewright bench speculative` on small files: what it prints, and what it writes."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from report.reading import Page, check_self_contained
from tilewright.cli.bench_speculative import DrafterArguments
from tilewright.cli.common import TargetOptions

SETS = {"first": ["t1 t2", "t3", "t4 t5 t6", "t9"], "[second]": ["t7 t8"]}


def write_data(folder: Path, sets: dict[str, list[str]]) -> list[object]:
    """Options that name a file for each set."""
    for name, prompts in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return ["--data", *(folder / f"{name}.jsonl" for name in sets)]


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    """Options that name two files of prompts, of which three and one are taken."""
    return [*write_data(tmp_path, SETS), "--samples", 3, "--max-new-tokens", 8, "--repetitions", 1]


@pytest.mark.parametrize(("model", "names"), [("demo", ("dflash",)), ("smollm2-135m", ("auto",)), ("a/folder", ("ngram",))])
def test_each_model_has_drafters_by_default(model: str, names: tuple[str, ...]):
    assert DrafterArguments().names(model) == names


def test_blocks_are_chosen_round_by_round_unless_a_size_is_named():
    assert DrafterArguments().options.block_size == "auto"
    assert DrafterArguments(block_size=8).options.block_size == 8
    assert DrafterArguments(block_size="trained").options.block_size is None, "each drafter's own"


def test_table_and_files_hold_the_same_figures(run: Run, folders: tuple[Path, Path], data: list[Any], tmp_path: Path):
    ways = ["--model", folders[0], "--drafter", folders[1], "ngram", "none", "--block-size", 4]
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html", "replay")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    ran = run("bench", "speculative", *ways, *data, *options, "--price-per-hour", 2)
    assert ran.status == 0, ran.err
    assert not list(tmp_path.glob("*.partial"))
    written = json.loads(files["json"].read_text())
    described = [written[name] for name in ("dtype", "max_new_tokens", "temperature", "batch_size", "chat_template")]
    assert described == ["float32", 8, 0.0, [1], False]
    drafters = ["none", "drafter", "ngram", "none, block 4"]
    assert [(row["dataset"], row["drafter"]) for row in written["data"]] == [(name, way) for name in SETS for way in drafters]
    for row in written["data"]:
        check_row(row, {"first": 3, "[second]": 1}[row["dataset"]])
    for shown in (*SETS, *drafters[1:], "temperature 0, top-p 1, 8 new tokens, batch 1", "mean", "cost/M", "3/3", "1/1"):
        assert shown in ran.out
    in_csv = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [float(row["tokens_per_s"]) for row in in_csv] == [row["tokens_per_s"] for row in written["data"]]
    report = Page(files["html"])
    replay = Page(files["replay"])
    check_self_contained(report)
    assert report.data()["records"] == written["data"]
    assert [passage["title"] for passage in replay.data()["passages"]] == ["first 1", "first 2", "first 3", "[second] 1"]


def check_row(row: dict[str, Any], prompts: int) -> None:
    """What must hold of every row of figures of a greedy run in float32, 8 tokens for each prompt."""
    assert (row["responses"], row["tokens"], row["skipped"]) == (prompts, 8 * prompts, 0)
    assert row["round_cost_steps"] > 0
    assert row["tau_published"] >= 1
    assert row["tokens_per_round"] == row["tokens"] / row["rounds"]
    assert row["cost_per_million_tokens"] == pytest.approx(2 / 3600 / row["tokens_per_s"] * 1e6)
    if row["drafter"] == "none":
        assert (row["speedup"], row["round_ms"], row["speculative_decoding"]) == (1, None, None)
        return
    assert row["identical"] is True
    assert row["first_differences"] == [None] * prompts
    assert row["block_size"] == 4
    assert row["speedup"] == row["tokens_per_s"] / row["baseline_tokens_per_s"]
    assert sum(row[f"{part}_ms"] for part in ("draft", "verify", "other")) == pytest.approx(row["round_ms"])
    assert row["round_ms"] > 0
    vllm = row["speculative_decoding"]
    assert vllm["num_spec_steps"] == sum(vllm["acceptance_histogram"])
    assert math.isclose(vllm["mean_acceptance_length"], 1 + sum(p["rate"] or 0 for p in row["acceptance_by_position"]))
    if row["drafter"] == "drafter":
        assert vllm["num_spec_steps"] == row["rounds"]
        assert math.isclose(vllm["mean_acceptance_length"], 1 + vllm["num_accepted_draft_tokens"] / row["rounds"])
    if row["drafter"] == "none, block 4":
        assert (row["tokens_per_round"], row["rounds"], vllm["num_spec_steps"]) == (1, 8 * prompts, 0)


@pytest.mark.slow
def test_rows_may_be_decoded_together(run: Run, pair: list[Any], data: list[Any]):
    ways = [*pair, *data, "--block-size", 4]  # rounds of one kind: chosen ones follow what they took by the clock
    alone = run("bench", "speculative", *ways, "--json", "-").json["data"]
    ran = run("bench", "speculative", *ways, "--batch-size", 4, 1, "--json", "-")
    assert ran.json["batch_size"] == [4, 1]
    assert "first, batch 4" in ran.err
    together = [row for row in ran.json["data"] if row["batch_size"] == 4]
    assert len(ran.json["data"]) == 2 * len(together)
    for one, both in zip(alone, together, strict=True):
        assert both["tokens_per_round"] == one["tokens_per_round"]
        assert both["rounds"] == one["rounds"], "a round of a batch counts for each row that it serves"
        assert both["speculative_decoding"] == one["speculative_decoding"]


def test_what_does_not_fit_the_context_is_counted(run: Run, pair: list[Any], tmp_path: Path):
    options = write_data(tmp_path, {"[long]": ["t1", "t2 " * 121, "t3 " * 120]})
    ran = run("bench", "speculative", *pair, *options, "--max-new-tokens", 8, "--repetitions", 1, "--json", "-")
    assert [(row["responses"], row["skipped"]) for row in ran.json["data"]] == [(2, 1)] * 2
    assert "[long]: 1 of 3 turns do not fit the model's context and were left out" in ran.err


def test_the_models_chat_template_is_applied(run: Run, folders: tuple[Path, Path], tmp_path: Path):
    """A template that says a prompt twice makes one too long that fits by itself."""
    template = folders[0] / "chat_template.jinja"
    options = write_data(tmp_path, {"chat": ["t1", "t2 " * 70]})
    template.write_text("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}")
    try:
        ran = run(
            "bench",
            "speculative",
            "--model",
            folders[0],
            "--drafter",
            "ngram",
            *options,
            "--max-new-tokens",
            8,
            "--repetitions",
            1,
            "--json",
            "-",
        )
        assert ran.json["chat_template"] is True
        assert [row["skipped"] for row in ran.json["data"]] == [1, 1]
        template.write_text("{% for")
        broken = run("bench", "speculative", "--model", folders[0], "--drafter", "ngram", *options)
        assert broken.status == 2
        assert "the chat template does not compile" in broken.err
    finally:
        template.unlink()


def test_drafters_of_one_name_are_told_apart(run: Run, folders: tuple[Path, Path], data: list[Any], tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "drafter").symlink_to(folders[1])
    both = [folders[1], tmp_path / "other" / "drafter"]
    ran = run("bench", "speculative", "--model", folders[0], "--drafter", *both, *data, "--json", "-")
    assert [row["drafter"] for row in ran.json["data"]] == ["none", *map(str, both)] * 2


def test_several_drafters_to_choose_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = TargetOptions(model="smollm2-135m")
    assert options.drafter_source("ngram,./mine") == ["ngram", "./mine"]
    assert options.drafter_source("auto,./mine") == ["ngram", "smollm2-dflash2", "./mine"]
    (tmp_path / "a,b").mkdir()
    assert options.drafter_source("a,b") == "a,b"
    for names, problem in (
        ("none,ngram", "expected names of drafters, found none among them: none,ngram"),
        ("auto,dflash2", "expected different drafters, found ngram, smollm2-dflash2, smollm2-dflash2"),
        ("ngram,eagle3", "found eagle3, which belongs to demo"),
    ):
        with pytest.raises(ValueError, match=problem):
            options.drafter_source(names)


def test_a_folder_with_the_name_of_a_packaged_drafter_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    options = TargetOptions(model="smollm2-135m")
    assert options.drafter_source("dflash2") == "smollm2-dflash2"
    assert not capsys.readouterr().err
    (tmp_path / "dflash2").mkdir()
    assert options.drafter_source("dflash2") == "smollm2-dflash2"
    message = "--drafter dflash2 is the packaged drafter of smollm2-135m; --drafter ./dflash2 is the folder"
    assert message in capsys.readouterr().err
    assert options.drafter_source("./dflash2") == "./dflash2"
    assert not capsys.readouterr().err
