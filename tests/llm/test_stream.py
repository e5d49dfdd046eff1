"""From rounds to results: text as it streams, stop strings, ends, results taken early, and memory that goes back."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llm.support import TABLE, build, prompts, run
from reference.dflash_numpy import Generation, Pair, oracle_like_pair, speculative_greedy
from tilewright.llm import language_model
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.layout import is_paged
from tilewright.runtime.output import Piece, Result
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling

NEW = 24
PROMPTS = prompts(0, [1, 7, 12])
SIZES: dict[str, Any] = {"target_layers": 3, "taps": [0, 2], "drafter_intermediate_size": 320, "length": NEW}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return oracle_like_pair(2, PROMPTS, **SIZES)


@pytest.fixture(scope="module")
def lm(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return build(tmp_path_factory.mktemp("pair"), pair)


@pytest.fixture(scope="module")
def want(pair: Pair) -> list[Generation]:
    return [speculative_greedy(*pair.build(), prompt, NEW) for prompt in PROMPTS]


def words(tokens: Sequence[int]) -> str:
    """Text that tokens add to a prompt: this tokenizer's words have spaces between them."""
    return "".join(f" t{token}" for token in tokens)


def streamed(pieces: Sequence[Piece], row: int) -> str:
    return "".join(piece.text for piece in pieces if piece.row == row)


def check_stream(pieces: Sequence[Piece], results: Sequence[Result]) -> None:
    for row, result in enumerate(results):
        row_pieces = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in row_pieces] == result.tokens
        assert streamed(pieces, row) == result.text
        assert sum(result.acceptance_lengths) == len(result.tokens)


@pytest.mark.parametrize("steps", [1, 3, 64])
@pytest.mark.parametrize("drafted", [False, True])
def test_pieces_add_up(lm: LanguageModel, want: list[Generation], drafted: bool, steps: int):
    session = lm.start(PROMPTS, Sampling(NEW), drafted)
    pieces = run(session, steps)
    results = session.results()
    check_stream(pieces, results)
    for result, prompt, generation in zip(results, PROMPTS, want, strict=True):
        assert result.tokens == generation.output
        assert result.text == words(generation.output)
        assert (result.finish_reason, result.prompt_tokens) == ("length", len(prompt))
        rounds = [len(r.emitted) for r in generation.rounds]
        assert result.acceptance_lengths == (rounds if drafted else [1] * NEW)
    assert session.rounds == max(len(result.acceptance_lengths) for result in results)
    assert session.advance() == []


def test_drafted_tokens_are_told_apart(lm: LanguageModel, want: list[Generation]):
    pieces = run(lm.start(PROMPTS, Sampling(NEW)))
    for row, generation in enumerate(want):
        flags = [piece.drafted for piece in pieces if piece.row == row]
        expected = [slot < r.accepted for r in generation.rounds for slot in range(len(r.emitted))]
        # The engine does not see whether the last token of all, where the limit cuts a round, was drafted.
        assert flags[:-1] == expected[:-1]
        assert any(expected)
        assert not all(expected)
    assert not any(piece.drafted for piece in run(lm.start(PROMPTS, Sampling(NEW), speculative=False)))


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
def test_length_limit(lm: LanguageModel, want: list[Generation], limit: int):
    for result, generation in zip(lm.generate(PROMPTS, Sampling(limit)), want, strict=True):
        assert result.tokens == generation.output[:limit]
        assert result.finish_reason == "length"


def expected_stop(tokens: Sequence[int], stop: str) -> tuple[str, int]:
    """The text before the stop string, and how many tokens it takes to complete it."""
    count = next(n for n in range(1, len(tokens) + 1) if stop in words(tokens[:n]))
    return words(tokens).partition(stop)[0], count


