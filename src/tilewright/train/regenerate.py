"""Responses written by the target itself: what a drafter should learn is what its target would say."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.sampling import Sampling
from tilewright.train.data import TokenStream, read_jsonl


def cut_prompts(stream: TokenStream, count: int, length: int, seed: int) -> list[list[int]]:
    """Random stretches of a text, to be continued: `count` prompts of `length` tokens.

    Raises:
        ValueError: the text is shorter than a prompt.
    """
    if len(stream.tokens) < length:
        raise ValueError(f"expected a text of at least {length} tokens to cut prompts from, found {len(stream.tokens)}")
    starts = np.random.default_rng(seed).integers(0, len(stream.tokens) - length + 1, count)
    return [stream.tokens[start : start + length].tolist() for start in starts]


GROUP = 8
"""Prompts that are asked at once, for each row of the batch: a row that ends is given the next one."""


@runtime_checkable
class Writer(Protocol):
    """Protocol of what lets a model write: `BatchWriter`, or `waves.WaveWriter`."""

    @property
    def target(self) -> str:
        """Fingerprint of the model's parameters as its file has them (`checkpoint.fingerprint`)."""
        ...

    @property
    def size(self) -> int:
        """Prompts that are asked at once."""
        ...

    def write(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        """The answers to at most `size` prompts."""
        ...


@dataclass(frozen=True)
class BatchWriter:
    """Writes with the model's own batches, without drafts.

    Attributes:
        lm: the model.
        target: see `Writer`; the parameters that `lm` holds are laid out for the machine.
    """

    lm: LanguageModel
    target: str

    @property
    def size(self) -> int:
        return GROUP * self.lm.table.batches[-1]

    def write(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        # Alike rows side by side: where all rows of a batch are greedy, no logits are made.
        order = sorted(range(len(prompts)), key=lambda n: (samplings[n].temperature, n))
        found = self.lm.generate([list(prompts[n]) for n in order], [samplings[n] for n in order], speculative=False)
        written = {n: result.tokens for n, result in zip(order, found, strict=True)}
        return [written[n] for n in range(len(prompts))]


Record = dict[str, object]
"""A prompt and what was written after it: "prompt_tokens", "response_tokens" and, since there is one, "made_by" (`made_by`)."""


def made_by(target: str, sampling: Sampling) -> str:
    """Digest of the model that writes a text and of its sampling."""
    how = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    said = {each.name: how[each.name] for each in fields(sampling) if how[each.name] != each.default}
    return hashlib.sha256(json.dumps([target, said], sort_keys=True).encode()).hexdigest()[:16]


def generated(
    writer: Writer,
    prompts: Sequence[list[int]],
    sampling: Callable[[int], Sampling],
    path: Path,
    title: str,
    console: Console,
) -> list[Record]:
    """Texts that the model writes after each prompt, row i under `sampling(i)`.

    Records are appended to `path` (JSONL) as they come; those already there are kept, so that an interrupted run goes on where
    it stopped.

    Raises:
        ValueError: `path` holds continuations of other prompts, or by another model or sampling.
    """
    rows = len(prompts)
    size = writer.size
    made = [made_by(writer.target, sampling(n)) for n in range(rows)]
    records = kept_records(path, prompts, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, Progress(console=console, disable=not console.is_terminal) as bar:
        row = bar.add_task(title, total=rows, completed=len(records))
        for first in range(len(records), rows, size):
            part = range(first, min(first + size, rows))
            written = writer.write([prompts[n] for n in part], [sampling(n) for n in part])
            new: list[Record] = [
                {"prompt_tokens": prompts[n], "response_tokens": tokens, "made_by": made[n]}
                for n, tokens in zip(part, written, strict=True)
            ]
            file.writelines(json.dumps(record) + "\n" for record in new)
            file.flush()
            os.fsync(file.fileno())
            records += new
            bar.update(row, completed=len(records))
            if not console.is_terminal:
                console.print(f"{title}: {len(records):,} of {rows:,}")
    return records


def regenerate(
    writer: Writer, prompts: Sequence[list[int]], samplings: Sequence[Sampling], path: Path, end: int, console: Console
) -> TokenStream:
    """Continues every prompt with the target, row i under `samplings[i % len(samplings)]` with seed i; see `generated`.

    Returns:
        all of it as a stream, each record closed by the token `end`, with only the responses in the loss.
    """

    def sampling(i: int) -> Sampling:
        return replace(samplings[i % len(samplings)], seed=i)

    return pair_stream(generated(writer, prompts, sampling, path, "regenerating responses", console), end, path)


def kept_records(path: Path, prompts: Sequence[list[int]], made: Sequence[str]) -> list[Record]:
    """The records that an interrupted run left. A last line that it did not finish is cut off, in the file too.

    Args:
        made: `made_by` of each prompt's text; records of before they said so are taken as they are.
    """
    if not path.exists():
        return []
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)
    records = read_jsonl(path)
    if [record.get("prompt_tokens") for record in records] != list(prompts[: len(records)]):
        raise ValueError(f"{path} holds continuations of other prompts; remove it, or write to another folder")
    if any(record.get("made_by", now) != now for record, now in zip(records, made, strict=False)):
        raise ValueError(f"{path} holds texts by another model, or drawn in another way; remove it, or write to another folder")
    return records


def pair_stream(records: Sequence[Record], end: int, path: Path) -> TokenStream:
    """Pairs of prompt and response tokens as a stream, each closed by `end`; only responses are in the loss.

    Raises:
        ValueError: a record lacks its token lists.
    """
    tokens: list[int] = []
    flags: list[bool] = []
    for number, record in enumerate(records, 1):
        prompt = record.get("prompt_tokens")
        response = record.get("response_tokens")
        if not isinstance(prompt, list) or not isinstance(response, list):
            raise ValueError(f"{path}:{number}: expected prompt_tokens and response_tokens")
        closing = [] if response and response[-1] == end else [end]
        tokens += [*prompt, *response, *closing]
        flags += [False] * len(prompt) + [True] * len(response) + [False] * len(closing)
    return TokenStream(np.asarray(tokens, np.int32), np.asarray(flags, bool))
