"""What becomes of one request of the diffusion engine: its blocks, its ends, and what is refused, given up or computed anew."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion.denoising import (
    OPTIONS,
    ask,
    check_empty,
    check_same,
    engine_like,
    expected,
    model_engine,
    model_of,
    requests,
    run,
)
from diffusion.support import wanted
from reference.diffusion_cases import MASK
from runtime.support import Heard
from tilewright.diffusion.engine_options import DENOISING, DiffusionEngineOptions
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionKey, DiffusionTable
from tilewright.diffusion.request import DenoisingRequest
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import Overloaded, Stopped
from tilewright.runtime.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROMPT = [3, 17, 8, 25, 11]


@dataclass
class Steps:
    """How many steps the dispatches of a test have."""

    count: int = 1

    def __call__(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return model_of("dream")


@pytest.fixture(scope="module")
def warm(model: DiffusionModel) -> Engine:
    engine = model.engine(OPTIONS)
    engine.warm()
    return engine


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def engine(warm: Engine, steps: Steps) -> Iterator[Engine]:
    engine = engine_like(warm, steps, queue_requests=6, queue_tokens=40)
    yield engine
    engine.stop()


def served(engine: Engine, asked: DenoisingRequest) -> Heard:
    """What one request is told."""
    heard = Heard()
    engine.submit(asked, heard)
    run(engine)
    return heard


# Blocks and ends.


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_blocks_are_handed_out_as_they_finish(model: DiffusionModel, engine: Engine, threshold: float | None):
    asked = ask(PROMPT, threshold=threshold)
    (want,) = expected(model, [asked])
    engine.accept_requests()
    heard = served(engine, asked)
    assert [[token.token for token in update.tokens] for update in heard.updates] == [
        want.tokens[first : first + 4] for first in (0, 4, 8)
    ]
    assert [update.end for update in heard.updates] == [None, None, "length"]
    assert heard.text == want.text
    took = [int(each.choice.removesuffix(" steps")) for update in heard.updates for each in update.rounds]
    assert sum(took) == want.steps
    assert took == [4, 4, 4] if threshold is None else max(took) < 4
    check_empty(engine)


def test_a_dispatch_of_many_steps_hands_out_many_blocks_at_once(model: DiffusionModel, engine: Engine, steps: Steps):
    asked = ask(PROMPT)
    steps.count = 8
    (want,) = expected(model, [asked])
    engine.accept_requests()
    heard = served(engine, asked)
    assert [len(update.tokens) for update in heard.updates] == [8, 4]
    assert heard.tokens == want.tokens


def test_the_end_of_the_sequence_ends_a_response_unless_it_is_ignored(model: DiffusionModel, engine: Engine):
    prompts = [[n, 2, 5] for n in range(1, 12)]
    asks = [ask(prompt, ignore_eos=False) for prompt in prompts]
    n, want = next((n, each) for n, each in enumerate(expected(model, asks)) if 0 < len(each.tokens) < 8)
    (whole,) = expected(model, [ask(prompts[n])])
    engine.accept_requests()
    heard = served(engine, asks[n])
    assert heard.end == "eos"
    assert heard.tokens[:-1] == want.tokens
    assert heard.tokens[-1] in model.config.eos_token_ids
    assert heard.text == want.text
    heard = served(engine, ask(prompts[n]))
    assert (heard.end, heard.tokens) == ("length", whole.tokens)


def test_a_stop_string_ends_a_response_inside_a_block(model: DiffusionModel, engine: Engine):
    (whole,) = expected(model, [ask(PROMPT)])
    words = whole.text.split()
    stop = f"{words[4]} {words[5]}"
    assert whole.text.index(stop) == len(" ".join(["", *words[:4]])) + 1, "the string stands there first"
    engine.accept_requests()
    heard = served(engine, ask(PROMPT, stop=("nowhere", stop)))
    assert (heard.end, heard.tokens) == ("stop", whole.tokens[:6])
    assert heard.text == whole.text[: whole.text.index(stop)]
    check_empty(engine)


def test_what_draws_without_a_seed_gets_one(model: DiffusionModel, engine: Engine):
    engine.accept_requests()
    heard = Heard()
    asked = ask(PROMPT, temperature=1.0, seed=None)
    handle = engine.submit(asked, heard)
    run(engine)
    assert handle.result is not None
    assert handle.result.seed is not None
    (want,) = expected(model, [ask(PROMPT, temperature=1.0, seed=handle.result.seed)])
    assert heard.tokens == want.tokens


PENALISED = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((5, 3.0),)}


@pytest.mark.parametrize(
    "changes", [{}, {"threshold": 0.2, "mode": "dual"}, {"mode": "sparse", "temperature": 1.0}, PENALISED], ids=str
)
def test_log_probabilities_are_of_the_step_that_committed_a_token(engine: Engine, changes: dict[str, Any]):
    """As the reference's logits say, without the mask's; a row that asks for none beside it gets none."""
    asked = ask(PROMPT, **changes)
    want = {}
    for step in wanted("dream", PROMPT, asked.denoising).steps:
        for place in np.flatnonzero(np.isin(step.candidates, step.committed)):
            logits = np.delete(step.logits[place].astype(np.float64), MASK)
            want[int(step.candidates[place])] = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    engine.accept_requests()
    heard = Heard()
    other = Heard()
    engine.submit(replace(asked, logprobs=3), heard)
    engine.submit(ask([2, 4], **changes), other)
    run(engine)
    told = [token for update in heard.updates for token in update.tokens]
    assert len(told) == 12
    for place, token in enumerate(told, len(PROMPT)):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(want[place][token.token], abs=2e-4)
        best = np.argsort(-want[place], kind="stable")[:3]
        assert [one for one, _ in token.logprobs.top] == best.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(want[place][best].tolist(), abs=2e-4)
    assert all(token.logprobs is None for update in other.updates for token in update.tokens)


# Given up, refused.


@pytest.mark.parametrize("after", range(4))
def test_the_slot_of_a_request_that_was_given_up_serves_the_next(model: DiffusionModel, engine: Engine, after: int):
    """Dispatches that were sent before are still to be read."""
    first = ask(PROMPT, new_tokens=16, mode="dual")
    others = requests(5, 3)
    want = expected(model, others)
    engine.accept_requests()
    heard = Heard()
    handle = engine.submit(first, heard)
    for _ in range(after):
        engine.step()
    assert bool(after) == (engine.scheduler.slots[0] is not None)
    engine.cancel(handle)
    told = [Heard() for _ in others]
    handles = []
    for asked, each in zip(others, told, strict=True):
        handles.append(engine.submit(asked, each))
    engine.step()
    assert heard.end == "cancelled"
    assert engine.scheduler.slots[0] is not None
    assert engine.scheduler.slots[0].sequence.handle is handles[0]
    run(engine)
    for each, one, alone in zip(told, handles, want, strict=True):
        check_same(each, one, alone)
    check_empty(engine)


def test_what_waits_is_given_up_too(engine: Engine):
    engine.accept_requests()
    heard = [Heard() for _ in range(5)]
    handles = [engine.submit(ask([1, 2]), each) for each in heard]
    engine.step()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().waiting_tokens) == (3, 2, 4)
    engine.cancel(handles[4])
    run(engine)
    assert [each.end for each in heard] == ["length"] * 4 + ["cancelled"]
    check_empty(engine)


def test_queue_slots_and_cancellation_are_the_scheduler_s(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """What runs is found there alone, and leaves there alone."""
    calls = list[tuple[str, int]]()
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    for name in ("wait", "drop", "leave", "remove"):
        move = getattr(scheduler, name)

        def noted(each: Any, name: str = name, move: Any = move) -> Any:
            calls.append((name, getattr(each, "sequence", each).number))
            return move(each)

        monkeypatch.setattr(scheduler, name, noted)
    engine.accept_requests()
    heard = [Heard() for _ in range(5)]
    handles = [engine.submit(ask([1, 2]), each) for each in heard]
    engine.step()
    assert calls == [*(("wait", n) for n in range(5)), *(("drop", n) for n in range(3))]
    assert [running.sequence.number for running in scheduler.running] == [0, 1, 2]
    assert [sequence.number for sequence in scheduler.waiting] == [3, 4]
    assert (engine.stats().pages, engine.stats().pages_used, engine.stats().preemptions) == (3, 3, 0)
    calls.clear()
    engine.cancel(handles[1])
    engine.cancel(handles[4])
    engine.step()
    assert calls == [("remove", 1), ("leave", 1), ("remove", 4), ("drop", 4), ("drop", 3)]
    assert [running.sequence.number for running in scheduler.slots if running is not None] == [0, 3, 2]
    run(engine)
    assert [each.end for each in heard] == ["length", "cancelled", "length", "length", "cancelled"]
    assert not any(scheduler.pages.ref_counts)
    check_empty(engine)


def test_where_pages_are_few_requests_wait_for_them(model: DiffusionModel):
    """A request of 14 positions takes two of the four pages; one of 30 takes all; none is computed anew."""
    engine = model.engine(replace(OPTIONS, page_size=8, pages=4))
    asks = [ask([1, 2]), ask([3, 4]), ask([5] * 14, new_tokens=16), ask([6, 7])]
    want = expected(model, asks)
    engine.warm()
    engine.accept_requests()
    heard = [Heard() for _ in asks]
    for asked, each in zip(asks, heard, strict=True):
        engine.submit(asked, each)
    engine.step()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().pages_used) == (2, 2, 4)
    run(engine)
    assert [each.tokens for each in heard] == [one.tokens for one in want]
    assert engine.stats().preemptions == 0
    check_empty(engine)
    engine.stop()
    small = model.engine(replace(OPTIONS, page_size=8, pages=2))
    with pytest.raises(ValueError, match="expected a request of at most 2 pages, found one of 4"):
        small.check(asks[2])


def test_a_deadline_ends_a_request_wherever_it_is(engine: Engine):
    engine.accept_requests()
    heard = [Heard() for _ in range(5)]
    for n, each in enumerate(heard):
        engine.submit(ask([1, 2], deadline_s=None if n == 3 else 1e-9), each)
    run(engine)
    assert [each.end for each in heard] == ["deadline"] * 3 + ["length", "deadline"]
    assert "within 1e-09 s" in heard[0].updates[-1].error
    check_empty(engine)


def test_what_has_not_ended_when_it_stops_is_cancelled(engine: Engine):
    with pytest.raises(Stopped, match="accepts no requests"):
        engine.submit(ask([1]), Heard())
    engine.accept_requests()
    heard = Heard()
    engine.submit(ask([1, 2]), heard)
    engine.step()
    assert not engine.stop()
    assert (heard.end, heard.updates[-1].error) == ("cancelled", "the engine was stopped")
    check_empty(engine)
    with pytest.raises(Stopped, match="accepts no requests"):
        engine.submit(ask([1]), Heard())


def test_the_queue_is_bounded_by_requests_and_by_tokens(engine: Engine):
    engine.accept_requests()
    for _ in range(2):
        engine.submit(ask([1] * 18), Heard())
    with pytest.raises(Overloaded, match="at most 40 tokens of prompts") as caught:
        engine.submit(ask([1] * 5), Heard())
    assert caught.value.retry_after_s > 0
    for _ in range(4):
        engine.submit(ask([1]), Heard())
    with pytest.raises(Overloaded, match="at most 6 requests"):
        engine.submit(ask([1]), Heard())
    assert engine.stats().rejected == 2
    run(engine)
    engine.check_room(6, 40)


def test_what_can_never_be_served_is_refused(warm: Engine, steps: Steps):
    engine = model_engine(warm, replace(warm.options, modes=("dense", "sparse")))
    for asked, message in (
        (ask([]), "at least one token, found an empty one"),
        (ask([40]), "below the vocabulary size 40, found 40"),
        (ask([1, 39]), "a prompt without the mask token 39"),
        (ask([1] * 21), "21 tokens leaves room for 11 in the context of 32; new_tokens is 12"),
        (ask([1], mode="dual"), "expected a mode among dense, sparse, found dual"),
        (ask([1], guidance=1.5), "expected no guidance, since this engine has no programs for it, found 1.5"),
        (ask([1], new_tokens=24), "expected responses of at most 16, the largest declared, found 24"),
        (ask([1], block_length=12), "expected blocks of at most 8, the largest declared, found 12"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(asked, Heard())
    assert (engine.stats().waiting, engine.next_number) == (0, 0)
    with pytest.raises(ValueError, match="a deadline of more than 0 seconds, found 0"):
        ask([1], deadline_s=0)
    with pytest.raises(ValueError, match="stop"):
        ask([1], stop=("",))


# Failures.


@dataclass
class Flaky:
    """Stands before an engine's programs; some dispatches fail."""

    engine: Engine
    failing: set[int] = field(default_factory=set)
    calls: int = 0

    def __post_init__(self) -> None:
        self.run = self.engine.runner.run

    def __call__(self, key: DiffusionKey, *inputs: Any) -> Any:
        self.calls += 1
        if self.calls in self.failing:
            self.engine.runner.state = None
            raise RuntimeError("the device is gone")
        return self.run(key, *inputs)


