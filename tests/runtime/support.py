"""What the tests of the engine share: small models, requests of all kinds, and a driver that steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tilewright.diffusion.engine import DiffusionEngine
from tilewright.diffusion.request import DenoisingRequest
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.pace import Pace
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest, RequestHandle, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.service import Service


@dataclass
class Heard:
    """What one request was told.

    Attributes:
        updates: all of them, in order.
    """

    updates: list[RequestOutput] = field(default_factory=list)

    def __call__(self, update: RequestOutput) -> None:
        assert not self.ended, "something came behind the end"
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
    """Greedy, drawn, filtered and penalised requests of mixed lengths, each drawn one with its seed."""
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
    """The tokens that plain decoding gives for each request by itself."""
    return [lm.generate([list(ask.prompt)], ask.sampling, speculative=False)[0].tokens for ask in asks]


def pace_of(engine: Service) -> Pace:
    pace = engine.pace if isinstance(engine, DiffusionEngine) else engine.chooser if isinstance(engine, Engine) else None
    assert isinstance(pace, Pace)
    return pace


@contextmanager
def paced_by(engine: Service, rng: np.random.Generator) -> Iterator[Callable[[], bool]]:
    """Its step, with dispatches of drawn numbers of rounds.

    An engine takes as many as its seconds allow: pages would do on one machine, and requests give way on another.
    """
    pace = pace_of(engine)
    own = (pace.dispatch_s, pace.longest)
    pace.dispatch_s = math.inf

    def step() -> bool:
        pace.longest = int(rng.choice([1, 2, 4, 8]))
        return engine.step()

    try:
        yield step
    finally:
        pace.dispatch_s, pace.longest = own


def drive(
    engine: Service,
    asks: Sequence[GenerateRequest | DenoisingRequest],
    rng: np.random.Generator,
    cancelled: Sequence[int] = (),
) -> tuple[list[Heard], list[RequestHandle]]:
    """Asks in random portions between steps until all have ended; some requests are given up on the way."""
    heard = [Heard() for _ in asks]
    handles: list[RequestHandle] = []
    with paced_by(engine, rng.spawn(1)[0]) as step:
        while len(handles) < len(asks) or not all(each.ended for each in heard):
            for _ in range(int(rng.integers(0, 5))):
                if len(handles) < len(asks):
                    handles.append(engine.submit(asks[len(handles)], heard[len(handles)]))
            for n in cancelled:
                if n < len(handles) and not heard[n].ended and (len(heard[n].updates) > 1 or rng.random() < 0.05):
                    engine.cancel(handles[n])
            step()
        while step():
            pass
    return heard, handles


def sent_and_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine does from now on: the names of the programs that it sends, and the types of what it reads."""
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
    """No page and no slot is held, and nobody waits."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens, stats.pages_used) == (0, 0, 0, 0)
    assert stats.compilations == 0 or engine.options.guard == "off"
    pages = engine.pages
    assert not any(pages.ref_counts)
    assert sorted([*pages.empty, *pages.evictable]) == list(range(pages.count))
