"""The benchmark's own part: what is asked, what is left out, which runs alternate, and where a round's time goes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from llm.support import build, state_of
from reference.dflash_numpy import random_pair
from tilewright.bench import speculative
from tilewright.bench.datasets import Example
from tilewright.bench.speculative import PARTS, DatasetPrompts, build_prompts, encoded, measure, part_seconds, round_up_to
from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.interfaces import Variant
from tilewright.runtime.sampling import Sampling
from tilewright.speculation.drafters.ngram import NGram

SAMPLING = Sampling(8)
TEMPLATE = ChatTemplate(jinja2.Template("{% for m in messages %}t9 {{ m.content }} {% endfor %}"), {}, "here")


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A pair of random weights whose context has 64 positions."""
    sizes: dict[str, Any] = {"target_layers": 2, "drafter_layers": 1, "taps": (0, 1), "block_size": 4}
    pair = random_pair(3, **sizes, max_position_embeddings=64)
    return build(tmp_path_factory.mktemp("pair"), pair)


def example(*turns: str, category: str = "") -> Example:
    return Example("mt-bench", category, turns, 1)


def test_a_later_turn_follows_the_answer_of_plain_decoding(lm: LanguageModel):
    built = build_prompts(lm, "chat", [example("t1 t2", "t3", category="a"), example("t4", category="b")], None, SAMPLING)
    answer = lm.generate(["t1 t2"], SAMPLING, speculative=False)[0].tokens
    assert built.prompts == [[1, 2], [1, 2, *answer, 3], [4]]
    assert (built.name, built.categories, built.skipped) == ("chat", ["a", "a", "b"], 0)


def test_a_turn_that_does_not_fit_is_left_out_with_those_after_it(lm: LanguageModel):
    """64 positions less 8 new tokens leave 56 for a prompt."""
    done: list[int] = []
    long = [example("t1 " * 57, "t2", "t3"), example("t1 " * 56), example("t1 " * 48, "t2", "t3"), example("t5")]
    built = build_prompts(lm, "long", long, None, SAMPLING, lambda: done.append(1))
    assert [len(prompt) for prompt in built.prompts] == [56, 48, 1]
    assert built.skipped == 3 + 2
    assert len(done) == 4
    assert len(lm.generate(built.prompts, SAMPLING)[0].tokens) == 8, "what is left fits"


def test_a_template_words_every_turn(lm: LanguageModel):
    built = build_prompts(lm, "chat", [example("t1", "t2")], TEMPLATE, SAMPLING)
    answer = lm.generate([[9, 1]], SAMPLING, speculative=False)[0].tokens
    assert built.prompts == [[9, 1], [9, 1, 9, *answer, 9, 2]]


