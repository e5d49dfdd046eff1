"""Fetching models with the real hub client from a local server."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from models.hub_server import HubServer, Repo
from tilewright.llm import diffusion_model, language_model
from tilewright.models.hub import DRAFT_ADAPTER, resolve

OLD = "0" * 39 + "1"
NEW = "0" * 39 + "2"
WEIGHTS = bytes(range(256)) * 1000
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "quantize_config.json": b'{"bits": 4}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": b'{"weight_map": {}}',
}
REST = {
    "README.md": b"a card",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"a second copy",
    "consolidated.safetensors": b"a third",
    "consolidated-00001-of-00002.safetensors": b"a fourth",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with two models, set as the client's endpoint, with a cache of its own."""
    model = Repo({OLD: {**FILES, "config.json": b"{}"}, NEW: FILES | REST}, {"main": NEW, "v1": OLD})
    locked = Repo({NEW: FILES}, {"main": NEW}, gated=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubServer({"org/model": model, "org/locked": locked}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetches_only_what_a_model_needs(hub: HubServer):
    assert contents(resolve("org/model")) == FILES
    assert not any(name in request for request in hub.requests for name in REST)


def test_second_time_asks_only_where_the_branch_stands(hub: HubServer):
    first = resolve("org/model")
    hub.requests.clear()
    assert resolve("org/model") == first
    assert set(hub.requests) == {"GET /api/models/org/model", "GET /api/models/org/model/revision/main"}


def test_cached_commit_needs_no_request(hub: HubServer):
    first = resolve("org/model", NEW)
    hub.requests.clear()
    assert resolve("org/model", NEW) == first
    assert hub.requests == []


def test_branch_that_moved_is_fetched_anew(hub: HubServer):
    hub.repos["org/model"].refs["main"] = OLD
    assert contents(resolve("org/model"))["config.json"] == b"{}"
    hub.repos["org/model"].refs["main"] = NEW
    hub.requests.clear()
    assert contents(resolve("org/model")) == FILES
    fetched = [request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /org/model/resolve")]
    assert fetched == ["config.json"]  # the other files are the same blobs


PARTS = {"vocab.json": b"{}", "merges.txt": b"#version: 0.2\n", "added_tokens.json": b"{}", "special_tokens_map.json": b"{}"}


def test_parts_of_a_tokenizer_are_fetched(hub: HubServer):
    files = {name: data for name, data in FILES.items() if name != "tokenizer.json"} | PARTS
    hub.repos["org/model"].commits[NEW] = files | {"tokenization_dream.py": b"code"}
    assert contents(resolve("org/model")) == files


def test_the_adapter_for_drafting_is_fetched(hub: HubServer):
    adapter = {f"{DRAFT_ADAPTER}/adapter_config.json": b"{}", f"{DRAFT_ADAPTER}/adapter_model.safetensors": WEIGHTS}
    hub.repos["org/model"].commits[NEW] = FILES | REST | adapter | {f"{DRAFT_ADAPTER}/README.md": b"a card"}
    assert contents(resolve("org/model")) == FILES | adapter
    assert contents(resolve("org/model", NEW)) == FILES | adapter


def test_a_check_comes_before_the_weights(hub: HubServer):
    found: list[dict[str, bytes]] = []

    def refuse(folder: Path) -> None:
        found.append(contents(folder))
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        resolve("org/model", check=refuse)
    small = {name: data for name, data in FILES.items() if "safetensors" not in name}
    assert found == [small]
    assert not any("safetensors" in request for request in hub.requests if "/resolve/" in request)
    assert contents(resolve("org/model", check=lambda folder: found.append(contents(folder)))) == FILES
    assert found == [small, small]


@pytest.mark.parametrize("load", [language_model.load, diffusion_model.load])
def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(hub: HubServer, load: Callable[[str], object]):
    kind = b"llama" if load is language_model.load else b"Dream"
    hub.repos["org/model"].commits[NEW] = {**FILES, "config.json": b'{"model_type": "%s"}' % kind}
    del hub.repos["org/model"].commits[NEW]["tokenizer.json"]
    with pytest.raises(ValueError, match=r"expected tokenizer\.json, or .*; found no vocab\.json and no merges\.txt"):
        load("org/model")
    assert not any("safetensors" in request for request in hub.requests if "/resolve/" in request)


def test_named_revision(hub: HubServer):
    assert contents(resolve("org/model", "v1"))["config.json"] == b"{}"
    assert contents(resolve("org/model"))["config.json"] == FILES["config.json"]


def test_resumes_where_the_connection_broke(hub: HubServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # the client resumes at a whole chunk, by default of 10 MB
    hub.cut["model-00001-of-00002.safetensors"] = 120_000
    assert contents(resolve("org/model")) == FILES
    assert hub.ranges == ["bytes=100000-"]


def test_fetch_that_failed_goes_on_with_the_missing_files(hub: HubServer):
    shard = "model-00002-of-00002.safetensors"
    hub.refused.add(shard)
    with pytest.raises(ValueError, match="org/model"):
        resolve("org/model")
    hub.refused.clear()
    hub.requests.clear()
    assert contents(resolve("org/model")) == FILES
    assert [request for request in hub.requests if request.startswith("GET /org")] == [f"GET /org/model/resolve/{NEW}/{shard}"]


def test_progress_bar_counts_the_bytes(hub: HubServer):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    resolve("org/model", console=console)
    total = sum(map(len, FILES.values())) / 1000
    assert "fetching org/model" in out.getvalue()
    assert re.search(rf"{total:.1f}/{total:.1f}\s+kB", out.getvalue())


def test_quiet_without_a_console(hub: HubServer, capfd: pytest.CaptureFixture[str]):
    resolve("org/model")
    assert capfd.readouterr() == ("", "")


def test_local_folder_is_returned_as_it_is(tmp_path: Path):
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"revision 'v1' was given, but .* is a local folder"):
        resolve(str(tmp_path), "v1")


def test_what_comes_with_the_package_has_no_revision():
    assert (resolve("demo") / "config.json").is_file()
    with pytest.raises(ValueError, match=r"revision 'v1' was given, but 'demo' comes with the package"):
        resolve("demo", "v1")


@pytest.mark.parametrize("source", ["", "./missing", "/nowhere/missing", "a/b/c", "org/na me", "org/.."])
def test_neither_folder_nor_id(source: str):
    with pytest.raises(
        ValueError, match=rf"^expected a folder or a hub id \(name or org/name\), found {re.escape(repr(source))}$"
    ):
        resolve(source)


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_missing_repository(hub: HubServer):
    with pytest.raises(ValueError, match="has no model 'org/missing'") as error:
        resolve("org/missing")
    assert one_line(error).startswith(hub.url)


def test_missing_revision(hub: HubServer):
    with pytest.raises(ValueError, match=r"'org/model' at .* has no revision 'v9'") as error:
        resolve("org/model", "v9")
    one_line(error)


def test_gated_repository(hub: HubServer):
    with pytest.raises(
        ValueError, match=r"'org/locked' is gated: ask for access at .*/org/locked, then log in or set HF_TOKEN"
    ):
        resolve("org/locked")


def test_server_error_names_its_status(hub: HubServer):
    hub.status = 403
    with pytest.raises(ValueError, match="answered HTTP 403 when asked for 'org/model'; check HF_TOKEN") as error:
        resolve("org/model")
    one_line(error)


def test_no_network_and_not_cached(hub: HubServer):
    hub.stop()
    with pytest.raises(
        ValueError, match=r"cannot be reached, and 'org/model' is neither a local folder .* in the cache"
    ) as error:
        resolve("org/model")
    one_line(error)


def test_no_network_but_cached(hub: HubServer):
    first = resolve("org/model")
    hub.stop()
    out = io.StringIO()
    assert resolve("org/model", console=Console(file=out, width=200)) == first
    assert "cannot be reached: using org/model from the cache" in out.getvalue()


def test_no_network_and_partly_cached(hub: HubServer):
    (resolve("org/model") / "model-00002-of-00002.safetensors").unlink()
    hub.stop()
    with pytest.raises(ValueError, match=r"nor complete in the cache"):
        resolve("org/model")


def test_a_name_that_is_nearly_one_of_ours(hub: HubServer):
    """The names come first, for a network that cannot be reached is not what is wrong."""
    pattern = r"^expected a folder, a Hugging Face id or one of demo.*found 'smolm2-135m': did you mean 'smollm2-135m'\? "
    with pytest.raises(ValueError, match=pattern) as error:
        resolve("smolm2-135m")
    one_line(error)
    with pytest.raises(ValueError, match=r"^expected a folder, a Hugging Face id or one of a, b, found 'other': http"):
        resolve("other", names=("a", "b"))
    with pytest.raises(ValueError, match=r"did you mean 'smollm2-135m'\? http"):
        resolve("HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(ValueError, match=r"^http"):
        resolve("org/other")


def test_environment_of_a_new_process(hub: HubServer, tmp_path: Path):
    """`HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE` as a user sets them."""
    code = "import sys; from tilewright.models.hub import resolve; print(resolve(sys.argv[1]))"
    home = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    home.pop("HF_HUB_CACHE", None)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**home, "PYTHONPATH": os.pathsep.join(sys.path), **more}
        return subprocess.run([sys.executable, "-c", code, "org/model"], env=env, capture_output=True, text=True, check=False)

    first = run()
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert contents(folder) == FILES
    hub.requests.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == first.stdout
    assert hub.requests == []
