"""Evaluates a language model on held-out text: loss per token and per byte, and repetition in its continuations."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import jax
import numpy as np
from tokenizers import Tokenizer

from tilewright.kernels.select import training_operations
from tilewright.llm.acceptance import distinct_ngram_ratio
from tilewright.llm.language_model import LanguageModel
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.data import TokenStream, require_windows
from tilewright.train.lm import next_token_loss
from tilewright.train.regenerate import cut_prompts

BATCH = 8
WINDOW = 512
BATCHES = 16
"""Windows per batch, tokens per window, and the largest number of batches, for the held-out loss."""
PROMPTS = 16
PROMPT_TOKENS = 64
NEW_TOKENS = 128
"""Prompts of each text that the model continues greedily, tokens per prompt, and new tokens per continuation."""


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Number of bytes of each token of a byte-level BPE, int32 `[vocab]`; 0 for special tokens."""
    special = tokenizer.get_added_tokens_decoder()
    # A byte-level vocabulary writes each byte as one character.
    sizes = [0 if n in special else len(tokenizer.id_to_token(n) or "") for n in range(tokenizer.get_vocab_size())]
    return np.asarray(sizes, np.int32)


def held_out_loss(config: DecoderConfig, params: DecoderParams, sizes: np.ndarray, stream: TokenStream) -> dict[str, float]:
    """Measures the mean loss over windows of `WINDOW` tokens of a text, at most `BATCHES` batches.

    Args:
        params: float32 parameters.
        sizes: bytes per token, from `token_bytes`.

    Returns:
        `tokens` in the loss, `loss_nats_per_token` and `bits_per_byte`.

    Raises:
        ValueError: no token of the windows is in the loss, or the text is too short for one batch.
    """
    require_windows(stream, WINDOW + 1, BATCH, "the held-out text")
    unbalanced = replace(config, balance=0.0)  # excludes the balancing loss of experts
    measure = jax.jit(partial(next_token_loss, unbalanced, training_operations("float32")))
    nats = tokens = covered = 0.0
    for batch, in_loss in islice(stream.windows(WINDOW + 1, BATCH, 0, 0), BATCHES):
        loss, count = measure(params, batch, in_loss)
        nats = nats + float(loss) * float(count)
        tokens = tokens + float(count)
        covered += float(np.sum(sizes[batch[:, 1:]] * in_loss[:, 1:]))
    if not tokens:
        raise ValueError("expected tokens in the loss of the held-out text, found none in the windows that are measured")
    return {"tokens": tokens, "loss_nats_per_token": nats / tokens, "bits_per_byte": nats / np.log(2.0) / covered}


def evaluate_target(
    config: DecoderConfig, params: DecoderParams, tokenizer: Tokenizer, held_out: Mapping[str, TokenStream]
) -> dict[str, dict[str, float]]:
    """Measures `held_out_loss` and the share of distinct 4-grams in greedy continuations, for each text."""
    table = ShapeTable(batches=(PROMPTS,))
    sizes = token_bytes(tokenizer)
    lm = LanguageModel(config, params, tokenizer, table=table)
    sampling = Sampling(NEW_TOKENS, 0.0, ignore_eos=True)
    figures = {}
    for name, stream in held_out.items():
        written = lm.generate(cut_prompts(stream, PROMPTS, PROMPT_TOKENS, seed=0), sampling, speculative=False)
        ratios = [distinct_ngram_ratio(result.tokens) for result in written]
        loss = held_out_loss(config, params, sizes, stream)
        figures[name] = {**loss, "distinct_4gram_ratio": sum(ratios) / len(ratios)}
    return figures
