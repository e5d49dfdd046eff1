"""`tilewright train drafter --self-instruct`: from prompts to records that the target wrote, and a drafter that drafts."""

import json
from pathlib import Path
from shutil import copytree

import pytest

import tilewright as tw
from cli.conftest import Run
from tilewright.train.records import Records

LOOP = ["--batch-size", 2, "--sequence-length", 40, "--held-out", 0.3, "--evaluate-every", 2, "--steps", 2]
SIZES = ["--sizes", "block_size=4,layers=1,draft_vocab=9", "--loss", "anchors=4,dpace=0.5"]
TEMPLATE = "{% for m in messages %}t1 {{ m.content }} t2 {% endfor %}{% if add_generation_prompt %}t3 {% endif %}"


@pytest.fixture
def target(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    copytree(folders[0], tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "target"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"t4 t{5 + n} t6"}) + "\n" for n in range(8)))
    return path


def test_the_target_writes_what_its_drafter_learns(run: Run, target: Path, prompts: Path, tmp_path: Path):
    measured = tmp_path / "measured.jsonl"
    measured.write_text(json.dumps({"prompt": "T4, t7, t6!"}) + "\n")
    command = ["train", "drafter", "--target", target, *LOOP, *SIZES]
    writing = ["--self-instruct", f"count=3,slots=2,exclude={measured}", "--out", tmp_path / "out"]
    ran = run(*command, prompts, *writing, "--json", "-")
    assert ran.status == 0, ran.err
    assert "1 prompt of the excluded files" in " ".join(ran.err.split())
    records = Records.load(tmp_path / "out" / "training" / "records.npz.xz")
    written = [json.loads(line) for line in (tmp_path / "out" / "training" / "messages.jsonl").read_text().splitlines()]
    assert len(written) == len(records) > 4
    assert not any("t7 t6" in each["prompt"] for each in written)
    lm = tw.load(target)
    for n, each in enumerate(written[:4]):
        prompt = records.tokens[records.starts[n] : records.starts[n] + records.prompts[n]].tolist()
        assert each["prompt"] == lm.tokenizer.decode(prompt, skip_special_tokens=False)
        assert len(prompt) == 6
    kept = tmp_path / "out" / "training" / "records.npz.xz"
    again = run(*command, kept, "--out", tmp_path / "again", "--json", "-")
    assert again.status == 0, again.err
    assert again.json["training_tokens"] == ran.json["training_tokens"] > 0
    gone_on = run(*command, kept, "--start", tmp_path / "again", "--out", tmp_path / "on")
    assert gone_on.status == 0, gone_on.err
    lm = tw.load(target, tmp_path / "on")
    both = [lm.generate("t4 t5", tw.Sampling(12), speculative=way)[0].tokens for way in (True, False)]
    assert both[0] == both[1]


def test_a_drafter_learns_in_bfloat16_what_follows_openings(run: Run, target: Path, prompts: Path, tmp_path: Path):
    openings = tmp_path / "openings.jsonl"
    openings.write_text(json.dumps({"begin": "t7 t8", "end": " t9"}) + "\n")
    command = ["train", "drafter", prompts, "--target", target, *LOOP, *SIZES, "--compute-dtype", "bfloat16"]
    ran = run(*command, "--self-instruct", f"count=8,slots=4,openings={openings}", "--out", tmp_path / "out")
    assert ran.status == 0, ran.err
    written = [json.loads(line) for line in (tmp_path / "out" / "training" / "messages.jsonl").read_text().splitlines()]
    assert any("t4 t5 t6" in each["prompt"] for each in written), "given prompts are answered"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--self-instruct", "count=-1"], "expected count of at least 0, found -1"),
        (["--self-instruct", "count=1,slots=0"], "expected slots of at least 1, found 0"),
        (["--self-instruct", "slots=8"], "expected count=INTEGER with slots, openings or exclude, found none"),
        (["--self-instruct", "count=1", "--regenerate", "count=2"], "expected --regenerate or --self-instruct, found both"),
        (["--self-instruct", "exclude=some.jsonl"], "expected count=INTEGER with slots, openings or exclude, found none"),
    ],
)
def test_options_that_do_not_go_together(
    run: Run, target: Path, prompts: Path, tmp_path: Path, options: list[object], message: str
):
    ran = run("train", "drafter", prompts, "--target", target, "--out", tmp_path / "out", *LOOP, *SIZES, *options)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())


def test_what_cannot_be_answered_or_read(run: Run, folders: tuple[Path, Path], prompts: Path, tmp_path: Path):
    command = ["train", "drafter", "--target", folders[0], "--out", tmp_path / "out", *LOOP, *SIZES]
    ran = run(*command, prompts, "--self-instruct", "count=1")
    assert ran.status == 2
    assert "expected a target with a chat template for --self-instruct" in " ".join(ran.err.split())
    (tmp_path / "some.npz.xz").write_bytes(b"")
    assert "expected a file of records" in " ".join(run(*command, tmp_path / "some.npz.xz").err.split())
    assert "expected no other data beside the records of" in " ".join(
        run(*command, tmp_path / "some.npz.xz", prompts).err.split()
    )
