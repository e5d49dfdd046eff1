"""One of two processes that initialise, save and load a model together; `test_shards.py` starts both.

Usage: python shards_process.py COORDINATOR INDEX FOLDER
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.counting import READ, CountedFile
from tilewright.models import checkpoint, stored
from tilewright.models.checkpoint import byte_progress, load_decoder, save_params
from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
from tilewright.models.params import abstract, initialise
from tilewright.parallel.mesh import initialise_processes, make_mesh
from tilewright.parallel.sharding import FULLY_SHARDED_TENSOR_PARALLEL, TENSOR_PARALLEL, shardings

index = int(sys.argv[2])
folder = Path(sys.argv[3])
initialise_processes(sys.argv[1], 2, index, timeout=60)

config = DecoderConfig(
    family="llama", vocab_size=24, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6
)
specs = declare(config)
mesh = make_mesh({"fsdp": 2, "tp": 2})  # the first process has the first row of devices, and so the first half of "fsdp"
both = shardings(specs, mesh, FULLY_SHARDED_TENSOR_PARALLEL)
params = initialise(specs, jax.random.key(0), jnp.bfloat16, both)
save_params(folder, config_to_hf(config), specs, params, jnp.bfloat16)
assert (folder / "model.safetensors").is_file(), "every process returns once the first one has written"

bar = byte_progress(None)
setattr(stored, "SafetensorsFile", CountedFile)  # noqa: B010 (all files are opened by it)
setattr(checkpoint, "byte_progress", lambda console: bar)  # noqa: B010
_, loaded = load_decoder(folder, jnp.bfloat16, shard=lambda specs: shardings(specs, mesh, FULLY_SHARDED_TENSOR_PARALLEL))
read = sum(size for _, size in READ)
total = sum(2 * leaf.size for leaf in jax.tree.leaves(abstract(specs)))
assert 2 * read == total, f"process {index} read {read} of {total} bytes, not half"
assert (bar.tasks[0].total, bar.tasks[0].completed) == (read, read), "the bar counts what this process reads"

READ.clear()
across = make_mesh({"tp": 2, "fsdp": 2})  # here each process holds one shard of "tp", twice
_, parallel = load_decoder(folder, jnp.bfloat16, shard=lambda specs: shardings(specs, across, TENSOR_PARALLEL))
norms = sum(2 * leaf.size for leaf in jax.tree.leaves(abstract(specs)) if len(leaf.shape) == 1)
assert 2 * sum(size for _, size in READ) == total + norms, "half of every matrix, every norm, and nothing for a replica"

_, whole = load_decoder(folder, jnp.bfloat16)
for found in (params, loaded, parallel):
    for value, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        for shard in value.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(wanted)[shard.index])
print("equal to one process")
