"""Settings of every test: eight CPU devices, strict dtypes, shape annotations checked."""

import os
import sys

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set its platform and its device count")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jaxtyping
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

# From here on, every import of the package checks its annotations: wrong shapes fail where they enter.
jaxtyping.install_import_hook("tilewright", "typecheck.check")

# The same examples on every run and every machine; the first example of a property compiles, so no deadline.
settings.register_profile("tilewright", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("tilewright")
