"""Text from the model itself: what opens a turn, what is left out, and that answers are the model's own."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train import self_instruct
from tilewright.train.regenerate import Writer
from tilewright.train.self_instruct import (
    SelfInstructOptions,
    answers,
    distinct,
    instructions,
    opening,
    prompt_tokens,
    runs,
    select_instructions,
)
from train.support import TARGET, silent, target_params

TEMPLATE = ChatTemplate.compiled(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "here",
)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    names = ["</>", "<user>", "<assistant>", *(f"t{i}" for i in range(21))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t20"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</>", "<user>", "<assistant>"])
    table = ShapeTable(batches=(4,), capacities=(64,), chunks=(8,))
    return LanguageModel(TARGET, target_params(), tokenizer, table=table)


def test_what_opens_a_turn_is_all_that_stands_before_its_text():
    assert opening(TEMPLATE) == "<user>"


def test_runs_of_words():
    assert runs("A b, c! D", 3) == {("a", "b", "c"), ("b", "c", "d")}
    assert runs("two words", 13) == {("two", "words")}
    assert runs(" ... ") == set()


@given(st.lists(st.integers(0, 3), max_size=12))
def test_distinct_4_grams(tokens: list[int]):
    grams = ["".join(map(str, tokens[i : i + 4])) for i in range(len(tokens) - 3)]
    assert distinct(tokens) == (1.0 if len(grams) < 2 else len(set(grams)) / len(grams))


def test_which_instructions_are_left_out():
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    left_out = Counter[str]()
    texts = ["Why is that?", "why is THAT", "Yes", "a b c d " * 8, f"Say {sentence}!", "What now, then?"]
    chosen = select_instructions(texts, runs(f"x {sentence}"), left_out)
    assert chosen == ["Why is that?", "What now, then?"]
    assert left_out == {
        "duplicate instruction": 1,
        "short or repetitive instruction": 2,
        "instruction of the excluded files": 1,
    }


def test_answers_are_what_the_model_says_at_both_temperatures(lm: LanguageModel, tmp_path: Path):
    options = SelfInstructOptions(length=24, seed=5)
    left_out = Counter[str]()
    messages = ["t1 t2 t3", "t1 t2 t3", "t4 t5", "t6 " * 40]
    records = answers(lm, TEMPLATE, messages, options, tmp_path / "answers.jsonl", silent(), left_out, Writer(lm, "x"))
    expected = []
    for n, message in enumerate(messages[:3]):
        prompt = prompt_tokens(lm, TEMPLATE, message)
        result = lm.generate([prompt], Sampling(24 - len(prompt), temperature=float(n % 2), seed=5 + n))[0]
        if len(result.tokens) > 1 and distinct(result.tokens) >= self_instruct.LEAST_DISTINCT:
            expected.append([*prompt, *result.tokens])
    assert expected, "the test shows nothing"
    found = [records.tokens[start:end].tolist() for start, end in zip(records.starts, records.ends, strict=True)]
    assert found == expected
    assert left_out["long prompt"] == 1
    assert sum(left_out.values()) == 4 - len(found)
    again = answers(lm, TEMPLATE, messages, options, tmp_path / "answers.jsonl", silent(), Counter(), Writer(lm, "x"))
    assert again.tokens.tolist() == records.tokens.tolist(), "what was written is read again"


def test_instructions_end_where_the_model_ends_them(lm: LanguageModel, tmp_path: Path):
    options = SelfInstructOptions(instruction_tokens=12)
    texts = instructions(lm, TEMPLATE, 16, options, tmp_path / "instructions.jsonl", silent(), Writer(lm, "x"))
    prompt = lm.tokenizer.encode("<user>", add_special_tokens=False).ids
    whole = []
    for seed in range(16):
        tokens = lm.generate([prompt], Sampling(12, temperature=1.0, seed=seed))[0].tokens
        whole += [lm.tokenizer.decode(tokens).strip()] if tokens[-1] == 0 else []
    assert texts == whole
    assert 0 < len(texts) < 16


def test_instructions_begin_as_they_are_told_in_turn(lm: LanguageModel, tmp_path: Path):
    options = SelfInstructOptions(instruction_tokens=12, openings=(("t1 t2", ""), ("t3", " t4 t5")))
    texts = instructions(lm, TEMPLATE, 16, options, tmp_path / "instructions.jsonl", silent(), Writer(lm, "x"))
    begun = [text.startswith("t1 t2") for text in texts]
    assert True in begun
    assert False in begun
    assert all(text.startswith("t1 t2") or (text.startswith("t3") and text.endswith(" t4 t5")) for text in texts)


def test_limits_of_prompts_and_answers(lm: LanguageModel, tmp_path: Path):
    options = SelfInstructOptions(length=40, prompt_tokens=6, answer_tokens=5, temperatures=(0.0,))
    left_out = Counter[str]()
    messages = ["t1", "t1 t2 t3 t4 t5 t6", "t7 t8"]
    records = answers(lm, TEMPLATE, messages, options, tmp_path / "answers.jsonl", silent(), left_out, Writer(lm, "x"))
    assert left_out["long prompt"] == 1
    sizes = records.ends - records.starts - records.prompts
    assert sizes.max() <= 5 < 40 - records.prompts.max()
