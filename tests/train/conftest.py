"""These tests compile the same small programs again and again, and run each only briefly."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compiles: None) -> None:
    """What is tested here are rules."""
