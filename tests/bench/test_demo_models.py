"""`benchmarks/demo_models.py`: sizes that fit together, and a small training of all models."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from tilewright import load
from tilewright.models import decoder, dflash, dflash2, eagle3
from tilewright.models.checkpoint import load_decoder
from tilewright.models.decoder import DecoderConfig, config_from_hf, config_to_hf
from tilewright.models.params import count
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.train.data import END_OF_TEXT, MASK, Document, TokenStream, encode_documents, train_tokenizer
from tilewright.train.loop import TrainResult
from tilewright.train.text import TextOptions
from train.support import TARGET, silent, target_params

demo: Any = importlib.import_module("demo_models")
held_out: Any = importlib.import_module("held_out")
DemoText = demo.DemoText

LINE = "for x in range(3): print(x)\n"
TINY = replace(TARGET, vocab_size=280)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_configurations_fit_together():
    target = demo.target_config(train_tokenizer([Document("aaa bbb")], 260))
    drafter = demo.dflash_config(target)
    chain = demo.eagle3_config(target)
    dflash.check_fits(drafter, target)
    second = demo.dflash2_config(target)
    assert second.backbone == demo.dflash_config(target, layers=2)
    assert dflash2.config_from_hf(dflash2.config_to_hf(second)) == second
    eagle3.check_fits(chain, target)
    assert config_from_hf(config_to_hf(target)) == target
    assert dflash.config_from_hf(dflash.config_to_hf(drafter)) == drafter
    assert eagle3.config_from_hf(eagle3.config_to_hf(chain), target.num_layers) == chain
    assert drafter.block_size == 16
    assert drafter.target_layer_ids == chain.target_layer_ids == (0, 1, 2)
    with pytest.raises(ValueError, match="vocab_size is 260 but the target's is 261"):
        dflash.check_fits(drafter, replace(target, vocab_size=261))


def test_all_that_ships_stays_small():
    target = replace(demo.target_config(train_tokenizer([Document("a b c")], 300)), vocab_size=4096)
    sizes = [
        count(decoder.declare(target)),
        count(dflash.declare(demo.dflash_config(target))),
        count(dflash2.declare(demo.dflash2_config(target))),
        count(eagle3.declare(demo.eagle3_config(target))),
    ]
    assert 2 * sum(sizes) < 5_000_000, "bytes in bfloat16"


def test_special_tokens_are_where_the_configurations_say():
    tokenizer = train_tokenizer([Document("a b c")], 300)
    assert tokenizer.token_to_id(MASK) == demo.MASK_TOKEN_ID
    assert demo.target_config(tokenizer).eos_token_ids == (tokenizer.token_to_id(END_OF_TEXT),)


def test_the_training_fits_the_context():
    target = demo.target_config(train_tokenizer([Document("a b c")], 300))
    for options in (demo.TARGET_OPTIONS, *(options for _, options in demo.DRAFTERS.values())):
        assert options.sequence_length <= target.max_position_embeddings
    assert demo.ANCHOR_OPTIONS.anchors < demo.DRAFTER_OPTIONS.sequence_length
    longest = demo.PROMPT_TOKENS + max(sampling.max_new_tokens for sampling in demo.REGENERATION_SAMPLING)
    assert longest <= target.max_position_embeddings


@pytest.mark.slow
def test_all_of_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tiny models, one step of each training: what is written loads, drafts, and is not made again."""
    tokenizer = train_tokenizer([Document(LINE * 9)], 280)
    stream = encode_documents(tokenizer, [Document(LINE * 40)] * 8, 0)
    metadata = {"left_out": {}, "dependencies": [], "dependencies_left_out": []}
    text = DemoText(tokenizer, stream, {"library": stream, "questions": stream}, metadata)
    small = {"batch_size": 2, "sequence_length": 64}
    deeper = replace(TINY, num_layers=3)
    patched = {
        "prepare_text": lambda gsm8k, bpe: text,
        "target_config": lambda bpe: deeper,
        "TARGET_OPTIONS": replace(demo.TARGET_OPTIONS, **small),
        "ANCHOR_OPTIONS": replace(demo.ANCHOR_OPTIONS, anchors=16),
        "DRAFTERS": {name: (train, replace(options, **small)) for name, (train, options) in demo.DRAFTERS.items()},
        "REGENERATED": 256,
        "REGENERATION_BATCH": 256,
        "PROMPT_TOKENS": 8,
        "REGENERATION_SAMPLING": tuple(replace(sampling, max_new_tokens=24) for sampling in demo.REGENERATION_SAMPLING),
        "library_sources": lambda: ([], []),
    }
    for name, value in patched.items():
        monkeypatch.setattr(demo, name, value)
    for name, value in {"BATCH": 2, "WINDOW": 32, "BATCHES": 1, "PROMPTS": 2, "PROMPT_TOKENS": 8, "NEW_TOKENS": 6}.items():
        monkeypatch.setattr(held_out, name, value)
    arguments = tmp_path / "gsm8k.jsonl", tmp_path / "out", tokenizer, silent(), 1, 1
    figures = demo.train_demo(*arguments)
    assert figures.keys() >= {"text", "target", *demo.DRAFTERS}
    assert figures["target"]["held_out"].keys() == text.held_out.keys()
    assert figures["regenerated_tokens"] == 256 * 24
    lm = load(tmp_path / "out" / "target")
    assert lm.target.num_layers == 3
    for name in demo.DRAFTERS:
        lm.load_drafter(str(tmp_path / "out" / name), DrafterOptions())
    weights = [(tmp_path / "out" / name / "model.safetensors").read_bytes() for name in ("target", *demo.DRAFTERS)]
    again = demo.train_demo(*arguments)
    assert weights == [(tmp_path / "out" / name / "model.safetensors").read_bytes() for name in ("target", *demo.DRAFTERS)]
    assert again["target"]["curve"] == figures["target"]["curve"]


