"""Times models with blocks: finished blocks are stored in passes of their own, or with the next block.

    python benchmarks/stored_blocks.py [--lengths 4 --lengths 16] [--steps 2] [--rows 1 --rows 8] [--json FILE]

Weights are random, of SmolLM2-135M's shape with SDAR's blocks: each block takes `--steps` passes, whatever its text. Rows begin
together with prompts of different lengths, so that they are in mixed phases. `diffusion.blocks.least_share` has the rule.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from cyclopts import App

import tilewright as tw
from tilewright.cli.options import Numbers
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, spread
from tilewright.diffusion import blocks
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.models import decoder, params
from tilewright.models.config import MaskedBlocks
from tilewright.models.hub import PACKAGED
from tilewright.models.published_configs import MODELS
from tilewright.models.tokenizer import load_tokenizer
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable

CONFIG = replace(MODELS["smollm2-135m"], family="sdar", max_position_embeddings=512)
MASK = 1
WAYS: dict[str, float | None] = {"by themselves": None, "with the next block": 0.0}
"""Share of rows with a block to store from which a pass runs two blocks; None for never."""
METRICS = (
    Metric("length", head="block"),
    Metric("rows", head="rows"),
    Metric("way", head="blocks are stored", words=True),
    Metric("passes", head="passes"),
    Metric("ms_per_pass", head="ms per pass", form=".2f"),
    Metric("tokens_per_s", head="tokens/s", form=",.0f"),
    Metric("speedup", head="speedup", form=".2f"),
    Metric("least", head="least", form=".2f"),
    Metric("most", head="most", form=".2f"),
)


def model_of(weights: Any, length: int, rows: int) -> LanguageModel:
    """Returns a model with blocks of this length and programs for that many rows."""
    config = replace(CONFIG, masked_blocks=MaskedBlocks(MASK, length, causal=False))
    table = ShapeTable(batches=(rows,), capacities=(512,), chunks=(64,))
    return LanguageModel(config, weights, load_tokenizer(PACKAGED["demo-blocks"]), "bfloat16", table=table)


def answer(lm: LanguageModel, share: float | None, prompts: list[list[int]], tokens: int, steps: int) -> tuple[int, float]:
    """Generates tokens; returns the number of passes and the seconds without prompts."""
    rule = blocks.least_share
    blocks.least_share = lambda target, blocks, rows: share  # read where programs are compiled
    try:
        options = tw.BlockDenoising("low_confidence_static", steps=steps)
        with lm.start(prompts, Sampling(tokens, ignore_eos=True), denoising=options) as stream:
            while not stream.finished:
                stream.advance()
        return stream.rounds, stream.decode_seconds
    finally:
        blocks.least_share = rule


def main(
    *,
    lengths: Numbers = (4, 16),
    steps: int = 2,
    rows: Numbers = (1, 8),
    tokens: int = 192,
    repetitions: int = 7,
    json: JsonFile = None,
) -> None:
    """Times models with blocks, whose finished blocks are stored in two ways.

    Args:
        lengths: positions of a block.
        steps: passes that denoise a block.
        rows: numbers of rows.
        tokens: new tokens of each row.
        repetitions: number of timed runs.
        json: file for all figures.
    """
    console = human_console(json)
    weights = params.initialise(decoder.declare(CONFIG), jax.random.key(0), jax.numpy.bfloat16)
    records = []
    with progress(console, len(lengths) * len(rows) * len(WAYS) * (repetitions + 1), "runs") as advance:
        for length in lengths:
            for count in rows:
                prompts = [list(range(2, 18 + n)) for n in range(count)]
                runs = {
                    name: partial(answer, model_of(weights, length, count), share, prompts, tokens, steps)
                    for name, share in WAYS.items()
                }
                found = alternate(runs, repetitions, advance, warm=True)
                base = [seconds for _, seconds in found["by themselves"]]
                for name, results in found.items():
                    speedups = spread([one / seconds for one, (_, seconds) in zip(base, results, strict=True)])
                    seconds = spread([seconds for _, seconds in results]).median
                    records.append(
                        {
                            "length": length,
                            "rows": count,
                            "way": name,
                            "passes": results[0][0],
                            "ms_per_pass": 1000 * seconds / results[0][0],
                            "tokens_per_s": count * tokens / seconds,
                            "speedup": speedups.median,
                            "least": speedups.least,
                            "most": speedups.most,
                        }
                    )
    title = f"SmolLM2-135M's shape, bfloat16, {steps} passes a block and its storing, {chip_name()}"
    print_table(console, FigureTable(title, "", {"": records}, METRICS))
    write_json(json, {"chip": chip_name(), "jax": jax.__version__, "steps": steps, "tokens": tokens, "records": records})


if __name__ == "__main__":
    app = App(help=__doc__)
    app.default(main)
    app()
