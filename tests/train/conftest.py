"""These tests compile the same small programs again and again, and run each only briefly."""

from collections.abc import Iterator

import pytest

from train.support import cheap_compilation


@pytest.fixture(scope="module", autouse=True)
def _cached_compilation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cheap_compilation(tmp_path_factory.getbasetemp() / "compiled"):
        yield
