"""Answers in waves: the tokens that the engine gives, whatever stands beside a row, and what is refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer, models

from tilewright.kernels.select import PLAIN
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.waves import Waves, WaveWriter, drawn
from train.support import TARGET, kept_target

PROMPTS = [[3], [5, 6, 7], [1, 2, 3, 4, 5, 6], [9, 9], [11, 4]]


@pytest.fixture(scope="module")
def waves() -> Waves:
    return Waves(TARGET, PLAIN, kept_target(), rows=4, prompt_room=6, answer_room=11, stretch=4)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(24)}, unk_token="t0"))
    return LanguageModel(TARGET, kept_target(), tokenizer, table=ShapeTable(batches=(4,), capacities=(64,), chunks=(8,)))


def test_greedy_answers_are_those_of_the_engine(waves: Waves, lm: LanguageModel):
    expected = [result.tokens for result in lm.generate(PROMPTS[:4], Sampling(11))]
    found = WaveWriter(waves, "target").write(PROMPTS[:4], [Sampling(11, seed=n) for n in range(4)])
    assert found == expected
    assert len(set(map(len, found))) > 1, "some row ends before the others"


def test_a_wave_that_is_not_full_gives_the_same_and_each_row_has_its_own_limit(waves: Waves, lm: LanguageModel):
    longest = [result.tokens for result in lm.generate(PROMPTS[:2], Sampling(11))]
    found = WaveWriter(waves, "target").write(PROMPTS[:2], [Sampling(2, seed=0), Sampling(9, seed=0)])
    assert found == [longest[0][:2], longest[1][:9]]


def test_warm_rows_are_drawn_by_their_seed_and_leave_greedy_ones_alone(waves: Waves):
    def written(seed: int, temperature: float) -> list[list[int]]:
        return WaveWriter(waves, "target").write(PROMPTS[:2], [Sampling(11, seed=seed), Sampling(11, temperature, seed=seed)])

    greedy = written(0, 0.0)
    first = written(0, 1.0)
    again = written(0, 1.0)
    other = written(1, 1.0)
    assert first == again != other
    assert greedy[0] == first[0] == other[0]
    assert first[1] != greedy[1]


def test_tokens_are_drawn_from_the_distribution():
    p = np.asarray([0.5, 0.2, 0.2, 0.1])
    logits = np.tile(np.log(p).astype(np.float32), (4000, 1))
    many = jax.jit(drawn)(logits, np.full(4000, 0.7, np.float32), jax.random.key(3))
    warped = p ** (1 / 0.7)
    counts = np.bincount(np.asarray(many), minlength=4)
    assert chisquare(counts, 4000 * warped / warped.sum()).pvalue > 1e-3
    assert chisquare(counts, 4000 * p).pvalue < 1e-6, "the temperature shows"


def test_what_is_refused(waves: Waves):
    with pytest.raises(ValueError, match="up to 4 prompts of 1 to 6 tokens, found 5, the longest of 6"):
        WaveWriter(waves, "target").write(PROMPTS, [Sampling(4, seed=0)] * 5)
    with pytest.raises(ValueError, match="1 to 6 tokens, found 1, the longest of 7"):
        WaveWriter(waves, "target").write([[1] * 7], [Sampling(4, seed=0)])
    with pytest.raises(ValueError, match="a temperature alone, found"):
        WaveWriter(waves, "target").write([[1]], [Sampling(4, 1.0, top_p=0.9, seed=0)])
    with pytest.raises(ValueError, match="see everything before them, found one of qwen3"):
        replace(waves, config=replace(TARGET, sliding_window=4, sliding_layers=(0,)))
    with pytest.raises(ValueError, match=r"within 256 positions, found \(4, 200, 57, 4\)"):
        replace(waves, prompt_room=200, answer_room=57)
