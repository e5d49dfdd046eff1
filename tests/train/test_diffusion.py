"""Masked-diffusion training: what is masked, what is in the loss, what the batches hold, and that a run learns and resumes."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from models.sizes import decoder_config
from reference.diffusion_model_numpy import predictions, read_model
from tilewright.kernels.select import PLAIN
from tilewright.models import diffusion
from tilewright.models.chat import ChatTemplate
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import initialise, to_tensors
from tilewright.train.arithmetic import Problem
from tilewright.train.data import MASK, Chat, Document, end_of_text, train_tokenizer
from tilewright.train.diffusion import (
    PADDING_WEIGHT,
    Batch,
    Examples,
    Pairs,
    encode_problem,
    fill_ins,
    masked_denoiser,
    train_diffusion,
)
from tilewright.train.loop import TrainingRun
from tilewright.train.text import TextOptions
from train.support import silent

SIZES = (40, 32, 48, 2, 4, 2, 8)
LLADA = DiffusionConfig(family="llada", decoder=decoder_config("llama", *SIZES, rope_theta=1e4), mask_token_id=39)
DREAM = DiffusionConfig(family="dream", decoder=decoder_config("qwen2", *SIZES, rope_theta=1e4), mask_token_id=39)
OPTIONS = TextOptions(steps=4, batch_size=3, sequence_length=48, evaluate_every=2, save_every=1, matmul_dtype="float32")
PROBLEMS = [Problem((n, 90 - n)) for n in range(20, 60)]
TEXT = Document("".join(f"line {n} of it\n" for n in range(59)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT, *(Document(p.response, p.prompt) for p in PROBLEMS)], 300)


def examples(tokenizer: Tokenizer, arithmetic: float = 0.0, **changes: Any) -> Examples:
    options = replace(OPTIONS, **changes)
    pairs = Pairs.encode(tokenizer, [TEXT, Document("one two", "given ")], options.sequence_length)
    return Examples(tokenizer, pairs, pairs, arithmetic, end_of_text(tokenizer), options)


def drawn(config: DiffusionConfig) -> Any:
    params = initialise(diffusion.declare(config), jax.random.key(0))
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)


def small_batch(rows: int = 8) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 39, (rows, 20)).astype(np.int32)
    first = rng.integers(0, 5, rows)
    end = rng.integers(8, 12, rows)
    return Batch(*(jnp.asarray(x, jnp.int32) for x in (tokens, first, end, rng.integers(13, 20, rows))))


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_the_loss_is_that_of_numpy(config: DiffusionConfig):
    """Of the tokens that the model saw as masks; prompts and padding are never among them."""
    params = drawn(config)
    batch = small_batch()
    model = masked_denoiser(config)
    tensors = dict(to_tensors(model.specs, params, jnp.float32))
    seen = np.asarray(model.predict(batch, jax.random.key(1)).inputs)
    loss, total = model.loss(PLAIN, params, model.predict(batch, jax.random.key(1)))
    key, _ = jax.random.split(jax.random.key(1))
    t = 1e-3 + (1 - 1e-3) * ((float(jax.random.uniform(key)) + np.arange(8) / 8) % 1)
    expected = weight = 0.0
    shares = []
    for row, (first, end, valid) in enumerate(zip(*(np.asarray(part) for part in batch[1:]), strict=True)):
        tokens = np.asarray(batch.tokens[row])
        ids = seen[row]
        masked = np.flatnonzero(ids == 39)
        assert ((first <= masked) & (masked < valid)).all()
        shares.append(len(masked) / (valid - first))
        logits = predictions(read_model(model.fields, tensors), ids[:valid].tolist())
        losses = (
            np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[range(valid), tokens[:valid]]
        )
        weights = np.where(np.arange(valid) < end, 1.0, PADDING_WEIGHT)
        expected += (losses * weights)[masked].sum() / t[row]
        weight += weights[first:].sum()
    np.testing.assert_allclose(float(total), weight, rtol=1e-5)
    np.testing.assert_allclose(float(loss), expected / weight, rtol=1e-4)
    assert np.corrcoef(shares, t)[0, 1] > 0.8, "rows are masked by their t"


def test_the_shares_spread_over_their_range():
    """Every batch has rows with little and rows with much of them masked; another key masks others."""
    batch = small_batch(64)._replace(first=jnp.zeros(64, jnp.int32), valid=jnp.full(64, 20, jnp.int32))
    params = drawn(LLADA)
    model = masked_denoiser(LLADA)
    losses = {float(model.loss(PLAIN, params, model.predict(batch, jax.random.key(n)))[0]) for n in range(4)}
    assert len(losses) == 4
    assert np.std(list(losses)) < 0.25 * np.mean(list(losses))


def test_texts_become_prompts_and_responses(tokenizer: Tokenizer):
    """Nothing is lost but what no window holds, and no piece is too long."""
    found = fill_ins(tokenizer, TEXT.text, 47)
    assert "".join(prompt + response for prompt, response in found) == TEXT.text
    for prompt, response in found:
        assert prompt.count("\n") == -(-(prompt + response).count("\n") // 4)
    pairs = Pairs.encode(tokenizer, [TEXT, Document("b", "a")], 48)
    assert len(pairs.starts) == len(found) + 1
    ids, first = pairs[1]
    assert tokenizer.decode(ids[:first].tolist()) == found[0][0]
    assert tokenizer.decode(ids.tolist()) == "".join(found[0])


def test_long_lines_and_long_records_are_cut_and_counted(tokenizer: Tokenizer):
    """A document of one line, a line longer than a window, a long response; a prompt that fills the window is left out."""
    line = "word " * 100
    left_out = Counter[str]()
    assert "".join(prompt + response for prompt, response in fill_ins(tokenizer, line, 47)) == line
    assert "".join(prompt + response for prompt, response in fill_ins(tokenizer, f"a\n{line}\nb\n", 47)) == f"a\n{line}\nb\n"
    assert [len(part) > 0 for part in fill_ins(tokenizer, "one two three", 47)[0]] == [True, True]
    documents = [Document(line), Document("x"), Document("long " * 50, "given "), Document("b", "given " * 50)]
    pairs = Pairs.encode(tokenizer, documents, 48, left_out=left_out)
    assert left_out == {
        "excerpts of a single token": 1,
        "prompts that fill 48 tokens": 1,
        "ends of responses beyond 48 tokens": 1,
    }
    sizes = [len(pairs[n][0]) for n in range(len(pairs.starts))]
    assert sizes[0] == 48
    assert max(sizes[1:]) < 48
    assert sum(sizes[1:]) >= len(tokenizer.encode(line).ids)
    batch = examples(tokenizer, batch_size=40).batch(np.random.default_rng(0), False)
    assert (batch.end <= batch.valid).all()
    alone = Examples(tokenizer, pairs.take(np.asarray([0])), pairs, 0.0, end_of_text(tokenizer), OPTIONS)
    batch = alone.batch(np.random.default_rng(0), False)
    assert (batch.valid == 48).all()
    assert end_of_text(tokenizer) not in batch.tokens


def test_only_the_beginning_has_special_tokens(tokenizer: Tokenizer):
    """Prompt and response are one text: a response, a problem's too, has none of its own, and their names are text."""
    begins = Tokenizer.from_str(tokenizer.to_str())
    begins.post_processor = processors.TemplateProcessing(single=f"{MASK} $A", special_tokens=[(MASK, 1)])
    pairs = Pairs.encode(begins, [Document(f"two{MASK}", "one"), Document("a b\nc d\n")], 48)
    for n, text in enumerate((f"onetwo{MASK}", "a b\nc d\n")):
        ids, first = pairs[n]
        assert (ids[0], list(ids).count(1), first > 1) == (1, 1, True)
        assert begins.decode(ids[1:].tolist(), skip_special_tokens=False) == text
    assert list(encode_problem(begins, PROBLEMS[0])[0]).count(1) == 1


