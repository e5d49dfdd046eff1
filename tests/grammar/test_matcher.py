"""Grammars over a model's tokens: what they allow, what they refuse and why, and what is forced."""

import json
import re
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from tilewright.grammar import sandbox
from tilewright.grammar.grammar import LONGEST, MOST_CHOICES, Grammar
from tilewright.grammar.matcher import CACHED_GRAMMARS, CACHED_REFUSALS, Compiler
from tilewright.grammar.sandbox import Refusal
from tilewright.models.hub import PACKAGED
from tilewright.models.tokenizer import load_tokenizer
from tilewright.runtime.constraints import ALL, ConstraintState, words

VOCAB = 4096
EOS = (0,)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(PACKAGED["demo"])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB, EOS)


def allowed(state: ConstraintState, drafts: Sequence[int] = ()) -> tuple[list[set[int]], int]:
    """Returns the tokens of each valid mask, and the number of allowed drafts."""
    masks = np.full((len(drafts) + 1, words(VOCAB)), ALL, np.uint32)
    kept = state.fill(drafts, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits[: kept + 1]], kept


def drawn(state: ConstraintState, rng: np.random.Generator, most: int = 400) -> list[int] | None:
    """Samples allowed tokens up to the end of the text, preferring low ids; None if the text does not end."""
    tokens: list[int] = []
    while len(tokens) < most:
        (may,), _ = allowed(state)
        if may & {*EOS} and (len(may) == len(EOS) or rng.random() < 0.3):
            return tokens
        token = int(rng.choice(sorted(may - {*EOS})[:40]))
        state.advance([token])
        tokens.append(token)
    return None


def test_masks_behind_drafts_are_those_of_the_tokens_taken_in(tokenizer: Tokenizer, compiler: Compiler):
    constraint = compiler.compile(Grammar.json_schema(PERSON))
    text = '{"name": "Bob", "age": 12}'
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    state = constraint.begin()
    one_by_one = constraint.begin()
    masks, kept = allowed(state, [*tokens, *EOS])
    assert kept == len(tokens), "the end is drawn, not drafted"
    for place, token in enumerate(tokens):
        assert allowed(one_by_one)[0] == [masks[place]]
        assert token in masks[place]
        one_by_one.advance([token])
    assert allowed(one_by_one)[0] == [masks[-1]] == [{*EOS}]
    assert allowed(state)[0] == masks[:1], "drafts leave no trace"
    wrong = [*tokens[:3], EOS[0], *tokens[3:]]
    assert allowed(state, wrong)[1] == 3


def test_what_is_forced_is_told(tokenizer: Tokenizer, compiler: Compiler):
    state = compiler.compile(Grammar.json_schema(PERSON)).begin()
    forced = state.forced()
    assert tokenizer.decode(forced).startswith('{"name')
    assert allowed(state, forced)[1] == len(forced)
    state.advance(tokenizer.encode('{"name": "Bob", "age": 12}', add_special_tokens=False).ids)
    assert state.forced() == []


TREE = {
    "type": "object",
    "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
    "required": ["of"],
    "additionalProperties": False,
}
SCHEMAS = (
    PERSON,
    {"type": "array", "items": {"enum": ["red", 3, None, "ä"]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"const": [1, {"b": 2}]}]}}, "required": ["a"]},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{3}$"},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 3},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    {"oneOf": [{"type": "integer", "minimum": 10}, {"type": "string", "maxLength": 3}]},
    {"type": "string", "format": "date"},
)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_whatever_is_drawn_follows_its_schema(tokenizer: Tokenizer, compiler: Compiler, number: int):
    constraint = compiler.compile(Grammar.json_schema(SCHEMAS[number]))
    ended = 0
    for seed in range(8):
        tokens = drawn(constraint.begin(), np.random.default_rng(seed))
        if tokens is not None:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMAS[number], cls=jsonschema.Draft202012Validator)
            ended += 1
    assert ended


def test_texts_of_other_grammars(tokenizer: Tokenizer, compiler: Compiler):
    choices = ['a "b" c', "it's\n\\x", "ä"]
    for grammar, right in (
        (Grammar.choice(choices), lambda text: text in choices),
        (Grammar.regex(r"[ab]{2,4}-[0-9]+"), lambda text: re.fullmatch(r"[ab]{2,4}-[0-9]+", text)),
        (Grammar.lark('start: n ("+" n)*\nn: /[0-9]{1,2}/'), lambda text: re.fullmatch(r"\d{1,2}(\+\d{1,2})*", text)),
    ):
        texts = [drawn(compiler.compile(grammar).begin(), np.random.default_rng(seed)) for seed in range(6)]
        found = [tokenizer.decode(tokens) for tokens in texts if tokens is not None]
        assert found
        assert all(right(text) for text in found), found
    tokens = drawn(compiler.compile(Grammar.json_object()).begin(), np.random.default_rng(2))
    assert tokens is not None
    assert isinstance(json.loads(tokenizer.decode(tokens)), dict)


