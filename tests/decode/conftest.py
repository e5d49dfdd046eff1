"""What tests of decoding may ask for."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """For tests of rules and not of numbers: code that is slower to run and quicker to make."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