def test_conversations_make_a_pair_for_each_answer(tokenizer: Tokenizer):
    template = ChatTemplate.compiled("{% for m in messages %}{{ m.content }}\n{% endfor %}", "template")
    chat = Chat(tuple({"role": role, "content": role[0]} for role in ("user", "assistant") * 2))
    pairs = Pairs.encode(tokenizer, [Document("", "", chat)], 48, (0,), template)
    found = [
        (tokenizer.decode(ids[:first].tolist()), tokenizer.decode(ids[first:].tolist()))
        for ids, first in map(pairs.__getitem__, (0, 1))
    ]
    assert found == [("u\n", "a\n"), ("u\na\nu\n", "a\n")]


def test_few_texts_are_held_out_by_pairs(tokenizer: Tokenizer):
    pairs = Pairs.encode(tokenizer, [TEXT], 48)
    trained, held_out = pairs.split(0.02, 0)
    assert (len(trained.starts), len(held_out.starts)) == (len(pairs.starts) - 1, 1)
    both = [part[n][0].tolist() for part in (trained, held_out) for n in range(len(part.starts))]
    assert sorted(both) == sorted(pairs[n][0].tolist() for n in range(len(pairs.starts)))
    with pytest.raises(ValueError, match=r"expected at least 2 excerpts of text, .* found 1"):
        held_out.split(0.02, 0)