@pytest.mark.parametrize("drafted", [False, True])
def test_stop_strings(lm: LanguageModel, want: list[Generation], drafted: bool):
    """Stops of all kinds: within a token, spanning several, at the very beginning, at the very end."""
    tokens = want[1].output
    text = words(tokens)
    spans = [(0, 1), (0, 6), (5, 3), (9, 12), (20, 5), (31, 20), (40, 2), (len(text) - 4, 4)]
    stops = [text[at : at + size] for at, size in spans]
    assert text.find(stops[5]) == 31
    for i in range(0, len(stops), 4):
        requests = [Sampling(NEW, stop=(stop, "never")) for stop in stops[i : i + 4]]
        session = lm.start([PROMPTS[1]] * 4, requests, drafted)
        pieces: list[Piece] = []
        while not session.finished:
            pieces += session.advance(2)
            for row, stop in enumerate(stops[i : i + 4]):
                assert expected_stop(tokens, stop)[0].startswith(streamed(pieces, row))
        check_stream(pieces, session.results())
        for result, stop in zip(session.results(), stops[i : i + 4], strict=True):
            before, count = expected_stop(tokens, stop)
            assert (result.text, result.tokens, result.finish_reason) == (before, tokens[:count], "stop")


def test_the_earliest_of_several_stops_counts(lm: LanguageModel, want: list[Generation]):
    text = words(want[0].output)
    early = text[10:14]
    late = text[50:60]
    result = lm.generate([PROMPTS[0]] * 3, Sampling(NEW, stop=(late, early)))[0]
    assert result.text == text[: text.find(early)]


def test_what_only_begins_a_stop_is_shown_in_the_end(lm: LanguageModel, want: list[Generation]):
    text = words(want[2].output)
    session = lm.start(PROMPTS, Sampling(NEW, stop=(text[-5:] + "?", "t?")))
    pieces = run(session, 1)
    check_stream(pieces, session.results())
    assert session.results()[2].text == text
    assert session.results()[2].finish_reason == "length"


def test_a_stopped_row_leaves_the_others_alone(lm: LanguageModel, want: list[Generation]):
    requests = [Sampling(NEW), Sampling(NEW, stop=(words(want[1].output[3:5]),)), Sampling(NEW)]
    session = lm.start(PROMPTS, requests)
    while session.results()[1].finish_reason == "interrupted":
        session.advance(1)
    assert [running.sequence for running in session.engine.scheduler.running] == [session.sequences[0], session.sequences[2]]
    run(session, 1)
    assert [result.finish_reason for result in session.results()] == ["length", "stop", "length"]
    assert [len(result.tokens) for result in session.results()] == [NEW, 5, NEW]
    assert [session.results()[row].tokens for row in (0, 2)] == [want[row].output for row in (0, 2)]


def test_a_batch_ends_when_every_row_has_stopped(lm: LanguageModel, want: list[Generation]):
    requests = [Sampling(NEW, stop=(words(g.output[:2]),)) for g in want]
    session = lm.start(PROMPTS, requests, speculative=False)
    run(session, 1)
    assert session.rounds == 2


@pytest.mark.parametrize("drafted", [False, True])
def test_end_of_sequence(pair: Pair, want: list[Generation], tmp_path: Path, drafted: bool):
    """The token ends its row, also in the middle of a block; a row that ignores it goes on."""
    long = next(r for r in want[1].rounds if r.accepted == 5 and len(r.emitted) == 6)
    eos = long.emitted[2]
    config = pair.target_config | {"eos_token_id": [eos, 39 if eos != 39 else 38]}
    ends = set(config["eos_token_id"])
    lm = build(tmp_path, Pair(config, pair.target_tensors, pair.drafter_config, pair.drafter_tensors))
    requests = [Sampling(NEW), Sampling(NEW), Sampling(NEW), Sampling(NEW, ignore_eos=True)]
    session = lm.start([*PROMPTS, PROMPTS[1]], requests, drafted)
    pieces = run(session)
    results = session.results()
    check_stream(pieces, results)
    for result, prompt in zip(results, PROMPTS, strict=False):
        expected = speculative_greedy(*pair.build(), prompt, NEW, eos=ends).output
        assert result.tokens == expected
        ended = expected[-1] in ends
        assert result.finish_reason == ("eos" if ended else "length")
        assert result.text == words(expected[:-1] if ended else expected)
    assert results[1].finish_reason == "eos"
    assert (results[3].tokens, results[3].finish_reason) == (want[1].output, "length")
    assert results[3].text == words(want[1].output)


