"""Requests with a constraint: a token a step from left to right, among the allowed ones, beside requests without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from jaxtyping import UInt32

from diffusion.denoising import OPTIONS, check_empty, engine_like, model_of, requests, run
from diffusion.support import MODELS, decided, mode_of, randomness, request_of
from reference.diffusion_numpy import Generation, generate
from runtime.support import Heard
from tilewright.diffusion.options import Denoising, Saliency
from tilewright.diffusion.request import DenoisingRequest
from tilewright.runtime.constraints import ConstraintError
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import RequestHandle

pytestmark = pytest.mark.usefixtures("quick_compiles")

TOKENS = 39
"""Number of tokens without the mask."""


@dataclass
class Climb:
    """Each token lies 1 to 9 beyond the one before, in a circle; only then, and after `least` tokens, the end is allowed.

    Attributes:
        breaks: number of tokens behind which it cannot continue; None for no such number.
    """

    end: int
    least: int = 5
    breaks: int | None = None
    tokens: tuple[int, ...] = ()
    automaton: None = None

    def begin(self) -> "Climb":
        return replace(self, tokens=())

    def forced(self) -> list[int]:
        return []

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        last = tokens[-1] if tokens else 0
        ends = {self.end} if len(tokens) >= self.least else set[int]()
        return {(last + step) % TOKENS for step in range(1, 10)} - {12, 17, 22, 27, 30, 36} | ends

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        if self.breaks is not None and len(self.tokens) >= self.breaks:
            raise ConstraintError("it cannot continue")
        bits = np.zeros(32 * masks.shape[1], np.uint8)
        bits[[*self.allowed(self.tokens)]] = 1
        masks[0] = np.packbits(bits, bitorder="little").view(np.uint32)
        return 0

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.allowed(self.tokens)
            self.tokens = (*self.tokens, token)


SPARSE = Saliency(0.9, 2, 3)
WAYS: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3, "mode": "prefix"},
    {"mode": "dual", "temperature": 1.2},
    {"mode": "sparse", "saliency": SPARSE, "remasking": "entropy"},
    {"mode": "sparse", "saliency": SPARSE, "temperature": 0.9, "presence_penalty": 0.8},
    {"remasking": "origin", "steps": 6, "suffix_window": 2},
]


def constrained(n: int, **changes: Any) -> DenoisingRequest:
    fields: dict[str, Any] = {"new_tokens": 12, "block_length": 4, "seed": n, **WAYS[n % len(WAYS)]}
    return DenoisingRequest([n % 30 + 1, 2, 5], Denoising(**fields), constraint=Climb(12), **changes)


def wanted(asked: DenoisingRequest) -> tuple[Generation, bool]:
    """The reference's generation, and whether rounding cannot change it."""
    assert isinstance(asked.constraint, Climb)
    request = replace(request_of(asked.denoising, "dream"), allowed=asked.constraint.allowed, eos=(12,))
    noise, uniform = randomness(asked.denoising.seed or 0)
    found = generate(
        MODELS["dream"],
        asked.prompt,
        request,
        mode_of(asked.denoising),
        lambda step, position, _: noise[step, position],
        lambda step, position: float(uniform[step, position]),
    )
    return found, all(decided(step, asked.denoising, request) for step in found.steps)


@pytest.fixture(scope="module")
def warm() -> Engine:
    engine = model_of("dream").engine(OPTIONS)
    engine.warm()
    return engine


@pytest.fixture(scope="module")
def wants() -> list[tuple[Generation, bool]]:
    return [wanted(constrained(n)) for n in range(12)]


@pytest.fixture
def engine(warm: Engine, wants: object) -> Iterator[Engine]:
    """Opened behind `wants`, since nothing compiles beside an open engine."""
    engine = engine_like(warm, lambda: 2)
    engine.accept_requests()
    yield engine
    engine.stop()


