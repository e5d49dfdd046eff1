"""Rows with a constraint get what plain decoding under the same masks gives, whatever is drafted and whoever is beside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import UInt32

from llm.support import build, prompts
from reference.dflash_numpy import random_pair
from runtime.support import Heard, check_empty, drive, expected, samplings
from tilewright.bench.exact_plain import draw_scores, next_logits
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.constraints import ALL, ConstraintError, Drafted, allowed, fill_blocks, forced_first, words
from tilewright.runtime.engine import Engine
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

VOCAB, BLOCK, CAPACITY, PAGE = 40, 4, 96, 16
TABLE = ShapeTable(batches=(4,), capacities=(CAPACITY,), chunks=(16,), widths=(2,))
EOS = (39,)
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK, eos_token_id=EOS[0])

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Dance:
    """A row of tokens: each lies at most `reach` beyond the one before, in a circle; every fifth is forced.

    Attributes:
        least: tokens after which it may end.
        breaks: after how many tokens it cannot go on; None for never.
    """

    def __init__(self, reach: int = 12, least: int = 6, breaks: int | None = None, seen: tuple[int, ...] = ()):
        self.reach, self.least, self.breaks, self.seen = reach, least, breaks, seen

    def begin(self) -> "Dance":
        return Dance(self.reach, self.least, self.breaks)

    def next(self) -> list[int]:
        last = self.seen[-1] if self.seen else 0
        if len(self.seen) % 5 == 4:
            return [(last + 3) % VOCAB]
        ends = EOS if len(self.seen) >= self.least else ()
        return sorted({*((last + step) % VOCAB for step in range(1, self.reach)), *ends} - ({*EOS} - {*ends}))

    def forced(self) -> list[int]:
        return self.next() if len(self.seen) % 5 == 4 else []

    def fill(self, drafts: Sequence[int], masks: UInt32[np.ndarray, "T W"]) -> int:
        if self.breaks is not None and len(self.seen) >= self.breaks:
            raise ConstraintError("it knows no further")
        state = self
        for slot in range(len(drafts) + 1):
            bits = np.zeros(32 * masks.shape[1], np.uint8)
            bits[state.next()] = 1
            masks[slot] = np.packbits(bits, bitorder="little").view(np.uint32)
            if slot == len(drafts) or drafts[slot] not in state.next() or drafts[slot] in EOS:
                return slot
            state = Dance(self.reach, self.least, None, (*state.seen, drafts[slot]))
        raise AssertionError

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.next()
            self.seen = (*self.seen, token)


def plain(lm: LanguageModel, ask: GenerateRequest) -> list[int]:
    """The tokens of a request, by passes over the whole text and masks in NumPy."""
    dance, generated = Dance() if ask.constraint is None else ask.constraint.begin(), list[int]()
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


@pytest.mark.parametrize("vocab", [1, 32, 75])
def test_masks_are_bits_by_token(vocab: int):
    rng = np.random.default_rng(vocab)
    may, logits = rng.random((2, 3, vocab)) < 0.5, rng.normal(size=(2, 3, vocab)).astype(np.float32)
    bits = np.zeros((2, 3, 32 * words(vocab)), np.uint8)
    bits[..., :vocab] = may
    masks = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(allowed(jnp.asarray(logits), jnp.asarray(masks)), np.where(may, logits, -np.inf))


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


@pytest.fixture(scope="module", params=["plain", "dflash"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    lm = build(tmp_path_factory.mktemp(request.param), PAIR, table=TABLE)
    return lm if request.param == "dflash" else lm.with_drafter(None)


@pytest.fixture(scope="module")
def warm(lm: LanguageModel) -> Engine:
    engine = lm.engine(EngineOptions(table=TABLE, page_size=PAGE, pages=9, constraints=True))
    engine.programs.warm(engine.programs.declared(constraints=True))
    return engine


@pytest.fixture
def engine(lm: LanguageModel, warm: Engine) -> Iterator[Engine]:
    engine = lm.engine(warm.options)
    engine.programs.compiled = warm.programs.compiled
    engine.runner.reset()
    yield engine
    engine.stop()


def requests(seed: int, count: int, constrained: Callable[[int], bool]) -> list[GenerateRequest]:
    rng = np.random.default_rng(seed)
    asked = prompts(seed, [int(n) for n in rng.integers(1, 40, count)], vocab=VOCAB)
    each = samplings(rng, count, 56)

    def request(n: int) -> GenerateRequest:
        if not constrained(n):
            return GenerateRequest(asked[n], each[n])
        return GenerateRequest(asked[n], replace(each[n], ignore_eos=False), constraint=Dance(least=20))

    return [request(n) for n in range(count)]


def test_tokens_are_those_of_plain_decoding_under_the_same_masks(lm: LanguageModel, engine: Engine):
    """In any company, with pages for a few only, so that some are computed anew. No program compiles."""
    asks = requests(0, 16, lambda n: n % 2 == 0)
    free = [n for n in range(len(asks)) if n % 2]
    want = dict(zip(free, expected(lm, [asks[n] for n in free]), strict=True))
    want |= {n: plain(lm, asks[n]) for n in range(0, len(asks), 2)}
    engine.open()
    heard, handles = drive(engine, asks, np.random.default_rng(1))
    for n, each in enumerate(heard):
        assert each.tokens == want[n], n
    stats = engine.stats()
    assert stats.preemptions > 0
    assert 0 < stats.constrained_rounds < stats.rounds
    results = [handle.result for handle in handles[::2]]
    assert sum(sum(result.accepted) for result in results if result is not None) > 0, "what is forced is accepted, at least"
    assert {"eos", "length"} == {each.end for each in heard[::2]}
    check_empty(engine)


def test_a_constraint_that_cannot_go_on_ends_its_request_alone(lm: LanguageModel, engine: Engine):
    (ask,) = requests(2, 1, lambda n: False)
    (want,) = expected(lm, [ask])
    bad, good = Heard(), Heard()
    engine.open()
    engine.submit(GenerateRequest([1, 2, 3], Sampling(30), constraint=Dance(breaks=4)), bad)
    engine.submit(ask, good)
    while engine.step():
        pass
    assert (bad.end, bad.updates[-1].error) == ("error", "it knows no further")
    assert good.tokens == want
    check_empty(engine)


def test_log_probabilities_are_of_the_tokens_that_may_come(lm: LanguageModel, engine: Engine):
    heard, prompt = Heard(), [1, 2, 3]
    engine.open()
    engine.submit(GenerateRequest(prompt, Sampling(8), logprobs=20, constraint=Dance()), heard)
    while engine.step():
        pass
    engine.stop()
    dance, before = Dance(), list(prompt)
    for token in (token for update in heard.updates for token in update.tokens):
        logits, may = next_logits(lm, before).astype(np.float64), dance.next()
        want = logits - np.log(np.sum(np.exp(logits[may])))
        assert token.logprobs is not None
        np.testing.assert_allclose(token.logprobs.logprob, want[token.token], atol=2e-5)
        top = dict(token.logprobs.top)
        assert {one for one, value in top.items() if value > -np.inf} == set(sorted(may, key=lambda one: -want[one])[:20])
        dance.advance([token.token])
        before.append(token.token)


def test_what_is_refused(lm: LanguageModel, engine: Engine):
    for sampling in (Sampling(8, ignore_eos=True), Sampling(8, min_tokens=2)):
        with pytest.raises(ValueError, match="a constraint to end as it says"):
            GenerateRequest([1], sampling, constraint=Dance())
    without = lm.engine(EngineOptions(table=TABLE, page_size=PAGE, pages=9))
    with pytest.raises(ValueError, match="no programs for one"):
        without.check(GenerateRequest([1], Sampling(8), constraint=Dance()))
