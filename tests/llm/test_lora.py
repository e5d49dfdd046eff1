"""Low-rank adapters in generation: each row with its own, equal to the merged model, with a drafter and without."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llm.adapters import ENGINE, PAIR, folders_of_adapters, merged_target
from llm.support import TABLE, build, prompts
from reference.dflash_numpy import as_folders, autoregressive_greedy
from runtime.support import Heard
from tilewright.llm.language_model import LanguageModel, load
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.request import GenerateRequest
from tilewright.runtime.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compiles")

NEW = 16
PROMPTS = prompts(0, [5, 12, 7])
PROMPTS.append(PROMPTS[0])
NAMES = ["few", None, "all", "all"]
"""Of each row; two rows have one prompt and different adapters."""


def expected(prompt: list[int], name: str | None, new: int = NEW) -> list[int]:
    """The tokens of the merged model, by NumPy in float64."""
    return autoregressive_greedy(merged_target(name), prompt, new)


@cache
def want() -> list[list[int]]:
    found = [expected(prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert len({tuple(tokens) for tokens in found}) == len(found), "the adapters change what the model says"
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def lm(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return build(tmp_path_factory.mktemp("pair"), PAIR, lora=folders)


@pytest.mark.parametrize("speculative", [False, True])
def test_each_row_is_as_its_merged_model(lm: LanguageModel, speculative: bool) -> None:
    """Several adapters and the base in one batch give what plain decoding of each merged model gives, alone."""
    got = lm.generate(PROMPTS, Sampling(NEW), speculative, lora=NAMES)
    assert [result.tokens for result in got] == want()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kernels": "xla"}, {"kernels": "xla", "weights": "int8"}], ids=str)
def test_what_xla_computes(folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any]) -> None:
    lm = build(tmp_path, PAIR, lora=folders, **settings)
    each = zip(PROMPTS, NAMES, strict=True)
    plain = [lm.generate([prompt], Sampling(NEW), False, lora=name)[0].tokens for prompt, name in each]
    assert [result.tokens for result in lm.generate(PROMPTS, Sampling(NEW), True, lora=NAMES)] == plain
    if settings == {"kernels": "xla"}:
        assert plain == want()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_bits(folders: dict[str, Path], tmp_path: Path, weights: str, dtype: str) -> None:
    """A row's tokens do not depend on its neighbours, nor on a drafter; temperatures included."""
    lm = build(tmp_path, PAIR, lora=folders, weights=weights, dtype=dtype)
    each = [Sampling(NEW, temperature=heat, seed=7) for heat in (0.0, 1.0, 1.0, 0.0)]
    alone = [
        lm.generate([prompt], one, False, lora=name)[0].tokens for prompt, one, name in zip(PROMPTS, each, NAMES, strict=True)
    ]
    assert [result.tokens for result in lm.generate(PROMPTS, each, True, lora=NAMES)] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_an_engine_keeps_the_pages_of_adapters_apart(lm: LanguageModel) -> None:
    """One prompt by the base, by an adapter twice, and by another: what one computed is found by its own alone."""
    (prompt,), small = prompts(3, [40]), Sampling(4)
    engine = lm.with_drafter(None).engine(ENGINE)
    engine.warm()
    engine.accept_requests()
    adapters = [None, "all", "all", "few", None]
    cached = []
    for name in adapters:
        listener = Heard()
        handle = engine.submit(GenerateRequest(prompt, small, lora=name), listener)
        while not listener.ended:
            engine.step()
        assert listener.tokens == expected(prompt, name, 4)
        cached.append(handle.cached_tokens)
    assert [each > 0 for each in cached] == [False, False, True, False, True]
    assert engine.stats().compilations == 0
    with pytest.raises(ValueError, match="expected an adapter among all, few, found 'none'"):
        engine.submit(GenerateRequest(prompt, small, lora="none"), Heard())
    engine.stop()


def test_what_cannot_be_is_refused(lm: LanguageModel, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for each of 2 prompts, found 1"):
        lm.generate(PROMPTS[:2], Sampling(1), lora=["all"])
    target, _ = as_folders(tmp_path, PAIR)
    with pytest.raises(ValueError, match=r"expected one device for low-rank adapters \(.+\), found 2"):
        load(target, lora=folders, mesh=make_mesh({"tp": 2}))
    with pytest.raises(ValueError, match="expected an adapter among none at all, found 'all'"):
        load(target, table=TABLE).generate(PROMPTS[:1], Sampling(1), lora="all")
