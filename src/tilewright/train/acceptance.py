"""Acceptance of a drafter's drafts, measured on held-out prompts as soon as it is trained, and kept with it.

A run that chooses among drafters round by round begins with these numbers (`speculation/policy.py`).
"""

from collections.abc import Sequence

import numpy as np

from tilewright.llm.acceptance import drafting_rounds, num_spec_tokens
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.output import Result
from tilewright.runtime.sampling import Sampling
from tilewright.train.data import TokenSource, TokenStream
from tilewright.train.records import Records
from tilewright.train.regenerate import cut_prompts

PROMPTS = 16
TOKENS = 96
"""Numbers of prompts that are answered, and of tokens in each answer: a minute with 135 million parameters on two cores."""
WEIGHT = 2.0
"""Rounds that the position before counts for, where few rounds came as far."""


def held_out_prompts(source: TokenSource, count: int, length: int) -> list[list[int]]:
    """Prompts of held-out text: those of whole records, or stretches of a stream.

    Args:
        length: tokens of a stretch; of a text that is shorter, half.
    """
    if isinstance(source, Records):
        pairs = zip(source.starts.tolist(), source.prompts.tolist(), strict=True)
        different = dict.fromkeys(tuple(source.tokens[start : start + size].tolist()) for start, size in pairs if size)
        return [list(prompt) for prompt in list(different)[:count]]
    assert isinstance(source, TokenStream)
    return cut_prompts(source, count, max(1, min(length, len(source.tokens) // 2)), seed=0)


def acceptance_rates(results: Sequence[Result], drafts: int) -> tuple[float, ...]:
    """The share of each draft of a block that was accepted, of the rounds in which those before it were."""
    drafted, accepted = np.asarray(drafting_rounds(results), int).reshape(-1, 2).T
    rates = list[float]()
    before = 0.5
    for place in range(drafts):
        reached = (drafted > place) & (accepted >= place)
        before = (np.sum(reached & (accepted > place)) + WEIGHT * before) / (np.sum(reached) + WEIGHT)
        rates.append(round(float(before), 3))
    return tuple(rates)


def expected_acceptance(lm: LanguageModel, held_out: TokenSource) -> tuple[float, ...]:
    """The acceptance of a model's drafter by position, greedily, in whole blocks; see `DFlashConfig.expected_acceptance`."""
    room = lm.target.max_position_embeddings
    tokens = max(1, min(TOKENS, room // 2))
    prompts = [prompt[: room - tokens] for prompt in held_out_prompts(held_out, PROMPTS, min(TOKENS, room // 2))]
    generation = lm.generate(prompts, Sampling(tokens), speculative=True)
    return acceptance_rates(generation.results, num_spec_tokens(lm))
