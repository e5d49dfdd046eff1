"""Responses by the target itself: their text, how an interrupted run goes on, and what is in the loss."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tilewright.llm.language_model import Generation, LanguageModel
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train.data import TokenStream
from tilewright.train.regenerate import Writer, cut_prompts, pair_stream, regenerate
from train.support import END, TARGET, random_stream, silent, target_params

SAMPLINGS = (Sampling(6, ignore_eos=True), Sampling(6, temperature=1.0, ignore_eos=True))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(24)}, unk_token="t0"))
    table = ShapeTable(batches=(2,), capacities=(64,), chunks=(8,))
    return LanguageModel(TARGET, target_params(), tokenizer, table=table)


def write(lm: LanguageModel, prompts: list[list[int]], path: Path, target: str = "target") -> TokenStream:
    return regenerate(Writer(lm, target), prompts, SAMPLINGS, path, END, silent())


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_stretches_of_the_text():
    stream = random_stream(60)
    prompts = cut_prompts(stream, 20, 5, seed=3)
    windows = {tuple(stream.tokens[i : i + 5].tolist()) for i in range(56)}
    assert all(tuple(prompt) in windows for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) > 5
    assert prompts == cut_prompts(stream, 20, 5, seed=3) != cut_prompts(stream, 20, 5, seed=4)
    assert cut_prompts(random_stream(5), 1, 5, seed=0) == [random_stream(5).tokens.tolist()]
    with pytest.raises(ValueError, match="a text of at least 6 tokens to cut prompts from, found 5"):
        cut_prompts(random_stream(5), 1, 6, seed=0)


def test_responses_are_what_generation_gives(lm: LanguageModel, tmp_path: Path):
    """Greedy ones and drawn ones by turns, each drawn one with its own seed."""
    prompts = cut_prompts(random_stream(), 5, 4, seed=0)
    write(lm, prompts, tmp_path / "new" / "responses.jsonl")
    found = records(tmp_path / "new" / "responses.jsonl")
    assert [record["prompt_tokens"] for record in found] == prompts
    for i, record in enumerate(found):
        sampling = Sampling(6, temperature=i % 2, ignore_eos=True, seed=i)
        assert record["response_tokens"] == lm.generate([prompts[i]], sampling)[0].tokens


def test_equal_prompts_are_drawn_with_different_seeds(lm: LanguageModel, tmp_path: Path):
    write(lm, [[3, 4]] * 8, tmp_path / "responses.jsonl")
    responses = [tuple(record["response_tokens"]) for record in records(tmp_path / "responses.jsonl")]
    assert len(set(responses[::2])) == 1
    assert len(set(responses[1::2])) > 1


@pytest.mark.parametrize("cut_off", ["", '{"prompt_tokens": [1, 2'], ids=["whole", "half a line"])
def test_an_interrupted_run_keeps_its_records(lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str):
    prompts = cut_prompts(random_stream(), 7, 4, seed=0)
    whole = write(lm, prompts, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "parts.jsonl"
    path.write_text("".join(lines[:3]) + cut_off)
    generated: list[list[int]] = []
    generate = lm.generate

    def counting(part: list[list[int]], *rest: Any, **settings: Any) -> Generation:
        generated.extend(part)
        return generate(part, *rest, **settings)

    monkeypatch.setattr(lm, "generate", counting)
    stream = write(lm, prompts, path)
    assert sorted(generated) == sorted(prompts[3:]), "in whatever order"
    assert path.read_text() == "".join(lines)
    np.testing.assert_array_equal(stream.tokens, whole.tokens)
    np.testing.assert_array_equal(stream.in_loss, whole.in_loss)


def test_records_of_other_prompts_are_refused(lm: LanguageModel, tmp_path: Path):
    path = tmp_path / "responses.jsonl"
    write(lm, [[1, 2], [3, 4]], path)
    before = path.read_text()
    for others in ([[1, 2], [3, 5]], [[1, 2]]):
        with pytest.raises(ValueError, match=r"responses\.jsonl: expected continuations of these prompts"):
            write(lm, others, path)
    assert path.read_text() == before


def test_records_by_another_model_or_drawn_in_another_way_are_refused(lm: LanguageModel, tmp_path: Path):
    path = tmp_path / "responses.jsonl"
    prompts = [[1, 2], [3, 4], [5, 6]]
    whole = write(lm, prompts[:2], path)
    before = path.read_text()
    with pytest.raises(ValueError, match=r"responses\.jsonl: expected texts of this model and sampling"):
        write(lm, prompts, path, target="another")
    hotter = (SAMPLINGS[0], replace(SAMPLINGS[1], temperature=0.7))
    with pytest.raises(ValueError, match=r"responses\.jsonl: expected texts of this model and sampling"):
        regenerate(Writer(lm, "target"), prompts, hotter, path, END, silent())
    assert path.read_text() == before
    kept = [{name: record[name] for name in ("prompt_tokens", "response_tokens")} for record in records(path)]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    again = write(lm, prompts, path, target="another")
    assert again.tokens[: len(whole.tokens)].tolist() == whole.tokens.tolist(), "those that do not say so are taken as they are"


def test_only_responses_are_in_the_loss():
    stream = pair_stream(
        [
            {"prompt_tokens": [1, 2, 3], "response_tokens": [4, 5]},
            {"prompt_tokens": [6], "response_tokens": [7, END]},
            {"prompt_tokens": [8], "response_tokens": []},
        ],
        END,
        Path("r.jsonl"),
    )
    assert stream.tokens.tolist() == [1, 2, 3, 4, 5, END, 6, 7, END, 8, END]
    assert np.flatnonzero(stream.in_loss).tolist() == [3, 4, 7, 8]
    assert stream.tokens.dtype == np.int32
    with pytest.raises(ValueError, match=r"r\.jsonl:2: expected lists prompt_tokens and response_tokens"):
        pair_stream([{"prompt_tokens": [1], "response_tokens": [2]}, {"text": "x"}], END, Path("r.jsonl"))
