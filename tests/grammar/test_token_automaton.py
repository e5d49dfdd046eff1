"""Automata over tokens, against the masks of llguidance along texts of all kinds."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tilewright.grammar import token_automaton
from tilewright.grammar.dfa import Deadline
from tilewright.grammar.grammar import Grammar, Tagged
from tilewright.grammar.matcher import Compiler, Matcher
from tilewright.grammar.regular import NotRegular
from tilewright.grammar.thinking import AfterThinking, thinking_end_token
from tilewright.grammar.token_automaton import PARTS, Vocabulary, build_automaton, deepest_automaton
from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import load_tokenizer
from tilewright.runtime.automata import ALL, BEYOND, words
from tilewright.runtime.constraints import Constraint, ConstraintState

VOCAB = 4096
EOS = (0,)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(PACKAGED["demo"])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB, EOS)


def of_automaton(state: ConstraintState) -> np.ndarray:
    """Returns the automaton's mask in a state."""
    assert state.automaton is not None
    automaton, at = state.automaton
    return automaton.masks[automaton.mask_of[at]]


def of_matcher(state: ConstraintState) -> np.ndarray:
    """Returns the host's mask in a state."""
    masks = np.full((1, words(VOCAB)), ALL, np.uint32)
    assert state.fill([], masks) == 0
    return masks[0]


def walk(constraint: Constraint, rng: np.random.Generator, most: int = 24, liked: Sequence[int] = ()) -> int:
    """Advances by random allowed tokens and compares the masks of automaton and matcher while the text is in its automaton.

    Args:
        liked: tokens from which every other token is chosen.

    Returns:
        the number of forced tokens.
    """
    state = constraint.begin()
    forced = 0
    for _ in range(most):
        mask = of_matcher(state)
        forced_tokens = state.forced()
        if state.automaton is not None:
            np.testing.assert_array_equal(of_automaton(state), mask)
            says = state.automaton.automaton.forced[state.automaton.state]
            assert says == (forced_tokens[0] if forced_tokens else -1)
            forced += says >= 0
        may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        may = may[~np.isin(may, EOS)]
        if not len(may):
            break
        better = may[np.isin(may, liked)]
        state.advance([int(rng.choice(better if len(better) and rng.random() < 0.5 else may))])
    return forced


LITERALS = st.text('ab "\\{x7ä', min_size=1, max_size=8)
CHOICES = st.tuples(st.just(Grammar.choice), st.lists(LITERALS, min_size=1, max_size=4))
REGEXES = st.tuples(
    st.just(Grammar.regex),
    st.sampled_from(["[ab]{2,4}-[0-9]+", "(true|false|maybe)( not)?", ".{0,5}", r"a\.(b|cd)*", "[^x]?ä+", r"\s?[7-9]{3}"]),
)
VALUES = st.sampled_from(
    [
        {"type": "string", "maxLength": 3},
        {"enum": ["red", 3, None, "ä"]},
        {"type": "boolean"},
        {"type": "number"},
        {"type": "integer", "minimum": -2, "maximum": 40},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,3}$"},
        {"type": "string"},
    ]
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(["name", "a", "is it", "ä"]), parts, min_size=1, max_size=3)
    return fields.flatmap(
        lambda properties: st.builds(
            lambda needed: {"type": "object", "properties": properties, "required": needed, "additionalProperties": False},
            st.lists(st.sampled_from(sorted(properties)), unique=True),
        )
    )


SCHEMAS = st.recursive(
    VALUES,
    lambda parts: st.one_of(
        objects(parts),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, parts, st.integers(1, 2)),
        st.lists(parts, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=3,
)


TAGS = st.sampled_from(['call {"of": ', "<a>\n", "["])
TAGGED = st.tuples(
    st.one_of(st.just(Grammar.tagged), st.just(partial(Grammar.tagged, repeats=True))),
    st.lists(st.builds(Tagged, TAGS, objects(VALUES), st.sampled_from(["}", "\n</a>"])), min_size=1, max_size=3),
)


@given(st.one_of(CHOICES, REGEXES, st.tuples(st.just(Grammar.json_schema), SCHEMAS), TAGGED), st.integers(0, 2**32 - 1))
def test_masks_are_those_of_the_matcher_on_every_way(compiler: Compiler, case: tuple[Callable[[Any], Grammar], Any], seed: int):
    kind, specification = case
    found = compiler.compile(kind(specification))
    assert found.automaton is not None, "it is one of those that become automata"
    walk(found, np.random.default_rng(seed))


TREE = {
    "type": "object",
    "properties": {"n": {"type": "null"}, "of": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n"],
}
OPEN = {
    "json_object": {"type": "object"},
    "others": {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"type": "array"}}, "required": ["ab"]},
    "map": {"type": "object", "properties": {"ä": {}}, "additionalProperties": {"type": "array", "items": {"$ref": "#"}}},
    "tree": {**TREE, "additionalProperties": False},
    "open tree": TREE,
}