DEEP = json.loads('{"items":' * 200 + "{}" + "}" * 200)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), r"minimum \(5\) is greater than maximum \(3\)"),
        (Grammar.json_schema({"properties": {"a": {"items": {"not": {"const": 1}}}}}), "at properties.a.items.not$"),
        (Grammar.json_schema({"anyOf": [{}, {"uniqueItems": True}]}), r"at anyOf\[1\].uniqueItems$"),
        (Grammar.json_schema({"$ref": "#"}), "no text satisfies it"),
        (Grammar.json_schema(DEEP), "recursion limit"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.lark("start: foo"), 'unknown name: "foo"'),
        (Grammar.lark("start: " + "(" * 9000), "deeply nested"),
        (Grammar.lark("start: start"), "no text satisfies it"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_what_cannot_be_used_says_why(compiler: Compiler, grammar: Grammar, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        compiler.compile(grammar)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_what_is_no_grammar_is_refused():
    for make, message in (
        (lambda: Grammar.json_schema("true"), "a schema that is an object, found bool"),
        (lambda: Grammar.json_schema("[1]"), "a schema that is an object, found list"),
        (lambda: Grammar.json_schema("{"), "a schema that is JSON"),
        (lambda: Grammar.json_schema('{"const": "\\ud83d"}'), "a grammar that is valid UTF-8"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "a schema that is JSON"),
        (lambda: Grammar.regex(""), f"1 to {LONGEST} characters, found 0"),
        (lambda: Grammar.regex("a" * (LONGEST + 1)), f"found {LONGEST + 1}"),
        (lambda: Grammar.choice([]), f"1 to {MOST_CHOICES} texts"),
        (lambda: Grammar.choice(["a", ""]), "none of them empty"),
        (lambda: Grammar.choice("ab"), f"1 to {MOST_CHOICES} texts"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_compiled_grammars_are_kept_and_not_for_ever(compiler: Compiler):
    first = Grammar.regex("a")
    kept = compiler.compile(first)
    assert compiler.compile(first) is kept
    assert compiler.is_cached(first)
    for n in range(CACHED_GRAMMARS):
        compiler.compile(Grammar.regex(f"a{{{n + 1}}}"))
    assert not compiler.is_cached(first)
    assert compiler.compile(first) is not kept
    assert len(compiler.cache) == CACHED_GRAMMARS


HOSTILE = Grammar.json_schema({"allOf": [{"type": "string", "pattern": f"[a-z]{{0,50}}x{n}"} for n in range(60)]})
"""The matcher goes through the products of all of them."""


def test_a_grammar_that_takes_too_long_is_ended(compiler: Compiler):
    try:
        with pytest.raises(ValueError, match=r"takes longer than 0\.5 s"):
            compiler.compile(HOSTILE, seconds=0.5)
        with pytest.raises(ValueError, match="recursion limit"):
            compiler.compile(Grammar.json_schema(DEEP), seconds=30.0)
        with pytest.raises(ValueError, match=r"at not$"):
            compiler.compile(Grammar.json_schema({"not": {"const": 1}}), seconds=30.0)
        grammar = Grammar.regex("tried|and kept")
        assert compiler.compile(grammar, seconds=30.0) is compiler.compile(grammar)
    finally:
        compiler.sandbox.close()


def test_what_is_refused_is_not_tried_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    """Refusals by the matcher and at the CPU limit are cached; refusals at the wall-clock limit are not."""
    bad = Grammar.regex("(never")
    tried = list[Grammar]()
    real = compiler.sandbox.refusal

    def refusal(grammar: Grammar, seconds: float) -> Refusal:
        tried.append(grammar)
        return real(grammar, seconds)

    def refused(grammar: Grammar, seconds: float, times: int) -> set[str]:
        said = set[str]()
        for _ in range(times):
            with pytest.raises(ValueError, match="cannot be used") as caught:
                compiler.compile(grammar, seconds)
            said.add(str(caught.value))
        return said

    monkeypatch.setattr(compiler.sandbox, "refusal", refusal)
    compiler.refusals.clear()  # of other tests
    try:
        monkeypatch.setattr(sandbox, "WALL_PER_CPU", 1000)
        assert len(refused(bad, 30.0, 2)) == len(refused(HOSTILE, 0.05, 2)) == 1
        assert tried == [bad, HOSTILE]
        monkeypatch.setattr(sandbox, "WALL_PER_CPU", 0)
        assert len(refused(HOSTILE, 0.5, 2)) == 1, "with another bound"
        assert tried == [bad, *[HOSTILE] * 3]
        for n in range(CACHED_REFUSALS):
            with pytest.raises(ValueError, match="unclosed"):
                compiler.compile(Grammar.regex(f"({n}"))
        assert len(compiler.refusals) == CACHED_REFUSALS
        assert (bad, 30.0) not in compiler.refusals
    finally:
        compiler.sandbox.close()


def test_a_model_without_an_end_has_no_grammars(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="a model with an end-of-sequence token"):
        Compiler(tokenizer, VOCAB, ())
