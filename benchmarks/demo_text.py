"""Training text and held-out text of the packaged demo models (`demo_models.py`).

Training text: the source of the Python standard library and of the project's permissively licensed dependencies, cleaned by
`clean_source.py`, and GSM8K's training questions with their answers. Held out: `HELD_OUT_MODULES` of the library, a tenth of
the dependencies' modules, and a twentieth of the questions.
"""

import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from clean_source import Cleaner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer

from tilewright.models.records import read_text
from tilewright.train.data import Document, TokenStream, encode_documents, end_of_text, read_documents

HELD_OUT_MODULES = frozenset(
    "calendar configparser csv fractions heapq json mailbox queue sched shutil statistics textwrap wsgiref zipfile".split()
)
"""Held-out modules and packages of the standard library."""

NOT_CODE = frozenset(
    "site-packages test tests testing _test encodings pydoc_data __phello__ __pycache__ _vendor vendor third_party".split()
)
"""Folders that are skipped: tables, tests, installed packages and vendored packages."""

EXTRAS = ("train", "serve", "graph", "neuron")
"""Extras of the project whose dependencies are read."""

PERMISSIVE = re.compile(
    r"MIT( License)?|BSD( License)?|BSD-[23]-Clause|0BSD|Apache-2\.0|Apache( Software)? License( 2\.0)?|Apache 2\.0|ISC"
    r"|Zlib|CC0-1\.0|PSF-2\.0|Python-2\.0|Python Software Foundation License",
    re.IGNORECASE,
)

WEIGHTS = {"library": 3, "dependencies": 1, "questions": 4}
"""Repetitions of each kind of document in the training text."""


def library_sources() -> tuple[list[Path], list[Path]]:
    """Lists the standard library's source files on this machine: training files, and files of held-out modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    trained = []
    held_out = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if NOT_CODE.intersection(parts):
            continue
        (held_out if parts[0].removesuffix(".py") in HELD_OUT_MODULES else trained).append(path)
    return trained, held_out


@dataclass(frozen=True)
class Dependency:
    """An installed distribution.

    Attributes:
        licence: licence from the metadata, an SPDX expression or the names of classifiers; "" if the metadata name none.
        sources: pairs of module name and Python file, without tests and vendored packages.
    """

    name: str
    version: str
    licence: str
    sources: tuple[tuple[str, Path], ...]

    @property
    def permissive(self) -> bool:
        """True if every licence matches `PERMISSIVE`."""
        names = [name.strip(" ()") for name in re.split(r"\bAND\b|\bOR\b|;", self.licence)]
        return all(PERMISSIVE.fullmatch(name) for name in names)


def licence_of(found: Distribution) -> str:
    """Returns the licence in the metadata: the SPDX expression, else the classifiers, else the field `License`."""

    def named(field: str) -> list[str]:
        return found.metadata.get_all(field) or []

    classifiers = [c.rpartition(" :: ")[2] for c in named("Classifier") if c.startswith("License :: ")]
    free = [text.strip().split("\n")[0] for text in named("License")]
    return "; ".join(named("License-Expression") or classifiers or free)


def module_sources(found: Distribution) -> Iterator[tuple[str, Path]]:
    for file in sorted(found.files or [], key=str):
        is_test = file.name.startswith("test_") or file.name.endswith("_test.py")
        if file.suffix == ".py" and not is_test and not {*NOT_CODE, ".."}.intersection(file.parts):
            path = Path(str(file.locate()))
            if path.is_file():
                yield ".".join(file.with_suffix("").parts).removesuffix(".__init__"), path


def dependencies(project: str = "tilewright", extras: Sequence[str] = EXTRAS) -> list[Dependency]:
    """Lists the installed direct and indirect dependencies of `project` with `extras`, sorted by name.

    Requirements of other systems, Python versions and extras are ignored.
    """
    root = canonicalize_name(project)
    waiting = [(root, frozenset(extras))]
    visited = set()
    installed = {}
    while waiting:
        name, wanted_extras = waiting.pop()
        if (name, wanted_extras) in visited:
            continue
        visited.add((name, wanted_extras))
        try:
            installed[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for need in map(Requirement, installed[name].requires or []):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in wanted_extras or ("",)):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    installed.pop(root, None)
    return [
        Dependency(name, found.version, licence_of(found), tuple(module_sources(found)))
        for name, found in sorted(installed.items())
    ]


def is_held_out(module: str) -> bool:
    """Returns True if a dependency's module is held out: one in ten, by the hash of its name."""
    return int.from_bytes(sha256(module.encode()).digest()[:4], "big") % 10 == 0


