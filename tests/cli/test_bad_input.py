"""What a user gets wrong: one line on standard error, exit status 2, and nothing written."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Ran, Run

Change = Callable[[Path, Path], None]
"""`change(target, drafter)` spoils a copy of the two folders."""


def check_refused(ran: Ran, problem: str, folder: Path) -> None:
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.startswith("tilewright: ")
    assert ran.err.endswith("\n")
    assert ran.err.count("\n") == 1, "one line"
    assert ran.out == ""
    assert not list(folder.iterdir()), "nothing is written"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which the command runs in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([""], "prompt 1 is empty"),
        (["t1", ""], "prompt 2 is empty"),
        (["  "], "expected a prompt of at least one token, found an empty one"),
        (["t1 " * 128], "expected a prompt shorter than the model's context of 128 tokens, found 128"),
        (["t1 " * 100], "a prompt of 100 tokens leaves room for 28 in the model's context of 128; max_new_tokens is 40"),
        (["t1", "--max-new-tokens", "0"], "expected max_new_tokens of at least 1, found 0"),
        (["t1", "--block-size", "1"], "expected a block size from 2 to the drafter's 4, found 1"),
        (["t1", "--block-size", "5"], "expected a block size from 2 to the drafter's 4, found 5"),
        (["t1", "--block-size", "wide"], "wide"),
        (["t1", "--drafter", "none", "--block-size", "auto"], "a block size of auto needs a drafter; no drafter was named"),
        (
            ["t1", "--drafter", "auto", "--drafting", "window=4"],
            "a draft window needs a drafter with weights; n-gram drafting has no",
        ),
        (["t1", "--drafting", "window=0"], "expected a draft window of at least 1, found 0"),
        (["t1", "--temperature", "-0.5"], "expected a temperature of 0, or from 1e-06 to 1e+06, found -0.5"),
        (["t1", "--temperature", "nan"], "expected a temperature of 0, or from 1e-06 to 1e+06, found nan"),
        (["t1", "--top-p", "-0.5"], "expected top_p from 0 to 1, found -0.5"),
        (["t1", "--top-p", "1.5"], "expected top_p from 0 to 1, found 1.5"),
        (["t1", "--top-k", "-1"], "expected top_k from 0 to 2**31 - 1, found -1"),
        (["t1", "--seed", str(2**63)], "expected a seed that is an integer from -2**63 to 2**63 - 1, found 9223"),
        (["t1", "--dtype", "float16"], "expected dtype to be one of auto, float32, bfloat16, found 'float16'"),
        (["t1", "--schedule", "ring"], "--schedule needs --tensor-parallel: one device has no partial results to sum"),
        (
            ["t1", "--tensor-parallel", "2", "--schedule", "star"],
            "expected a schedule among sync, sequence, ring, domino, column, exact, auto, found 'star'",
        ),
        (["t1", "--tensor-parallel", "0"], "--tensor-parallel 0: expected a size of 1 or more"),
        (
            ["t1", "--tensor-parallel", "9"],
            "from 1 to 8 devices, all that are available, found 9; XLA_FLAGS=--xla_force_host",
        ),
        (["t1", "--tensor-parallel", "3"], "expected devices that divide 4 heads"),
        (["t1", "--sampling", "min_p=2"], "expected min_p from 0 to 1, found 2"),
        (["t1", "--sampling", "logit_bias=4"], "--sampling: expected logit_bias=TOKEN:BIAS,..., found '4'"),
        (["t1", "--denoising", "mode=sparse"], "--denoising is for diffusion models; this one decodes token by token"),
        (["t1", "--drafter", "none", "--compare"], "--compare needs a drafter"),
        (["t1", "--drafter", "none", "--block-size", "1"], "expected a block size of at least 2, found 1"),
        (
            ["t1", "--drafter", "none", "--drafting", "window=4"],
            "a draft window needs a drafter with weights; no drafter was named",
        ),
        (["t1", "--drafter", "none", "--replay", "page.html"], "--replay needs a drafter"),
        (["t1", "--replay", "absent/page.html"], "--replay absent/page.html: its folder does not exist"),
        (["t1", "--chat"], "--chat needs a model with a chat template; "),
        (["t1", "--json", "absent/figures.json"], "--json absent/figures.json: its folder does not exist"),
        (["t1", "--json", "."], "--json .: expected a file, found a folder"),
        (["t1", "--json", "--compare"], "--json --compare: expected a file"),
        (["t1", "--nope"], "Unknown option: --nope. "),
        (["t1", "--max-tokens", "5"], "Unknown option: --max-tokens. Did you mean --max-new-tokens? (Pass a prompt"),
        (["t1", "--tempature=1"], "Unknown option: --tempature=1. Did you mean --temperature? (Pass a prompt"),
        (["t1", "--json", "same", "--replay", "./same"], "expected different files, found same for --replay and --json"),
        (
            ["t1", "--drafter", "demo-diffusion"],
            "expected a drafter; demo-diffusion is a diffusion language model: run it with `tilewright",
        ),
        (["t1", "--drafter", "demo"], "expected a drafter; demo is an autoregressive language model: run it with `tilewright"),
        (["t1", "--max-new-tokens", "many"], "many"),
        (["--prompt-file", "absent.jsonl"], "absent.jsonl cannot be read: No such file or directory"),
        ([], "expected a prompt as an argument, in --prompt-file, or on standard input; found none"),
    ],
)
def test_arguments(run: Run, pair: list[Any], empty: Path, arguments: list[str], problem: str):
    options = [] if "--max-new-tokens" in arguments else ["--max-new-tokens", "40"]
    models = pair[:2] if "--drafter" in arguments else pair
    json_file = [] if "--json" in arguments else ["--json", "figures.json"]
    check_refused(run("generate", *arguments, *models, *options, *json_file), problem, empty)


@pytest.mark.parametrize("stdin", ["", None])
def test_no_prompt_on_standard_input(run: Run, pair: list[Any], empty: Path, stdin: str | None):
    check_refused(run("generate", *pair, stdin=stdin), "expected a prompt", empty)
    check_refused(run("generate", "-", *pair, stdin=""), "prompt 1 is empty", empty)


@pytest.mark.parametrize("dash", [[], ["-"]], ids=["piped", "dash"])
def test_what_is_not_utf8(run: Run, pair: list[Any], empty: Path, dash: list[str]):
    ran = run("generate", *dash, *pair, stdin=b"t1 \xff\xfe")
    check_refused(ran, "standard input is not UTF-8: byte 0xff at 3", empty)
    check_refused(run("generate", "t1", b"t1 \xff".decode(errors="surrogateescape"), *pair), "prompt 2 is not UTF-8", empty)


def test_a_models_texts_that_are_not_utf8(run: Run, folders: tuple[Path, Path], empty: Path):
    target = Path(shutil.copytree(folders[0], empty.parent / "target"))
    (target / "chat_template.jinja").write_bytes(b"\xff")
    check_refused(run("generate", "t1", "--chat", "--model", target), "chat_template.jinja: not UTF-8 text", empty)
    (target / "chat_template.jinja").unlink()
    (target / "config.json").write_bytes(b'{"\xff": 1}')
    check_refused(run("generate", "t1", "--model", target), "config.json is not JSON", empty)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"prompt": "t1"}\n{"prompt": \n', "prompts.jsonl:2: not JSON"),
        ('{"prompt": "t1"}\n{"name": "t1"}\n', "prompts.jsonl:2: expected a prompt record like the first one, with 'prompt'"),
        ('{"name": "t1"}\n', "prompts.jsonl:1: unknown dataset layout"),
        ('{"prompt": ""}\n', "prompts.jsonl:1: expected a text in 'prompt', found ''"),
        ("\n", "prompts.jsonl: expected at least one record, found an empty file"),
        ('{"prompt": "\udcff"}\n', "prompts.jsonl:1: not UTF-8"),
    ],
)
def test_prompt_files(run: Run, pair: list[Any], empty: Path, content: str, problem: str):
    path = empty.parent / "prompts.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    check_refused(run("generate", "--prompt-file", path, *pair), problem, empty)


def change_config(which: str, **fields: Any) -> Change:
    def change(target: Path, drafter: Path) -> None:
        path = (target if which == "target" else drafter) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def truncate(which: str) -> Change:
    def change(target: Path, drafter: Path) -> None:
        path = (target if which == "target" else drafter) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    return change


def remove(name: str) -> Change:
    def change(target: Path, drafter: Path) -> None:
        (target / name).unlink()

    return change


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (change_config("drafter", vocab_size=41), ["the drafter does not fit the target", "vocab_size is 41", "is 40"]),
        (change_config("drafter", hidden_size=64), ["the drafter does not fit the target", "hidden_size is 64", "is 32"]),
        (change_config("drafter", num_target_layers=3), ["num_target_layers is 3 but the target's is 2"]),
        (
            change_config("drafter", dflash_config={"mask_token_id": 40, "target_layer_ids": [0, 2]}),
            ["target_layer_ids [2] lie outside the target's 2 layers", "mask_token_id 40 lies outside"],
        ),
        (truncate("target"), ["target/model.safetensors is not a readable safetensors file"]),
        (truncate("drafter"), ["drafter/model.safetensors is not a readable safetensors file"]),
        (remove("tokenizer.json"), ["has no tokenizer: expected tokenizer.json"]),
        (remove("config.json"), ["is not a checkpoint: it has no config.json"]),
        (remove("model.safetensors"), ["expected model.safetensors"]),
        (change_config("target", model_type="gpt2"), ["model_type must be one of qwen3,", "found 'gpt2'; the nearest family"]),
        (change_config("drafter", model_type="llama"), ["drafter/config.json", "model_type='llama' is not supported"]),
    ],
)
def test_models(run: Run, folders: tuple[Path, Path], empty: Path, change: Change, problems: Sequence[str]):
    target, drafter = (Path(shutil.copytree(folder, empty.parent / folder.name)) for folder in folders)
    change(target, drafter)
    ran = run("generate", "t1", "--model", target, "--drafter", drafter, "--max-new-tokens", 8, "--json", "figures.json")
    for problem in problems:
        check_refused(ran, problem, empty)


def test_a_model_that_is_nowhere(run: Run, empty: Path):
    check_refused(run("generate", "t1", "--model", "no/such/folder"), "no/such/folder", empty)


@pytest.mark.parametrize(
    "command",
    ["lm no.txt", "drafter no.txt --target no", "diffusion no.txt", "gnn --data no.npz"],
)
def test_training_into_a_place_that_is_taken(run: Run, empty: Path, command: str):
    """All of this is refused before anything is read."""
    for name in ("config.json", "model.safetensors"):
        (empty.parent / name).write_text("another model's")
        ran = run("train", *command.split(), "--out", "..")
        problem = "expected --out without a model, or with a checkpoint to resume, found a model in ..; name another folder"
        check_refused(ran, problem, empty)
        assert (empty.parent / name).read_text() == "another model's"
        (empty.parent / name).rename(empty.parent / "outfile")
        for out in ("../outfile", "../outfile/model"):
            check_refused(
                run("train", *command.split(), "--out", out), "--out ../outfile: expected a folder, found a file", empty
            )


def test_unknown_commands(run: Run, empty: Path):
    check_refused(run("generat"), "generat", empty)
    check_refused(run("train", "nothing"), "nothing", empty)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--samples", "0"], "expected samples of at least 1, found 0"),
        (["--batch-size", "0"], "expected batch_size of at least 1, found 0"),
        (["--repetitions", "0"], "expected repetitions of at least 1, found 0"),
        (["--top-p", "2"], "expected top_p from 0 to 1, found 2"),
        (["--price-per-hour", "0"], "expected a price per hour above 0, found 0.0"),
        (["--price-per-hour", "inf"], "expected a price per hour above 0, found inf"),
        (["--csv", "absent/figures.csv"], "--csv absent/figures.csv: its folder does not exist"),
        (["--html", "absent/page.html"], "--html absent/page.html: its folder does not exist"),
        (["--html", "."], "--html .: expected a file, found a folder"),
        (["--replay", "absent/page.html"], "--replay absent/page.html: its folder does not exist"),
        (["--drafter", "none"], "expected a drafter, or a block size for plain decoding in blocks; found neither"),
        (["--drafter", "ngram", "ngram"], "expected different drafters, found ngram, ngram"),
        (["--drafter", "dflash"], "found dflash, which belongs to demo"),
        (["--drafter", "ngram", "none", "--drafting", "window=8"], "a draft window needs a drafter with weights"),
        (["--drafter", "ngram", "--drafting", "dtype=bfloat16"], "a drafter dtype needs a drafter with weights"),
        (["--drafter", "ngram", "--drafting", "suffix_corpus=a.txt"], "a corpus needs the drafter suffix or auto, found ngram"),
        (["--drafter", "ngram", "--refine", "1"], "refining needs a DFlash drafter"),
        (["--data", "absent.jsonl"], "absent.jsonl cannot be read: No such file or directory"),
        (["--data", "."], ". cannot be read: Is a directory"),
        (["--data", "../empty.jsonl"], "empty.jsonl: expected at least one record, found an empty file"),
        (["--data", "../layout.jsonl"], "layout.jsonl:1: unknown dataset layout: expected the fields of one of (gsm8k:"),
        (["--data", "../hole.jsonl"], "hole.jsonl:3: expected a text in 'prompt', found None"),
        (["--data", "../other/prompts.jsonl"], "expected data files of different names, found prompts.jsonl, prompts.jsonl"),
    ],
)
def test_benchmark(
    run: Run, folders: tuple[Path, Path], empty: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
):
    """All of this is refused before the model is loaded."""
    (empty.parent / "other").mkdir()
    records = {
        "prompts": '{"prompt": "t1"}\n',
        "empty": "\n",
        "layout": '{"name": "t1"}\n',
        "other/prompts": '{"prompt": "t1"}\n',
    }
    records["hole"] = '{"prompt": "t1"}\n\n{"prompt": null}\n'
    for name, text in records.items():
        (empty.parent / f"{name}.jsonl").write_text(text)
    monkeypatch.setattr("tilewright.cli.common.load", None)
    drafter = [] if "--drafter" in arguments else ["--drafter", folders[1]]
    options = ["--model", folders[0], *drafter, "--data", "../prompts.jsonl"]
    check_refused(run("bench", "speculative", *options, *arguments, "--json", "figures.json"), problem, empty)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["ngram", "DRAFTER", "--block-size", "5"], "expected a block size from 2 to the drafter's 4, found 5"),
        (["ngram", "OTHER"], "the drafter does not fit the target"),
        (["ngram", "--max-new-tokens", "128"], "prompts: no prompt fits the model's context with 128 new tokens"),
    ],
)
def test_benchmark_of_what_does_not_fit(run: Run, folders: tuple[Path, Path], empty: Path, arguments: list[str], problem: str):
    other = Path(shutil.copytree(folders[1], empty.parent / "other"))
    change_config("drafter", vocab_size=41)(folders[0], other)
    (empty.parent / "prompts.jsonl").write_text('{"prompt": "t1"}\n')
    places = {"DRAFTER": folders[1], "OTHER": other}
    options = ["--model", folders[0], "--data", "../prompts.jsonl", "--json", "figures.json", "--drafter"]
    check_refused(run("bench", "speculative", *options, *(places.get(a, a) for a in arguments)), problem, empty)


def test_a_page_that_fails_is_not_there(run: Run, pair: list[Any], empty: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither half of it, nor the file that it would have replaced by less."""

    def fail(path: Path, page: object) -> None:
        path.write_text("half")
        raise ValueError("no page")

    monkeypatch.setattr("tilewright.cli.outputs.write_replay", fail)
    Path("page.html").write_text("before")
    ran = run("generate", "t1", *pair, "--max-new-tokens", 4, "--replay", "page.html")
    assert (ran.status, ran.err.splitlines()[-1]) == (2, "tilewright: no page")
    assert [(path.name, path.read_text()) for path in empty.iterdir()] == [("page.html", "before")]


