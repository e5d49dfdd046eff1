"""The engine gives each request what plain decoding gives it alone, whatever happens beside it, and holds nothing after."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build, prompts
from reference.assistant_numpy import as_folders as with_assistant
from reference.dflash_numpy import as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.mtp_numpy import add_head, random_head
from reference.sampling_numpy import adjusted
from runtime.support import Heard, check_empty, drive, expected, samplings, sent_and_read
from tilewright.kernels import native
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models import decoder
from tilewright.runtime.engine import Engine
from tilewright.runtime.interfaces import Choice
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.output import Result
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.request import GenerateRequest, Overloaded, RequestHandle, Stopped
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.scheduler import RunningSequence
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.team import Team

VOCAB = 24
BLOCK = 4
CAPACITY = 96
PAGE = 16
TABLE = ShapeTable(batches=(1, 4), capacities=(CAPACITY,), chunks=(16,), widths=(2,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK)
EAGLE3 = random_eagle3(0, PAIR.target_config, taps=[1], draft_vocab_size=12)
SMALL_POOL = 9
"""Pages that four slots of up to six pages have to share."""

pytestmark = pytest.mark.usefixtures("quick_compiles")


def team_of(folder: Path) -> LanguageModel:
    """A model with three drafters that take turns."""
    target, dflash = as_folders(folder, PAIR)
    lm = load(target, table=TABLE)
    default_options = DrafterOptions(block_size=BLOCK)
    sources = ("ngram", str(dflash), str(as_folder(folder / "eagle3", *EAGLE3)))
    members, params = zip(*(lm.load_drafter(source, default_options) for source in sources), strict=True)
    return lm.with_drafter(Team(members, TABLE.widths), params)


def suffix_of(folder: Path) -> LanguageModel:
    """A model that drafts from a corpus, of answers of its own."""
    target, _ = as_folders(folder, PAIR)
    answers = load(target, table=TABLE).generate(prompts(3, [4, 9, 17], vocab=VOCAB), Sampling(60, ignore_eos=True))
    corpus = folder / "corpus.txt"
    corpus.write_text(" ".join(f"t{token}" for answer in answers for token in answer.tokens))
    return load(target, "suffix", suffix_corpus=corpus, block_size=BLOCK, table=TABLE)


def with_stored_head(folder: Path) -> LanguageModel:
    """A model with an MTP head in its own folder."""
    target, _ = as_folders(folder, PAIR)
    return load(add_head(target, random_head(0, PAIR.target_config)), "mtp", block_size=BLOCK, table=TABLE)


MODELS: dict[str, Callable[[Path], LanguageModel]] = {
    "plain": lambda folder: build(folder, PAIR, table=TABLE).with_drafter(None),
    "dflash": lambda folder: build(folder, PAIR, table=TABLE),
    "bfloat16": lambda folder: build(folder, PAIR, table=TABLE, dtype="bfloat16"),
    "mtp": with_stored_head,
    "assistant": lambda folder: load(*with_assistant(folder, VOCAB), block_size=BLOCK, table=TABLE),
    "suffix": suffix_of,
    "team": team_of,
}


RARE = ("bfloat16", "mtp", "assistant", "suffix")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in MODELS],
)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    if request.param == "bfloat16" and native.kernels().isa is None:
        pytest.skip(native.kernels().reason or "no kernels")  # others round a block and a row differently
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def options(lm: LanguageModel) -> EngineOptions:
    """Of a team, only the programs that are needed are compiled: for four rows alone, and those that serve all requests."""
    team = isinstance(lm.drafter, Team)
    table = replace(TABLE, batches=(4,)) if team else TABLE
    return EngineOptions(table=table, page_size=PAGE, pages=SMALL_POOL, guard="off" if team else "fail")


@pytest.fixture(scope="module")
def warm(lm: LanguageModel, options: EngineOptions) -> Engine:
    """An engine whose programs the others use too."""
    engine = lm.engine(options)
    if options.guard == "fail":
        engine.decoding.programs.warm(engine.decoding.programs.declared())
    return engine


@pytest.fixture
def engines(
    lm: LanguageModel, options: EngineOptions, warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Makes engines, which are stopped in the end; of a team, rounds are drawn from all choices."""
    made: list[Engine] = []

    def make(**more: Any) -> Engine:
        engine = lm.engine(replace(options, **more))
        engine.decoding.programs.compiled = warm.decoding.programs.compiled
        engine.runner.reset()
        rng = np.random.default_rng(5)

        def plan(rows: int, most: int, hurried: bool, left: int) -> tuple[Choice | None, int]:
            choices = engine.decoding.programs.choices
            return choices[rng.integers(len(choices))], int(rng.integers(1, 7))

        monkeypatch.setattr(engine.decoding.chooser, "next", plan)
        monkeypatch.setattr(engine.decoding.chooser, "observe", lambda *given: None)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines()


