"""Requests of all kinds for tests of the engine, and a driver that steps it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tilewright.diffusion.request import DenoisingRequest
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.autoregressive import Autoregressive
from tilewright.runtime.engine import Engine
from tilewright.runtime.pace import Pace
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.sampling import Sampling


@dataclass
class Heard:
    """Listener of a request.

    Attributes:
        updates: all outputs, in order.
    """

    updates: list[RequestOutput] = field(default_factory=list)

    def __call__(self, update: RequestOutput) -> None:
        assert not self.ended, "expected no output after the end"
        self.updates.append(update)

    @property
    def ended(self) -> bool:
        return any(update.end is not None for update in self.updates)

    @property
    def end(self) -> str | None:
        return self.updates[-1].end

    @property
    def tokens(self) -> list[int]:
        return [token.token for update in self.updates for token in update.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for update in self.updates for token in update.tokens)


def samplings(rng: np.random.Generator, count: int, longest: int) -> list[Sampling]:
    """Draws greedy, sampled, filtered and penalised settings of mixed lengths, each with its seed."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
        {"repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    )
    drawn = [kinds[rng.integers(len(kinds))] for _ in range(count)]
    return [
        Sampling(int(rng.integers(1, longest)), seed=int(rng.integers(2**32)), ignore_eos=bool(rng.integers(2)), **kind)
        for kind in drawn
    ]


def expected(lm: LanguageModel, asks: Sequence[GenerateRequest]) -> list[list[int]]:
    """Returns the tokens of plain decoding for each request alone."""
    return [lm.generate([list(ask.prompt)], ask.sampling, speculative=False)[0].tokens for ask in asks]


def pace_of(engine: Engine) -> Pace:
    pace = engine.decoding.chooser if isinstance(engine.decoding, Autoregressive) else getattr(engine.decoding, "pace", None)
    assert isinstance(pace, Pace)
    return pace


@contextmanager
def paced_by(engine: Engine, rng: np.random.Generator) -> Iterator[Callable[[], bool]]:
    """Yields a step with dispatches of random numbers of rounds.

    By default the numbers depend on the speed of the machine, and with them preemptions.
    """
    pace = pace_of(engine)
    settings = (pace.dispatch_s, pace.longest)
    pace.dispatch_s = math.inf

    def step() -> bool:
        pace.longest = int(rng.choice([1, 2, 4, 8]))
        return engine.step()

    try:
        yield step
    finally:
        pace.dispatch_s, pace.longest = settings


def drive(
    engine: Engine,
    asks: Sequence[GenerateRequest | DenoisingRequest],
    rng: np.random.Generator,
    cancelled: Sequence[int] = (),
) -> tuple[list[Heard], list[RequestHandle]]:
    """Submits requests in random portions between steps until all have ended. Cancels some of them."""
    listeners = [Heard() for _ in asks]
    handles: list[RequestHandle] = []
    with paced_by(engine, rng.spawn(1)[0]) as step:
        while len(handles) < len(asks) or not all(each.ended for each in listeners):
            for _ in range(int(rng.integers(0, 5))):
                if len(handles) < len(asks):
                    handles.append(engine.submit(asks[len(handles)], listeners[len(handles)]))
            for n in cancelled:
                if n < len(handles) and not listeners[n].ended and (len(listeners[n].updates) > 1 or rng.random() < 0.05):
                    engine.cancel(handles[n])
            step()
        while step():
            pass
    return listeners, handles


def sent_and_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the programs that an engine dispatches, and the types of the results that it reads."""
    run = engine.runner.run
    read = engine.read
    events = list[str]()

    def running(key: ProgramKey, *inputs: Any) -> Any:
        events.append(key.name)
        return run(key, *inputs)

    def reading(sent: Any) -> None:
        events.append(type(sent).__name__)
        read(sent)

    monkeypatch.setattr(engine.runner, "run", running)
    monkeypatch.setattr(engine, "read", reading)
    return events


def check_empty(engine: Engine) -> None:
    """Checks that no request runs or waits and no page is referenced."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens, stats.pages_used) == (0, 0, 0, 0)
    assert stats.compilations == 0 or engine.options.guard == "off"
    pages = engine.scheduler.pages
    assert not any(pages.ref_counts)
    assert sorted([*pages.empty, *pages.evictable]) == list(range(pages.count))
