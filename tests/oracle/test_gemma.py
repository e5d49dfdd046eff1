"""Gemma 3 270M from its GGUF file, beside transformers and llama.cpp, which read the same file.

`make gemma` fetches the file for users who accept its terms; without it these tests are skipped. Gemma 3 270M
is a base model, so prompts are plain texts.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright as tw
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder
from tilewright.models.tokenizer import encode
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.load import DrafterOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "gemma-3-270m-q4_k_m.gguf"
pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="needs Gemma 3 270M: `make gemma` fetches it, if you accept its terms"
)
NEW = 8
"""Greedy tokens of a text."""
POSITIONS = 576
"""Length of the long text, beyond the windows of 512."""
COMPARED = 32
"""Positions at either end of the long text whose logits are compared: a logit for each of 262,144 tokens is large."""
TOLERANCE = 5e-4
"""Difference of a logit in float32, from sums of 18 layers in another order."""
MARGIN = 2 * TOLERANCE
"""Distance of the two best logits below which either token may be the best."""
LLAMA_CPP_TOLERANCE = 0.15
"""Mean absolute difference from llama.cpp's log-probabilities, over its three best tokens at each position: measured 0.083."""
LLAMA_CPP_BIAS = 0.06
"""Absolute mean of the signed differences: measured 0.020."""
LLAMA_CPP_MARGIN = 0.3
"""Distance of the two best log-probabilities below which llama.cpp may choose another token."""
SAMPLING = tw.Sampling(max_new_tokens=NEW, ignore_eos=True)
TABLE = ShapeTable(batches=(2,), capacities=(128,), chunks=(64,), widths=(4,))
PROMPTS = (
    "The capital of France is",
    "One, two, three, four, one, two, three, four, one, two,",
)
SPACE_MARKS = "▁ is SentencePiece's own ▁▁ space"
TEXTS = (
    *PROMPTS,
    "",
    " ",
    "   three spaces before, two after  ",
    "\n\n\tdef f(x):\r\n\t\treturn x  # 1234567890\n",
    "Grüße aus München, 東京 und 🍣:   drei Leerzeichen.",
    "e\u0301 is not é; \u200b\u200d\ufeff are invisible, \u00a0 is not a space",
    "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷",
    "שלום مرحبا नमस्ते ไทย 한국어",
    "<bos><eos><start_of_turn>user\n<end_of_turn> <unused7> <0x0A> [multimodal]",
    "\x00\x01\x7f ￿ \U0010ffff \U0001d518\U0001d52b",
    "https://example.com/?a=1&b=%20#x != 3.14159e-10 ~~~~~~~~~~~~~~~~",
)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """transformers' tokenizer and model, both made of the file alone."""
    with pytest.MonkeyPatch.context() as patch:  # transformers reads the file's 262,144 tokens five times over
        patch.setattr(gguf, "GGUFReader", lru_cache(gguf.GGUFReader))
        tokenizer = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype="float32")
    return tokenizer, model.eval()


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tw.load(FILE, dtype="float32", weights="dequantised", table=TABLE)


