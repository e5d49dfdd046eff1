"""What a replay is made of: rounds as the decode loop ran them, and the target's own view of every token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llm.support import build
from reference.dflash_numpy import random_pair
from tilewright.bench.replay import described, passage, replay, text_probabilities, token_texts
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder
from tilewright.report.replay import Passage, write_replay
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.blockwise import Blockwise
from tilewright.speculation.drafters.ngram import NGram

PROMPT = [7, 1, 2, 7, 1, 2, 7]


def pair_of(folder: Path, eos: int | None = None, kernels: str = "auto") -> LanguageModel:
    sizes: dict[str, Any] = {"target_layers": 2, "drafter_layers": 1, "taps": (0, 1), "block_size": 4}
    return build(folder, random_pair(3, **sizes, eos_token_id=eos), kernels=kernels)


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return pair_of(tmp_path_factory.mktemp("pair"))


def check_passage(shown: Passage, lm: LanguageModel, sampling: Sampling) -> list[int]:
    """Both sides are what the two ways of decoding give. Returns the tokens."""
    tokens = [token.id for each in shown.rounds for token in each.emitted]
    plain, drafted = (lm.generate([PROMPT], sampling, speculative=way)[0] for way in (False, True))
    assert tokens == drafted.tokens == plain.tokens == [step.token.id for step in shown.baseline]
    assert [len(each.emitted) for each in shown.rounds] == drafted.acceptance_lengths
    assert [each.accepted for each in shown.rounds] == drafted.accepted
    assert [len(each.drafted) for each in shown.rounds] == drafted.drafted
    for each in shown.rounds:
        accepted = min(each.accepted, len(each.emitted))
        assert [t.id for t in each.drafted[:accepted]] == [t.id for t in each.emitted[:accepted]]
    return tokens


@pytest.mark.parametrize(
    ("kind", "temperature"), [("dflash", 0.0), pytest.param("ngram", 1.0, marks=pytest.mark.slow), ("none", 0.0)]
)
def test_rounds_are_those_of_the_decode_loop(lm: LanguageModel, tmp_path: Path, kind: str, temperature: float):
    model = {"dflash": lm, "ngram": lm.with_drafter(NGram(4)), "none": lm.with_drafter(Blockwise(4))}[kind]
    sampling = Sampling(12, temperature=temperature, seed=5)
    shown = replay(model, ("target", kind), [("one", PROMPT)], sampling)
    assert len(check_passage(shown.passages[0], model, sampling)) == 12
    idle = [each for each in shown.passages[0].rounds if not each.drafted]
    if kind != "dflash":
        assert idle, "a round without a proposal is a plain step"
        assert all((each.accepted, len(each.emitted)) == (0, 1) for each in idle)
    write_replay(tmp_path / "page.html", shown)  # which checks every figure
    assert (shown.about["temperature"], shown.about["seed"], shown.about["max_new_tokens"]) == (temperature, 5, 12)
    assert "top_k" not in shown.about, "what does nothing is not told"


def test_one_token_is_one_round(lm: LanguageModel, tmp_path: Path):
    shown = replay(lm, ("target", "dflash"), [("one", PROMPT), ("two", PROMPT[:1])], Sampling(1))
    assert [len(each.rounds) for each in shown.passages] == [1, 1]
    assert [len(each.baseline) for each in shown.passages] == [1, 1]
    write_replay(tmp_path / "page.html", shown)


def test_a_stop_string_may_end_a_round_early(lm: LanguageModel, tmp_path: Path):
    """The text repeats itself, so that n-grams accept several tokens a round; the stop string ends among them."""
    model = lm.with_drafter(NGram(4))
    sampling = Sampling(40, frequency_penalty=-2.0)
    whole = model.generate([PROMPT], sampling)[0]
    ends = set(np.cumsum(whole.acceptance_lengths).tolist())
    inside = next(n for n in range(2, 40) if n not in ends)
    sampling = replace(sampling, stop=("".join(token_texts(lm, whole.tokens[:inside])),))
    shown = replay(model, ("target", "ngram"), [("one", PROMPT)], sampling)
    assert len(check_passage(shown.passages[0], model, sampling)) == inside
    last = shown.passages[0].rounds[-1]
    assert 1 <= len(last.emitted) <= last.accepted, "not all that it accepted came into the text"
    write_replay(tmp_path / "page.html", shown)


def test_an_end_of_sequence_ends_both_sides(lm: LanguageModel, tmp_path: Path):
    last = lm.generate([PROMPT], Sampling(12), speculative=False)[0].tokens[-1]
    model = pair_of(tmp_path, eos=last)
    sampling = Sampling(40)
    shown = replay(model, ("target", "dflash"), [("one", PROMPT)], sampling)
    tokens = check_passage(shown.passages[0], model, sampling)
    assert tokens[-1] == last
    assert len(tokens) <= 12
    write_replay(tmp_path / "page.html", shown)


def test_times_are_shared_evenly(lm: LanguageModel):
    shown = passage(lm, "one", PROMPT, Sampling(8))
    assert len({each.seconds for each in shown.rounds}) == len({step.seconds for step in shown.baseline}) == 1
    assert shown.rounds[0].seconds > 0
    assert shown.prompt == "t7 t1 t2 t7 t1 t2 t7"


def test_probabilities_are_the_targets(tmp_path: Path):
    """Against the softmax of its logits in float64, over a text without padding."""
    model = pair_of(tmp_path, kernels="xla")
    text = [3, 9, 4, 1, 30]
    config = model.target
    ops = model.ops
    params = model.model.models.target
    run = jax.jit(lambda tokens: decoder.logits(config, ops, params, decoder.forward_full(config, ops, params, tokens).hidden))
    rows = np.asarray(run(jnp.asarray([text])), np.float64)[0]
    probability, margin = text_probabilities(model, text)
    assert np.isnan(probability[0])
    for at in range(1, len(text)):
        logits = rows[at - 1]
        weights = np.exp(logits - logits.max())
        best = np.sort(logits)[::-1]
        assert probability[at] == pytest.approx(weights[text[at]] / weights.sum(), rel=1e-4)
        assert margin[at] == pytest.approx(best[0] - best[1], abs=1e-4)


def test_tokens_are_described_in_their_places(lm: LanguageModel):
    result = lm.generate([PROMPT], Sampling(6))[0]
    tokens = described(lm, PROMPT, result)
    probability, margin = text_probabilities(lm, [*PROMPT, *result.tokens])
    assert [token.id for token in tokens] == result.tokens
    np.testing.assert_array_equal([token.probability for token in tokens], probability[len(PROMPT) :])
    np.testing.assert_array_equal([token.margin for token in tokens], margin[len(PROMPT) :])
    assert "".join(token.text for token in tokens) == result.text


def test_token_texts_add_up_to_the_text(lm: LanguageModel):
    assert token_texts(lm, []) == []
    assert "".join(token_texts(lm, [4, 4, 9])) == "t4 t4 t9"