def tiny_text() -> Any:
    tokenizer = train_tokenizer([Document(LINE * 9)], 280)
    stream = encode_documents(tokenizer, [Document(LINE)], 0)
    return DemoText(tokenizer, stream, {"library": stream}, {"left_out": {}, "dependencies": [], "dependencies_left_out": []})


def test_drafters_learn_from_the_target_as_it_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tiny_text()
    configured = []
    received = []
    curve = {name: np.zeros(1) for name in ("step", "loss", "held_out_loss")}

    def trained(
        config: DecoderConfig, stream: TokenStream, held_out: TokenStream, options: TextOptions, out: Path, console: Console
    ) -> TrainResult:
        configured.append((config, options))
        return TrainResult(target_params(config), curve, 0.0, 0.0)

    def taught(data: Any, options: TextOptions) -> dict[str, int]:
        received.append((data, options))
        return {"steps": options.steps}

    monkeypatch.setattr(demo, "train_lm", trained)
    monkeypatch.setattr(demo, "target_config", lambda bpe: TINY)
    monkeypatch.setattr(demo, "evaluate_target", lambda *given: {})
    monkeypatch.setattr(demo, "prepare_text", lambda gsm8k, bpe: text)
    monkeypatch.setattr(demo, "continue_text", lambda *given: (text.trained, text.trained))
    monkeypatch.setattr(demo, "DRAFTERS", {"one": (taught, demo.DRAFTER_OPTIONS)})
    monkeypatch.setattr(demo, "library_sources", lambda: ([], []))
    figures = demo.train_demo(tmp_path / "gsm8k.jsonl", tmp_path, text.tokenizer, silent(), steps=7)
    assert configured == [(TINY, replace(demo.TARGET_OPTIONS, steps=7))]
    ((data, options),) = received
    assert figures["one"] == {"steps": demo.DRAFTER_OPTIONS.steps} == {"steps": options.steps}
    _, stored = load_decoder(tmp_path / "target", np.float32)
    for kept, given in zip(jax.tree.leaves(stored), jax.tree.leaves(data.params), strict=True):
        np.testing.assert_array_equal(kept, given)
    assert np.any(np.asarray(target_params(TINY).embed) != np.asarray(data.params.embed)), "it ships rounded"


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


@pytest.mark.parametrize(("changes", "expected"), [({}, (1200, None)), ({"steps": 7, "drafter_steps": 5}, (7, 5))])
def test_the_script_passes_its_options_on(
    tmp_path: Path,
    changes: dict[str, int],
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    calls: list[tuple[Any, ...]] = []
    measured = {"library": {"loss_nats_per_token": 4.0, "bits_per_byte": 1.5, "distinct_4gram_ratio": 0.25}}

    def trained(gsm8k: Path, out: Path, tokenizer: Any, console: Any, *options: Any) -> dict[str, Any]:
        calls.append((gsm8k, out, *options))
        return {"target": {"held_out": measured}}

    monkeypatch.setattr(demo, "train_demo", trained)
    monkeypatch.setattr(demo, "keep_programs", lambda: None)
    monkeypatch.chdir(tmp_path)
    demo.train(Path("questions.jsonl"), **changes)
    assert calls == [(Path("questions.jsonl"), Path("runs/demo"), *expected)]
    printed = capsys.readouterr().out
    assert "held-out library: 4.000 nats/token, 1.500 bits/byte, 25% distinct 4-grams\n" in printed
    assert "wrote runs/demo/target, runs/demo/drafter" in printed
    with pytest.raises(ValueError, match="expected steps of at least 1, found 0"):
        demo.train(Path("questions.jsonl"), steps=0)
