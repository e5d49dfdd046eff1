"""Loading a model, what it accepts, and the errors that say what is wrong."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from llm.support import TABLE, build, prompts, state_of, tokens_of
from reference.dflash_numpy import Pair, as_folders, random_pair
from tilewright.llm.conversation import check_messages
from tilewright.llm.language_model import LanguageModel, listed, load
from tilewright.runtime.model import token_ids
from tilewright.runtime.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compiles")

SIZES: dict[str, Any] = {"target_layers": 2, "drafter_layers": 1, "taps": [0, 1]}
NEW = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return build(tmp_path_factory.mktemp("pair"), random_pair(0, **SIZES))


def test_texts_and_token_ids_are_the_same_prompts(lm: LanguageModel):
    texts = [r.tokens for r in lm.generate(["t3 t1 t4", "t1 t5"], NEW)]
    assert [r.tokens for r in lm.generate([[3, 1, 4], (1, 5)], NEW)] == texts
    assert [r.tokens for r in lm.generate(["t3 t1 t4", [1, 5]], NEW)] == texts
    assert [r.tokens for r in lm.generate("t3 t1 t4", NEW)] == texts[:1]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"role": "user", "content": "t1"}], "found messages of a chat: `chat` takes them"),
        ({"role": "user", "content": "t1"}, "found messages of a chat: `chat` takes them"),
        ([1.5, 2], "expected a prompt, a text or token ids, found [1.5, 2]"),
        (["t1"], "expected a prompt, a text or token ids, found ['t1']"),
        (5, "expected a prompt, a text or token ids, found 5"),
    ],
)
def test_what_is_no_prompt_is_told(prompt: object, problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        token_ids(prompt)


def test_token_ids_of_other_kinds_of_integers():
    assert token_ids(np.array([3, 1], np.int32)) == token_ids((3, 1)) == [3, 1]


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ({"role": "user", "content": "t1"}, "use `chat` with a list of messages"),
        (5, "expected a prompt or a list of prompts, found 5"),
    ],
)
def test_what_is_no_list_of_prompts_is_told(prompts: object, problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        listed(prompts)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("t1", "expected a list of messages, as [{"),
        ({"role": "user", "content": "t1"}, "found a single message"),
        ([], "found []"),
        ([{"content": "t1"}], "message 1: expected an object with a role"),
        ([{"role": "user", "content": "t1"}, "t2"], "message 2: expected an object with a role, found 't2'"),
        ([{"role": "user", "text": "t1"}], "message 1: expected content, or tool_calls, found 'role', 'text'"),
    ],
)
def test_what_is_no_conversation_is_told(messages: object, problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_messages(messages)


TOOL = {"type": "function", "function": {"name": "t9"}}
TEMPLATE = """{% for message in messages %}{{ message.content }} {% endfor %}\
{% if tools %}{{ tools[0].function.name }} {% endif %}{% if thinking is defined %}t8 {% endif %}t7"""


def test_a_chat_is_its_template_s_text(tmp_path: Path):
    lm = build(tmp_path, random_pair(0, **SIZES))
    messages = [{"role": "user", "content": "t3 t1"}, {"role": "assistant", "content": "t4"}, {"role": "user", "content": "t5"}]
    with pytest.raises(ValueError, match=r"expected a model with a chat template; .* has none, so use `generate`"):
        lm.chat(messages)
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (plain,) = lm.generate("t3 t1 t4 t5 t7", NEW)
    assert lm.chat(messages, NEW) == plain
    with lm.start_chat(messages, NEW) as stream:
        pieces = list(stream)
    assert ("".join(piece.text for piece in pieces), [piece.token for piece in pieces]) == (plain.text, plain.tokens)
    result = lm.chat(messages, NEW, tools=[TOOL], template_values={"thinking": True}, speculative=False)
    assert result.tokens == lm.generate("t3 t1 t4 t5 t9 t8 t7", NEW)[0].tokens
    assert len(lm.chat(messages).tokens) == lm.table.capacities[-1] - 5, "as long as there is room"


def test_a_model_says_what_it_is(lm: LanguageModel):
    assert re.fullmatch(
        r"<LanguageModel .*target: qwen3, 0\.\d M parameters, weights in float32, drafter dflash, context \d+>", repr(lm)
    )
    assert "no drafter" in repr(lm.with_drafter(None))


def test_more_prompts_than_the_largest_batch(lm: LanguageModel):
    inputs = prompts(0, range(1, 12))
    got = lm.generate(inputs, NEW)
    assert len(got) == 11
    assert [r.prompt_tokens for r in got] == list(range(1, 12))
    assert [r.tokens for r in got] == tokens_of(lm, inputs, NEW, speculative=False, batch=1)
    assert got[10] is list(got)[10]
    assert got.rounds == sum(max(len(got[i].acceptance_lengths) for i in part) for part in (range(8), range(8, 11)))
    assert got.tokens_per_s == pytest.approx(66 / got.decode_seconds)


def test_rounds_of_the_plain_path_are_its_tokens(lm: LanguageModel):
    got = lm.generate(prompts(1, [2, 5]), NEW, speculative=False)
    assert got.rounds == 6
    assert {tuple(r.acceptance_lengths) for r in got} == {(1,) * 6}


def test_each_prompt_may_have_its_own_sampling(lm: LanguageModel):
    got = lm.generate([[1, 2], [3]], [Sampling(3), Sampling(5)])
    assert [len(r.tokens) for r in got] == [3, 5]


def test_requests_without_a_seed_draw_noise_of_their_own(lm: LanguageModel):
    inputs = [[3, 1, 4]] * 11
    free = Sampling(12, temperature=1.0)
    drawn = lm.generate(inputs, free)
    seeds = [result.seed for result in drawn]
    assert len(set(seeds)) == 11
    assert len({tuple(result.tokens) for result in drawn}) > 5
    again = lm.generate(inputs, [replace(free, seed=seed) for seed in seeds], speculative=False)
    assert [(r.tokens, r.seed) for r in again] == [(r.tokens, r.seed) for r in drawn]
    shared = lm.generate(inputs[:3], replace(free, seed=5))
    assert {(tuple(r.tokens), r.seed) for r in shared} == {(tuple(shared[0].tokens), 5)}
    greedy = lm.generate(inputs[:2], NEW)
    assert [r.seed for r in greedy] == [None, None]
    assert greedy.results == lm.generate(inputs[:2], NEW).results


def test_a_model_without_a_drafter(tmp_path: Path, lm: LanguageModel):
    target, _ = as_folders(tmp_path, random_pair(0, **SIZES))
    alone = load(target, table=TABLE)
    assert alone.drafter is None
    assert alone.generate([[1, 2]], NEW)[0].tokens == lm.generate([[1, 2]], NEW, speculative=False)[0].tokens
    with pytest.raises(ValueError, match="expected a drafter for speculative decoding, found none"):
        alone.generate([[1, 2]], NEW, speculative=True)


def dtypes(arrays: Any) -> set[str]:
    """Of all arrays that hold anything."""
    return {x.dtype.name for x in jax.tree.leaves(arrays) if x.size}


def test_bfloat16(tmp_path: Path, lm: LanguageModel):
    """It runs, in bfloat16 throughout, and mostly agrees with float32 where a text begins."""
    half = build(tmp_path, random_pair(0, **SIZES), dtype="bfloat16")
    assert dtypes(half.model.models) == {"bfloat16"}
    inputs = prompts(0, [1, 4, 5, 7, 3, 12, 9, 2])
    one = Sampling(max_new_tokens=1)
    want = tokens_of(lm, inputs, one, speculative=False)
    for drafted in (False, True):
        session = half.start(inputs, NEW, drafted)
        session.prefill()
        state, _ = state_of(session)
        assert dtypes([cast(Any, one).pool for one in (*state.target_cache, *state.draft_cache)]) == {"bfloat16"}
        got = tokens_of(half, inputs, NEW, speculative=drafted)
        assert {len(tokens) for tokens in got} == {6}
        assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= 6


def test_a_drafter_in_bfloat16_changes_no_token(tmp_path: Path, lm: LanguageModel):
    mixed = build(tmp_path, random_pair(0, **SIZES), drafter_dtype="bfloat16")
    models = mixed.model.models
    assert dtypes((models.drafter, models.draft_head)) == {"bfloat16"}
    assert dtypes(models.target) == {"float32"}
    inputs = prompts(0, [1, 4, 5, 7, 3, 12, 9, 2])
    assert tokens_of(mixed, inputs, NEW, speculative=True) == tokens_of(lm, inputs, NEW, speculative=False)


@pytest.mark.parametrize(
    ("inputs", "sampling", "message"),
    [
        ([[]], NEW, "expected a prompt of at least one token, found an empty one"),
        ([[1], []], NEW, "expected a prompt of at least one token, found an empty one"),
        ("", NEW, "expected a prompt of at least one token, found an empty one"),
        ([], NEW, "expected at least one prompt, found none"),
        ([[1, 40]], NEW, "expected token ids below the vocabulary size 40, found 40"),
        ([[-1]], NEW, "expected token ids below the vocabulary size 40, found -1"),
        ([[1] * 512], NEW, "expected a prompt shorter than the model's context of 512 tokens, found 512"),
        (
            [[1], [1] * 507],
            NEW,
            "a prompt of 507 tokens leaves room for 5 in the model's context of 512; max_new_tokens is 6",
        ),
        ([[1] * 124], NEW, "expected at most 8 rows of 128 positions, as declared, found 1 rows of 130 positions"),
        ([[1], [2]], [NEW], "expected one sampling for each of 2 prompts, found 1"),
    ],
)
def test_what_a_call_refuses(lm: LanguageModel, inputs: Any, sampling: Any, message: str):
    before = dict(lm.programs)
    with pytest.raises(ValueError, match=message):
        lm.generate(inputs, sampling)
    assert lm.programs == before


def test_the_whole_context_can_be_used(tmp_path: Path):
    """Blocks may reach beyond the context; what is committed does not."""
    lm = build(tmp_path, random_pair(0, max_position_embeddings=40, **SIZES))
    for drafted in (False, True):
        assert len(lm.generate([[1] * 34], NEW, drafted)[0].tokens) == 6
    with pytest.raises(ValueError, match="leaves room for 5"):
        lm.generate([[1] * 35], NEW)


@pytest.mark.parametrize("settings", [{}, {"draft_window": 5}, {"drafter": "ngram"}], ids=["contiguous", "ring", "ngram"])
def test_the_last_positions_of_the_longest_capacity_can_be_used(tmp_path: Path, settings: dict[str, Any]):
    """With a drafter and without, beside a row that ends long before."""
    target, drafter = as_folders(tmp_path, random_pair(0, **SIZES))
    tight, wide = (
        load(target, **{"drafter": drafter, **settings}, table=replace(TABLE, capacities=c)) for c in ((64,), (128,))
    )
    inputs = [[int(n) for n in np.arange(54) % 7], [3, 1, 4]]
    want = [result.tokens for result in wide.generate(inputs, [Sampling(10), Sampling(4)], speculative=False)]
    for drafted in (False, True):
        got = tight.generate(inputs, [Sampling(10), Sampling(4)], drafted)
        assert [result.tokens for result in got] == want
    with pytest.raises(ValueError, match="as declared, found 1 rows of 65 positions"):
        tight.generate(inputs[:1], Sampling(11))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "expected dtype to be one of auto, float32, bfloat16, found 'float16'"),
        ({"block_size": 1}, "expected a block size from 2 to the drafter's 6, found 1"),
        ({"block_size": 7}, "expected a block size from 2 to the drafter's 6, found 7"),
        ({"draft_window": 0}, "expected a draft window of at least 1, found 0"),
        ({"drafter_dtype": "int8"}, "expected a drafter dtype among float32, bfloat16, found 'int8'"),
        ({"drafter": None, "drafter_dtype": "bfloat16"}, "a drafter dtype needs a drafter with weights; no drafter was named"),
        ({"drafter": None, "draft_window": 4}, "a draft window needs a drafter with weights; no drafter was named"),
    ],
)
def test_settings_that_load_refuses(tmp_path: Path, settings: dict[str, Any], message: str):
    target, drafter = as_folders(tmp_path, random_pair(0, **SIZES))
    with pytest.raises(ValueError, match=message):
        load(target, **{"drafter": drafter, **settings})


def misfit(pair: Pair, tmp_path: Path, **drafter_sizes: Any) -> tuple[Path, Path]:
    """The pair's target, and the drafter of another pair."""
    target, _ = as_folders(tmp_path / "a", pair)
    _, drafter = as_folders(tmp_path / "b", random_pair(1, **{**SIZES, **drafter_sizes}))
    return target, drafter


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ({"vocab_size": 30}, ["vocab_size is 30 but the target's is 40"]),
        ({"hidden_size": 48}, ["hidden_size is 48 but the target's is 32"]),
        ({"target_layers": 3}, ["num_target_layers is 3 but the target's is 2"]),
        ({"taps": [0, 2]}, [r"target_layer_ids \[2\] lie outside the target's 2 layers"]),
        (
            {"vocab_size": 50, "target_layers": 4, "taps": [1, 3]},
            [
                "vocab_size is 50 but",
                "num_target_layers is 4 but",
                r"target_layer_ids \[3\] lie",
                "mask_token_id 49 lies outside the target's vocabulary of 40",
            ],
        ),
    ],
)
def test_a_drafter_that_does_not_fit(tmp_path: Path, sizes: dict[str, Any], messages: list[str]):
    target, drafter = misfit(random_pair(0, **SIZES), tmp_path, **sizes)
    with pytest.raises(ValueError, match="the drafter does not fit the target") as error:
        load(target, drafter)
    for message in messages:
        assert error.match(message)


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        ("target", drop("tokenizer.json"), "has no tokenizer: expected tokenizer.json"),
        ("target", drop("config.json"), r"it has no config\.json"),
        ("target", drop("model.safetensors"), r"expected model\.safetensors"),
        ("target", change_config(model_type="gpt2"), "model_type must be one of qwen3, qwen3_moe, qwen2, .*, found 'gpt2'"),
        ("target", change_config(hidden_size=48), "the tensors do not fit the configuration"),
        ("target", truncate, "is not a readable safetensors file"),
        ("drafter", drop("config.json"), r"it has no config\.json"),
        ("drafter", change_config(model_type="llama"), "model_type='llama' is not supported"),
        ("drafter", change_config(is_neox_style=False), "is_neox_style=False is not supported"),
        ("drafter", change_config(dflash_config=None), "mask_token_id is missing"),
        ("drafter", change_config(block_size="x"), "block_size must be a positive integer, found 'x'"),
        ("drafter", change_config(block_size=1), "block_size must be at least 2, found 1"),
        ("drafter", truncate, "is not a readable safetensors file"),
    ],
)
def test_files_that_load_refuses(tmp_path: Path, which: str, change: Callable[[Path], None], message: str):
    target, drafter = as_folders(tmp_path, random_pair(0, **SIZES))
    change(target if which == "target" else drafter)
    with pytest.raises(ValueError, match=message):
        load(target, drafter)


def test_a_drafter_with_a_foreign_tensor_is_refused(tmp_path: Path):
    pair = random_pair(0, **SIZES)
    pair.drafter_tensors["embed_positions.weight"] = np.zeros((40, 32), np.float32)
    target, drafter = as_folders(tmp_path, pair, model_prefix=True)
    with pytest.raises(ValueError, match=r"1 unknown: model\.embed_positions\.weight"):
        load(target, drafter)


def test_a_long_context_has_shapes_to_its_end(tmp_path: Path):
    pair = random_pair(0, vocab_size=24, target_layers=1, drafter_layers=1, taps=[0], max_position_embeddings=300_000)
    lm = load(as_folders(tmp_path, pair)[0])
    assert lm.start([[1, 2, 3]], Sampling(200_000)).engine.decoding.programs.layout.capacity == 262_144
