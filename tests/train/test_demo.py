"""The demo pair's text and sizes; its training takes too long for a test."""

import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright.models import dflash
from tilewright.models.decoder import config_from_hf, config_to_hf
from tilewright.train import demo
from tilewright.train.data import END_OF_TEXT, MASK, Document, train_tokenizer

MODULES = {
    "keep.py": "kept = 1\n",
    "json/__init__.py": "json_package = 2\n",
    "json/inner/deep.py": "json_deep = 3\n",
    "csv.py": "csv_module = 4\n",
    "other/json.py": "not_the_package = 5\n",
    "other/test/test_x.py": "a_test = 6\n",
    "site-packages/installed.py": "installed = 7\n",
    "encodings/cp1.py": "table = 8\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few modules."""
    root = tmp_path / "lib"
    for name, text in MODULES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_named_modules_are_held_out_and_no_others(library: Path):
    trained, held_out = ([p.relative_to(library).as_posix() for p in paths] for paths in demo.library_sources())
    assert held_out == ["csv.py", "json/__init__.py", "json/inner/deep.py"]
    assert trained == ["keep.py", "other/json.py"]


def test_the_library_of_this_machine_is_split_by_module():
    root = Path(sysconfig.get_paths()["stdlib"])
    trained, held_out = demo.library_sources()
    tops = [{path.relative_to(root).parts[0].removesuffix(".py") for path in paths} for paths in (trained, held_out)]
    assert tops[1] == demo.HELD_OUT_MODULES, "each held-out name is a module of the library"
    assert not tops[0] & tops[1]
    assert len(trained) > 10 * len(held_out) > 100
    assert not [path for path in trained + held_out if demo.NOT_CODE & set(path.relative_to(root).parts)]


def test_questions_are_split_too(library: Path, tmp_path: Path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(f'{{"question": "q{i}?", "answer": "a{i}"}}\n' for i in range(40)))
    trained, held_out = ([document.whole for document in part] for part in demo.demo_documents(path))
    assert len(trained) == 2 + 38
    assert held_out == ["csv_module = 4\n", "json_package = 2\n", "json_deep = 3\n"] + [
        f"Question: q{i}?\nAnswer: a{i}" for i in range(2)
    ]
    assert not set(trained) & set(held_out)
    again = tuple([document.whole for document in part] for part in demo.demo_documents(path))
    assert again == (trained, held_out), "the order is always the same"
    assert trained != sorted(trained, key=lambda text: text.startswith("Question")), "code and questions are mixed"


def test_configurations_fit_together():
    target = demo.target_config(train_tokenizer([Document("aaa bbb")], 260))
    drafter = demo.drafter_config(target)
    dflash.check_fits(drafter, target)
    assert config_from_hf(config_to_hf(target)) == target
    assert dflash.config_from_hf(dflash.config_to_hf(drafter)) == drafter
    assert drafter.block_size == 16
    with pytest.raises(ValueError, match="vocab_size is 260 but the target's is 261"):
        dflash.check_fits(drafter, replace(target, vocab_size=261))


def test_special_tokens_are_where_the_configurations_say():
    tokenizer = train_tokenizer([Document("a b c")], 300)
    assert tokenizer.token_to_id(MASK) == demo.MASK_TOKEN_ID
    assert demo.target_config(tokenizer).eos_token_ids == (tokenizer.token_to_id(END_OF_TEXT),)


def test_the_training_fits_the_context():
    target = demo.target_config(train_tokenizer([Document("a b c")], 300))
    for options in (demo.TARGET_OPTIONS, demo.DRAFTER_OPTIONS):
        assert options.sequence_length <= target.max_position_embeddings
    assert demo.ANCHOR_OPTIONS.anchors < demo.DRAFTER_OPTIONS.sequence_length
    longest = demo.PROMPT_TOKENS + max(sampling.max_new_tokens for sampling in demo.REGENERATION_SAMPLING)
    assert longest <= target.max_position_embeddings


def test_an_interrupted_run_keeps_its_tokenizer(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "q?", "answer": "a"}\n')
    monkeypatch.setattr(demo, "VOCAB_SIZE", 270)
    first = demo.prepare_text(path, tmp_path / "out")
    monkeypatch.setattr(demo, "VOCAB_SIZE", 260)
    again = demo.prepare_text(path, tmp_path / "out")
    assert first.tokenizer.to_str() == again.tokenizer.to_str()
    np.testing.assert_array_equal(first.trained.tokens, again.trained.tokens)
    np.testing.assert_array_equal(first.held_out.tokens, again.held_out.tokens)
    ends = int((first.trained.tokens == first.end).sum())
    assert ends == len(demo.demo_documents(path)[0])


def test_prompts_end_with_the_head_of_a_function(tmp_path: Path):
    source = "".join(f"x{i} = {i}\n\n    def f{i}(a):\n        return {i}\n" for i in range(90))
    (tmp_path / "long.py").write_text(source)
    (tmp_path / "short.py").write_text("def f(a):\n    return 1\n")
    records = demo.held_out_prompts([tmp_path / "long.py", tmp_path / "short.py"], each=3, characters=100)
    assert [record["source"] for record in records] == ["long.py"] * 3
    assert len({record["prompt"] for record in records}) == 3
    for record in records:
        prompt = record["prompt"]
        assert prompt in source
        assert source[source.index(prompt) - 1] == "\n", "it begins with a line"
        assert prompt.rstrip("\n").splitlines()[-1].strip().startswith("def f")
        assert prompt.endswith(":\n")
        assert 60 < len(prompt) < 140