@pytest.fixture
def flaky(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Flaky:
    made = Flaky(engine)
    monkeypatch.setattr(engine.runner, "run", made)
    return made


def test_after_a_failed_dispatch_requests_are_computed_anew(model: DiffusionModel, engine: Engine, flaky: Flaky, steps: Steps):
    """What was handed out before is not told again."""
    asks = [ask([n, 2, 5], mode="sparse", seed=n, temperature=1.0) for n in range(1, 6)]
    steps.count = 3
    want = expected(model, asks)
    flaky.failing = {4}
    engine.accept_requests()
    heard = [Heard() for _ in asks]
    handles = [engine.submit(asked, each) for asked, each in zip(asks, heard, strict=True)]
    for _ in range(3):
        engine.step()
    assert all(len(each.tokens) == 4 for each in heard[:3]), "a block of each was handed out before"
    run(engine)
    assert [each.tokens for each in heard] == [one.tokens for one in want]
    assert [each.text for each in heard] == [one.text for one in want]
    assert [handle.steps for handle in handles] == [one.steps for one in want]
    assert engine.stats().ended == {"length": 5}
    assert (engine.stats().preemptions, engine.stats().prompt_tokens) == (3, 15), "a prompt is counted once"
    check_empty(engine)


def test_a_response_that_ends_sooner_when_it_is_computed_anew_is_an_error(
    engine: Engine, flaky: Flaky, steps: Steps, monkeypatch: pytest.MonkeyPatch
):
    """Its first block was handed out already."""

    def ending(key: DiffusionKey, *inputs: Any) -> Any:
        outputs = flaky(key, *inputs)
        if flaky.calls <= min(flaky.failing):
            return outputs
        reports = np.array(outputs.reports)
        reports[:, 0, 2] = True
        tokens = np.full(outputs.tokens.shape, MASK, np.int32)
        return outputs._replace(tokens=jax.device_put(tokens), reports=jax.device_put(reports))

    steps.count = 3
    flaky.failing = {4}
    monkeypatch.setattr(engine.runner, "run", ending)
    engine.accept_requests()
    heard = Heard()
    engine.submit(ask(PROMPT), heard)
    for _ in range(8):
        engine.step()
    assert (heard.end, len(heard.tokens)) == ("error", 4)
    assert heard.updates[-1].error == "the request could not be computed"
    check_empty(engine)


@pytest.mark.parametrize("asked", [{}, {"mode": "sparse", "temperature": 1.0}], ids=["dense", "sparse, drawn"])
def test_a_request_whose_logits_are_not_finite_ends_alone(
    model: DiffusionModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
):
    """Also in the slot that it leaves, nothing of it is left."""
    others = expected(model, [ask([n, 2, 5], seed=n, **asked) for n in (1, 3)])
    bad = next(n for n in range(6, 30) if not any(n in one.tokens for one in others))
    asks = [ask([n, 2, 5], seed=n, **asked) for n in (1, bad, 3)]
    want = expected(model, asks)
    broken = replace(model.params, embed=model.params.embed.at[bad].set(jnp.nan))
    monkeypatch.setattr(engine.decoding.programs, "params", broken)
    engine.accept_requests()
    heard = [Heard() for _ in asks]
    for one, each in zip(asks, heard, strict=True):
        engine.submit(one, each)
    run(engine)
    assert [each.end for each in heard] == ["length", "error", "length"]
    assert heard[1].updates[-1].error == "the request could not be computed"
    assert [heard[n].tokens for n in (0, 2)] == [want[n].tokens for n in (0, 2)]
    monkeypatch.undo()
    engine.runner.called.clear()
    assert [served(engine, one).tokens for one in asks] == [one.tokens for one in want]
    check_empty(engine)
    engine.stop()
    monkeypatch.setattr(model, "params", broken)
    monkeypatch.setattr(model, "programs", {})
    with pytest.raises(ArithmeticError, match="the model's logits are not finite"):
        model.generate([list(one.prompt) for one in asks], [one.denoising for one in asks])
    session = model.start([list(asks[1].prompt)], asks[1].denoising)
    with pytest.raises(ArithmeticError, match="the model's logits are not finite"):
        session.advance()
    assert (session.finished, session.advance()) == (True, [])


def test_those_aboard_of_a_second_failure_are_given_up_and_the_engine_goes_on(
    model: DiffusionModel, engine: Engine, flaky: Flaky
):
    asks = [ask([n, 2, 5]) for n in range(1, 5)]
    want = expected(model, asks)
    flaky.failing = {2, 3}
    engine.accept_requests()
    heard = [Heard() for _ in asks]
    for asked, each in zip(asks, heard, strict=True):
        engine.submit(asked, each)
    run(engine)
    assert [each.end for each in heard] == ["error"] * 3 + ["length"]
    assert heard[0].updates[-1].error == "the request could not be computed"
    assert heard[3].tokens == want[3].tokens
    assert served(engine, asks[0]).tokens == want[0].tokens
    check_empty(engine)


def test_an_engine_whose_device_is_gone_for_good_ends_all_requests(
    engine: Engine, flaky: Flaky, monkeypatch: pytest.MonkeyPatch
):
    def gone() -> NoReturn:
        raise MemoryError("no room for a pool")

    flaky.failing = {1}
    monkeypatch.setattr(engine.runner, "reset", gone)
    engine.accept_requests()
    heard = [Heard() for _ in range(4)]
    for each in heard:
        engine.submit(ask([1, 2, 5]), each)
    engine.run()
    assert [each.end for each in heard] == ["cancelled"] * 4
    assert (engine.ready, engine.ending) == (False, True)
    with pytest.raises(Stopped):
        engine.submit(ask([1]), Heard())


def test_a_failing_listener_or_text_ends_its_own_request_alone(
    model: DiffusionModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    def fails(*given: object) -> NoReturn:
        raise RuntimeError("no more")

    (want,) = expected(model, [ask(PROMPT)])
    good = Heard()
    bad = Heard()
    engine.accept_requests()
    engine.submit(ask([1, 2]), fails)
    engine.submit(ask([3, 4]), bad)
    monkeypatch.setattr(engine.submitted[1].processor.decoder, "push", fails)
    engine.submit(ask(PROMPT), good)
    run(engine)
    assert (bad.end, bad.updates[-1].error) == ("error", "the request could not be computed")
    assert (good.end, good.tokens) == ("length", want.tokens)
    assert engine.stats().ended == {"cancelled": 1, "error": 1, "length": 1}
    check_empty(engine)


# Options.


@pytest.mark.parametrize(
    ("context", "positions", "responses", "blocks"),
    [
        (8192, (256, 1024, 4096), (128, 512, 1024), {32, 128, 512, 1024}),
        (4096, (256, 1024, 4096), (128, 512, 1024), {32, 128, 512, 1024}),
        (1000, (256, 1000), (128, 512, 999), {32, 128, 512, 999}),
        (256, (256,), (128, 255), {32, 128, 255}),
        (24, (24,), (23,), {23}),
    ],
)
def test_the_default_shapes_go_as_far_as_the_context(
    context: int, positions: tuple[int, ...], responses: tuple[int, ...], blocks: set[int]
):
    """A block is of 32 tokens, or as long as the response."""
    table = DiffusionEngineOptions().shapes(context)
    assert (table.batches, table.positions, table.responses) == ((1, 4), positions, responses)
    shapes = list(table.shapes(context, ["sparse"]))
    assert {shape.block for shape in shapes} == blocks
    assert {shape.block for shape in shapes if shape.block > 32} <= {*responses}
    assert len(shapes) == len(set(shapes))


def test_options_that_do_not_go_together():
    table = DiffusionTable(positions=(64,), responses=(32,))
    assert DiffusionEngineOptions(table=table).shapes(8) is table
    assert DiffusionEngineOptions().defaults == DENOISING == Denoising(128, block_length=32)
    for given, message in (
        ({"modes": ()}, "expected modes among dense, prefix, dual, sparse, found none"),
        ({"modes": ("dual", "sparse")}, "expected a default mode among dual, sparse, found dense"),
        ({"queue_requests": 0}, "expected queue_requests of at least 1, found 0"),
        ({"dispatch_s": 0.0}, "expected dispatch_s of more than 0 seconds, found 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            DiffusionEngineOptions(**given)  # type: ignore[arg-type]
