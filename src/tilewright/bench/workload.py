"""Plans of requests and their arrival times, from a trace or from a file of prompts."""

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
"""`make(tokens, number)` returns a prompt of about this number of tokens for request `number`."""


@dataclass(frozen=True)
class PlannedRequest:
    """A request to send.

    Attributes:
        number: index in the plan, from 0.
        due_s: time of sending in seconds after the start.
        prompt: text or token ids.
        max_new_tokens: maximum number of tokens to generate, at least 1.
        example: record of the prompt, which formats the prompt for a chat model.
    """

    number: int
    due_s: float
    prompt: str | Ids
    max_new_tokens: int
    example: Example | None = None

    @property
    def messages(self) -> list[Message]:
        """Prompt as a conversation.

        Raises:
            ValueError: The prompt consists of token ids.
        """
        if self.example is not None:
            return messages(self.example)
        if not isinstance(self.prompt, str):
            raise ValueError("expected a text prompt for a chat model, found token ids")
        return [Message(role="user", content=self.prompt)]


def token_prompts(vocab_size: int, seed: int) -> MakePrompt:
    """Returns a maker of prompts of random token ids below `vocab_size`, with exact lengths."""
    return lambda tokens, number: np.random.default_rng([seed, number]).integers(0, vocab_size, tokens, np.int32)


def text_prompts(text: str, characters_per_token: float, seed: int) -> MakePrompt:
    """Returns a maker of prompts cut from a repeated text at random positions, so that prompts share no prefix."""

    def make(tokens: int, number: int) -> str:
        length = max(round(tokens * characters_per_token), 1)
        start = int(np.random.default_rng([seed, number]).integers(len(text)))
        return (text * (1 + (start + length) // len(text)))[start : start + length]

    return make


def joined(examples: Sequence[Example]) -> str:
    """Joins the prompts of a file to one text."""
    return "\n\n".join(prompt(example, (), None) for example in examples)


def context_scale(trace: RequestTrace, context: int | None) -> float:
    """Returns the factor (at most 1) on a trace's lengths with which its longest request fits `context` positions."""
    longest = int((trace.prompts + np.maximum(trace.outputs, 1)).max())
    return 1.0 if context is None else min(1.0, context / longest)


def trace_plan(
    trace: RequestTrace, due: Times, make: MakePrompt, *, scale: float = 1.0, max_new_tokens: int | None = None
) -> list[PlannedRequest]:
    """Plans the requests of a trace, one for each time in `due`.

    Args:
        scale: factor on all lengths, which are then rounded down to at least 1.
        max_new_tokens: upper limit of output lengths.
    """
    plan = []
    for number, (due_s, tokens, new) in enumerate(
        zip(due.tolist(), trace.prompts.tolist(), trace.outputs.tolist(), strict=False)
    ):
        new_tokens = min(scaled(new, scale), max_new_tokens or math.inf)
        plan.append(PlannedRequest(number, due_s, make(scaled(tokens, scale), number), int(new_tokens)))
    return plan


def scaled(tokens: int, scale: float) -> int:
    return max(math.floor(tokens * scale + 1e-9), 1)


def file_plan(examples: Sequence[Example], due: Times, max_new_tokens: int) -> list[PlannedRequest]:
    """Plans the first turns of a file's records, one for each time in `due`. A shorter file repeats."""
    chosen = [examples[number % len(examples)] for number in range(len(due))]
    return [
        PlannedRequest(number, due_s, prompt(example, (), None), max_new_tokens, example)
        for number, (due_s, example) in enumerate(zip(due.tolist(), chosen, strict=True))
    ]


def at_once(requests: int) -> Times:
    return np.zeros(requests)


def poisson_times(requests: int, rate: float, seed: int) -> Times:
    """Returns Poisson arrival times with `rate` requests per second; the first is 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(requests - 1, 0))
    return np.concatenate([np.zeros(min(requests, 1)), np.cumsum(gaps)])


def trace_times(trace: RequestTrace, requests: int, speed: float) -> Times:
    """Returns the trace's arrival times, `speed` times as fast; the first is 0.

    Raises:
        ValueError: The trace has no arrival times.
    """
    if trace.arrivals_s is None:
        raise ValueError(
            "expected arrival times in the trace (arrival_s or TIMESTAMP), found none; use --arrivals burst or --rate"
        )
    times = trace.arrivals_s[:requests]
    return (times - times[0]) / speed


def split_warmup(plan: Sequence[PlannedRequest], warmup: int) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Splits a plan into warm-up requests, all due at 0, and the others, the first of which is due at 0."""
    rest = plan[warmup:]
    start = rest[0].due_s if rest else 0.0
    return [replace(each, due_s=0.0) for each in plan[:warmup]], [replace(each, due_s=each.due_s - start) for each in rest]
