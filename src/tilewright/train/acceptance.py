"""Measures the acceptance of a trained drafter on held-out prompts.

The rates are saved with the drafter. The policy that chooses a drafter per round starts from them (`speculation/policy.py`).
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
"""Prompts, and new tokens per prompt. With 135 million parameters on two cores this takes a minute."""
WEIGHT = 2.0
"""Pseudo-count, in rounds, of the previous position's rate as a prior: few rounds reach the last positions."""


def held_out_prompts(source: TokenSource, count: int, length: int) -> list[list[int]]:
    """Returns prompts of held-out text: prompts of records, or excerpts of a stream.

    Args:
        source: held-out text.
        count: most prompts.
        length: tokens per excerpt; at most half of the text.
    """
    if isinstance(source, Records):
        pairs = zip(source.starts.tolist(), source.prompts.tolist(), strict=True)
        distinct = dict.fromkeys(tuple(source.tokens[start : start + size].tolist()) for start, size in pairs if size)
        return [list(prompt) for prompt in list(distinct)[:count]]
    assert isinstance(source, TokenStream)
    return cut_prompts(source, count, max(1, min(length, len(source.tokens) // 2)), seed=0)


def acceptance_rates(results: Sequence[Result], drafts: int) -> tuple[float, ...]:
    """Returns the acceptance rate of each draft position, given that all drafts before it were accepted.

    Args:
        results: results of speculative generation.
        drafts: draft positions per block.
    """
    drafted, accepted = np.asarray(drafting_rounds(results), int).reshape(-1, 2).T
    rates = list[float]()
    before = 0.5
    for place in range(drafts):
        reached = (drafted > place) & (accepted >= place)
        before = (np.sum(reached & (accepted > place)) + WEIGHT * before) / (np.sum(reached) + WEIGHT)
        rates.append(round(float(before), 3))
    return tuple(rates)


def expected_acceptance(lm: LanguageModel, held_out: TokenSource) -> tuple[float, ...]:
    """Measures the acceptance by draft position, in greedy decoding with whole blocks (`DFlashConfig.expected_acceptance`)."""
    room = lm.target.max_position_embeddings
    tokens = max(1, min(TOKENS, room // 2))
    prompts = [prompt[: room - tokens] for prompt in held_out_prompts(held_out, PROMPTS, min(TOKENS, room // 2))]
    generation = lm.generate(prompts, Sampling(tokens), speculative=True)
    return acceptance_rates(generation.results, num_spec_tokens(lm))
