"""One of two processes that run a decoder under every schedule; `test_strategies_processes.py` starts both.

Usage: python strategies_process.py COORDINATOR INDEX forward|gradient
"""

import sys

import jax
import numpy as np

from parallel.test_tensor_parallel import CONFIGS, SCHEDULES, alone, close, divided, tokens
from tilewright.parallel.mesh import initialise_processes

initialise_processes(sys.argv[1], 2, int(sys.argv[2]), timeout=60)
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)

config = CONFIGS["llama"]
wanted, gradient = alone("llama", 4, 8)
for name in ("sync", "sequence", "ring", "domino"):
    run, params = divided("llama", SCHEDULES[name], 4)
    if sys.argv[3] == "forward":
        close(jax.tree.map(np.asarray, jax.jit(run)(params, tokens(4, 8))), wanted, config)
        print(f"{name} equal to one device")
        continue
    found, parts = jax.jit(jax.value_and_grad(run, has_aux=True))(params, tokens(4, 8))
    close(jax.tree.map(np.asarray, found), wanted, config)
    for part, whole in zip(jax.tree.leaves(parts), jax.tree.leaves(gradient), strict=True):
        largest = float(np.max(np.abs(whole)))
        for shard in part.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(whole)[shard.index], rtol=0, atol=1e-4 * largest)
    print(f"{name} equal to one device")