def test_results_taken_early(lm: LanguageModel, want: list[Generation]):
    session = lm.start(PROMPTS, Sampling(NEW))
    assert [(r.tokens, r.text, r.finish_reason) for r in session.results()] == [([], "", "interrupted")] * 3
    early = []
    pieces = []
    while not session.finished:
        pieces += session.advance(1)
        early.append(session.results())
    for number, results in enumerate(early, 1):
        for result, generation in zip(results, want, strict=True):
            tokens = [token for r in generation.rounds[:number] for token in r.emitted]
            assert (result.tokens, result.text) == (tokens, words(tokens))
            assert result.acceptance_lengths == [len(r.emitted) for r in generation.rounds[:number]]
            assert result.finish_reason == ("length" if len(tokens) == NEW else "interrupted")
    check_stream(pieces, session.results())


def test_seconds_are_counted(lm: LanguageModel):
    session = lm.start(PROMPTS, Sampling(NEW))
    run(session)
    assert session.prefill_seconds > 0
    assert session.decode_seconds > 0


@pytest.mark.parametrize("drafted", [False, True])
def test_logits_that_are_not_finite_are_an_error(lm: LanguageModel, drafted: bool, monkeypatch: pytest.MonkeyPatch):
    stream = lm.start(PROMPTS, Sampling(NEW), drafted)
    models = stream.engine.decoding.programs.models
    broken = replace(models.target, embed=models.target.embed.at[PROMPTS[1][3]].set(np.nan))
    monkeypatch.setattr(stream.engine.decoding.programs, "models", replace(models, target=broken))
    with pytest.raises(ArithmeticError, match="the target's logits are not finite"):
        run(stream)


@pytest.mark.parametrize("steps", [0, 65, -1])
def test_steps_that_no_dispatch_runs(lm: LanguageModel, steps: int):
    session = lm.start(PROMPTS, Sampling(NEW))
    with pytest.raises(ValueError, match=f"expected from 1 to 64 steps, found {steps}"):
        session.advance(steps)


def test_an_engine_that_reports_no_log_probabilities_refuses_to_be_asked_for_them(lm: LanguageModel):
    engine = lm.start(PROMPTS, Sampling(NEW)).engine
    engine.check(GenerateRequest([1], Sampling(1)))
    with pytest.raises(ValueError, match="expected no logprobs, since the compiled rounds report none"):
        engine.check(GenerateRequest([1], Sampling(1), logprobs=0))


def live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def test_memory_is_taken_when_a_stream_begins_and_given_back_when_it_ends(lm: LanguageModel):
    run(lm.start(PROMPTS, Sampling(NEW)))
    before = live_bytes()
    streams = [lm.start(PROMPTS, Sampling(NEW)) for _ in range(3)]
    assert live_bytes() == before, "a stream takes nothing until it runs"
    for stream in streams:
        stream.advance(1)
        assert live_bytes() > before
        run(stream)
        assert live_bytes() == before
    assert len({tuple(result.tokens) for stream in streams for result in stream.results()}) == len(PROMPTS)


def test_a_stream_that_is_left_early_gives_its_memory_back(lm: LanguageModel, want: list[Generation]):
    run(lm.start(PROMPTS, Sampling(NEW)))
    before = live_bytes()
    with lm.start(PROMPTS, Sampling(NEW)) as stream:
        pieces = stream.advance(2)
    assert live_bytes() == before
    assert sum(len(result.tokens) for result in stream.results()) == len(pieces) > 0
    assert [result.finish_reason for result in stream.results()] == ["interrupted"] * len(PROMPTS)
    with pytest.raises(RuntimeError, match="expected an open stream, found a closed one"):
        stream.advance()
    with pytest.raises(ArithmeticError), lm.start(PROMPTS, Sampling(NEW)) as stream:
        stream.advance(1)
        raise ArithmeticError("of the caller")
    assert live_bytes() == before


