"""What denoising compiles, how often it goes to the device and back, and what its programs move besides."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from diffusion import support
from diffusion.support import REPAIRED, asking, build, needs_native
from llm.support import prompts
from tilewright.compiled.ledger import CompileError, Ledger, no_compile_guard
from tilewright.diffusion import decoding as module
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DiffusionKey, DiffusionTable
from tilewright.diffusion.steps import STEPS_PER_DISPATCH
from tilewright.diffusion.window import LayerCache
from tilewright.llm.diffusion_model import DiffusionModel

ASKED = prompts(0, [n % 44 + 1 for n in range(64)], support.MASK)
"""64 prompts of 44 lengths."""
TABLE = DiffusionTable(batches=(1, 4), positions=(32, 64), responses=(16,), blocks=(8,), buckets=(4, 8))
PROGRAMS = {"jit(allocate)", "jit(steps)"}

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def model() -> DiffusionModel:
    """A model that has compiled nothing, in a process that forgets the rest."""
    made = build("tiny", table=TABLE)
    jax.clear_caches()
    return made


def mixed(mode: Any, count: int = len(ASKED)) -> list[Denoising]:
    """Lengths, rules and thresholds are data."""
    ways: list[dict[str, Any]] = [
        {},
        {"new_tokens": 16, "threshold": 0.5},
        {"steps": 6, "temperature": 0.8},
        {"new_tokens": 5, "block_length": 5},
        {"remasking": "random"},
        {"saliency": REPAIRED},
    ]
    return [asking(mode=mode, **ways[n % len(ways)]) for n in range(count)]


def test_prompts_of_all_lengths_compile_at_most_the_table(model: DiffusionModel):
    requests = mixed("sparse")
    with Ledger() as ledger:
        first = [result.tokens for result in model.generate(ASKED, requests)]
    assert {program.name for program in ledger.programs} == PROGRAMS
    assert 0 < ledger.compilations <= len(PROGRAMS) * len(list(TABLE.shapes(64, ["sparse"])))
    assert ledger.compilations == sum(len(programs.compiled) for programs in model.programs.values())
    with no_compile_guard("fail", "the second call"):
        assert [result.tokens for result in model.generate(ASKED, requests)] == first


def test_a_warm_table_compiles_no_more():
    """Batches of one mode, of the other, and of both."""
    model = build("tiny", table=replace(TABLE, positions=(64,)))
    jax.clear_caches()
    with Ledger() as ledger:
        model.warm(("sparse", "dense"))
    assert Counter(program.name for program in ledger.programs) == {"jit(allocate)": 4, "jit(steps)": 4}
    with no_compile_guard("fail", "calls after the warming"):
        model.generate(ASKED, mixed("sparse"))
        model.generate(ASKED[:8], mixed("dense", 8))
        model.generate(ASKED[:8], [*mixed("dense", 6), *mixed("sparse", 2)])
        for prompt in (ASKED[0], ASKED[43]):
            model.generate([prompt], asking(mode="sparse"))
            model.generate([prompt], asking())
        model.warm(("dense",))


def test_the_guard_sees_a_mode_that_was_not_ready(model: DiffusionModel):
    model.generate([[1, 2]], asking())
    with pytest.raises(CompileError, match=r"jit\((allocate|steps)\)"), no_compile_guard("fail"):
        model.generate([[1, 2]], asking(mode="sparse"))


class Counted:
    """Stands in for a compiled program, or for NumPy where it reads arrays of the device."""

    def __init__(self, real: Any, calls: list[str]):
        self.real = real
        self.calls = calls

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append("dispatch")
        with jax.transfer_guard_device_to_host("disallow"):
            return self.real(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def asarray(self, x: Any, *rest: Any) -> np.ndarray:
        if isinstance(x, jax.Array):
            self.calls.append("read")
        return np.asarray(x, *rest)


@pytest.mark.parametrize(("steps", "dispatches"), [(64, 1), (5, 3), (1, 12)])
def test_a_dispatch_runs_many_steps_and_the_host_waits_for_none(
    model: DiffusionModel, monkeypatch: pytest.MonkeyPatch, steps: int, dispatches: int
):
    """It reads once after the dispatch: what all of its steps report."""
    calls: list[str] = []
    session = model.start([[1, 2, 3]], asking(mode="sparse", saliency=REPAIRED))
    session.prefill()
    key = DiffusionKey("steps", session.shape)
    programs = model.programs_of(session.shape)
    session.engine.runner.called[key] = Counted(programs.get(key), calls), model.params
    monkeypatch.setattr(module, "np", Counted(np, calls))
    while not session.finished:
        session.advance(steps)
    assert calls == ["dispatch", *["read"] * 3] * dispatches
    assert len(session.reports) == 12


def test_more_steps_than_a_dispatch_has_take_another():
    model = build("tiny", table=DiffusionTable((1,), (128,), (80,), (80,), ()))
    session = model.start([[1, 2, 3]], asking(new_tokens=STEPS_PER_DISPATCH + 6, block_length=None))
    session.advance()
    assert [len(session.reports), session.finished] == [STEPS_PER_DISPATCH, False]
    session.advance()
    assert [len(session.reports), session.finished] == [STEPS_PER_DISPATCH + 6, True]
    assert session.advance() == []


@pytest.fixture(scope="module", params=[pytest.param("auto", marks=needs_native), pytest.param("xla", marks=pytest.mark.slow)])
def program(request: pytest.FixtureRequest) -> tuple[str, jax.stages.Compiled, Any]:
    """One that looks at all, at responses and at blocks, with the caches that it is given."""
    made = build("dream", request.param, DiffusionTable((3,), (48,), (16,), (8,), (4, 24)))
    session = made.start([[1, 2]] * 3, [asking(mode="dual"), asking(mode="sparse"), asking()])
    session.prefill()
    compiled = made.programs_of(session.shape).get(DiffusionKey("steps", session.shape))
    return request.param, compiled, session.engine.runner.state.target_cache


def test_a_program_never_calls_the_host(program: Any):
    kernels, compiled, _ = program
    text = compiled.as_text()
    assert not re.search(r"\b(outfeed|infeed|send|recv|send-done|recv-done)\(", text)
    called = set(re.findall(r'custom_call_target="([^"]*)"', text))
    assert not [name for name in called if "callback" in name.lower()]
    assert all(name.startswith("tilewright_") or kernels == "xla" for name in called)


def test_caches_are_given_to_a_program_and_come_back_in_their_places(program: Any):
    _, compiled, caches = program
    size = sum(x.nbytes for x in jax.tree.leaves(caches))
    assert size > 0
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def cache_copies(text: str, cache: LayerCache) -> Counter[str]:
    """How many instructions copy an array of a cache's shape, or of its rows side by side, by that shape."""
    shapes = {x.shape for x in jax.tree.leaves(cache)}
    shapes |= {(shape[0] * shape[1], int(np.prod(shape[2:]))) for shape in shapes}
    names = {f"f32[{','.join(map(str, shape))}]" for shape in shapes}
    found = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(%(?!broadcast)", text)
    return Counter(name for name in found if name in names)


def test_no_cache_is_copied_but_values(program: Any):
    """Three spans of two layers. Values are copied where the whole sequence is computed and `base` begins anew."""
    kernels, compiled, caches = program
    if kernels == "xla":
        pytest.skip("XLA's own updates are its own affair")
    copied = cache_copies(compiled.as_text() or "", caches[0])
    assert copied["f32[3,48,2,16]"] <= 2, copied
    assert copied["f32[3,48,64]"] <= 2, copied
    assert set(copied) <= {"f32[3,48,2,16]", "f32[3,48,64]"}, "nothing is reshaped to be written"
