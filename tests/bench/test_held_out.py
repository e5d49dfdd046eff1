"""`benchmarks/held_out.py` against sums by hand, and the command that measures a model on the demo's text."""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import training_operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.experts import Mixture
from tilewright.train.data import END_OF_TEXT, Document, TokenStream, encode_documents, train_tokenizer
from train.support import TARGET, random_stream, target_params

evaluate: Any = importlib.import_module("held_out")
demo_models: Any = importlib.import_module("demo_models")
demo_text: Any = importlib.import_module("demo_text")

TEXT = "for x in range(3): print(x, 'ä')\n" * 12

pytestmark = pytest.mark.usefixtures("quick_compiles")


def evaluate_config(vocab_size: int) -> DecoderConfig:
    return replace(TARGET, vocab_size=vocab_size)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"BATCH": 2, "WINDOW": 16, "BATCHES": 3, "PROMPTS": 2, "PROMPT_TOKENS": 8, "NEW_TOKENS": 6}.items():
        monkeypatch.setattr(evaluate, name, value)


def test_the_bytes_of_tokens_add_up_to_those_of_the_text():
    tokenizer = train_tokenizer([Document(TEXT)], 300)
    sizes = evaluate.token_bytes(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    assert sizes[ids].sum() == len(TEXT.encode()) > len(ids)
    assert sizes[tokenizer.token_to_id(END_OF_TEXT)] == 0


def test_the_loss_by_token_and_by_byte(small: None):
    tokenizer = train_tokenizer([Document(TEXT)], 300)
    config = evaluate_config(tokenizer.get_vocab_size())
    params = target_params(config)
    sizes = evaluate.token_bytes(tokenizer)
    stream = encode_documents(tokenizer, [Document(TEXT), Document("given " * 9 + TEXT)], 0)
    stream = TokenStream(stream.tokens, np.arange(len(stream.tokens)) % 5 != 0)
    found = evaluate.held_out_loss(config, params, sizes, stream)
    nats = 0.0
    count = 0
    covered = 0
    for number, (tokens, in_loss) in enumerate(stream.windows(17, 2, 0, 0)):
        if number == 3:
            break
        hidden = decoder.forward_full(config, training_operations("float32"), params, jnp.asarray(tokens[:, :-1])).hidden
        logits = np.asarray(decoder.logits(config, training_operations("float32"), params, hidden), np.float64)
        chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, wanted, flags in zip(chances, tokens[:, 1:], in_loss[:, 1:], strict=True):
            for said, token, counts in zip(row, wanted, flags, strict=True):
                if counts:
                    nats = nats - said[token]
                    count = count + 1
                    covered = covered + int(sizes[token])
    assert found["tokens"] == count
    assert found["loss_nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / covered, rel=1e-5)


def test_a_mixtures_balancing_loss_is_no_loss_of_the_text(small: None):
    """It is for training alone: the figure is the same whatever the model's configuration weighs it with."""
    config = replace(TARGET, family="qwen3_moe", num_layers=1, mixture=Mixture(4, 2, 16), balance=0.9)
    params = target_params(config)
    sizes = np.ones(24, np.int32)
    found = evaluate.held_out_loss(config, params, sizes, random_stream(120))
    assert found == evaluate.held_out_loss(replace(config, balance=0.0), params, sizes, random_stream(120))


def test_each_text_is_measured_apart(small: None):
    tokenizer = train_tokenizer([Document(TEXT)], 280)
    config = evaluate_config(280)
    params = target_params(config)
    encode = partial(encode_documents, tokenizer, end=0)
    texts = {"code": encode([Document(TEXT)]), "prose": encode([Document("Some words, and more of them. " * 20)])}
    figures = evaluate.evaluate_target(config, params, tokenizer, texts)
    assert figures.keys() == texts.keys()
    assert figures["code"]["loss_nats_per_token"] != figures["prose"]["loss_nats_per_token"]
    for row in figures.values():
        assert 0 < row["distinct_4gram_ratio"] <= 1
        assert row["bits_per_byte"] > 0
    again = evaluate.evaluate_target(config, params, tokenizer, texts)
    assert again == figures


def test_a_short_text_is_refused():
    tokenizer = train_tokenizer([Document(TEXT)], 280)
    stream = encode_documents(tokenizer, [Document(TEXT)], 0)
    with pytest.raises(ValueError, match="in the held-out text, for a batch of 8 windows"):
        evaluate.held_out_loss(evaluate_config(280), target_params(), evaluate.token_bytes(tokenizer), stream)


def test_windows_without_a_token_in_the_loss_are_refused(small: None):
    stream = random_stream(400)
    stream = TokenStream(stream.tokens, np.arange(400) == 399)  # behind the windows that are measured
    with pytest.raises(ValueError, match="expected tokens in the loss of the held-out text, found none"):
        evaluate.held_out_loss(TARGET, target_params(TARGET), np.ones(24, np.int32), stream)


def test_a_model_is_measured_on_the_demos_text(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "held.py").write_text("".join(f"one_{n} = two({n})\n" for n in range(200)))
    questions = "".join(json.dumps({"question": f"one {n}?", "answer": "two three " * 20}) + "\n" for n in range(200))
    (tmp_path / "gsm8k.jsonl").write_text(questions)
    installed = [
        demo_text.Dependency("pack", "1.0", "MIT", (("package.module_0", tmp_path / "held.py"),)),
        demo_text.Dependency("closed", "2.0", "Secret", ()),
    ]
    assert demo_text.is_held_out("package.module_0")
    monkeypatch.setattr(demo_text, "library_sources", lambda: ([], [tmp_path / "held.py"]))
    monkeypatch.setattr(demo_text, "dependencies", lambda: installed)
    monkeypatch.setattr(demo_text.Cleaner, "without_duplicates", lambda self, lines, left_out: list(lines))
    monkeypatch.setattr(demo_models, "keep_programs", lambda *args, **kwargs: None)
    demo_models.evaluate(tmp_path / "gsm8k.jsonl", json_file="-")
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert figures["held_out"].keys() == {"library", "dependencies", "questions"}
    assert figures["held_out"]["library"] == figures["held_out"]["dependencies"] != figures["held_out"]["questions"]
    assert figures["text"]["dependencies"] == ["pack 1.0 (MIT)"]
    assert figures["text"]["dependencies_left_out"] == ["closed 2.0 (Secret)"]
    assert f"held-out questions: {figures['held_out']['questions']['loss_nats_per_token']:.3f} nats/token" in printed.err
