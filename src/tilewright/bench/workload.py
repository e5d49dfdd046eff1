"""Requests to send to a server, and their times: those of a trace, or the prompts of a file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from tilewright.bench.datasets import Example, Message, messages, prompt
from tilewright.bench.lengths import RequestTrace

Times = Float[np.ndarray, " N"]
Ids = Int[np.ndarray, " T"]
MakePrompt = Callable[[int, int], str | Ids]
"""A prompt of about so many tokens for the request of this number."""


@dataclass(frozen=True)
class Planned:
    """A request to send.

    Attributes:
        number: from 0, in the order of the plan.
        due_s: when to send it, in seconds after the start.
        prompt: text or token ids.
        max_new_tokens: at least 1.
        example: the record that the prompt is of, which words it for a chat model.
    """

    number: int
    due_s: float
    prompt: str | Ids
    max_new_tokens: int
    example: Example | None = None

    @property
    def messages(self) -> list[Message]:
        """The prompt as a conversation.

        Raises:
            ValueError: it is one of token ids.
        """
        if self.example is not None:
            return messages(self.example)
        if not isinstance(self.prompt, str):
            raise ValueError("expected a text to put to a chat model, found token ids")
        return [Message(role="user", content=self.prompt)]


def token_prompts(vocab_size: int, seed: int) -> MakePrompt:
    """Prompts of random token ids below `vocab_size`, as long as they are asked for, each from its number and the seed."""
    return lambda tokens, number: np.random.default_rng([seed, number]).integers(0, vocab_size, tokens, np.int32)


def text_prompts(text: str, characters_per_token: float, seed: int) -> MakePrompt:
    """Prompts cut from a text that repeats itself, each from a place of its own, so that none begins like another."""

    def make(tokens: int, number: int) -> str:
        length = max(round(tokens * characters_per_token), 1)
        start = int(np.random.default_rng([seed, number]).integers(len(text)))
        return (text * (1 + (start + length) // len(text)))[start : start + length]

    return make


def joined(examples: Sequence[Example]) -> str:
    """The prompts of a file as one text."""
    return "\n\n".join(prompt(example, (), None) for example in examples)


def context_scale(trace: RequestTrace, context: int | None) -> float:
    """Factor on the lengths of a trace by which its longest request fits `context` positions; at most 1."""
    longest = int((trace.prompts + np.maximum(trace.outputs, 1)).max())
    return 1.0 if context is None else min(1.0, context / longest)


def trace_plan(
    trace: RequestTrace, due: Times, make: MakePrompt, *, scale: float = 1.0, most_new_tokens: int | None = None
) -> list[Planned]:
    """The requests of a trace, one for each time in `due`, each with its own lengths.

    Args:
        scale: lengths are multiplied by it and rounded down, to 1 at least; so is an output that has none.
        most_new_tokens: a limit of the outputs.
    """
    plan = []
    for number, (at, tokens, new) in enumerate(zip(due.tolist(), trace.prompts.tolist(), trace.outputs.tolist(), strict=False)):
        new_tokens = min(scaled(new, scale), most_new_tokens or math.inf)
        plan.append(Planned(number, at, make(scaled(tokens, scale), number), int(new_tokens)))
    return plan


def scaled(tokens: int, scale: float) -> int:
    return max(math.floor(tokens * scale + 1e-9), 1)


def file_plan(examples: Sequence[Example], due: Times, max_new_tokens: int) -> list[Planned]:
    """The first turns of a file's records, one for each time in `due`, from the beginning again where there are more times."""
    chosen = [examples[number % len(examples)] for number in range(len(due))]
    return [
        Planned(number, at, prompt(example, (), None), max_new_tokens, example)
        for number, (at, example) in enumerate(zip(due.tolist(), chosen, strict=True))
    ]


def at_once(requests: int) -> Times:
    return np.zeros(requests)


def poisson_times(requests: int, rate: float, seed: int) -> Times:
    """Times of arrival at `rate` a second, with gaps that are exponentially distributed; the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(requests - 1, 0))
    return np.concatenate([np.zeros(min(requests, 1)), np.cumsum(gaps)])


def trace_times(trace: RequestTrace, requests: int, speed: float) -> Times:
    """The trace's own times of arrival, `speed` times as fast, the first of them at 0.

    Raises:
        ValueError: the trace has none.
    """
    if trace.arrivals_s is None:
        raise ValueError(
            "expected times of arrival in the trace (arrival_s or TIMESTAMP), found none; --arrivals burst or --rate"
        )
    times = trace.arrivals_s[:requests]
    return (times - times[0]) / speed


def split_warmup(plan: Sequence[Planned], warmup: int) -> tuple[list[Planned], list[Planned]]:
    """The first requests, to send at once, and the others, of which the first is due at 0."""
    rest = plan[warmup:]
    begin = rest[0].due_s if rest else 0.0
    return [replace(each, due_s=0.0) for each in plan[:warmup]], [replace(each, due_s=each.due_s - begin) for each in rest]