@dataclass(frozen=True)
class Documents:
    """Documents of the demo by kind: "library", "dependencies", "questions"."""

    trained: dict[str, list[Document]]
    held_out: dict[str, list[Document]]
    cleaner: Cleaner
    needed: list[Dependency]

    def metadata(self) -> dict[str, Any]:
        """Counts, weights, removed lines and dependencies, for `--json` and the model card."""
        listed = [[one for one in self.needed if one.permissive is wanted] for wanted in (True, False)]
        kept, left_out = ([f"{one.name} {one.version} ({one.licence})" for one in part] for part in listed)
        return {
            "documents": {kind: len(part) for kind, part in self.trained.items()},
            "held_out_documents": {kind: len(part) for kind, part in self.held_out.items()},
            "weights": WEIGHTS,
            "lines": self.cleaner.kept,
            "left_out": dict(sorted(self.cleaner.left_out.items())),
            "dependencies": kept,
            "dependencies_left_out": left_out,
        }


def cleaned(cleaner: Cleaner, paths: Sequence[Path]) -> list[Document]:
    """Cleans each source into a document; skips sources that are empty afterwards or not UTF-8."""
    documents = []
    for path in paths:
        try:
            text = cleaner.clean(read_text(path))
        except ValueError:
            cleaner.left_out["file, not UTF-8"] += 1
            continue
        if text:
            documents.append(Document(text))
    return documents


def demo_documents(gsm8k: Path, held_out_only: bool = False) -> Documents:
    """Reads and cleans the demo's documents.

    Held-out sources are cleaned first, so that their stretches are removed from the training text.

    Args:
        gsm8k: JSONL file of GSM8K's training questions.
        held_out_only: leave the training text empty, which saves cleaning it.
    """
    questions = read_documents([gsm8k])
    cleaner = Cleaner()
    needed = dependencies()
    cut = len(questions) // 20
    library = library_sources()
    sources = [source for one in needed if one.permissive for source in one.sources]

    def documents(held_out: bool) -> dict[str, list[Document]]:
        modules = [path for module, path in sources if is_held_out(module) is held_out]
        code = {"library": cleaned(cleaner, library[held_out]), "dependencies": cleaned(cleaner, modules)}
        return {**code, "questions": questions[:cut] if held_out else questions[cut:]}

    held_out = documents(True)
    return Documents({} if held_out_only else documents(False), held_out, cleaner, needed)


@dataclass(frozen=True)
class DemoText:
    """Tokenised text of the demo.

    Attributes:
        held_out: held-out text by kind, as in `Documents`.
        metadata: `Documents.metadata()`.
    """

    tokenizer: Tokenizer
    trained: TokenStream
    held_out: dict[str, TokenStream]
    metadata: dict[str, Any]

    @property
    def end(self) -> int:
        return end_of_text(self.tokenizer)

    def summary(self) -> str:
        """Describes the sizes of the text and what was left out."""
        held_out = ", ".join(f"{len(stream.tokens):,} of {kind}" for kind, stream in self.held_out.items())
        left_out = ", ".join(f"{reason} {lines:,}" for reason, lines in self.metadata["left_out"].items())
        return (
            f"{len(self.trained.tokens):,} training tokens; held out: {held_out}\n"
            f"left out (lines): {left_out}\n"
            f"dependencies: {', '.join(self.metadata['dependencies'])}\n"
            f"left out for their licence: {', '.join(self.metadata['dependencies_left_out']) or 'none'}"
        )

    @property
    def watched(self) -> TokenStream:
        """Held-out text for the loss during training: pieces of each kind, interleaved."""
        return interleaved(list(self.held_out.values()))


def interleaved(streams: Sequence[TokenStream], piece: int = 2048) -> TokenStream:
    """Interleaves equally long parts of the streams in pieces of `piece` tokens."""
    pieces = min(max(1, len(stream.tokens) // piece) for stream in streams)
    parts = [(stream, slice(n * piece, (n + 1) * piece)) for n in range(pieces) for stream in streams]
    tokens, flags = ([getattr(stream, name)[part] for stream, part in parts] for name in ("tokens", "in_loss"))
    return TokenStream(np.concatenate(tokens), np.concatenate(flags))


def held_out_text(documents: Documents, tokenizer: Tokenizer) -> dict[str, TokenStream]:
    """Tokenises each kind of held-out document."""
    end = end_of_text(tokenizer)
    return {kind: encode_documents(tokenizer, part, end) for kind, part in documents.held_out.items()}


def prepare_text(gsm8k: Path, tokenizer: Tokenizer) -> DemoText:
    """Reads, cleans and tokenises the demo's text; training documents are repeated by `WEIGHTS` and shuffled."""
    documents = demo_documents(gsm8k)
    weighted = [document for kind, part in documents.trained.items() for document in part * WEIGHTS[kind]]
    order = np.random.default_rng(0).permutation(len(weighted))
    trained = encode_documents(tokenizer, [weighted[n] for n in order], end_of_text(tokenizer))
    return DemoText(tokenizer, trained, held_out_text(documents, tokenizer), documents.metadata())
