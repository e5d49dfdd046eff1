"""`verify-exact` on small random models: nothing differs where all is well, and what a defect commits is found where it is."""

import hashlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from llm.support import plain_step, prompts
from reference.dflash_numpy import Target as NumpyTarget
from reference.dflash_numpy import as_folders, random_pair
from reference.sampling_numpy import penalised, warped
from tilewright.bench import exact_engine
from tilewright.bench.exact import (
    AGAIN,
    KINDS,
    LIKE,
    NEXT,
    ExactRequest,
    PathAnswer,
    PathResult,
    Plain,
    agreeing,
    derived_requests,
    digest,
    make_requests,
    mixed_lengths,
)
from tilewright.bench.exact_engine import ARRIVALS, Client, left_over
from tilewright.bench.exact_paths import TEAM, Effort, Verification
from tilewright.bench.exact_plain import draw_scores, next_logits, plain_tokens, score_lead, top_margin
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import EngineStats, GenerateRequest, Listener, RequestHandle, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Target, Verified, verify
from tilewright.speculation.drafters.load import DrafterOptions

PAIR = random_pair(0, vocab_size=12, target_layers=2, drafter_layers=1, taps=[0], block_size=4)
NEW = 40
EFFORT = Effort(
    requests=6,
    max_new_tokens=NEW,
    batches=(1, 3),
    widths=(),
    alone=("mixed",),
    served=("mixed",),
    arrivals=("as given", "reversed", "everything"),
)
PROMPTS = prompts(0, [1, 30, 17, 40, 9, 33], vocab=12)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("pair")
    return load(as_folders(folder, PAIR)[0], table=ShapeTable(batches=(1,), capacities=(128,), chunks=(16,)))


