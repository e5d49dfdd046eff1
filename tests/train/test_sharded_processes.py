"""Training in two processes of two devices each: what each brings of a batch, and a checkpoint that both write."""

from contextlib import closing
from pathlib import Path

import jax
import numpy as np

from parallel.processes import run_two
from tilewright.models import decoder
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.checkpoint import Checkpoints
from train.sharded_support import CONFIGS, counted, placed


def test_two_processes_divide_batches_and_write_a_checkpoint_that_one_reads(tmp_path: Path):
    said = run_two(Path(__file__).with_name("sharded_process.py"), tmp_path)
    for text in said:
        assert "batches divided" in text, text
        assert "checkpoint read" in text, text
        assert "refused expected the same options and data in all processes, found others (stream.files: process 0" in text, (
            text
        )
    assert len({line for text in said for line in text.splitlines() if line.startswith("tokenizer")}) == 1
    parts = tmp_path / "3" / "state"
    assert {path.name for path in parts.glob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    whole = counted("qwen2")
    shardings = placed("qwen2", 8, 1, FullyShardedPlan()).shardings(decoder.declare(CONFIGS["qwen2"]))
    with closing(Checkpoints(str(tmp_path))) as checkpoints:
        found = checkpoints.load(3, jax.device_put(whole, shardings), {"run": 1})
    jax.tree.map(np.testing.assert_array_equal, found.state, whole)
