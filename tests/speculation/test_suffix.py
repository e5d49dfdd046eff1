"""Drafting with a corpus: tokens of plain decoding, few rounds for known text, and a policy that knows the rounds."""

from pathlib import Path
from typing import cast

import jax
import pytest

from llm.support import prompts, tokens_of
from reference.dflash_numpy import as_folders, random_pair
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.interfaces import PLAIN, Choice
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.counterfactual import CounterfactualNGram
from tilewright.speculation.drafters.load import DrafterOptions
from tilewright.speculation.drafters.ngram import NGram, Suffix
from tilewright.speculation.suffix_index import HostIndex
from tilewright.speculation.team import Team

NEW = 40
VOCAB = 24
BLOCK = 8
TABLE = ShapeTable(batches=(1, 4), capacities=(96,), chunks=(16,), widths=(2,))
PAIR = random_pair(0, vocab_size=VOCAB, target_layers=2, drafter_layers=1, taps=[0], block_size=BLOCK)
GREEDY = Sampling(NEW, ignore_eos=True)
DRAWN = Sampling(NEW, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = prompts(0, [1, 7, 12, 30], vocab=VOCAB)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def as_text(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return as_folders(tmp_path_factory.mktemp("models"), PAIR)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> LanguageModel:
    return load(folders[0], table=TABLE)


@pytest.fixture(scope="module")
def corpus(target: LanguageModel, folders: tuple[Path, Path]) -> Path:
    """The greedy answers to all prompts but the last, with their prompts, and random text."""
    texts = [
        [*prompt, *tokens] for prompt, tokens in zip(PROMPTS[:-1], tokens_of(target, PROMPTS[:-1], GREEDY, False), strict=True)
    ]
    path = folders[0].parent / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "{as_text(text)}"}}\n' for text in [*texts, *prompts(9, [200], vocab=VOCAB)]))
    return path


@pytest.fixture(scope="module")
def lm(target: LanguageModel, corpus: Path) -> LanguageModel:
    options = DrafterOptions(block_size=BLOCK, suffix_corpus=corpus)
    return target.with_drafter(*target.load_drafter("suffix", options))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_are_those_of_plain_decoding(lm: LanguageModel, sampling: Sampling, batch: int):
    assert tokens_of(lm, PROMPTS, sampling, True, batch) == tokens_of(lm, PROMPTS, sampling, False, batch)


def test_a_corpus_with_the_answer_drafts_all_of_it(lm: LanguageModel, target: LanguageModel):
    """The first round of a row of one token has no suffix of two."""
    alone = target.with_drafter(Suffix(BLOCK))
    for prompt in PROMPTS[:-1]:
        known, unknown = (each.generate([prompt], GREEDY)[0] for each in (lm, alone))
        assert known.tokens == unknown.tokens
        assert len(known.acceptance_lengths) <= NEW // BLOCK + 2 < len(unknown.acceptance_lengths)
        assert known.accepted[2:-1] == [BLOCK - 1] * len(known.accepted[2:-1])


@pytest.mark.parametrize("with_corpus", [True, False])
def test_counterfactual_rounds_are_those_that_run(lm: LanguageModel, target: LanguageModel, with_corpus: bool):
    drafting = lm if with_corpus else target.with_drafter(Suffix(BLOCK))
    index = HostIndex(lm.model.models.corpus) if with_corpus else None
    drafted = 0
    for sampling in (GREEDY, DRAWN):
        for prompt, result in zip(PROMPTS, drafting.generate(PROMPTS, sampling), strict=True):
            counterfactual = CounterfactualNGram(cast(NGram, drafting.drafter), prompt, (BLOCK, 3), index)
            rounds = []
            for at in range(0, len(result.tokens), 5):
                rounds += counterfactual.push(result.tokens[at : at + 5])[BLOCK]
            ran = list(zip(result.drafted, result.accepted, strict=True))
            assert rounds[: len(ran) - 1] == ran[:-1]  # of the last one the end is not in the text
            drafted += sum(result.drafted)
    assert drafted


def test_a_team_searches_the_corpus_first(folders: tuple[Path, Path], corpus: Path):
    team = load(folders[0], ["suffix", folders[1]], suffix_corpus=corpus, table=TABLE)
    assert isinstance(team.drafter, Team)
    names = ("suffix", "suffix+dflash")
    assert team.drafter.choices == (
        PLAIN,
        *(Choice(name, width) for name in names for width in (2, 16 if name == "suffix" else 8)),
    )
    searching = [
        bool(jax.tree.leaves(team.drafter.variant(each).params_for(team.model.models).corpus)) for each in team.drafter.choices
    ]
    assert searching == [False, True, True, True, True]
    results = team.generate(PROMPTS, GREEDY)
    assert [result.tokens for result in results] == [
        result.tokens for result in team.generate(PROMPTS, GREEDY, speculative=False)
    ]


def test_errors(folders: tuple[Path, Path], corpus: Path):
    model, dflash = folders
    for drafter, message in (
        ("ngram", "a corpus needs the drafter suffix, found ngram"),
        (None, "a corpus needs the drafter suffix, found none"),
        (["ngram", dflash], "a corpus needs the drafter suffix, found ngram"),
    ):
        with pytest.raises(ValueError, match=message):
            load(model, drafter, suffix_corpus=corpus, table=TABLE)
    with pytest.raises(ValueError, match="expected ngram or suffix, which also matches n-grams, found ngram and suffix"):
        load(model, ["ngram", "suffix"], table=TABLE)
    with pytest.raises(ValueError, match="expected suffix lengths from 2 to 24, found min_n 1 and max_n 24"):
        Suffix(min_n=1)
