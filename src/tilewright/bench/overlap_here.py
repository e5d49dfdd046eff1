"""The grid of the overlap benchmark on devices that are here: a small model of Llama 3's form, through the engine's programs.

Where several devices are forced out of one CPU they share its cores: there, what counts is that every schedule and number of
devices gives the same tokens, and how many collectives of how many bytes its programs hold. Times are given all the same.
"""

import time
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tilewright.bench.overlap_grid import GridCase
from tilewright.bench.overlap_micro import COLLECTIVES
from tilewright.compiled.hlo import read_module
from tilewright.llm.language_model import LanguageModel
from tilewright.llm.stream import Stream
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import initialise
from tilewright.parallel.mesh import make_mesh
from tilewright.runtime.placement import placement_over
from tilewright.runtime.programs import ProgramKey
from tilewright.runtime.sampling import Sampling

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=896,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=8192,
)
"""Llama 3 8B with a sixteenth of its width: 3.5 columns of the MLP for each hidden one, and key/value heads for 8 devices."""


@cache
def drawn() -> DecoderParams:
    """Random weights, larger than they are drawn for training, so that tokens vary."""
    params = jax.jit(partial(initialise, decoder.declare(CONFIG)))(jax.random.key(0))
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, params)


def model(devices: int, schedule: str | None, compiler_options: bool = False) -> LanguageModel:
    """The model with random weights, the same for any number of devices.

    Raises:
        ValueError: there are not so many devices, or the model cannot be divided over them.
    """
    mesh = None if devices == 1 else make_mesh({"tp": devices})
    words = Tokenizer(WordLevel({f"t{n} ": n for n in range(CONFIG.vocab_size)}, unk_token="t0 "))
    placement = placement_over(CONFIG, mesh, schedule, compiler_options and mesh is not None)
    return LanguageModel(CONFIG, drawn(), words, kernels="xla", placement=placement)


def prompts(case: GridCase) -> list[list[int]]:
    rng = np.random.default_rng(case.input_tokens)
    return rng.integers(CONFIG.vocab_size, size=(case.batch, case.input_tokens)).tolist()


def timed(lm: LanguageModel, case: GridCase) -> tuple[float, float, list[list[int]], Stream]:
    """Seconds to the first token, seconds for each further one, and the tokens of each row.

    The last prompt token is the first that decoding runs, so that the first token takes the prefill and a step.
    """
    stream = lm.start(prompts(case), Sampling(case.output_tokens, ignore_eos=True))
    stream.prefill()
    stream.advance(1)
    first = stream.prefill_seconds + stream.decode_seconds
    began = time.perf_counter()
    while not stream.finished:
        stream.advance()
    further = (time.perf_counter() - began) / (case.output_tokens - 1)
    return first, further, [result.tokens for result in stream.results()], stream


def prefills(lm: LanguageModel, case: GridCase) -> Counter[ProgramKey]:
    """The programs that a case's prompts run through, and how often."""
    engine = lm.start(prompts(case), Sampling(case.output_tokens, ignore_eos=True)).engine
    counted = Counter[ProgramKey]()
    engine.admit()
    while chunks := engine.scheduler.next_chunks():
        counted[engine.runner.prefill_key(chunks)] += 1
        for chunk in chunks:
            engine.scheduler.on_prefilled(chunk)
    return counted


def measured(lm: LanguageModel, case: GridCase, wanted: list[list[int]] | None) -> tuple[dict[str, Any], list[list[int]]]:
    """The record of a model and a case, and its tokens, which are to be `wanted`; None where nothing stands beside them."""
    timed(lm, case)  # compiles
    first, further, tokens, stream = timed(lm, case)
    programs = stream.engine.programs
    prefill = [exchanged(programs.get(key), times) for key, times in prefills(lm, case).items()]
    rounds = programs.get(programs.round_key(None, case.batch, programs.layout.capacity, stream.engine.runner.sampling))
    record = {
        "devices": 1 if lm.placement is None else lm.placement.mesh.size,
        "schedule": None if lm.placement is None else lm.placement.name,
        **case.figures(first, further),
        "same_tokens": None if wanted is None else tokens == wanted,
    }
    for name, counts in (("prefill", prefill), ("step", [exchanged(rounds, 1)])):
        record[f"{name}_collectives"] = sum((kinds for kinds, _ in counts), Counter())
        record[f"{name}_sent_bytes"] = sum(sent for _, sent in counts)
    return record, tokens


def exchanged(program: Any, times: int) -> tuple[Counter[str], int]:
    """Number of collectives of each kind in a program, and the bytes that a device gives to them, `times` over.

    Of a decoding loop those of its body, which is a step.
    """
    kinds: Counter[str] = Counter()
    sent = 0
    for each in read_module(program.as_text()).computations.values():
        for op in each.ops:
            kind = op.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                kinds[kind] += times
                sent += times * sum(array.bytes for name in op.operands for array in each.by_name[name].outputs)
    return kinds, sent
