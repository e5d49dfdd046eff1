"""Rows with a constraint get what plain decoding under the same masks gives, whatever is drafted and whoever is beside them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llm.support import build, prompts
from reference.assistant_numpy import as_folders as with_assistant
from reference.dflash_numpy import as_folders, random_pair
from reference.mtp_numpy import add_head, random_head
from runtime.dance import EOS, VOCAB, Dance, with_automaton
from runtime.support import Heard, check_empty, drive, expected, samplings
from tilewright.bench.exact_plain import draw_scores, next_logits
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.autoregressive import fixed_rounds
from tilewright.runtime.constraints import ALL, ConstraintError, Drafted, fill_blocks, forced_first
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.runner import SentRounds
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

BLOCK = 4
CAPACITY = 96
PAGE = 16
TABLE = ShapeTable(batches=(4,), capacities=(CAPACITY,), chunks=(16,), widths=(2,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK, eos_token_id=EOS[0])

pytestmark = pytest.mark.usefixtures("quick_compiles")


def plain(lm: LanguageModel, ask: GenerateRequest) -> list[int]:
    """The tokens of a request, by passes over the whole text and masks in NumPy."""
    dance = Dance() if ask.constraint is None else ask.constraint.begin()
    generated = list[int]()
    assert isinstance(dance, Dance)
    while len(generated) < ask.sampling.max_new_tokens:
        logits = next_logits(lm, [*ask.prompt, *generated])
        masked = np.full_like(logits, -np.inf)
        masked[dance.next()] = logits[dance.next()]
        token = int(np.argmax(draw_scores(masked, ask.sampling, ask.prompt, generated)))
        generated.append(token)
        if token in EOS:
            break
        dance.advance([token])
    return generated


def test_blocks_cut_drafts_that_break_a_constraint():
    good = Dance().next()[0]
    forced = Dance(seen=(1, 2, 3, 4))
    drafted = [(None, [5, 6, 7, 8]), (Dance(), [good, 0, good]), (forced, [9]), (Dance(), [])]
    blocks = fill_blocks([Drafted(*each) for each in drafted], 5, 4, VOCAB)
    assert blocks.counts.tolist() == [3, 1, 1, 0, 0]
    assert blocks.drafts.tolist() == [[5, 6, 7], [good, 0, 0], [7, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert blocks.masks.shape == (5, 4, 2)
    assert (blocks.masks[0] == ALL).all()
    assert (blocks.masks[4] == ALL).all()
    assert blocks.masks[2, 0].tolist() == [1 << 7, 0]
    broken = Drafted(Dance(breaks=0), [])
    with pytest.raises(ConstraintError) as caught:
        fill_blocks([Drafted(None, []), broken], 2, 4, VOCAB)
    assert caught.value.row == 1


def test_what_is_forced_is_drafted_first():
    assert forced_first([], [1, 2]) == [1, 2]
    assert forced_first([1], [1, 2]) == [1, 2]
    assert forced_first([1, 3], [1, 2]) == [1, 3]
    assert forced_first([3], []) == [3]


@pytest.fixture(
    scope="module",
    params=["plain", "dflash", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp", "assistant", "suffix"))],
)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "suffix":
        tokens = np.random.default_rng(0).integers(0, VOCAB, 3000)
        (folder / "corpus.txt").write_text(" ".join(f"t{token}" for token in tokens))
        target, _ = as_folders(folder, PAIR)
        return load(target, "suffix", suffix_corpus=folder / "corpus.txt", block_size=BLOCK, table=TABLE)
    if request.param == "mtp":
        target, _ = as_folders(folder, PAIR)
        return load(add_head(target, random_head(0, PAIR.target_config)), "mtp", block_size=BLOCK, table=TABLE)
    if request.param == "assistant":
        return load(*with_assistant(folder, VOCAB, eos=EOS[0], seed=1), block_size=BLOCK, table=TABLE)
    lm = build(folder, PAIR, table=TABLE)
    return lm if request.param == "dflash" else lm.with_drafter(None)


@pytest.fixture(scope="module")
def warm(lm: LanguageModel) -> Engine:
    engine = lm.engine(EngineOptions(table=TABLE, page_size=PAGE, pages=9, constraints=True))
    engine.decoding.programs.warm(engine.decoding.programs.declared(constraints=True))
    return engine


@pytest.fixture
def engine(lm: LanguageModel, warm: Engine) -> Iterator[Engine]:
    engine = lm.engine(warm.decoding.options)
    engine.decoding.programs.compiled = warm.decoding.programs.compiled
    engine.runner.reset()
    yield engine
    engine.stop()


def requests(
    seed: int, count: int, constrained: Callable[[int], bool], dance: Callable[[int], Dance] = lambda _: Dance(least=20)
) -> list[GenerateRequest]:
    rng = np.random.default_rng(seed)
    inputs = prompts(seed, [int(n) for n in rng.integers(1, 40, count)], vocab=VOCAB)
    each = samplings(rng, count, 56)

    def request(n: int) -> GenerateRequest:
        if not constrained(n):
            return GenerateRequest(inputs[n], each[n])
        return GenerateRequest(inputs[n], replace(each[n], ignore_eos=False), constraint=dance(n))

    return [request(n) for n in range(count)]


@pytest.fixture(scope="module")
def known() -> list[Dance]:
    """Dances with an automaton each."""
    return [with_automaton(20), with_automaton(20)]


@pytest.fixture(scope="module")
def leaving() -> list[Dance]:
    """Dances with an automaton each, which they leave sooner or later."""
    return [with_automaton(20, leaving=(n, n + 11, n + 22)) for n in range(2)]


@pytest.fixture(scope="module")
def wanted(lm: LanguageModel) -> list[list[int]]:
    """The tokens of 16 requests, of which every other one has a constraint."""
    asks = requests(0, 16, lambda n: n % 2 == 0)
    found = [plain(lm, ask) if ask.constraint is not None else [] for ask in asks]
    found[1::2] = expected(lm, asks[1::2])
    return found


@pytest.mark.parametrize("source", ["host", "device", "both", "left"])
def test_tokens_are_those_of_plain_decoding_under_the_same_masks(
    engine: Engine, known: list[Dance], leaving: list[Dance], wanted: list[list[int]], source: str
):
    """In any company, with pages for a few only, so that some are computed anew. No program compiles."""
    plainly = {"host": range(16), "both": (2, 10)}.get(source, ())
    automata = leaving if source == "left" else known
    asks = requests(0, 16, lambda n: n % 2 == 0, lambda n: Dance(least=20) if n in plainly else automata[n // 2 % 2])
    engine.accept_requests()
    listeners, handles = drive(engine, asks, np.random.default_rng(1))
    for n, each in enumerate(listeners):
        assert each.tokens == wanted[n], n
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.constrained_rounds + stats.automaton_rounds < stats.rounds
    assert (stats.constrained_rounds > 0, stats.automaton_rounds > 0) == (source != "device", source != "host")
    assert [handle.masks for handle in handles[1::2]] == [set()] * 8
    found = {each for handle in handles for each in handle.masks}
    assert found == ({source} if source in ("host", "device") else {"host", "device"})
    results = [handle.result for handle in handles[::2]]
    assert sum(sum(result.accepted) for result in results if result is not None) > 0, "what is forced is accepted, at least"
    assert {"eos", "length"} == {each.end for each in listeners[::2]}
    check_empty(engine)


def test_rows_under_masks_of_the_device_run_many_rounds_to_a_dispatch(
    lm: LanguageModel, engine: Engine, known: list[Dance], monkeypatch: pytest.MonkeyPatch
):
    """With the drafts that they have in dispatches of one round: the device keeps them from one to the next."""
    engine.decoding.chooser = fixed_rounds(engine.runner, math.inf)
    asks = [GenerateRequest([1, 2, 3], Sampling(40, temperature, seed=5), constraint=known[0]) for temperature in (0.0, 1.0)]
    want = [plain(lm, ask) for ask in asks]
    engine.accept_requests()
    listeners, handles = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == want
    stats = engine.stats()
    assert stats.automaton_rounds == stats.rounds > 3 * stats.dispatches
    monkeypatch.setattr(engine.decoding.chooser, "under_masks", lambda *_: 1)
    again = drive(engine, asks, np.random.default_rng(0))[1]
    assert engine.stats().rounds - stats.rounds <= engine.stats().dispatches - stats.dispatches
    for one, other in zip(handles, again, strict=True):
        assert one.result is not None
        assert one.result == other.result
    check_empty(engine)


@pytest.mark.parametrize("fails", [False, True])
def test_the_next_round_of_the_hosts_masks_is_sent_before_tokens_are_handed_out(
    lm: LanguageModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """What a dispatch that fails leaves is neither lost nor taken in twice."""
    asks = [GenerateRequest([1, 2, 3], Sampling(n, 1.0, seed=n), constraint=Dance(least=40)) for n in (24, 30)]
    want = [plain(lm, ask) for ask in asks]
    run = engine.runner.run
    rounds = list[str]()
    waiting = list[int]()

    def running(key: ProgramKey, *inputs: Any) -> Any:
        rounds.append(key.name)
        if fails and rounds.count("rounds") == 4:
            rounds.append("rounds")
            raise RuntimeError("a dispatch that fails")
        return run(key, *inputs)

    monkeypatch.setattr(engine.runner, "run", running)
    take = engine.deliver_dispatch

    def taking(sent: SentRounds, *arguments: Any) -> None:
        waiting.append(len(engine.flight))
        take(sent, *arguments)

    monkeypatch.setattr(engine, "deliver_dispatch", taking)
    engine.accept_requests()
    listeners = [Heard() for _ in asks]
    for ask, each in zip(asks, listeners, strict=True):
        engine.submit(ask, each)
    while engine.step():
        pass
    assert [each.tokens for each in listeners] == want
    assert waiting.count(1) > len(waiting) // 2
    assert (engine.stats().preemptions > 0) == fails
    check_empty(engine)


def test_rows_that_leave_their_automaton_go_on_under_masks_of_the_host(lm: LanguageModel, engine: Engine):
    """In the middle of a dispatch of many rounds; one of them with its last token."""
    engine.decoding.chooser = fixed_rounds(engine.runner, math.inf)
    ask = GenerateRequest([1, 2, 3], Sampling(40, 1.0, seed=5), constraint=Dance(least=20))
    want = plain(lm, ask)
    rule = with_automaton(20, leaving=want[7:8])
    leaves = want.index(want[7]) + 1
    sizes = (leaves, leaves + 1, leaves + 20)
    asks = [replace(ask, sampling=Sampling(size, 1.0, seed=5), constraint=rule) for size in sizes]
    engine.accept_requests()
    listeners, handles = drive(engine, asks, np.random.default_rng(0))
    assert [each.tokens for each in listeners] == [want[:size] for size in sizes]
    assert [handle.masks for handle in handles] == [{"device"}, {"device", "host"}, {"device", "host"}]
    check_empty(engine)


def test_stop_strings_do_not_cut_an_answer_under_masks(lm: LanguageModel, engine: Engine, known: list[Dance]):
    ask = GenerateRequest([1, 2, 3], Sampling(40), constraint=known[1])
    want = plain(lm, ask)
    whole = lm.tokenizer.decode(want)
    stop = whole[len(whole) // 2 :][:2]
    engine.accept_requests()
    listeners, _ = drive(engine, [replace(ask, sampling=Sampling(40, stop=(stop,))), ask], np.random.default_rng(0))
    assert listeners[0].end == "eos"
    assert stop in listeners[0].text
    assert [each.tokens for each in listeners] == [want, want]
    check_empty(engine)


def test_a_constraint_that_cannot_go_on_ends_its_request_alone(lm: LanguageModel, engine: Engine):
    (ask,) = requests(2, 1, lambda n: False)
    (want,) = expected(lm, [ask])
    bad = Heard()
    good = Heard()
    engine.accept_requests()
    engine.submit(GenerateRequest([1, 2, 3], Sampling(30), constraint=Dance(breaks=4)), bad)
    engine.submit(ask, good)
    while engine.step():
        pass
    assert (bad.end, bad.updates[-1].error) == ("error", "it knows no further")
    assert good.tokens == want
    check_empty(engine)


@pytest.mark.parametrize("source", ["host", "device"])
def test_log_probabilities_are_of_the_tokens_that_may_come(lm: LanguageModel, engine: Engine, known: list[Dance], source: str):
    listener = Heard()
    prompt = [1, 2, 3]
    engine.accept_requests()
    constraint = known[0] if source == "device" else Dance()
    engine.submit(GenerateRequest(prompt, Sampling(8), logprobs=20, constraint=constraint), listener)
    while engine.step():
        pass
    engine.stop()
    dance = constraint.begin()
    before = list(prompt)
    for token in (token for update in listener.updates for token in update.tokens):
        logits = next_logits(lm, before).astype(np.float64)
        may = dance.next()
        want = logits - np.log(np.sum(np.exp(logits[may])))
        assert token.logprobs is not None
        np.testing.assert_allclose(token.logprobs.logprob, want[token.token], atol=2e-5)
        top = dict(token.logprobs.top)
        assert {one for one, value in top.items() if value > -np.inf} == set(sorted(may, key=lambda one: -want[one])[:20])
        dance.advance([token.token])
        before.append(token.token)


def test_rounds_under_masks_are_one_program_for_each_number_of_rows(lm: LanguageModel):
    """Whoever makes the masks."""
    programs = lm.engine(EngineOptions(constraints=True, context=CAPACITY)).decoding.programs
    without = list(programs.declared())
    keys = list(programs.declared(constraints=True))
    assert not any(key.masked for key in without)
    assert [key.rows for key in keys if key not in without] == list(programs.table.batches)


def test_what_is_refused(lm: LanguageModel, engine: Engine):
    for sampling in (Sampling(8, ignore_eos=True), Sampling(8, min_tokens=2)):
        with pytest.raises(ValueError, match="neither ignore_eos nor min_tokens with a constraint"):
            GenerateRequest([1], sampling, constraint=Dance())
    without = lm.engine(EngineOptions(table=TABLE, page_size=PAGE, pages=9))
    with pytest.raises(ValueError, match="no programs for one"):
        without.check(GenerateRequest([1], Sampling(8), constraint=Dance()))