@pytest.mark.parametrize("drafted", [False, True])
def test_more_prompts_than_rows_wait_for_one(lm: LanguageModel, want: list[Generation], drafted: bool):
    """Whoever ends lets the next one in; each gets what it gets alone."""
    inputs = PROMPTS * 7
    limits = [NEW - n % 5 for n in range(len(inputs))]
    stream = lm.start(inputs, [Sampling(limit) for limit in limits], drafted)
    assert stream.engine.decoding.programs.layout.batch == max(TABLE.batches) < len(inputs)
    pieces = run(stream, 3)
    check_stream(pieces, stream.results())
    for row, result in enumerate(stream.results()):
        assert result.tokens == want[row % len(PROMPTS)].output[: limits[row]]
    assert stream.engine.scheduler.preemptions == 0


def test_rows_that_run_are_not_touched_by_an_admission(lm: LanguageModel):
    """Bit for bit: what they hold, in slots and in pages."""
    stream = lm.start(PROMPTS * 3, [Sampling(NEW), *[Sampling(2)] * 3, *[Sampling(NEW)] * 5])
    engine = stream.engine
    stream.prefill()
    stream.advance(2)
    assert engine.scheduler.waiting
    running = [running for running in engine.scheduler.running if running.sequence.processor.finish_reason is None]

    def held() -> list[np.ndarray]:
        state = engine.runner.state
        slots = [running.slot for running in running]
        pages = [page for running in running for page in running.pages]
        parts = jax.tree.leaves(state, is_leaf=is_paged)
        rows = [np.asarray(part)[slots] for part in parts if not is_paged(part)]
        return rows + [np.asarray(x)[pages] for part in parts if is_paged(part) for x in jax.tree.leaves(part)]

    before = held()
    stream.fill()
    assert not engine.scheduler.waiting
    for old, new in zip(before, held(), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("drafted", [False, True])
def test_the_single_step_gives_what_the_loop_gives(
    pair: Pair, lm: LanguageModel, tmp_path: Path, drafted: bool, monkeypatch: pytest.MonkeyPatch
):
    """The same tokens and rounds, by programs of which only the last is another."""
    monkeypatch.setattr(language_model, "takes_loops", lambda: False)
    stepping = build(tmp_path, pair)
    requests = [Sampling(NEW, stop=("t9",)), Sampling(NEW, temperature=1.0, seed=3), Sampling(NEW)]
    looping = lm.start(PROMPTS, requests, drafted)
    pieces = run(looping, 5)
    session = stepping.start(PROMPTS, requests, drafted)
    assert run(session, 5) == pieces
    assert (session.results(), session.rounds) == (looping.results(), looping.rounds)
    assert session.keys == looping.keys


def test_the_single_step_has_no_loop_that_depends_on_data(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """Loops of a fixed number of turns are `scan` in a trace."""
    programs = lm.start(PROMPTS, Sampling(NEW)).engine.decoding.programs
    counted = {}
    state = jax.eval_shape(lambda: programs.empty_state(*programs.get(ProgramKey("allocate"))()))
    for loops, masked in product((True, False), repeat=2):
        monkeypatch.setattr(programs, "target", replace(lm.model.target, loops=loops))
        function, inputs = programs.function(programs.round_key(None, 4, 64, masked=masked))
        counted[loops, masked] = str(jax.make_jaxpr(function)(lm.model.models, state, *inputs)).count(" while[")
    assert counted[False, False] == counted[False, True] == 0
    assert min(counted[True, False], counted[True, True]) > 1
