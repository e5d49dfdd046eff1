"""Targets whose layers see a window keep no more pages than that, and give the tokens of transformers by every path."""

from pathlib import Path

import numpy as np
import pytest

from llm.test_families import copied, golden_tokens, random_drafter, tokenizer  # noqa: F401 (a fixture)
from runtime.support import check_empty, drive
from tilewright.kernels.operations import UNMAPPED
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.checkpoint import decoder_config
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.engine import Engine
from tilewright.runtime.layout import look_ahead, window_pages
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

PAGE = 16
CONTEXT = 256
TABLE = ShapeTable(batches=(1, 2), capacities=(CONTEXT,), chunks=(16,), widths=(4,))
NEW = 64
LONG = 200
WINDOW = 9


def engine_of(lm: LanguageModel, slots: int = 2, **options: object) -> Engine:
    engine = lm.engine(EngineOptions(page_size=PAGE, table=TABLE, slots=slots, guard="off", **options))  # type: ignore[arg-type]
    engine.warm()
    engine.accept_requests()
    return engine


def asks(name: str) -> tuple[list[GenerateRequest], list[list[int]]]:
    prompts, want = golden_tokens(name)
    return [GenerateRequest(prompt, Sampling(NEW, ignore_eos=True)) for prompt in prompts], want


@pytest.fixture(scope="module")
def mistral(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:  # noqa: F811
    """All of its layers have a window of 9 positions."""
    folder = copied(tmp_path_factory.mktemp("windows") / "target", "mistral-window", tokenizer)
    return load(folder, "ngram", table=TABLE, block_size=4)


def test_pages_before_the_window_are_given_up(mistral: LanguageModel):
    """While those of layers that see everything grow with the text; tokens are those of pages that hold all of it."""
    engine, (requests, want) = engine_of(mistral, slots=1), asks("mistral-window")
    request = GenerateRequest(requests[1].prompt, Sampling(LONG, ignore_eos=True))
    outputs: list[RequestOutput] = []
    held = [0]
    whole = [0]
    engine.submit(request, outputs.append)
    while engine.step():
        for running in engine.scheduler.running:
            everything, window = running.groups
            assert window.columns[: window.first] == [UNMAPPED] * window.first
            assert UNMAPPED not in window.held
            whole.append(len(everything.held))
            held.append(len(window.held))
    tokens = [token.token for update in outputs for token in update.tokens]
    assert tokens[:NEW] == want[1]
    assert tokens == mistral.generate([list(request.prompt)], request.sampling, speculative=False)[0].tokens
    assert max(whole) == -(-(23 + LONG + 3) // PAGE)
    bound = window_pages(WINDOW, look_ahead(16, 4), PAGE, CONTEXT)
    assert max(held) <= bound < max(whole) // 2
    # And memory is taken for no more: of the layers here all have the window.
    sizes = engine.decoding.sizes
    assert sizes is not None
    assert sizes.held_bytes == 2 * 2 * mistral.model.target.config.head_dim * 2 * 4 * PAGE * bound
    check_empty(engine)
    assert not any(engine.scheduler.groups[1].pages.ref_counts)


def test_layers_with_a_window_have_heads_of_their_own(tokenizer: Path, tmp_path: Path):  # noqa: F811
    """Prefixes are shared and requests preempted; memory counts each layer's heads, and tokens are those of transformers."""
    lm = load(copied(tmp_path / "target", "gemma4-tied", tokenizer), "ngram", table=TABLE, block_size=4)
    engine = engine_of(lm, pages=9)
    requests, want = asks("gemma4-tied")
    again = [0, 1, 1, 0, 1]
    listeners, _ = drive(engine, [requests[n] for n in again], np.random.default_rng(0))
    assert [each.tokens for each in listeners] == [want[n] for n in again]
    assert engine.stats().prefix_hits > 0
    # Two key heads of 16 in layers with a window, one of 32 in the others: keys and values in float32, two layers of each.
    sizes = engine.decoding.sizes
    assert sizes is not None
    layout = sizes.layout
    assert sizes.held_bytes == 2 * 2 * 32 * 4 * PAGE * (layout.pages + layout.windows[0].pages)
    with pytest.raises(ValueError, match="expected one device for gemma4_text"):
        load(tmp_path / "target", table=TABLE, mesh=make_mesh({"tp": 2}))


@pytest.mark.parametrize("seed", range(2))
def test_prefixes_are_found_and_the_newest_gives_way(mistral: LanguageModel, seed: int):
    """With few pages, requests that begin alike and are asked for again: the tokens stay those of transformers."""
    engine = engine_of(mistral, pages=9)
    requests, want = asks("mistral-window")
    again = [0, 1, 1, 0, 1]
    listeners, _ = drive(engine, [requests[n] for n in again], np.random.default_rng(seed))
    assert [each.tokens for each in listeners] == [want[n] for n in again]
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0
    check_empty(engine)
    assert not any(engine.scheduler.groups[1].pages.ref_counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2-tied", "gemma3-tied", "gemma4-tied", "mistral-window", "qwen3-window"])
def test_every_family_with_windows_and_a_learnt_drafter(name: str, tokenizer: Path, tmp_path: Path):  # noqa: F811
    folder = copied(tmp_path / "target", name, tokenizer)
    drafter = random_drafter(tmp_path / "drafter", decoder_config(folder))
    for drafters in (drafter, ["ngram", drafter]):
        engine = engine_of(load(folder, drafters, table=TABLE), pages=9)
        requests, want = asks(name)
        listeners, _ = drive(engine, [*requests, *requests], np.random.default_rng(0))
        assert [each.tokens for each in listeners] == [*want, *want]
        check_empty(engine)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gemma3-tied", "ring"),
        *(pytest.param("qwen3-window", each, marks=pytest.mark.slow) for each in ("sync", "domino")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gemma2-tied", "domino"), ("gpt-oss", "sync"))),
        pytest.param("gemma2-tied", "exact", marks=pytest.mark.slow),
    ],
)
def test_windows_over_two_devices(name: str, schedule: str, tokenizer: Path, tmp_path: Path):  # noqa: F811
    """Norms and biases behind the halves of a layer come once, after the sum over the devices."""
    folder = copied(tmp_path / "target", name, tokenizer)
    table = ShapeTable(batches=(2,), capacities=(128,), chunks=(16,))
    kernels = "xla" if schedule == "exact" else "auto"
    lm = load(folder, table=table, mesh=make_mesh({"tp": 2}), schedule=schedule, kernels=kernels)
    prompts, want = golden_tokens(name)
    assert [each.tokens for each in lm.generate(prompts, Sampling(NEW, ignore_eos=True))] == want
