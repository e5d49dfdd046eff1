"""Where two generations part, and how nearly the target's best two tokens are equal there."""

from collections.abc import Sequence
from typing import NamedTuple

from tilewright.bench.replay import opinions_of
from tilewright.bench.speculative_figures import first_difference
from tilewright.llm.language_model import LanguageModel


class Divergence(NamedTuple):
    """Place where two generations part: the index of the first token that differs, and the target's margin there.

    The margin is the largest logit less the second. Programs that round differently part where it is close to 0.
    """

    at: int
    margin: float


def difference(lm: LanguageModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Divergence | None:
    """Place where two generations after one prompt first differ; None if they are equal."""
    at = first_difference(a, b)
    if at is None:
        return None
    text = [*prompt, *max(a, b, key=len)[: at + 1]]
    return Divergence(at, float(opinions_of(lm, text)[1][-1]))