@pytest.fixture(scope="module")
def logits_at(lm: LanguageModel) -> Callable[[list[int], list[int]], np.ndarray]:
    """Computes the logits `[positions, vocabulary]` at some positions of a text, without a cache."""

    @jax.jit
    def logits(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        hidden = decoder.forward_full(lm.target, lm.ops, params, tokens).hidden
        return decoder.logits(lm.target, lm.ops, params, hidden[:, positions])[0]

    def found(tokens: list[int], positions: list[int]) -> np.ndarray:
        ids = jnp.asarray([tokens], jnp.int32)
        at = jnp.asarray(positions, jnp.int32)
        return np.asarray(logits(lm.model.models.target, ids, at))

    return found


def reference_logits(model: Any, tokens: list[int], positions: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, logits_to_keep=torch.tensor(positions)).logits[0].numpy()


def test_tokens_equal_transformers(reference: tuple[Any, Any], lm: LanguageModel):
    found = [encode(lm.tokenizer, text) for text in TEXTS]
    assert found == [reference[0](text).input_ids for text in TEXTS]
    decoded = [lm.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in found]
    assert decoded == [reference[0].decode(tokens) for tokens in found]


def test_logits_equal_transformers_beyond_the_windows(
    reference: tuple[Any, Any], lm: LanguageModel, logits_at: Callable[[list[int], list[int]], np.ndarray]
):
    tokens = encode(lm.tokenizer, (ROOT / "LICENSE").read_text(encoding="utf-8"))[:POSITIONS]
    assert len(tokens) == POSITIONS
    positions = [*range(COMPARED), *range(POSITIONS - COMPARED, POSITIONS)]
    expected = reference_logits(reference[1], tokens, positions)
    found = logits_at(tokens, positions)
    assert np.abs(found - expected).max() <= TOLERANCE
    ordered = np.partition(expected, -2, axis=-1)
    clear = ordered[:, -1] - ordered[:, -2] > MARGIN
    assert clear.sum() > COMPARED
    assert (found.argmax(-1) == expected.argmax(-1))[clear].all()


def test_greedy_tokens_equal_transformers_with_drafts_and_without(reference: tuple[Any, Any], lm: LanguageModel):
    """Each of our tokens is transformers' most likely token after the tokens before it."""
    plain = [result.tokens for result in lm.generate(PROMPTS, SAMPLING)]
    for text, tokens in zip(PROMPTS, plain, strict=True):
        prompt = encode(lm.tokenizer, text)
        whole = [*prompt, *tokens]
        logits = reference_logits(reference[1], whole, list(range(len(prompt) - 1, len(whole) - 1)))
        assert (logits.max(-1) - logits[np.arange(NEW), tokens]).max() < MARGIN, text
    drafted = lm.with_drafter(*lm.load_drafter("ngram", DrafterOptions(block_size=4))).generate(PROMPTS, SAMPLING)
    assert [result.tokens for result in drafted] == plain
    assert sum(sum(result.accepted) for result in drafted) > 0


def test_log_probabilities_agree_with_llama_cpp(lm: LanguageModel, logits_at: Callable[[list[int], list[int]], np.ndarray]):
    """llama.cpp multiplies the file's 4- to 8-bit matrices by rounded activations, so the tolerance is wider."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install --no-deps xllamacpp")
    options = xllamacpp.CommonParams()
    options.model.path = str(FILE)
    options.n_ctx = 256
    options.n_parallel = 1
    options.warmup = False
    server = xllamacpp.Server(options)
    # transformers takes this character for a space, llama.cpp does not: its vocabulary spells two spaces as such.
    answer = server.handle_completions({"prompt": SPACE_MARKS, "n_predict": 1})
    assert answer["usage"]["prompt_tokens"] == len(encode(lm.tokenizer, SPACE_MARKS))
    differences: list[float] = []
    for text in PROMPTS:
        prompt = encode(lm.tokenizer, text)
        body = {"prompt": text, "n_predict": NEW, "n_probs": 3, "temperature": 0.0, "ignore_eos": True}
        answer = server.handle_completions(body)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        entries = answer["choices"][0]["logprobs"]["content"]
        whole = [*prompt, *(entry["id"] for entry in entries)]
        logits = logits_at(whole, list(range(len(prompt) - 1, len(whole) - 1)))
        log_probabilities = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        for row, entry in zip(log_probabilities, entries, strict=True):
            second, first = np.partition(row, -2)[-2:]
            assert entry["id"] == row.argmax() or first - second < LLAMA_CPP_MARGIN
            differences += [float(row[each["id"]]) - each["logprob"] for each in entry["top_logprobs"]]
    assert len(differences) == 3 * NEW * len(PROMPTS)
    assert abs(np.mean(differences)) < LLAMA_CPP_BIAS
    assert np.abs(differences).mean() < LLAMA_CPP_TOLERANCE
