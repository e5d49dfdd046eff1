"""One of two processes that divide batches and write a checkpoint together; `test_sharded_processes.py` starts both.

Usage: python sharded_process.py COORDINATOR INDEX FOLDER
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tilewright.parallel.mesh import initialise_processes

# What is imported below asks for devices.
initialise_processes(sys.argv[1], 2, int(sys.argv[2]), timeout=60)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from tilewright.cli.train import broadcast_tokenizer  # noqa: E402
from tilewright.models import decoder  # noqa: E402
from tilewright.parallel.exchanges import FullyShardedPlan  # noqa: E402
from tilewright.parallel.mesh import gather_texts  # noqa: E402
from tilewright.train.checkpoint import Checkpoints  # noqa: E402
from tilewright.train.data import Document, train_tokenizer  # noqa: E402
from tilewright.train.step import ONE_DEVICE, TrainingPlacement, require_one_run  # noqa: E402
from tilewright.train.text import TextOptions, Windows  # noqa: E402
from train.sharded_support import CONFIGS, counted, placed  # noqa: E402
from train.support import random_stream  # noqa: E402

assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
index = jax.process_index()
folder = Path(sys.argv[3])

OPTIONS = TextOptions(steps=4, batch_size=8, sequence_length=8)


def batch_of(placement: TrainingPlacement) -> tuple[np.ndarray, ...]:
    rows = placement.local_rows(OPTIONS.batch_size)
    windows = Windows(random_stream(400), random_stream(200, seed=1), 9, OPTIONS, rows)
    return next(windows.batches(2))


def divided(placement: TrainingPlacement) -> Any:
    def place(x: np.ndarray, sharding: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    return jax.tree.map(place, counted("qwen2"), placement.shardings(decoder.declare(CONFIGS["qwen2"])))


def require_shards(found: Any, whole: Any) -> None:
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(wanted)[shard.index])


over_both, over_rows, over_columns = (placed("qwen2", *sizes, FullyShardedPlan()) for sizes in ((2, 2), (4, 1), (1, 4)))
for sharded, rows in ((over_both, 4), (over_rows, 4), (over_columns, 8)):
    cut = batch_of(sharded)
    assert len(cut[0]) == rows
    require_shards(sharded.place(cut), batch_of(ONE_DEVICE))
print("batches divided")

with closing(Checkpoints(str(folder))) as checkpoints:
    checkpoints.save(divided(over_both), 3, {"curve.loss": np.array([2.5], np.float32)}, {"run": 1})
with closing(Checkpoints(str(folder))) as checkpoints:
    found = checkpoints.load(3, divided(over_rows), {"run": 1})
require_shards(found.state, counted("qwen2"))
assert (found.step, found.metrics["curve.loss"].tolist()) == (3, [2.5])
print("checkpoint read")

assert gather_texts("a" * (index + 1)) == ["a", "aa"]
try:
    require_one_run({"seed": 0, "stream": {"files": "one" if index else "another"}})
except ValueError as error:
    print("refused", error)

own_words = ["one two three " * 9, "one two three four five six " * 9][index]
agreed = broadcast_tokenizer(train_tokenizer([Document(own_words)], 300))
print("tokenizer", agreed.get_vocab_size(), len(agreed.encode("one two three four").ids))
