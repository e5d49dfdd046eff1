"""The queue between threads: nothing asked or given up is lost, whenever it comes; a request is there until it has ended."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from runtime.support import Heard
from server.fake import FakeEngine
from tilewright.runtime.collect import NotFinite
from tilewright.runtime.engine import FAULTS
from tilewright.runtime.request import GenerateRequest, Stopped
from tilewright.runtime.sampling import Sampling

LONG = GenerateRequest([1, 2, 3], Sampling(600, ignore_eos=True))


class Watched(threading.Condition):
    """A lock after whose n-th release on the thread that made it something happens, once."""

    def __init__(self, then: Callable[[], None], release: int):
        super().__init__()
        self.then = then
        self.left = release
        self.thread = threading.get_ident()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if threading.get_ident() == self.thread:
            self.left -= 1
            if not self.left:
                self.then()


def elsewhere(work: Callable[[], None]) -> None:
    """Does it on another thread, and waits for it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the other thread was held up"


def steps(engine: FakeEngine) -> None:
    """Until there is nothing to do; the requests of these tests take 200 rounds where they are not given up."""
    left = 50
    while engine.step():
        left -= 1
        assert left, "a request runs on that nobody waits for"


@pytest.mark.parametrize("release", range(1, 5))
def test_what_is_asked_and_given_up_between_two_looks_of_a_step_ends(release: int):
    engine = FakeEngine()
    listener = Heard()
    engine.accept_requests()
    engine.submit(GenerateRequest([1, 2], Sampling(4)), Heard())

    def come_and_go() -> None:
        elsewhere(lambda: engine.cancel(engine.submit(LONG, listener)))

    engine.wake = Watched(come_and_go, release)
    steps(engine)
    assert listener.end == "cancelled"
    assert (len(engine.live_sequences), engine.stats().running, engine.stats().waiting) == (0, 0, 0)


@pytest.mark.parametrize("release", range(1, 5))
def test_a_request_that_was_asked_before_may_be_given_up_at_any_time(release: int):
    engine = FakeEngine()
    listener = Heard()
    engine.accept_requests()
    handle = engine.submit(LONG, listener)
    engine.wake = Watched(lambda: elsewhere(lambda: engine.cancel(handle)), release)
    steps(engine)
    assert listener.end == "cancelled"


def test_an_engine_is_busy_until_a_request_has_ended(monkeypatch: pytest.MonkeyPatch):
    """Also while a step moves it from one list to another, which others may look at meanwhile."""
    engine = FakeEngine()
    listener = Heard()
    seen = list[bool]()
    real = engine.scheduler

    def watched(name: str) -> Callable[..., Any]:
        move = getattr(real, name)

        def moved(*given: Any) -> Any:
            elsewhere(lambda: seen.append(engine.busy))
            result = move(*given)
            elsewhere(lambda: seen.append(engine.busy))
            return result

        return moved

    for name in ("wait", "drop", "preempt"):
        monkeypatch.setattr(real, name, watched(name))
    engine.accept_requests()
    engine.submit(GenerateRequest([1, 2], Sampling(40, ignore_eos=True)), listener)
    for _ in range(3):
        engine.step()
    (running,) = real.running
    real.preempt(running)
    while engine.step():
        continue
    assert (listener.end, len(seen), all(seen)) == ("length", 10, True)
    assert not engine.busy


def test_the_queue_counts_what_a_step_takes_in(monkeypatch: pytest.MonkeyPatch):
    """Whoever looks while a request goes from what was asked into the queue finds it in exactly one of them."""
    engine = FakeEngine()
    found = list[tuple[int, int]]()
    engine.accept_requests()
    for _ in range(3):
        engine.submit(LONG, Heard())
    wait = engine.scheduler.wait
    looks = list[threading.Thread]()

    def look() -> None:
        stats = engine.stats()
        found.append((stats.waiting, stats.waiting_tokens))

    def waited(sequence: Any) -> None:
        looks.append(threading.Thread(target=look))
        looks[-1].start()
        looks[-1].join(0.05)  # it may have to wait until the step has taken all of them in
        wait(sequence)

    monkeypatch.setattr(engine.scheduler, "wait", waited)
    monkeypatch.setattr(engine, "fill", lambda everything: 0)
    engine.step()
    for each in looks:
        each.join(20)
    assert found == [(3, 9)] * 3


@pytest.mark.parametrize(
    ("error", "end"), [(NotFinite("the logits of another request"), "length"), (RuntimeError("the device is gone"), "error")]
)
def test_failures_that_another_request_caused_are_not_counted(monkeypatch: pytest.MonkeyPatch, error: Exception, end: str):
    engine = FakeEngine()
    listener = Heard()
    engine.accept_requests()
    engine.submit(GenerateRequest([1, 2], Sampling(40, ignore_eos=True)), listener)
    for _ in range(FAULTS):
        engine.step()
        assert not listener.ended
        engine.recover(error)
    steps(engine)
    assert listener.end == end


def test_an_engine_that_was_stopped_does_not_begin():
    engine = FakeEngine()
    assert engine.stop()
    with pytest.raises(Stopped, match="stopped before it started"):
        engine.start()
    with pytest.raises(Stopped, match="accepts no requests"):
        engine.submit(LONG, Heard())
    assert (engine.ready, engine.thread) == (False, None)


@pytest.mark.parametrize("again", range(10))
def test_stopping_and_starting_at_once_leaves_nobody_waiting(again: int):
    """Whichever comes first: no request is taken that no thread runs."""
    engine = FakeEngine()
    listener = Heard()
    refused = list[Stopped]()
    together = threading.Barrier(2)

    def begin() -> None:
        together.wait()
        try:
            engine.start()
            engine.submit(LONG, listener)
        except Stopped as error:
            refused.append(error)

    other = threading.Thread(target=begin)
    other.start()
    together.wait()
    engine.stop()
    other.join(20)
    assert bool(refused) != listener.ended
    assert not engine.ready


def test_a_request_given_up_while_the_thread_sleeps_is_ended_at_once(monkeypatch: pytest.MonkeyPatch):
    """The thread that steps is woken, and does not sleep through what came just before it lay down."""
    engine = FakeEngine()
    listener = Heard()
    slept = threading.Event()
    monkeypatch.setattr("tilewright.runtime.engine.IDLE_S", 3600.0)
    ended = threading.Event()
    real = engine.step

    def step() -> bool:
        worked = real()
        if not worked and not slept.is_set():
            slept.set()
            elsewhere(lambda: engine.cancel(engine.submit(LONG, on_output)))
        return worked

    def on_output(update: Any) -> None:
        listener(update)
        if listener.ended:
            ended.set()

    monkeypatch.setattr(engine, "step", step)
    engine.start()
    assert ended.wait(20)
    assert listener.end == "cancelled"
    assert engine.stop()