@pytest.fixture(scope="module")
def drafters(lm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source = str(as_folders(tmp_path_factory.mktemp("drafter"), PAIR)[1])
    return {"dflash": lm.load_drafter(source, DrafterOptions())}


@pytest.mark.slow
def test_every_path_gives_the_plain_tokens(lm: LanguageModel, drafters: dict[str, Any]):
    progress: list[str] = []
    verification = Verification(lm, drafters, PROMPTS, EFFORT, seed=1)
    found = list(verification.findings(progress.append))
    assert [each for each in found if not each.same] == []
    assert len(found) == verification.count()
    plain = digest([verification.plain.answer(each) for each in verification.requests("mixed")])
    assert {each.sha256 for each in found} == {each.plain_sha256 for each in found} == {plain}
    assert agreeing(found, len(PROMPTS)) == (6, 6)
    paths = {(each.drafter, each.path): each for each in found}
    served = ["engine, as given", "engine, reversed", "engine, everything"]
    assert list(paths) == [
        ("none", "one at a time"),
        ("none", "batches of 3"),
        ("none", "engine, 1 at a time"),
        *(("none", name) for name in served),
        ("dflash", "one at a time"),
        ("dflash", "batches of 3"),
        ("dflash", "engine, 1 at a time"),
        *(("dflash", name) for name in served),
        (TEAM, "batches of 3, random widths"),
        (TEAM, "engine, 1 at a time"),
        *((TEAM, name) for name in served),
    ]
    for drafter in ("none", "dflash", TEAM):
        everything = paths[drafter, "engine, everything"]
        assert everything.answers % (len(PROMPTS) + 3 * 3) == 0
        assert set(everything.exercised) >= {"rounds", "preemptions", "prefix tokens", "cancelled"}
    assert paths["dflash", "batches of 3"].exercised["accepted drafts"] > 0
    assert paths["dflash", "engine, everything"].lacking == []
    assert set(paths[TEAM, "batches of 3, random widths"].exercised) >= {"of plain", "of dflash, block 4"}
    assert "dflash: the engine compiles" in progress


def test_what_did_not_happen_is_told(lm: LanguageModel):
    """A drafter that never finds anything, for no text here repeats itself."""
    effort = replace(EFFORT, alone=("greedy",), arrivals=(), max_new_tokens=1, batches=(1,))
    drafters: dict[str, Any] = {"ngram": lm.load_drafter("ngram", DrafterOptions(block_size=4))}
    found = list(Verification(lm, drafters, [[1, 2, 3], [4, 5]], effort, seed=1).findings())
    assert [each.path for each in found] == ["one at a time", "one at a time", "batches of 1, random widths"]
    assert all(each.same for each in found)
    assert [list(each.lacking) for each in found] == [[], ["accepted drafts"], ["accepted drafts"]]


@pytest.mark.slow
def test_a_wrong_token_is_found_where_it_is(lm: LanguageModel, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """A round commits another token than the target's at one position, whatever drafted it."""
    wrong = 60

    def careless(target: Target, params: Any, state: DecodeState, block: Array, *rest: Any) -> Verified:
        verified = verify(target, params, state, block, *rest)
        place = state.last_position[:, None] + 1 + jnp.arange(block.shape[1])[None]
        wrongly = jnp.where(place == wrong, (verified.tokens + 1) % 12, verified.tokens)
        return verified._replace(tokens=wrongly.astype(verified.tokens.dtype))

    monkeypatch.setattr("tilewright.runtime.rounds.verify", careless)
    monkeypatch.setattr("tilewright.runtime.rounds.autoregressive_step", plain_step)
    effort = replace(EFFORT, alone=("greedy", "sampled"), widths=(2,), arrivals=())
    found = list(Verification(lm, drafters, PROMPTS, effort, seed=1).findings())
    requests = make_requests(PROMPTS, "greedy", 1, NEW)
    reached = {each.number: wrong - len(each.prompt) for each in requests if len(each.prompt) <= wrong < each.end}
    assert 0 < len(reached) < len(requests), "some requests span the position"
    for each in found:
        if each.drafter == "none":
            assert each.same, each.path
            continue
        assert not each.same
        assert each.sha256 != each.plain_sha256
        assert {one.number: one.position for one in each.differences} == reached, each.path
        for one in each.differences:
            assert one.plain_token is not None
            assert one.token == (one.plain_token + 1) % 12
            assert one.margin > 0
            if each.kind == "greedy":
                assert one.lead is not None
                assert one.lead >= one.margin - 1e-5
    assert {each.path for each in found} >= {"one at a time, block 2", "batches of 3"}
    assert agreeing(found, len(PROMPTS)) == (2 * (len(PROMPTS) - len(reached)), 2 * len(PROMPTS))


def test_hashes_are_of_all_tokens_in_their_order():
    want = hashlib.sha256(np.asarray([2, 7, 8, 0, 1, 300], "<i4").tobytes()).hexdigest()
    assert digest([[7, 8], [], [300]]) == want
    assert (
        len({digest(each) for each in ([[7, 8], [], [300]], [[7], [8], [300]], [[], [7, 8], [300]], [[300], [], [7, 8]])}) == 4
    )


def test_prompts_are_cut_at_all_lengths():
    whole = [list(range(16)), list(range(100, 116))]
    cut = mixed_lengths(whole, 8, seed=3)
    assert sorted(map(len, cut)) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert all(prompt == whole[n % 2][: len(prompt)] for n, prompt in enumerate(cut))
    assert mixed_lengths(whole, 8, seed=3) == cut
    assert mixed_lengths(whole, 8, seed=4) != cut
    assert [len(prompt) for prompt in mixed_lengths([[5]], 4, seed=0)] == [1, 1, 1, 1]


def test_requests_differ_in_limit_and_seed():
    requests = make_requests(PROMPTS, "mixed", 2**63 - 2, NEW)
    assert {each.sampling.max_new_tokens for each in requests} == {NEW, 30, 16}
    assert [each.sampling.seed for each in requests] == [2**63 - 2, 2**63 - 1, *range(-(2**63), -(2**63) + 4)]
    ways = [KINDS[name] for name in ("greedy", "sampled", "penalised")] * 2
    assert [each.sampling.temperature for each in requests] == [way.temperature for way in ways]
    assert [bool(each.sampling.stop) for each in requests] == [False, False, False, True, False, False]
    assert make_requests([[1]], "sampled", 0, 1)[0].sampling == replace(KINDS["sampled"], max_new_tokens=1, seed=0)


def test_derived_requests_share_prefixes(lm: LanguageModel):
    plain = Plain(lm)
    request = ExactRequest(2, tuple(PROMPTS[1]), Sampling(NEW))
    answer = plain.answer(request)
    again, like, following = derived_requests(plain, request)
    assert (again.prompt, again.about) == (request.prompt, AGAIN)
    assert (like.prompt[:22], like.about) == (request.prompt[:22], LIKE)
    assert like.prompt[22:] == request.prompt[22:][::-1] != request.prompt[22:]
    assert (following.prompt, following.about) == ((*request.prompt, *answer[:20]), NEXT)
    assert plain.answer(following) == answer[20:]


def text_and_logits(lm: LanguageModel, sampling: Sampling) -> Iterator[tuple[list[int], list[int], int, np.ndarray]]:
    """For each token of an answer the prompt, what was generated before, itself, and NumPy's logits for it."""
    prompt = PROMPTS[2]
    answer = lm.generate([prompt], sampling, speculative=False)[0].tokens
    logits = NumpyTarget(PAIR.target_config, PAIR.target_tensors).run([*prompt, *answer])[0]
    for n, token in enumerate(answer):
        yield prompt, answer[:n], token, logits[len(prompt) - 1 + n]


def test_margins_are_those_of_numpy(lm: LanguageModel):
    sampling = Sampling(8)
    for prompt, before, token, logits in text_and_logits(lm, sampling):
        found = next_logits(lm, [*prompt, *before])
        down = np.argsort(logits)[::-1]
        assert token == down[0]
        assert top_margin(found) == pytest.approx(logits[down[0]] - logits[down[1]], abs=1e-4)
        lead = score_lead(draw_scores(found, sampling, prompt, before), token, int(down[5]))
        assert lead == pytest.approx(logits[token] - logits[down[5]], abs=1e-4)


@pytest.mark.parametrize("kind", ["sampled", "penalised"])
def test_scores_are_what_the_draw_compares(lm: LanguageModel, kind: str):
    """Less their noise, which is the same whatever the logits, they are the logits after penalties, temperature and filters."""
    sampling = replace(KINDS[kind], max_new_tokens=5, seed=5)
    left_out = 0
    for prompt, before, token, logits in text_and_logits(lm, sampling):
        found = next_logits(lm, [*prompt, *before])
        scores = draw_scores(found, sampling, prompt, before)
        noise = draw_scores(found, Sampling(8, temperature=1.0, seed=5), prompt, before) - found
        assert np.argmax(scores) == token
        after = penalised(
            logits, prompt, before, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        )
        kept = warped(after, sampling.temperature, sampling.top_p) > 0
        np.testing.assert_allclose((scores - noise)[kept], (after / sampling.temperature)[kept], atol=1e-3)
        assert np.all(scores[~kept] == -np.inf)
        for other in np.flatnonzero(~kept)[:1]:
            assert score_lead(scores, token, int(other)) is None
            left_out += 1
    assert bool(left_out) == (kind == "sampled")


DRAWN: dict[str, Sampling] = {
    **KINDS,
    "top-k and min-p": Sampling(temperature=0.8, top_k=5, min_p=0.05),
    "all at once": Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4),
    "penalised, greedy": Sampling(repetition_penalty=1.2, presence_penalty=0.3),
    "up to a stop string": Sampling(temperature=1.5, stop=("t3", "t5 t")),
    "past the end": Sampling(temperature=1.5, ignore_eos=True),
}


@pytest.mark.parametrize("sampling", list(DRAWN.values()), ids=list(DRAWN))
def test_the_loop_without_a_cache_draws_what_the_runtime_draws(lm: LanguageModel, sampling: Sampling):
    ended = set()
    for seed, prompt in zip((2**32 - 1, 2**53, -5, 3), PROMPTS[:4], strict=True):
        settings = replace(sampling, max_new_tokens=30, seed=seed)
        result = lm.generate([prompt], settings, speculative=False)[0]
        assert plain_tokens(lm, prompt, settings) == result.tokens
        ended.add(result.finish_reason)
    assert ("stop" in ended) == bool(sampling.stop)


def test_the_loop_is_for_float32_alone(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """Elsewhere the runtime's own plain decoding is what others are held to: another program would round differently."""
    other = copy(lm)
    other.dtype = "bfloat16"
    kept = copy(lm)
    kept.quantised = True
    assert [Plain(each).uncached for each in (lm, other, kept)] == [True, False, False]
    monkeypatch.setattr("tilewright.bench.exact.plain_tokens", lambda *_: pytest.fail("the loop ran"))
    plain = Plain(lm)
    request = ExactRequest(0, tuple(PROMPTS[1]), Sampling(6))
    plain.uncached = False
    assert plain.answer(request) == lm.generate([PROMPTS[1]], Sampling(6), speculative=False)[0].tokens


def test_an_answer_that_ends_early_differs_at_its_end(lm: LanguageModel):
    plain = Plain(lm)
    request = ExactRequest(0, tuple(PROMPTS[1]), Sampling(6))
    want = plain.answer(request)
    short = plain.difference(PathAnswer(request, want[:4]))
    assert short is not None
    assert (short.position, short.token, short.text, short.plain_token, short.lead) == (4, None, None, want[4], None)
    assert short.plain_text == plain.text(want[4])
    long = plain.difference(PathAnswer(request, [*want, 3]))
    assert long is not None
    assert (long.position, long.token, long.plain_token) == (6, 3, None)
    assert plain.difference(PathAnswer(request, want)) is None


def test_what_else_goes_wrong_is_a_problem_too(lm: LanguageModel):
    plain = Plain(lm)
    requests = [ExactRequest(0, tuple(PROMPTS[1]), Sampling(6))]
    good = [PathAnswer(each, plain.answer(each)) for each in requests]
    assert plain.finding("p", "none", "greedy", requests, PathResult(good), 0.0).same
    assert not plain.finding("p", "none", "greedy", requests, PathResult(good, problem="2 pages left over"), 0.0).same


class DeadEngine(Engine):
    """An engine that takes requests and answers none, and holds on to what it had."""

    def __init__(self, counted: EngineStats = EngineStats()):
        self.counted = counted
        self.gave_up = 0

    def submit(self, request: GenerateRequest, listener: Listener, encoded: bool = False) -> RequestHandle:
        return RequestHandle(request, 0)

    def cancel(self, handle: RequestHandle) -> None:
        self.gave_up += 1

    @property
    def busy(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return self.counted


def clients(engine: DeadEngine, requests: Sequence[ExactRequest], arrivals: str = "as given") -> Client:
    return Client(engine, requests, ARRIVALS[arrivals])


def test_an_engine_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exact_engine, "PATIENCE_S", 0.01)
    engine = DeadEngine()
    client = clients(engine, make_requests(PROMPTS, "greedy", 0, 4))
    client.run()
    assert "stuck" in client.problem
    assert engine.gave_up == len(PROMPTS)
    assert client.tokens == [[]] * len(PROMPTS)


def test_a_request_that_the_engine_gives_up_is_told():
    client = clients(DeadEngine(), make_requests(PROMPTS[:1], "greedy", 0, 4))
    client.updates.put((0, RequestOutput(end="error", error="the request could not be computed")))
    client.run()
    assert client.problem == "the request could not be computed"


def test_arrivals_wait_for_tokens_of_earlier_requests():
    client = clients(DeadEngine(), make_requests(PROMPTS, "greedy", 0, 4), "staggered")
    assert client.may_submit(), "nobody runs"
    client.tokens = [[]]
    client.submit_next(0)
    assert not client.may_submit()
    client.since = ARRIVALS["staggered"].every
    assert client.may_submit()


def test_what_an_engine_holds_at_the_end_is_told():
    assert left_over(DeadEngine(EngineStats(pages_used=5)), reserved=5) == ""
    held = EngineStats(running=1, waiting=2, pages_used=8)
    assert left_over(DeadEngine(held), reserved=5) == "1 running left over, 2 waiting left over, 3 pages left over"


def test_a_request_beyond_the_context_is_refused(lm: LanguageModel):
    with pytest.raises(ValueError, match="context of 512"):
        Verification(lm, {}, [[1] * 500], EFFORT, seed=0)
