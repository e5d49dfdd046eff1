"""A published model from its GGUF file, beside transformers, which reads and dequantises the file by itself.

The model is smollm2-135m, whose distribution `make oracle` installs; without it every test here fails.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright as tw
from server.conftest import Real, on_a_port
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder, published
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Result
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.load import DrafterOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAME = "smollm2-135m"
NEW = 32
END = 2
TOLERANCE = 1e-3
"""Of a logit in float32: sums of 30 layers, in another order. The logits themselves reach 40."""
MARGIN = 2 * TOLERANCE
"""Where the two most likely tokens are nearer to each other than this, either may come."""
SAMPLING = tw.Sampling(max_new_tokens=NEW)
TABLE = ShapeTable(batches=(8,), capacities=(512,), chunks=(64,), widths=(4,))
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "weights": "dequantised"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "bfloat16": {"dtype": "bfloat16", "weights": "dequantised"},
}
CODE = """def total(prices, discounts):
    result = 0
    for price, discount in zip(prices, discounts):
        result += price * (1 - discount)
    return result
"""
QUESTIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": content}]
    for content in (
        "What is the capital of France?",
        "Write a Python function that says whether a number is prime.",
        f"Repeat this code without any change:\n\n```python\n{CODE}```",
        f"Rename `result` to `sum_of_prices` in this function, and give me all of it:\n\n```python\n{CODE}```",
        "Was heißt „Grüße aus München“ auf Englisch? Und wie sagt man 東京 und 🍣?",
        "Janet has 16 eggs. She eats 3 for breakfast and bakes muffins with 4. She sells the rest at $2 each, and her brother "
        "sells twice as many at $3 each. A neighbour, who has 12 hens, gives both of them 5 eggs a day and takes 1 back. "
        "How much do they make in a week together? Think step by step, and say at the end what each of them makes.",
    )
]
QUESTIONS += [
    [
        {"role": "user", "content": "Name three fruits."},
        {"role": "assistant", "content": "1. Apple\n2. Banana\n3. Cherry"},
        {"role": "user", "content": "Now name them again, backwards, each with its colour."},
    ],
    [
        {"role": "system", "content": "You are a poet. You answer in verse."},
        {"role": "user", "content": "Write about the sea, the wind and the night:\t\n\n  three lines, no more."},
    ],
]


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's file, as the package index has it."""
    return published.find(NAME)


@pytest.fixture(scope="module")
def theirs(file: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and model, both made of the file alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    return tokenizer, model.eval()


@lru_cache(maxsize=1)
def loaded(kind: str) -> LanguageModel:
    return tw.load(NAME, table=TABLE, **FORMATS[kind])


@pytest.fixture(scope="module")
def prompts(file: Path) -> list[list[int]]:
    template = ChatTemplate.load(file)
    assert template is not None
    tokenizer = loaded("float32").tokenizer
    return [encode(tokenizer, template.render(question), add_special_tokens=False) for question in QUESTIONS]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]]) -> list[list[int]]:
    """What we generate in float32, greedily."""
    return [result.tokens for result in loaded("float32").generate(prompts, SAMPLING)]


@pytest.fixture(scope="module")
def their_logits(theirs: tuple[Any, Any], prompts: list[list[int]], answers: list[list[int]]) -> list[np.ndarray]:
    """transformers' logits, over each question and our answer to it."""
    with torch.no_grad():
        return [
            theirs[1](torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].numpy()
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_a_conversation_has_their_text_and_tokens(file: Path, theirs: tuple[Any, Any], prompts: list[list[int]], number: int):
    template = ChatTemplate.load(file)
    tokenizer = theirs[0]
    assert template is not None
    question = QUESTIONS[number]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert template.render(question) == text
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert prompts[number] == tokens
    ours = loaded("float32").tokenizer
    assert ours.decode(tokens, skip_special_tokens=False) == tokenizer.decode(tokens)
    assert ours.decode(tokens, skip_special_tokens=True) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_logits_are_theirs(prompts: list[list[int]], answers: list[list[int]], their_logits: list[np.ndarray]):
    """Over question and answer, at every position."""
    lm = loaded("float32")

    @jax.jit
    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        return decoder.logits(lm.target, lm.ops, params, decoder.forward_full(lm.target, lm.ops, params, tokens).hidden)[0]

    longest = max(len(prompt) for prompt in prompts) + NEW
    for prompt, answer, logits in zip(prompts, answers, their_logits, strict=True):
        padded = jnp.asarray([[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))]], jnp.int32)
        found = np.asarray(logits_of(lm.model.models.target, padded))[: len(logits)]
        assert np.abs(found - logits).max() <= TOLERANCE


def test_greedy_answers_are_theirs(prompts: list[list[int]], answers: list[list[int]], their_logits: list[np.ndarray]):
    """At each position of our answer, given what stands before it, their most likely token is ours: so theirs is the same."""
    for prompt, answer, logits in zip(prompts, answers, their_logits, strict=True):
        assert len(answer) == NEW or answer[-1] == END
        assert END not in answer[:-1]
        there = logits[len(prompt) - 1 : -1]
        best = there.argmax(axis=-1)
        behind = there[np.arange(len(answer)), best] - there[np.arange(len(answer)), answer]
        assert behind.max() < MARGIN, f"they part: {best.tolist()}, {answer}"
    assert sum(len(answer) == NEW for answer in answers) >= 4


@pytest.mark.parametrize("kind", FORMATS)
def test_drafts_change_nothing(prompts: list[list[int]], kind: str):
    """Of n-grams, with blocks of 8 and as chosen round by round."""
    lm = loaded(kind)
    plain = [result.tokens for result in lm.generate(prompts, SAMPLING)]
    drafted = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size=8))).generate(prompts, SAMPLING)
    assert [result.tokens for result in drafted] == plain
    assert sum(sum(result.accepted) for result in drafted) >= NEW
    chosen = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size="auto"))).generate(prompts, SAMPLING)
    assert [result.tokens for result in chosen] == plain
    assert all(result.choices for result in chosen)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[Result]:
    """Each answer by itself, in bfloat16, without drafts."""
    lm = loaded("bfloat16")
    return [result for prompt in prompts for result in lm.generate([prompt], SAMPLING)]


@pytest.fixture(scope="module")
def served(file: Path, alone: list[Result]) -> Iterator[Real]:
    lm = loaded("bfloat16")
    lm = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size=4)))
    engine = lm.engine(EngineOptions(table=ShapeTable(batches=(4,), capacities=(512,), chunks=(64,), widths=())))
    engine.warm()
    engine.start()
    with on_a_port(engine, template=ChatTemplate.load(file)) as server:
        yield server
    assert engine.stop(20.0)
    assert engine.stats().compilations == 0


@pytest.mark.parametrize("apart_s", [0.0, 0.15], ids=["at once", "staggered"])
def test_what_is_served_beside_others_is_what_comes_alone(served: Real, alone: list[Result], apart_s: float):
    """Eight requests for four slots, over HTTP, with drafts."""

    def ask(number: int) -> tuple[str, list[int]]:
        time.sleep(number * apart_s)
        body = {"messages": QUESTIONS[number], "max_tokens": NEW, "temperature": 0, "return_token_ids": True}
        answer = httpx2.post(f"{served.url}/v1/chat/completions", json={"model": "demo", **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"], choice["token_ids"]

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        found = list(pool.map(ask, range(len(QUESTIONS))))
    assert found == [(result.text, result.tokens) for result in alone]