@pytest.mark.parametrize("name", OPEN)
def test_automata_of_open_and_recursive_schemas(compiler: Compiler, name: str):
    found = compiler.compile(Grammar.json_schema(OPEN[name]))
    assert found.automaton is not None
    assert (found.automaton.after == BEYOND).any()
    opening = [token for token, text in enumerate(bytes_of(compiler)) if text[-1:] in (b"[", b"{", b'"')]
    for seed in range(6):
        walk(found, np.random.default_rng(seed), 40, opening)


@pytest.mark.parametrize(("name", "levels"), [("json_object", 4), ("tree", 16), ("open tree", 4)])
def test_a_text_leaves_its_automaton_where_that_ends_and_comes_back(
    compiler: Compiler, tokenizer: Tokenizer, name: str, levels: int
):
    """The text outside the automaton has brackets in strings, too."""
    within = {"json_object": '"]\\"}\\\\"', "tree": '{"n": null}', "open tree": '{"n": null, "}": "["}'}[name]
    deep = '{"n": null, "of": [' * levels + within + "]}" * levels
    found = compiler.compile(Grammar.json_schema(OPEN[name]))
    state = found.begin()
    plain = Matcher(found.matcher, found.eos).begin()
    left = list[bool]()
    for token in tokenizer.encode(deep, add_special_tokens=False).ids:
        if state.automaton is not None:
            np.testing.assert_array_equal(of_automaton(state), of_matcher(plain))
        np.testing.assert_array_equal(of_matcher(state), of_matcher(plain))
        state.advance([token])
        plain.advance([token])
        left.append(state.automaton is None)
    away = [place for place, one in enumerate(left) if one]
    assert away == [*range(away[0], away[-1] + 1)]
    assert 0 < away[0] < away[-1] < len(left) - 2
    assert plain.matcher.is_accepting()


@pytest.mark.parametrize(("name", "least"), [("json_object", 3), ("tree", 9)])
def test_an_automaton_goes_as_deep_as_there_is_room_for(name: str, least: int):
    text = json.dumps(OPEN[name])
    deadline = Deadline(20.0)
    found, brackets = deepest_automaton("json_schema", text, 700, deadline)
    assert len(found.transitions) <= 700
    assert brackets is not None
    assert brackets >= least
    assert deepest_automaton("json_schema", text, len(found.transitions) - 1, deadline)[1] == brackets - 1
    assert deepest_automaton("json_schema", text, 1, deadline)[1] == 0, "there is an automaton, whatever the room"


def test_an_automaton_that_describes_all_texts_has_no_depth():
    found, brackets = deepest_automaton("json_schema", '{"enum": [1, 2]}', 1, Deadline(20.0))
    assert brackets is None
    assert len(found.transitions) > 1


@pytest.mark.parametrize(("bound", "most"), [("FITTING_MASKS", 9), ("MOST_ENTRIES", 600)])
def test_a_text_leaves_its_automaton_where_a_table_has_no_room_for_more(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
):
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["red", "green", 10]}, "minItems": 3, "maxItems": 3})
    whole = compiler.compile(grammar)
    monkeypatch.setattr(token_automaton, bound, most)
    made = compiler.automaton(grammar)
    assert whole.automaton is not None
    assert made is not None
    assert len(made.automaton.masks) <= 9 if bound == "FITTING_MASKS" else made.automaton.after.size <= most
    assert [(each.after == BEYOND).any() for each in (whole.automaton, made.automaton)] == [False, True]
    constraint = Matcher(whole.matcher, whole.eos, made, lambda token: compiler.tokenizer.decode_bytes([token]))
    for seed in range(6):
        walk(constraint, np.random.default_rng(seed))


def test_what_is_forced_is_known(compiler: Compiler):
    """After different tokens a forced text is written in different ones."""
    schema = {"type": "object", "properties": {"n": {"type": "string"}, "m": {"const": "long enough"}}, "required": ["n", "m"]}
    found = compiler.compile(Grammar.json_schema({**schema, "additionalProperties": False}))
    assert found.automaton is not None
    assert walk(found, np.random.default_rng(1), 60) > 0
    assert 0 < np.count_nonzero(found.automaton.forced >= 0) < len(found.automaton.forced)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark('start: "a"'),
        Grammar.regex(r"\w+"),
        Grammar.json_schema({"type": "string", "format": "date"}),
        Grammar.json_schema({"type": "string", "maxLength": 2000}),
        Grammar.regex("[ab]*a[ab]{13}"),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_other_grammars_have_none(compiler: Compiler, grammar: Grammar):
    found = compiler.compile(grammar)
    assert found.automaton is None
    state = found.begin()
    assert state.automaton is None
    assert of_matcher(state).any()