def test_a_template_has_the_special_tokens(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer adds its own only where no template has put them."""
    other = lm.with_drafter(None)
    adds = Tokenizer.from_str(lm.tokenizer.to_str())
    adds.post_processor = TemplateProcessing(single="t0 $A", special_tokens=[("t0", 0)])
    monkeypatch.setattr(other, "tokenizer", adds)
    monkeypatch.setattr(other, "model", replace(other.model, tokenizer=adds))
    assert encoded(other, "t5", None) == [0, 5]
    assert encoded(other, "t5", TEMPLATE) == [5]


def test_every_way_decodes_the_same_prompts(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speculative, "part_seconds", lambda *_: dict.fromkeys(PARTS, 1.0))
    order: list[tuple[object, bool | None]] = []
    generate = LanguageModel.generate

    def noted(self: LanguageModel, prompts: Any, sampling: Any = None, speculative: bool | None = None) -> Any:
        order.append((self.drafter and self.drafter.name, speculative))
        return generate(self, prompts, sampling, speculative)

    monkeypatch.setattr(LanguageModel, "generate", noted)
    done: list[int] = []
    ways = {"none": lm, "mine": lm, "ngram": lm.with_drafter(NGram(4))}
    dataset = DatasetPrompts("set", [[1, 2, 1, 2], [3], [4, 5]], ["a", "a", "b"], skipped=2)
    runs = measure(ways, dataset, SAMPLING, 2, 1, lambda: done.append(1))
    assert order[::2] == order[1::2], "batch by batch"
    turn = [("dflash", False), ("dflash", True), ("ngram", True)]
    assert order[::2] == [*reversed(turn), *turn], "every second turn is reversed"
    assert len(done) == 3 * (1 + 2)
    assert [(run.dataset, run.drafter, run.num_spec_tokens, run.skipped) for run in runs] == [
        ("set", "none", 0, 2),
        ("set", "mine", 3, 2),
        ("set", "ngram", 3, 2),
    ]
    assert [run.part_seconds is None for run in runs] == [True, False, False]
    for run in runs:
        assert [response.tokens for response in run.responses] == [r.tokens for r in runs[0].responses]
        assert run.categories == dataset.categories
        assert all(len(r.accepted) == len(r.acceptance_lengths) for r in run.responses), "known of the last round too"


@pytest.mark.parametrize("drafter", ["dflash", "ngram"])
def test_the_parts_of_a_round_are_those_that_the_decode_loop_runs(lm: LanguageModel, drafter: str):
    """Each part leaves the round to come: run one after another on one state, all see the same known token."""
    model = lm if drafter == "dflash" else lm.with_drafter(NGram(4))
    chosen_rounds = chosen(model)
    prompts = [[7, 1, 7, 1], [2, 3]]
    session = model.start(prompts, SAMPLING)
    whole = model.start(prompts, SAMPLING)
    session.prefill()
    results: dict[Any, Any] = {}
    known = np.asarray([len(prompt) - 1 for prompt in prompts])
    for part in (None, *PARTS, *PARTS):
        results[part] = session.apply(partial(round_up_to, part, chosen_rounds, model.model.target))
        np.testing.assert_array_equal(state_of(session)[0].last_position, known)
    whole.advance(1)
    info = results["other"]
    assert [row.accepted[0] for row in whole.rows] == np.asarray(info.accepted)[:2].tolist()
    assert [row.acceptance_lengths[0] for row in whole.rows] == np.asarray(info.committed)[:2].tolist()
    after, _ = results["verify"]
    for n, row in enumerate(whole.rows):
        assert np.asarray(after)[n, : len(row.tokens)].tolist() == row.tokens
    assert np.asarray(results["draft"].block)[:2, 0].tolist() == [prompt[-1] for prompt in prompts]


def chosen(lm: LanguageModel) -> Variant:
    assert lm.drafter is not None
    return lm.drafter.variant(None)


class Clock:
    """Stands in for the programs and for the time: a run of a part takes what is listed for it, one entry a run."""

    def __init__(self, seconds: Mapping[Any, Sequence[float]]):
        self.seconds = {part: iter(each) for part, each in seconds.items()}
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def run(self, part: str | None, drafter: Any, target: Any, models: Any, state: Any, *rows: Any) -> tuple[Any, Any]:
        self.now += next(self.seconds[part])
        return state, 0


def split(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, seconds: Mapping[Any, Sequence[float]]) -> dict[str, float]:
    clock = Clock(seconds)
    monkeypatch.setattr(speculative, "round_up_to", clock.run)
    monkeypatch.setattr(speculative, "time", clock)
    return part_seconds(lm, chosen(lm), [[1, 2]], SAMPLING, repetitions=2)


def test_a_part_is_what_it_adds_to_the_round(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """The first runs compile; of the others the fastest counts."""
    seconds = {None: [99, 1, 8], "draft": [99, 9, 3], "verify": [99, 7, 9], "other": [99, 7.5, 80]}
    assert split(lm, monkeypatch, seconds) == {"draft": 2, "verify": 4, "other": 0.5}


def test_a_disturbed_part_is_told_as_it_was_measured(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    """The parts add up to the round, whichever of them was disturbed in all its runs; a difference may be below 0."""
    seconds = {None: [99, 1, 1], "draft": [99, 2, 3], "verify": [99, 7, 9], "other": [99, 6.5, 8]}
    assert split(lm, monkeypatch, seconds) == {"draft": 1, "verify": 5, "other": -0.5}


def test_the_split_is_measured(lm: LanguageModel):
    seconds = part_seconds(lm, chosen(lm), [[1, 2], [3]], SAMPLING, repetitions=2)
    assert tuple(seconds) == PARTS
    assert sum(seconds.values()) > 0