def served(engine: Engine, asks: Sequence[DenoisingRequest]) -> list[tuple[Heard, RequestHandle]]:
    """Returns the updates and handles of requests that run together."""
    heard = [Heard() for _ in asks]
    handles = [engine.submit(asked, each) for asked, each in zip(asks, heard, strict=True)]
    run(engine)
    return list(zip(heard, handles, strict=True))


def test_tokens_and_steps_are_those_of_the_reference_alone_and_among_others(
    engine: Engine, wants: list[tuple[Generation, bool]]
):
    asks = [constrained(n) for n in range(12)]
    others = requests(3, 12)
    alone = [served(engine, [asked])[0] for asked in asks]
    others_alone = [served(engine, [other])[0] for other in others]
    among = served(engine, [each for pair in zip(asks, others, strict=True) for each in pair])
    compared = 0
    for (heard, handle), (beside, _), (want, sure) in zip(alone, among[::2], wants, strict=True):
        assert (heard.tokens, heard.text, heard.end) == (beside.tokens, beside.text, beside.end)
        assert all(len(update.tokens) == 1 for update in heard.updates), "a token is delivered at once"
        assert handle.steps == len(heard.tokens)
        assert handle.masks == {"host"}
        compared += sure
        if sure:
            assert heard.tokens == want.output
            assert handle.result is not None
            assert handle.result.passes == len(want.steps)
    assert compared >= 9
    assert {heard.end for heard, _ in alone} == {"eos", "length"}
    for (heard, handle), (beside, other) in zip(others_alone, among[1::2], strict=True):
        assert (heard.tokens, heard.text, heard.end, handle.steps) == (beside.tokens, beside.text, beside.end, other.steps)
    check_empty(engine)


def test_log_probabilities_are_of_the_allowed_tokens(engine: Engine):
    ((heard, _),) = served(engine, [constrained(0, logprobs=3)])
    state = Climb(12)
    for update in heard.updates:
        (token,) = update.tokens
        assert token.logprobs is not None
        assert {each for each, _ in token.logprobs.top} <= state.allowed(state.tokens)
        assert token.logprobs.logprob <= 0
        state.advance([token.token])


def test_after_a_failed_dispatch_a_text_continues_as_before(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The row repeats the tokens that were delivered; its constraint is behind them."""
    asks = [constrained(2), constrained(4)]
    want = [heard.tokens for heard, _ in served(engine, asks)]
    dispatch = engine.runner.run
    calls = 0

    def failing(key: Any, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            engine.runner.state = None
            raise RuntimeError("the device is gone")
        return dispatch(key, *inputs)

    monkeypatch.setattr(engine.runner, "run", failing)
    found = served(engine, asks)
    assert [heard.tokens for heard, _ in found] == want
    assert [handle.preemptions for _, handle in found] == [1, 1]
    check_empty(engine)


def test_a_constraint_that_fails_ends_its_request_alone(engine: Engine):
    other = requests(4, 1)[0]
    ((want, _),) = served(engine, [other])
    (heard, _), (told, _) = served(engine, [replace(constrained(0), constraint=Climb(12, breaks=2)), other])
    assert (heard.end, len(heard.tokens), heard.updates[-1].error) == ("error", 2, "it cannot continue")
    assert (told.tokens, told.end) == (want.tokens, want.end)
    check_empty(engine)


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 1}, {"logits_eos_inf": True}], ids=str)
def test_options_that_keep_a_text_from_its_end_are_refused(changes: dict[str, Any]):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"expected no {name} with a constraint, which ends the text itself"):
        replace(constrained(0), denoising=replace(Denoising(4), **changes))


def test_stop_strings_and_stop_tokens_do_not_end_a_constrained_text(engine: Engine):
    (whole, _), (stopped, _) = served(engine, [constrained(0), constrained(0, stop=(" t",))])
    assert (stopped.tokens, stopped.end) == (whole.tokens, whole.end)
