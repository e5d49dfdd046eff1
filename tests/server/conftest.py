"""Servers for tests: an application without a network, and a real one on a port of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

import tilewright as tw
from server.fake import FakeEngine
from tilewright.models.chat import ChatTemplate
from tilewright.runtime.engine import Engine
from tilewright.server.api import Api, ServerOptions
from tilewright.server.app import make_app
from tilewright.server.connections import MOST_CONNECTIONS, HttpServer
from tilewright.server.run import listen, server_url

TEMPLATE = ChatTemplate.compiled(
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}\n{% endfor %}",
    "a test's template",
)


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compiles: None) -> None:
    """What is tested here are rules."""


Client = Callable[..., TestClient]


@pytest.fixture
def client() -> Iterator[Client]:
    """`client(FakeEngine(...), api_keys=..., ...)`: the application without a network; `started=False` while it warms."""
    engines: list[FakeEngine] = []

    def made(engine: FakeEngine | None = None, started: bool = True, **options: Any) -> TestClient:
        fake = engine or FakeEngine()
        if started and not fake.ready:
            fake.start()
        engines.append(fake)
        api = Api(fake, ServerOptions(**{"name": "demo", "version": tw.__version__, "template": TEMPLATE, **options}))
        return TestClient(make_app(api), raise_server_exceptions=False)

    yield made
    for fake in engines:
        fake.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[TestClient]:
    """Application shared by tests that leave no state in it."""
    engine = FakeEngine(context=256)
    engine.start()
    yield TestClient(make_app(Api(engine, ServerOptions("demo", tw.__version__, TEMPLATE))), raise_server_exceptions=False)
    engine.stop()


@dataclass(frozen=True)
class Real:
    """A server on a port."""

    url: str
    engine: Any
    api: Api
    http: HttpServer


@contextmanager
def on_a_port(engine: Engine, most: int = MOST_CONNECTIONS, **options: Any) -> Iterator[Real]:
    """Serves an engine that is ready, in a thread."""
    api = Api(engine, ServerOptions(**{"name": "demo", "version": tw.__version__, "template": TEMPLATE, **options}))
    http = HttpServer(make_app(api), most, api.options.tls)
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve([listening])), daemon=True)
    thread.start()
    yield Real(server_url(listening, api.options.tls is not None), engine, api, http)
    http.should_exit = True
    thread.join(20)
    assert not thread.is_alive(), "the server did not end"
    api.close()