def requests(seed: int, count: int) -> list[GenerateRequest]:
    """Prompts of mixed lengths, several of which begin alike, with all kinds of sampling."""
    rng = np.random.default_rng(seed)
    begun = prompts(seed, [40, 33], vocab=VOCAB)
    inputs = prompts(seed + 1, [int(n) for n in rng.integers(1, 50, count)], vocab=VOCAB)
    inputs = [[*begun[n % 2], *prompt][:60] if n % 3 == 0 else prompt for n, prompt in enumerate(inputs)]
    return [GenerateRequest(tokens, sampling) for tokens, sampling in zip(inputs, samplings(rng, count, 36), strict=True)]


@pytest.mark.parametrize("seed, count", [(0, 24), *(pytest.param(seed, 64, marks=pytest.mark.slow) for seed in range(3))])
def test_the_tokens_are_those_of_plain_decoding(lm: LanguageModel, engine: Engine, seed: int, count: int):
    """Requests in random order and pace, with pages for a few of them only, prefixes in common, and some given up."""
    asks = requests(seed, count)
    want = expected(lm, asks)
    cancelled = [n for n in (7, 20, 41) if n < count]
    engine.accept_requests()
    listeners, handles = drive(engine, asks, np.random.default_rng(seed), cancelled)
    for n, (each, handle) in enumerate(zip(listeners, handles, strict=True)):
        assert handle.result is not None
        assert each.tokens == handle.result.tokens
        if each.end == "cancelled":
            assert n in cancelled
            assert each.tokens == want[n][: len(each.tokens)]
        else:
            assert each.tokens == want[n], n
            stopped = each.tokens[-1] in lm.target.eos_token_ids and not asks[n].sampling.ignore_eos
            assert each.end == ("eos" if stopped else "length")
        assert each.text == handle.result.text or each.end == "cancelled"
        assert sum(one.tokens for update in each.updates for one in update.rounds) == len(each.tokens)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert {each.end for each in listeners} >= {"length", "cancelled"}
    assert stats.generated_tokens == sum(len(each.tokens) for each in listeners)
    assert stats.row_rounds <= stats.generated_tokens + count
    check_empty(engine)
    engine.stop()
    check_empty(engine)


