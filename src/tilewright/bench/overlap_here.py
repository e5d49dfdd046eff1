"""Measurement of `bench overlap` on devices that are present: a small Llama 3 model through the engine's programs.

Devices simulated on one CPU share its cores. There, the results of interest are equal tokens under every schedule and device
count, and the number and bytes of collectives. Times are reported as well.
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
"""Llama 3 8B at a sixteenth of its width, with the same MLP ratio of 3.5 and enough key/value heads for 8 devices."""


@cache
def drawn() -> DecoderParams:
    """Returns random weights, larger than those for training, so that tokens vary."""
    params = jax.jit(partial(initialise, decoder.declare(CONFIG)))(jax.random.key(0))
    return jax.tree.map(lambda w: 4 * w if w.ndim == 2 else w, params)


def model(devices: int, schedule: str | None, compiler_options: bool = False) -> LanguageModel:
    """Returns the model with random weights, the same for any number of devices.

    Raises:
        ValueError: There are too few devices, or the model cannot be sharded over them.
    """
    mesh = None if devices == 1 else make_mesh({"tp": devices})
    words = Tokenizer(WordLevel({f"t{n} ": n for n in range(CONFIG.vocab_size)}, unk_token="t0 "))
    placement = placement_over(CONFIG, mesh, schedule, compiler_options and mesh is not None)
    return LanguageModel(CONFIG, drawn(), words, kernels="xla", placement=placement)


def prompts(case: GridCase) -> list[list[int]]:
    rng = np.random.default_rng(case.input_tokens)
    return rng.integers(CONFIG.vocab_size, size=(case.batch, case.input_tokens)).tolist()


def timed(lm: LanguageModel, case: GridCase) -> tuple[float, float, list[list[int]], Stream]:
    """Returns seconds to the first token, seconds per further token, the tokens of each row, and the stream.

    The first decoding step processes the last prompt token, so the first token takes the prefill and one step.
    """
    stream = lm.start(prompts(case), Sampling(case.output_tokens, ignore_eos=True))
    stream.prefill()
    stream.advance(1)
    first = stream.prefill_seconds + stream.decode_seconds
    started_at = time.perf_counter()
    while not stream.finished:
        stream.advance()
    further = (time.perf_counter() - started_at) / (case.output_tokens - 1)
    return first, further, [result.tokens for result in stream.results()], stream


def prefills(lm: LanguageModel, case: GridCase) -> Counter[ProgramKey]:
    """Returns the programs that prefill a case's prompts, with their number of runs."""
    engine = lm.start(prompts(case), Sampling(case.output_tokens, ignore_eos=True)).engine
    counted = Counter[ProgramKey]()
    engine.admit()
    while chunks := engine.scheduler.next_chunks():
        counted[engine.runner.prefill_key(chunks)] += 1
        for chunk in chunks:
            engine.scheduler.on_prefilled(chunk)
    return counted


def measured(lm: LanguageModel, case: GridCase, expected: list[list[int]] | None) -> tuple[dict[str, Any], list[list[int]]]:
    """Returns the record of a case and its tokens, compared with `expected` (None: no comparison)."""
    timed(lm, case)  # compiles the programs
    first, further, tokens, stream = timed(lm, case)
    programs = stream.engine.decoding.programs
    prefill = [exchanged(programs.get(key), times) for key, times in prefills(lm, case).items()]
    rounds = programs.get(programs.round_key(None, case.batch, programs.layout.capacity, stream.engine.runner.sampling))
    record = {
        "devices": 1 if lm.placement is None else lm.placement.mesh.size,
        "schedule": None if lm.placement is None else lm.placement.name,
        **case.figures(first, further),
        "same_tokens": None if expected is None else tokens == expected,
    }
    for name, counts in (("prefill", prefill), ("step", [exchanged(rounds, 1)])):
        record[f"{name}_collectives"] = sum((kinds for kinds, _ in counts), Counter())
        record[f"{name}_sent_bytes"] = sum(sent for _, sent in counts)
    return record, tokens


def exchanged(program: Any, times: int) -> tuple[Counter[str], int]:
    """Returns the number of collectives of each kind in a program, and the bytes that a device sends, multiplied by `times`.

    For a decoding loop, counts the loop body, which is one step.
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