def test_what_a_batch_holds(tokenizer: Tokenizer):
    """Prompt, response and end-of-text up to the row's length; problems that are held out in held-out batches alone."""
    source = examples(tokenizer, 0.5, batch_size=40, sequence_length=256)
    end = end_of_text(tokenizer)
    training = next(source.batches(0))
    held_out = source.held_out_batches()[0]
    kinds = set()
    for batch, apart in ((training, False), (held_out, True)):
        for ids, first, behind, valid in zip(*batch, strict=True):
            assert 0 < first < behind <= valid <= 256
            assert (ids[behind - 1 :] == end).all()
            assert end not in ids[: behind - 1]
            prompt = tokenizer.decode(ids[:first])
            response = tokenizer.decode(ids[first : behind - 1])
            kinds.add((apart, "answer" in response))
            if "answer" in response:
                problem = Problem(tuple(map(int, re.findall(r"=(\d+)", prompt))), "*" in prompt)
                assert (problem.prompt, problem.response, problem.held_out) == (prompt, response, apart)
    assert kinds == {(apart, answer) for apart in (False, True) for answer in (False, True)}
    assert 8 < (training.valid == 256).sum() < 40


def test_batches_depend_on_seed_and_step_alone(tokenizer: Tokenizer):
    source = examples(tokenizer, 0.5, sequence_length=256)
    later = next(source.batches(2))
    steps = source.batches(0)
    third = [next(steps) for _ in range(3)][2]
    for a, b in zip(later, third, strict=True):
        np.testing.assert_array_equal(a, b)
    other = next(examples(tokenizer, 0.5, sequence_length=256, seed=1).batches(2))
    assert not np.array_equal(other.tokens, later.tokens)


def config_for(tokenizer: Tokenizer) -> DiffusionConfig:
    sizes = replace(LLADA.decoder, vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True)
    return replace(LLADA, decoder=sizes, mask_token_id=tokenizer.token_to_id(MASK))


def test_training_learns_and_resumes_exactly(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = masked_denoiser(config_for(tokenizer))
    source = examples(tokenizer, steps=30, evaluate_every=15, learning_rate=1e-2, batch_size=8)
    whole = train_diffusion(config, source, tmp_path / "whole", silent())
    assert whole.last("held_out_loss") < 0.7 * np.log(300)
    advance = TrainingRun.advance

    def interrupted(self: TrainingRun, batch: Any) -> None:
        if self.step == 17:
            raise KeyboardInterrupt
        advance(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_diffusion(config, source, tmp_path / "cut", silent())
    resumed = train_diffusion(config, source, tmp_path / "cut", silent())
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"belongs to another run \(text"):
        train_diffusion(config, replace(source, texts=Pairs.encode(tokenizer, [TEXT], 48)), tmp_path / "cut", silent())
    going_on = train_diffusion(config, examples(tokenizer, steps=1), tmp_path / "on", silent(), start=whole.params)
    assert going_on.last("held_out_loss") < 1.2 * whole.last("held_out_loss")


def test_what_cannot_be_trained_on(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"expected a share of arithmetic from 0 to 1, found 1\.5"):
        examples(tokenizer, 1.5)
    empty = Pairs.encode(tokenizer, [], 48)
    with pytest.raises(ValueError, match="expected a prompt and response within 48 tokens in the training text"):
        Examples(tokenizer, empty, empty, 0.0, 0, OPTIONS)
    with pytest.raises(ValueError, match=r"expected sequences longer than a problem's 2\d\d tokens, found 48"):
        Examples(tokenizer, empty, empty, 1.0, 0, OPTIONS)
