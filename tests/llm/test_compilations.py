"""What a call compiles: the declared programs and nothing else; the next call compiles nothing."""

import io
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from llm.support import build, prompts
from reference.dflash_numpy import as_folders, random_pair
from reference.eagle3_numpy import as_folder, random_eagle3
from reference.mtp_numpy import add_head, random_head
from tilewright.compiled.ledger import CompileError, Ledger, no_compile_guard
from tilewright.llm import language_model
from tilewright.llm.language_model import LanguageModel, load
from tilewright.runtime.programs import ProgramKey, Programs
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import Shape, ShapeTable

PROMPTS = prompts(0, range(1, 100, 2))
"""50 lengths."""
TABLE = ShapeTable(batches=(1, 3), capacities=(64, 128), chunks=(8, 32))
NEW = 8
PROGRAMS = {"jit(allocate)", "jit(prefill_chunk)", "jit(run_rounds)"}
PAIR = random_pair(0, target_layers=1, drafter_layers=1, taps=[0])
KINDS = ("plain", "dflash", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "mtp", "ngram", "none")))

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def lm(tmp_path: Path) -> LanguageModel:
    """A model that has compiled nothing, in a process that forgets the rest: no stray program hides behind another test."""
    made = build(tmp_path, PAIR, table=TABLE)
    jax.clear_caches()
    return made


def with_drafter(folder: Path, kind: str) -> LanguageModel:
    """As `lm`, with a drafter of some kind, or none where it is "plain"."""
    target, drafter = as_folders(folder, PAIR)
    eagle3 = as_folder(folder / "eagle3", *random_eagle3(0, PAIR.target_config, taps=[0]))
    sources = {"dflash": drafter, "eagle3": eagle3, "mtp": "mtp", "ngram": "ngram"}
    add_head(target, random_head(0, PAIR.target_config))
    made = load(target, sources.get(kind), block_size=None if kind == "plain" else 4, table=TABLE)
    jax.clear_caches()
    return made


def declared(lm: LanguageModel, *shapes: Shape) -> int:
    """How many programs serve these shapes."""
    return sum(len(list(lm.programs_for(lm.drafter, shape).declared())) for shape in shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_compiles_at_most_the_table(tmp_path: Path, kind: str):
    lm = with_drafter(tmp_path, kind)
    requests = [Sampling(NEW)] * 24 + [Sampling(NEW, temperature=1.0, seed=n) for n in range(26)]

    def call() -> list[list[int]]:
        return [result.tokens for result in lm.generate(PROMPTS, requests)]

    with Ledger() as ledger:
        first = call()
    assert [shape for _, shape in lm.programs] == [Shape(3, 128)]
    assert 0 < ledger.compilations <= declared(lm, Shape(3, 128))
    assert ledger.compilations == sum(len(programs.compiled) for programs in lm.programs.values())
    assert {program.name for program in ledger.programs} == PROGRAMS
    with no_compile_guard("fail", "the second call"):
        assert call() == first


def test_one_prompt_at_a_time(lm: LanguageModel):
    with Ledger() as ledger:
        for prompt in PROMPTS:
            lm.generate([prompt], Sampling(NEW))
    used = {shape for _, shape in lm.programs}
    assert used == {Shape(1, 64), Shape(1, 128)}
    assert ledger.compilations <= declared(lm, *used)
    assert Counter(program.name for program in ledger.programs) == {
        "jit(allocate)": 2,
        "jit(prefill_chunk)": 4,
        "jit(run_rounds)": 2,
    }


@pytest.mark.parametrize(
    ("change", "programs"),
    [
        ({"temperature": 0.5}, ["jit(run_rounds)"]),
        ({"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}, ["jit(run_rounds)"]),
        ({"seed": 5, "top_p": 0.5, "stop": ("t1",), "ignore_eos": True, "max_new_tokens": 30}, []),
    ],
)
def test_what_another_request_adds(lm: LanguageModel, change: dict[str, Any], programs: list[str]):
    """Rounds for all kinds of sampling, which from then on serve greedy requests, too."""
    lm.generate([[1, 2, 3]], Sampling(NEW))
    with Ledger() as ledger:
        lm.generate([[3, 2, 1, 0]], Sampling(**{"max_new_tokens": NEW, **change}))
    assert [program.name for program in ledger.programs] == programs
    with no_compile_guard("fail", "further requests"):
        lm.generate([[3, 2, 1, 0]], Sampling(NEW))
        lm.generate([[1, 2]], Sampling(**{"max_new_tokens": NEW, **change, "seed": 9}))


def test_streaming_compiles_no_more(lm: LanguageModel):
    lm.generate(PROMPTS[:3], Sampling(NEW))
    with no_compile_guard("fail", "streaming"):
        session = lm.start(PROMPTS[:3], Sampling(NEW, stop=("t3",)))
        while not session.finished:
            session.advance(1)
            session.results()


def test_a_warm_table_compiles_no_more(tmp_path: Path):
    """Of the table's capacities the context of 40 positions needs one."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    pair = random_pair(0, target_layers=1, drafter_layers=1, taps=[0], max_position_embeddings=40)
    lm = build(tmp_path, pair, table=TABLE)
    jax.clear_caches()
    with Ledger() as ledger:
        lm.warm(console=console)
    assert ledger.compilations == declared(lm, Shape(1, 64), Shape(3, 64))
    assert Counter(program.name for program in ledger.programs) == {
        "jit(allocate)": 2,
        "jit(prefill_chunk)": 5,
        "jit(run_rounds)": 2,
    }
    assert isinstance(console.file, io.StringIO)
    assert "compiling" in console.file.getvalue()
    with no_compile_guard("fail", "calls after the warming"):
        for group, temperature in product((PROMPTS[:1], PROMPTS[:3], PROMPTS[10:13]), (0, 1)):
            lm.generate(group, Sampling(NEW, temperature=temperature))
        lm.warm()


def test_warming_needs_what_it_names(lm: LanguageModel):
    with pytest.raises(ValueError, match="expected a drafter for speculative decoding, found none"):
        lm.with_drafter(None).warm(speculative=True)


@pytest.mark.parametrize("constraints", [False, True])
def test_warming_compiles_programs_for_grammars_where_it_is_told_to(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, constraints: bool
):
    warmed: list[ProgramKey] = []
    monkeypatch.setattr(language_model, "warm", lambda programs, console: warmed.extend(key for _, key in programs))
    lm.warm(constraints=constraints)
    assert any(key.masked for key in warmed) == constraints


def test_threads_never_compile_a_program_twice(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch):
    made = []
    compiled = jax.jit(lambda: 0).lower().compile()

    def slowly(self: Programs, key: ProgramKey) -> Any:
        made.append(key)
        time.sleep(0.02)
        return compiled

    monkeypatch.setattr(Programs, "compile", slowly)
    programs = lm.programs_for(None, Shape(3, 64))
    start = threading.Barrier(8)

    def ask(n: int) -> list[Any]:
        start.wait()
        keys = list(programs.declared())
        return [programs.get(key) for key in keys[n:] + keys[:n]][-n:]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
        stores = list(pool.map(lambda _: lm.programs_for(None, Shape(1, 64)), range(8)))
    assert len(made) == len(set(made)) == declared(lm, Shape(3, 64))
    assert all(store is stores[0] for store in stores)


def test_the_guard_sees_a_shape_that_was_not_ready(lm: LanguageModel):
    lm.generate([[1, 2]], Sampling(NEW))
    with pytest.raises(CompileError, match=r"jit\(run_rounds\)"), no_compile_guard("fail"):
        lm.generate([[1, 2], [3, 4]], Sampling(NEW))
