"""What the tests of the diffusion engine share: requests of every kind, what the model gives for each by itself, and an engine
whose dispatches have as many steps as a test says.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.support import EXACT, MODELS, PLAIN, REPAIRED, asking
from llm.support import prompts
from reference.diffusion_cases import MASK
from reference.diffusion_folder import write_model
from runtime.support import Heard
from tilewright.diffusion.decoding import MaskedDenoising
from tilewright.diffusion.engine_options import DiffusionEngineOptions
from tilewright.diffusion.options import MODES, Denoising, Mode
from tilewright.diffusion.programs import DiffusionTable
from tilewright.diffusion.request import DenoisingRequest
from tilewright.llm.diffusion_model import Denoised, DiffusionModel, load
from tilewright.runtime.engine import Engine
from tilewright.runtime.request import RequestHandle

TABLE = DiffusionTable(batches=(1, 3), positions=(32,), responses=(16,), blocks=(8,), buckets=(12,))
BY_ITSELF = replace(TABLE, batches=(1,))
"""Of the model that says what the engine must give."""
ENDS = (12, 17, 22, 27, 30, 36)
OPTIONS = DiffusionEngineOptions(table=TABLE)

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"threshold": 0.3},
    {"threshold": 0.15, "temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.2},
    {"remasking": "random"},
    {"remasking": "origin"},
    {"remasking": "maskgit_plus", "threshold": 0.2},
    {"remasking": "topk_margin", "temperature": 0.5, "presence_penalty": 0.6, "logit_bias": ((5, 2.0),)},
    {"remasking": "entropy"},
)


def model_of(family: str, kernels: Any = "auto", table: DiffusionTable = BY_ITSELF) -> DiffusionModel:
    """One that ends its responses often: several tokens of its vocabulary are ends of the sequence."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_model(Path(folder), MODELS[family], MASK, ENDS[0], eos_token_id=list(ENDS))
        return load(written, kernels=kernels, table=table)


def requests(seed: int, count: int, modes: Sequence[Mode] = MODES) -> list[DenoisingRequest]:
    """Of all modes, ways, lengths and numbers of steps, each with its seed; some go on past the end of the sequence."""
    rng = np.random.default_rng(seed)
    asks = []
    for n, prompt in enumerate(prompts(seed, [int(n) for n in rng.integers(1, 17, count)], vocab=MASK)):
        way = WAYS[n % len(WAYS)]
        block = int(rng.choice([2, 4, 8]))
        blocks = int(rng.integers(1, 3))
        if "threshold" not in way and rng.integers(2):
            way = {"steps": blocks * int(rng.integers(1, block + 1)), **way}
        if rng.integers(3) == 0:
            way = {"suffix_window": int(rng.integers(0, 5)), **way}
        asked: dict[str, Any] = {"new_tokens": block * blocks, "block_length": block, "ignore_eos": bool(rng.integers(2))}
        asked |= {"seed": int(rng.integers(2**32)), "saliency": (PLAIN, REPAIRED, EXACT)[int(rng.integers(3))]}
        asks.append(DenoisingRequest(prompt, Denoising(mode=modes[int(rng.integers(len(modes)))], **asked, **way)))
    return asks


def ask(prompt: Sequence[int], stop: tuple[str, ...] = (), deadline_s: float | None = None, **changes: Any) -> DenoisingRequest:
    """12 tokens in blocks of 4, unless `changes` say otherwise."""
    return DenoisingRequest(prompt, asking(**changes), stop, deadline_s)


def expected(model: DiffusionModel, asks: Sequence[DenoisingRequest]) -> list[Denoised]:
    """What the model gives for each request by itself."""
    return [model.generate([list(one.prompt)], one.denoising)[0] for one in asks]


def check_same(heard: Heard, handle: RequestHandle, want: Denoised) -> None:
    """The same tokens, text, end and number of steps; the model leaves the end of the sequence out."""
    assert heard.end == want.finish_reason
    assert (heard.tokens[:-1] if heard.end == "eos" else heard.tokens) == want.tokens
    assert heard.text == want.text
    assert handle.steps == want.steps
    assert sum(int(each.choice.removesuffix(" steps")) for update in heard.updates for each in update.rounds) == want.steps


def check_empty(engine: Engine) -> None:
    """No slot is taken, nobody waits, and nothing was compiled."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens, stats.compilations) == (0, 0, 0, 0)
    assert not any(engine.scheduler.slots)
    assert not engine.flight


def engine_like(warm: Engine, steps: Callable[[], int], **more: Any) -> Engine:
    """Another engine with the programs of one that is warm; its options may differ in all but what is compiled.

    Args:
        steps: how many the next dispatch may have, for the clock is not to decide it.
    """
    engine = model_engine(warm, replace(warm.options, **more))
    engine.runner.reset()
    engine.decoding.pace.most = lambda seconds, hurry: steps()  # type: ignore[method-assign]
    return engine


def model_engine(warm: Engine, options: Any) -> Engine:
    """Another engine with the programs of one."""
    return Engine(MaskedDenoising(warm.decoding.programs, warm.tokenizer, options), options)


def run(engine: Engine) -> None:
    """Steps until there is nothing to do."""
    while engine.step():
        pass