def test_an_automaton_that_says_something_else_is_dropped(
    compiler: Compiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    vocabulary = Vocabulary.from_tokenizer(compiler.tokenizer, VOCAB, EOS)
    right = token_automaton.grammar_node

    def made(wrong: str) -> None:
        monkeypatch.setattr(token_automaton, "grammar_node", lambda kind, _, most: right(kind, wrong, most))
        build_automaton(compiler.tokenizer, vocabulary, "regex", "[ab]c{3}", 20.0)

    made("(a|b)ccc")
    for wrong in ("[ab]c{2}", "[ab]c{3,}", "[abd]c{3}", "[ab]c{3}d?"):
        with pytest.raises(NotRegular, match="the byte automaton differs from the matcher"):
            made(wrong)
    with pytest.raises(NotRegular, match="takes too long"):
        build_automaton(compiler.tokenizer, vocabulary, "regex", "[ab]c{3}", 0.0)
    monkeypatch.undo()
    other = Vocabulary([b"" if token in (*EOS, 70) else text for token, text in enumerate(bytes_of(compiler))], EOS)
    with pytest.raises(NotRegular, match="the token automaton differs from the matcher"):
        build_automaton(compiler.tokenizer, other, "regex", ".*", 20.0)


def bytes_of(compiler: Compiler) -> list[bytes]:
    return [compiler.tokenizer.decode_bytes([token]) for token in range(VOCAB)]


def test_automata_of_strangers_come_from_the_process_that_tries_their_grammars(tokenizer: Tokenizer):
    trusting = Compiler(tokenizer, VOCAB, EOS)
    careful = Compiler(tokenizer, VOCAB, EOS)
    try:
        grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3})
        here = trusting.compile(grammar).token_automaton
        there = careful.compile(grammar, seconds=30.0).token_automaton
        assert here is not None
        assert there is not None
        for part, (_, names) in PARTS.items():
            for name in names:
                np.testing.assert_array_equal(getattr(getattr(here, part), name), getattr(getattr(there, part), name))
        np.testing.assert_array_equal(here.byte_states, there.byte_states)
        assert here.brackets == there.brackets
        assert careful.compile(Grammar.lark('start: "a"'), seconds=30.0).automaton is None
    finally:
        careful.sandbox.close()


MARK = 7
WORD_TOKEN = 300
"""A token of the thinking block."""


def thoughtful(compiler: Compiler) -> tuple[Matcher, AfterThinking]:
    matcher = compiler.compile(Grammar.json_schema({"enum": ["red", "green"]}))
    return matcher, matcher.after_thinking(MARK)


def test_a_grammar_begins_behind_a_thought(compiler: Compiler):
    matcher, rule = thoughtful(compiler)
    state = rule.begin()
    plain = matcher.begin()
    free = np.full(words(VOCAB), ALL, np.uint32)
    free[0] &= ~np.uint32(1 << EOS[0])
    for _ in range(2):
        np.testing.assert_array_equal(of_matcher(state), free)
        np.testing.assert_array_equal(of_automaton(state), free)
        assert state.forced() == []
        state.advance([WORD_TOKEN, 12])
    state.advance([WORD_TOKEN, MARK])
    assert state.forced() == plain.forced()
    for _ in range(3):
        np.testing.assert_array_equal(of_matcher(state), of_matcher(plain))
        np.testing.assert_array_equal(of_automaton(state), of_automaton(plain))
        token = int(np.flatnonzero(np.unpackbits(of_matcher(plain).view(np.uint8), bitorder="little"))[0])
        state.advance([token])
        plain.advance([token])
    assert matcher.after_thinking(MARK) is rule


def test_a_grammar_begins_inside_a_block(compiler: Compiler, tokenizer: Tokenizer):
    matcher, rule = thoughtful(compiler)
    answer = tokenizer.encode('"red"', add_special_tokens=False).ids
    drafts = [WORD_TOKEN, MARK, *answer, *EOS]
    masks, expected = (np.zeros((size, words(VOCAB)), np.uint32) for size in (len(drafts) + 1, len(answer) + 2))
    state = rule.begin()
    plain = matcher.begin()
    kept = plain.fill([*answer, *EOS], expected)
    assert kept == len(answer)
    assert state.fill(drafts, masks) == 2 + kept
    np.testing.assert_array_equal(masks[2 : kept + 3], expected[: kept + 1])
    np.testing.assert_array_equal(masks[1], masks[0])
    assert state.fill([WORD_TOKEN, *EOS, MARK], masks[:4]) == 1, "a text does not end before its answer"
    assert state.fill([MARK, WORD_TOKEN], masks[:3]) == 1, "what breaks the grammar is cut off"
    state.advance([WORD_TOKEN, MARK, *answer])
    assert of_matcher(state).tolist() == of_automaton(state).tolist()


def test_prompts_say_whether_an_answer_begins_with_a_thought(tokenizer: Tokenizer):
    marked = Tokenizer.from_str(tokenizer.to_str())
    marked.add_special_tokens(["<think>", "</think>"])
    begin, end = (marked.token_to_id(each) for each in ("<think>", "</think>"))
    assert begin is not None
    assert end is not None
    for prompt, enabled, want in (
        ([5, begin, 6], False, end),
        ([5, begin, 6, end, 6], False, None),
        ([begin, *range(9, 20)], False, None),
        ([5, 6], False, None),
        ([5, 6], True, end),
        ([begin, 6, end, 6], True, None),
    ):
        assert thinking_end_token(marked, prompt, enabled) == want, (prompt, enabled)
    assert thinking_end_token(tokenizer, [5, 6], True) is None
