"""Lets the target write responses, so that a drafter learns the text that its target generates."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tilewright.llm.language_model import LanguageModel
from tilewright.models.records import read_jsonl
from tilewright.runtime.sampling import Sampling
from tilewright.train.data import TokenStream


def cut_prompts(stream: TokenStream, count: int, length: int, seed: int) -> list[list[int]]:
    """Cuts `count` random excerpts of `length` tokens from a text, as prompts.

    Raises:
        ValueError: the text is shorter than a prompt.
    """
    if len(stream.tokens) < length:
        raise ValueError(f"expected a text of at least {length} tokens to cut prompts from, found {len(stream.tokens)}")
    starts = np.random.default_rng(seed).integers(0, len(stream.tokens) - length + 1, count)
    return [stream.tokens[start : start + length].tolist() for start in starts]


GROUP = 8
"""Prompts per call for each row of the batch; a finished row continues with the next prompt."""


@dataclass(frozen=True)
class Writer:
    """Generates text with a model in full batches, without drafts.

    Attributes:
        lm: the model.
        target: fingerprint of the parameters in the model's file (`checkpoint.fingerprint`), since `lm` stores them in another
            layout.
    """

    lm: LanguageModel
    target: str

    @property
    def size(self) -> int:
        """Prompts per call."""
        return GROUP * self.lm.table.batches[-1]

    def write(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        """Generates the responses to at most `size` prompts."""
        # Sorts by temperature, since batches of greedy rows only compute no logits.
        order = sorted(range(len(prompts)), key=lambda n: (samplings[n].temperature, n))
        results = self.lm.generate([list(prompts[n]) for n in order], [samplings[n] for n in order], speculative=False)
        written = {n: result.tokens for n, result in zip(order, results, strict=True)}
        return [written[n] for n in range(len(prompts))]


Record = dict[str, object]
"""Prompt and response: "prompt_tokens", "response_tokens" and, except in old files, "made_by" (see `provenance`)."""


def provenance(target: str, sampling: Sampling) -> str:
    """Returns a digest of a model and its sampling."""
    values = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    changed = {each.name: values[each.name] for each in fields(sampling) if values[each.name] != each.default}
    return hashlib.sha256(json.dumps([target, changed], sort_keys=True).encode()).hexdigest()[:16]


def generated(
    writer: Writer,
    prompts: Sequence[list[int]],
    sampling: Callable[[int], Sampling],
    path: Path,
    title: str,
    console: Console,
) -> list[Record]:
    """Generates a response to each prompt, row i with `sampling(i)`.

    Records are appended to `path` (JSONL) as they finish. Existing records are kept, so that an interrupted run resumes.

    Args:
        writer: the model.
        prompts: tokens of the prompts.
        sampling: returns the sampling of a row.
        path: file of records.
        title: title of the progress bar.
        console: console for progress.

    Raises:
        ValueError: `path` holds continuations of other prompts, or by another model or sampling.
    """
    rows = len(prompts)
    size = writer.size
    provenances = [provenance(writer.target, sampling(n)) for n in range(rows)]
    records = resumed_records(path, prompts, provenances)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, Progress(console=console, disable=not console.is_terminal) as bar:
        row = bar.add_task(title, total=rows, completed=len(records))
        for first in range(len(records), rows, size):
            part = range(first, min(first + size, rows))
            written = writer.write([prompts[n] for n in part], [sampling(n) for n in part])
            new: list[Record] = [
                {"prompt_tokens": prompts[n], "response_tokens": tokens, "made_by": provenances[n]}
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
    """Continues each prompt, row i with `samplings[i % len(samplings)]` and seed i; see `generated`.

    Returns:
        prompts and responses as a stream with only the responses in the loss; the token `end` ends each record.
    """

    def sampling(i: int) -> Sampling:
        return replace(samplings[i % len(samplings)], seed=i)

    return pair_stream(generated(writer, prompts, sampling, path, "regenerating responses", console), end, path)


def resumed_records(path: Path, prompts: Sequence[list[int]], provenances: Sequence[str]) -> list[Record]:
    """Reads the records of an interrupted run, and truncates the file after its last complete line.

    Args:
        path: file of records.
        prompts: tokens of the prompts.
        provenances: `provenance` of each prompt; records without the field are accepted.

    Raises:
        ValueError: the records have other prompts, or come from another model or sampling.
    """
    if not path.exists():
        return []
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)
    records = read_jsonl(path)
    if [record.get("prompt_tokens") for record in records] != list(prompts[: len(records)]):
        raise ValueError(
            f"{path}: expected continuations of these prompts, found others; remove the file, or name another folder"
        )
    if any(record.get("made_by", now) != now for record, now in zip(records, provenances, strict=False)):
        raise ValueError(
            f"{path}: expected texts of this model and sampling, found others; remove the file, or name another folder"
        )
    return records


def pair_stream(records: Sequence[Record], end: int, path: Path) -> TokenStream:
    """Concatenates prompts and responses to a stream; `end` ends each pair, and only responses are in the loss.

    Raises:
        ValueError: a record lacks its token lists.
    """
    tokens: list[int] = []
    flags: list[bool] = []
    for number, record in enumerate(records, 1):
        prompt = record.get("prompt_tokens")
        response = record.get("response_tokens")
        if not isinstance(prompt, list) or not isinstance(response, list):
            raise ValueError(f"{path}:{number}: expected lists prompt_tokens and response_tokens, found others")
        closing = [] if response and response[-1] == end else [end]
        tokens += [*prompt, *response, *closing]
        flags += [False] * len(prompt) + [True] * len(response) + [False] * len(closing)
    return TokenStream(np.asarray(tokens, np.int32), np.asarray(flags, bool))
