"""Embeddings against a reference in NumPy: pooled in chunks, beside generation, behind a cached prefix, with an adapter."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llm.adapters import ENGINE, PAIR, folders_of_adapters, merged_target
from llm.support import TABLE, prompts
from reference.dflash_numpy import as_folders, autoregressive_greedy
from runtime.support import Heard, check_empty
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.pooling import Pooling
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compiles")

LONG = prompts(1, [45, 3])
"""The first has several chunks."""


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("pair")
    return load(as_folders(folder, PAIR)[0], table=TABLE, lora=folders_of_adapters(folder))


def expected(tokens: list[int], pooling: Pooling, lora: str | None = None) -> np.ndarray:
    target = merged_target(lora)
    hidden = target.final_norm(target.run(tokens)[1][-1])
    vector = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_the_reference(lm: LanguageModel, pooling: Pooling) -> None:
    found = lm.embed([*LONG, LONG[0]], pooling, lora=[None, None, "few"])
    assert (found.dtype, found.shape) == (np.float32, (3, PAIR.target_config["hidden_size"]))
    wanted = [expected(LONG[0], pooling), expected(LONG[1], pooling), expected(LONG[0], pooling, "few")]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-2
    with pytest.raises(ValueError, match="expected at least one prompt, found none"):
        lm.embed([], pooling)


def test_embeddings_of_a_model_that_was_saved_without_its_head(tmp_path: Path) -> None:
    folder = as_folders(tmp_path, PAIR)[0]
    stored = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in stored.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    found = load(folder, table=TABLE).embed([LONG[1]])
    np.testing.assert_allclose(found, [expected(LONG[1], "last")], atol=2e-5)


def test_embeddings_beside_generation(lm: LanguageModel) -> None:
    """They need no program of their own, find prefixes that were computed, leave some, and hold no page in the end."""
    engine = lm.engine(ENGINE)
    engine.warm()
    engine.accept_requests()
    listeners = []
    cached = []
    poolings: list[Pooling | None] = ["last", None, "last", "mean"]
    for turn in (poolings[:2], poolings[2:]):
        batch = [Heard() for _ in turn]
        handles = []
        for pooling, listener in zip(turn, batch, strict=True):
            handles.append(engine.submit(GenerateRequest(LONG[0], Sampling(4), pooling=pooling), listener))
        while engine.step():
            continue
        listeners += batch
        cached += [handle.cached_tokens for handle in handles]
    assert listeners[1].tokens == autoregressive_greedy(merged_target(None), LONG[0], 4)
    for each, pooling in zip(listeners, poolings, strict=True):
        (last,) = each.updates[-1:]
        assert (last.embedding is None) == (pooling is None)
        if pooling is not None:
            assert (each.end, each.tokens) == ("length", [])
            np.testing.assert_allclose(last.embedding, expected(LONG[0], pooling), atol=2e-5)
    assert [each > 0 for each in cached[2:]] == [True, False], "a mean needs every position"
    check_empty(engine)
    stats = engine.stats()
    assert (stats.compilations, stats.prompt_tokens) == (0, 4 * len(LONG[0]))
    engine.stop()


def test_what_is_no_request_for_an_embedding(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="neither logprobs nor a constraint with pooling"):
        GenerateRequest([1], pooling="last", logprobs=0)
    wrong = GenerateRequest([1])
    object.__setattr__(wrong, "pooling", "cls")  # past the annotations, where these are checked
    with pytest.raises(ValueError, match="expected pooling to be one of last, mean, found 'cls'"):
        wrong.__post_init__()
    context = lm.target.max_position_embeddings
    with pytest.raises(
        ValueError, match=f"expected prompts of at most the model's context of {context} tokens, found {context + 1}"
    ):
        lm.embed([[1] * (context + 1)])
