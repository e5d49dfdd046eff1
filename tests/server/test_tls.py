"""TLS by a certificate of the test's own: real clients, what is no client, certificates of clients, files that are wrong."""

import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from server.conftest import Real, on_a_port
from server.fake import FakeEngine
from tilewright.server.tls import tls_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@dataclass(frozen=True)
class Made:
    """A certificate that is its own authority, and its key."""

    cert: Path
    key: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("tls")
    cert = folder / "cert.pem"
    key = folder / "key.pem"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *kind, *named, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return Made(cert, key)


@pytest.fixture(scope="module")
def real(made: Made) -> Iterator[Real]:
    engine = FakeEngine()
    engine.start()
    with on_a_port(engine, tls=tls_context(made.cert, made.key)) as server:
        yield server
    engine.stop()


def trusting(made: Made) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=made.cert)


def status(url: str, context: ssl.SSLContext) -> int:
    with urllib.request.urlopen(f"{url}/health", context=context, timeout=10) as answer:
        return answer.status


def test_openais_client_comes_over_tls(real: Real, made: Made) -> None:
    assert real.url.startswith("https://127.0.0.1:")
    web = openai.DefaultHttpxClient(verify=trusting(made))
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=20, http_client=web) as client:
        whole = client.completions.create(model="demo", prompt="one two three", max_tokens=6)
        parts = client.completions.create(model="demo", prompt="one two three", max_tokens=6, stream=True)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text != ""


def test_who_does_not_speak_tls_is_let_go_and_keeps_nobody_waiting(real: Real, made: Made) -> None:
    host = "127.0.0.1"
    port = int(real.url.rpartition(":")[2])
    with socket.create_connection((host, port)), socket.create_connection((host, port), timeout=10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert status(real.url, trusting(made)) == 200  # beside one that says nothing
        assert not plain.recv(1000).startswith(b"HTTP")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        status(real.url, ssl.create_default_context())
    assert status(real.url, trusting(made)) == 200


def test_what_is_no_http_is_answered_under_tls_too(real: Real, made: Made) -> None:
    port = int(real.url.rpartition(":")[2])
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    with trusting(made).wrap_socket(raw, server_hostname="localhost") as sent:
        sent.sendall(b"no request\r\n\r\n")
        assert sent.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert status(real.url, trusting(made)) == 200


def test_clients_may_have_to_have_a_certificate(made: Made) -> None:
    engine = FakeEngine()
    engine.start()
    with on_a_port(engine, tls=tls_context(made.cert, made.key, made.cert, 2)) as server:
        known = trusting(made)
        known.load_cert_chain(made.cert, made.key)
        assert status(server.url, known) == 200
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            status(server.url, trusting(made))
    engine.stop()


def test_files_that_cannot_be_used_are_named(made: Made, tmp_path: Path) -> None:
    assert tls_context(None) is None
    with pytest.raises(ValueError, match="--tls: expected cert beside key"):
        tls_context(None, made.key)
    with pytest.raises(ValueError, match=r"--tls cert: .*none\.pem"):
        tls_context(tmp_path / "none.pem")
    with pytest.raises(ValueError, match="--tls cert: expected a certificate and its key"):
        tls_context(made.key, made.cert)
    with pytest.raises(ValueError, match="--tls: expected client_ca and client_cert=optional or required together"):
        tls_context(made.cert, made.key, cert_reqs=2)
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ValueError, match="--tls client_ca: expected certificates in PEM"):
        tls_context(made.cert, made.key, tmp_path / "empty.pem", 1)