LM = ["lm", "TEXT", "--out", "new"]
DRAFTER = ["drafter", "TEXT", "--target", "TARGET", "--out", "new", "--sequence-length", "64"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["lm", "--out", "new"], "expected files or folders to train on, found none"),
        (["lm", "absent", "--out", "new"], "absent: no such file or folder"),
        (LM, "expected at least 2 windows of 513 tokens in a text of 30"),
        ([*LM, "--held-out", "0"], "expected a held-out share between 0 and 1, found 0.0"),
        ([*LM, "--steps", "0"], "expected steps above 0, found 0"),
        ([*LM, "--optimizer", "kind=sgd"], "expected kind=adamw|muon, found kind=sgd"),
        ([*LM, "--sizes", "heads=3"], "num_attention_heads is no multiple of num_key_value_heads"),
        ([*LM, "--sizes", "vocab_size=100"], "expected a vocabulary of at least 258, found 100"),
        ([*LM, "--router-aux-loss-coef", "1"], "for a model with experts, found 1 for a model without experts"),
        ([*LM, "--tokenizer", "TARGET"], "expected a tokenizer with the token <|endoftext|>"),
        (["lm", "TEXT"], "--out"),
        (["drafter", "--target", "TARGET", "--out", "new"], "expected files or folders to train on, found none"),
        (DRAFTER, "expected at least 2 windows of 64 tokens in a text of 15"),
        ([*DRAFTER, "--sizes", "block_size=1"], "block_size must be at least 2, found 1"),
        ([*DRAFTER, "--sizes", "taps=2"], "target_layer_ids [2] lie outside"),
        ([*DRAFTER, "--sizes", "mask_token_id=40"], "mask_token_id 40 lies outside"),
        ([*DRAFTER, "--loss", "gamma=0"], "expected a gamma above 0, found 0"),
        ([*DRAFTER, "--loss", "anchors=0"], "expected at least 1 anchor, found 0"),
        ([*DRAFTER, "--regenerate", "count=-1"], "expected count of at least 0, found -1"),
        (["drafter", "TEXT", "--target", "absent", "--out", "new"], "absent"),
    ],
)
def test_training(run: Run, folders: tuple[Path, Path], empty: Path, arguments: list[str], problem: str):
    text = empty.parent / "text"
    text.mkdir()
    for n in range(3):
        (text / f"{n}.txt").write_text("t1 t2 t3 t4\n")
    places = {"TEXT": text, "TARGET": folders[0]}
    check_refused(run("train", *(places.get(a, a) for a in arguments), "--json", "figures.json"), problem, empty)
