"""Settings of the oracle tests: transformers and torch warn about themselves, which is not ours to hold."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))