def test_rounds_are_those_of_the_standalone_loop(lm: LanguageModel, engine: Engine):
    """One request at a time: as many tokens a round, drafts run and accepted, as without an engine."""
    if isinstance(lm.drafter, Team):
        pytest.skip("whose rounds are drawn here")
    asks = requests(3, 6)
    wanted = [lm.generate([list(ask.prompt)], ask.sampling)[0] for ask in asks]
    engine.accept_requests()
    for ask, want in zip(asks, wanted, strict=True):
        listener = Heard()
        handle = engine.submit(ask, listener)
        while not listener.ended:
            engine.step()
        got = handle.result
        assert got is not None
        assert (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
        assert (got.acceptance_lengths, got.drafted, got.accepted) == (want.acceptance_lengths, want.drafted, want.accepted)


@pytest.mark.parametrize("pooling", [None, "last"])
def test_a_long_prompt_goes_piece_by_piece(
    lm: LanguageModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, pooling: Pooling | None
):
    """Each step sends one piece and waits for the one before; others come between, and the rest of it may be given up."""
    events = sent_and_read(engine, monkeypatch)
    short = GenerateRequest([1, 2], Sampling(4, ignore_eos=True))
    listener = Heard()
    other = Heard()
    (want,) = expected(lm, [short])
    engine.accept_requests()
    handle = engine.submit(GenerateRequest([3] * 90, Sampling(4), pooling=pooling), listener)
    engine.step()
    engine.submit(short, other)
    engine.step()
    assert engine.stats().running == 2
    engine.step()
    assert events == ["prefill", "prefill", "SentPrefill", "prefill", "SentPrefill"]
    engine.cancel(handle)
    while engine.step():
        continue
    assert listener.end == "cancelled"
    assert events.count("prefill") == 4, "three pieces of six, and the other's only one"
    assert other.tokens == want
    check_empty(engine)


def test_a_stop_string_ends_a_request_inside_a_block(lm: LanguageModel, engine: Engine):
    (prompt,) = prompts(4, [9], vocab=VOCAB)
    whole = lm.generate([prompt], Sampling(30, ignore_eos=True), speculative=False)[0].text
    stop = whole[9:12]
    want = lm.generate([prompt], Sampling(30, ignore_eos=True, stop=(stop,)), speculative=False)[0]
    listener = Heard()
    engine.accept_requests()
    engine.submit(GenerateRequest(prompt, Sampling(30, ignore_eos=True, stop=(stop,))), listener)
    while engine.step():
        pass
    assert (listener.end, listener.text, listener.tokens) == ("stop", want.text, want.tokens)
    assert stop not in listener.text
    check_empty(engine)


def test_what_is_refused(engine: Engine):
    with pytest.raises(Stopped, match="accepts no requests"):
        engine.submit(GenerateRequest([1], Sampling(4)), Heard())
    engine.accept_requests()
    for ask, message in (
        (GenerateRequest([]), "at least one token, found an empty one"),
        (GenerateRequest([VOCAB + 99]), "below the vocabulary size"),
        (
            GenerateRequest([1] * 90, Sampling(7)),
            f"90 tokens leaves room for 6 in the context of {CAPACITY}; max_new_tokens is 7",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(ask, Heard())
    check_empty(engine)


def test_the_queue_is_bounded_by_requests_and_by_tokens(engines: Callable[..., Engine]):
    engine = engines(queue_requests=3, queue_tokens=40)
    few = Sampling(4)
    engine.accept_requests()
    listeners = [Heard() for _ in range(3)]
    engine.submit(GenerateRequest([1] * 30, few), listeners[0])
    with pytest.raises(Overloaded, match="at most 40 tokens of prompts") as caught:
        engine.submit(GenerateRequest([1] * 30, few), Heard())
    assert caught.value.retry_after_s > 0
    for each in listeners[1:]:
        engine.submit(GenerateRequest([1], few), each)
    with pytest.raises(Overloaded, match="at most 3 requests"):
        engine.check_room(1, 0)
    assert engine.stats().rejected == 2
    while engine.step():
        pass
    assert all(each.ended for each in listeners)
    engine.check_room(3, 40)


def test_a_deadline_ends_a_request_wherever_it_is(engine: Engine):
    engine.accept_requests()
    listeners = [Heard() for _ in range(6)]
    for n, each in enumerate(listeners):
        engine.submit(GenerateRequest([1, 2], Sampling(60, ignore_eos=True), deadline_s=None if n == 3 else 1e-9), each)
    while engine.step():
        pass
    assert [each.end for each in listeners] == ["deadline"] * 3 + ["length"] + ["deadline"] * 2
    assert "within 1e-09 s" in listeners[0].updates[-1].error
    check_empty(engine)


def test_a_listener_that_fails_ends_its_own_request_alone(lm: LanguageModel, engine: Engine):
    def fails(update: object) -> None:
        raise RuntimeError("no more")

    ask = GenerateRequest([1, 2], Sampling(20, ignore_eos=True))
    good = Heard()
    (want,) = expected(lm, [ask])
    engine.accept_requests()
    engine.submit(GenerateRequest([3, 4], Sampling(40, ignore_eos=True)), fails)
    engine.submit(ask, good)
    while engine.step():
        pass
    assert good.tokens == want
    assert engine.stats().ended == {"cancelled": 1, "length": 1}
    check_empty(engine)


def test_a_request_whose_text_fails_ends_alone(lm: LanguageModel, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    ask = GenerateRequest([1, 2], Sampling(20, ignore_eos=True))
    good = Heard()
    bad = Heard()
    (want,) = expected(lm, [ask])
    engine.accept_requests()
    engine.submit(GenerateRequest([3, 4], Sampling(40, ignore_eos=True)), bad)

    def broken(*given: object) -> str:
        raise RuntimeError("no such text")

    monkeypatch.setattr(engine.submitted[0].processor.decoder, "push", broken)
    engine.submit(ask, good)
    while engine.step():
        pass
    assert (bad.end, bad.updates[-1].error) == ("error", "the request could not be computed")
    assert (good.end, good.tokens) == ("length", want)
    assert engine.stats().preemptions == 0
    check_empty(engine)


def test_a_request_whose_logits_are_not_finite_ends_alone(
    lm: LanguageModel, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    """Its first page holds what is not a number. The other request is computed anew, over pages that are clean."""
    engine = engines(guard="off")  # what writes the page is compiled
    ask = GenerateRequest([1, 2], Sampling(20, ignore_eos=True))
    real = engine.runner.rounds
    broken = list[RequestHandle]()
    (want,) = expected(lm, [ask])

    def rounds(batch: Sequence[RunningSequence], *given: Any) -> Any:
        state = engine.runner.state
        assert state is not None
        for page in (running.pages[0] for running in batch if running.sequence.handle in broken):
            cache = jax.tree.map(lambda pool, page=page: pool.at[page].set(jnp.nan), state.target_cache)
            engine.runner.state = state = replace(state, target_cache=cache)
        return real(batch, *given)

    monkeypatch.setattr(engine.runner, "rounds", rounds)
    engine.accept_requests()
    for number in range(2):
        good = Heard()
        bad = Heard()
        broken.append(engine.submit(GenerateRequest([3] * 20, Sampling(40, ignore_eos=True)), bad))
        engine.submit(ask, good)
        while engine.step():
            pass
        assert (bad.end, bad.tokens, bad.updates[-1].error) == ("error", [], "the request could not be computed")
        assert (good.end, good.tokens) == ("length", want)
        assert engine.stats().ended == {"error": number + 1, "length": number + 1}
    check_empty(engine)


def test_after_a_failed_dispatch_requests_are_computed_anew(lm: LanguageModel, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Once; those aboard of a second failure are given up, and the engine goes on."""
    asks = requests(6, 5)
    want = expected(lm, asks)
    real = engine.runner.rounds
    calls = []

    def flaky(*given: object) -> object:
        calls.append(1)
        if len(calls) in failing:
            raise RuntimeError("the device is gone")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "rounds", flaky)
    engine.accept_requests()
    failing = {3}
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    check_empty(engine)
    failing = {len(calls) + 1, len(calls) + 2}
    first = Heard()
    engine.submit(asks[0], first)
    while engine.step():
        pass
    assert (first.end, first.updates[-1].error) == ("error", "the request could not be computed")
    listeners, _ = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    check_empty(engine)


def test_it_steps_on_a_thread_and_ends_what_it_has(lm: LanguageModel, engine: Engine):
    asks = requests(7, 8)
    want = expected(lm, asks)
    listeners = [Heard() for _ in asks]
    engine.start()
    for ask, each in zip(asks, listeners, strict=True):
        engine.submit(ask, each)
    assert engine.stop(drain_s=60.0)
    assert [each.tokens for each in listeners] == want
    with pytest.raises(Stopped):
        engine.submit(asks[0], Heard())
    check_empty(engine)


def test_what_has_not_ended_when_it_stops_is_cancelled(engine: Engine):
    engine.accept_requests()
    listener = Heard()
    engine.submit(GenerateRequest([1, 2], Sampling(60, ignore_eos=True)), listener)
    engine.step()
    assert not engine.stop()
    assert (listener.end, listener.updates[-1].error) == ("cancelled", "the engine was stopped")
    check_empty(engine)


CHANGES: tuple[dict[str, Any], ...] = (
    {"logit_bias": ((3, 100.0),), "ignore_eos": True},
    {"logit_bias": ((3, 2.0), (5, 2.5), (7, -100.0))},
    {"stop_token_ids": (1, 4)},
    {"stop_token_ids": tuple(range(12)), "min_tokens": 9},
    {"stop_token_ids": tuple(range(20)), "min_tokens": 30, "temperature": 1.0},
    {"logit_bias": ((2, 5.0), (3, 5.0)), "stop_token_ids": (2,), "min_tokens": 5, "temperature": 0.8, "top_p": 0.9},
    {"logit_bias": ((2, 1.0),), "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 3, "stop_token_ids": (6, 9)},
    {},
)


def ended(results: Iterable[Result]) -> list[Any]:
    """What came of requests, and why it ended."""
    return [(result.tokens, result.finish_reason, result.stop_reason) for result in results]


def test_changed_logits_and_ends_are_those_of_plain_decoding(lm: LanguageModel, engine: Engine):
    """Biases, tokens that end a request, and tokens that may not end it yet: whatever is drafted, in any company."""
    rng = np.random.default_rng(3)
    inputs = prompts(3, [int(n) for n in range(5, 45)], vocab=VOCAB)
    # n-grams find what repeats
    inputs = [tokens + tokens[: len(tokens) // 2] if n % 2 else tokens for n, tokens in enumerate(inputs)][:32]
    samplings = [Sampling(32, seed=n, **CHANGES[n % len(CHANGES)]) for n in range(len(inputs))]
    asks = [GenerateRequest(tokens[:60], sampling) for tokens, sampling in zip(inputs, samplings, strict=True)]
    plain = [lm.generate([list(ask.prompt)], ask.sampling, speculative=False)[0] for ask in asks]
    if isinstance(lm.drafter, DFlash):
        drafted = [lm.generate([list(ask.prompt) for ask in asks[n : n + 4]], samplings[n : n + 4]) for n in (0, 4)]
        assert [result for part in drafted for result in ended(part)] == ended(plain[:8])
    engine.accept_requests()
    listeners, handles = drive(engine, asks, rng)
    assert [each.tokens for each in listeners] == [result.tokens for result in plain]
    for ask, handle, result in zip(asks, handles, plain, strict=True):
        assert handle.result is not None
        assert (handle.result.finish_reason, handle.result.stop_reason) == (result.finish_reason, result.stop_reason)
        least = ask.sampling.min_tokens
        stops = {*ask.sampling.stop_token_ids, *lm.target.eos_token_ids}
        assert not stops & set(result.tokens[:least])
        assert not set(ask.sampling.stop_token_ids) & set(result.tokens[:-1])
    assert {result.finish_reason for result in plain} == {"stop", "length"}
    assert set(plain[0].tokens) == {3}
    assert sum(len(result.tokens) > ask.sampling.min_tokens > 0 for ask, result in zip(asks, plain, strict=True)) > 5
    check_empty(engine)


def test_plain_decoding_takes_the_best_of_the_changed_logits(lm: LanguageModel):
    """Against logits of one pass without a cache, changed in NumPy."""
    if lm.dtype == "bfloat16":
        pytest.skip("a pass without a cache rounds otherwise")
    prompt = prompts(4, [7], vocab=VOCAB)[0]
    sampling = Sampling(12, logit_bias=((3, 1.5), (5, -2.0)), stop_token_ids=(1, 2, 4, 8, 3, 6), min_tokens=8)
    (result,) = lm.generate([prompt], sampling, speculative=False)
    for n, token in enumerate(result.tokens):
        logits = np.asarray(observed_logits(lm, [*prompt, *result.tokens[:n]]))[-1]
        changed = adjusted(logits, dict(sampling.logit_bias), sampling.stop_token_ids if n < 8 else ())
        assert token == changed.argmax()


def test_log_probabilities_are_the_targets_at_each_position(lm: LanguageModel, engine: Engine):
    """With any drafter, in any company; the prompt's too, though its beginning lies in pages that others have filled."""
    if lm.dtype == "bfloat16":
        pytest.skip("a pass without a cache rounds otherwise; tests/decode/test_scores.py holds it against plain decoding")
    asks = [
        GenerateRequest(list(ask.prompt), ask.sampling, logprobs=3 if n % 2 else None, prompt_logprobs=n % 4 == 1)
        for n, ask in enumerate(requests(8, 24))
    ]
    engine.accept_requests()
    listeners, _ = drive(engine, asks, np.random.default_rng(1))
    assert engine.stats().preemptions > 0
    check_empty(engine)
    engine.stop()
    for n, (ask, each) in enumerate(zip(asks, listeners, strict=True)):
        given = [token.logprobs for update in each.updates for token in update.tokens]
        prompt = [update.prompt_logprobs for update in each.updates]
        assert all(one is None for one in prompt[1:])
        if ask.logprobs is None:
            assert not any(given)
            continue
        text = [*ask.prompt, *each.tokens]
        logits = np.asarray(observed_logits(lm, text), np.float64)
        want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        first = 1 if ask.prompt_logprobs else len(ask.prompt)
        found = [*(prompt[0] or ()), *given]
        assert len(found) == len(text) - first
        for position, one in enumerate(found, first):
            assert one is not None
            assert one.logprob == pytest.approx(want[position - 1, text[position]], abs=1e-4), (n, position)
            assert [value for _, value in one.top] == pytest.approx(sorted(want[position - 1])[:-4:-1], abs=1e-4)
            assert all(want[position - 1, token] == pytest.approx(value, abs=1e-4) for token, value in one.top)


def test_a_prompts_log_probabilities_outlast_a_preemption(lm: LanguageModel, engine: Engine):
    """Whenever it comes: while the prompt is computed, while rounds are on their way, and later."""
    ask = GenerateRequest(prompts(9, [40], vocab=VOCAB)[0], Sampling(30, ignore_eos=True), logprobs=0, prompt_logprobs=True)
    logprobs = []
    engine.accept_requests()
    for steps in (0, 1, 2, 4):
        listener = Heard()
        engine.submit(ask, listener)
        for _ in range(steps):
            engine.step()
        for running in engine.scheduler.running:
            engine.scheduler.preempt(running)
        while engine.flight:  # what was sent is read before there is a place again
            engine.read(engine.flight.popleft())
        while engine.step():
            pass
        first = listener.updates[0].prompt_logprobs
        assert first is not None
        logprobs.append([one.logprob for one in first])
        assert len(logprobs[-1]) == len(ask.prompt) - 1
    assert all(each == pytest.approx(logprobs[0], abs=1e-5) for each in logprobs)
    check_empty(engine)


def observed_logits(lm: LanguageModel, text: list[int]) -> Any:
    """The target's logits `[T, V]` at each position of a text, in one pass without a cache."""
    params = lm.model.models.target
    config = lm.target
    ops = lm.ops
    ran = decoder.forward_full(config, ops, params, jnp.asarray([[*text, *[0] * (CAPACITY - len(text))]]))
    return decoder.logits(config, ops, params, ran.hidden)[0, : len(text)]
