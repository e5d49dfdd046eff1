"""Training text of `tilewright train drafter`: files, or text that the target writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tilewright.bench import datasets
from tilewright.cli.options import check_least
from tilewright.cli.outputs import progress_console
from tilewright.cli.train import LoopOptions, chat_template, encode_split, print_left_out, read_split
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.chat import ChatTemplate
from tilewright.models.decoder import DecoderConfig
from tilewright.models.records import read_jsonl
from tilewright.models.tokenizer import decode_after, load_tokenizer
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train import self_instruct as writing
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource, TokenStream, encode_documents
from tilewright.train.records import SUFFIX, Records
from tilewright.train.regenerate import Writer, cut_prompts, regenerate
from tilewright.train.self_instruct import SelfInstructOptions


@dataclass(frozen=True)
class Regeneration:
    """Settings of `--regenerate`: continuations of the data by the target.

    Attributes:
        count: number of excerpts of the data that the target continues; 0 trains on the data. [default: 0]
        prompt_tokens: tokens per excerpt. [default: 64]
        response_tokens: tokens per continuation. [default: 192]
        temperature: sampling temperature of half of the continuations; the other half is greedy. [default: 1]
    """

    count: int = 0
    prompt_tokens: int = 64
    response_tokens: int = 192
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_least(self, count=0, prompt_tokens=1)

    @property
    def enabled(self) -> bool:
        return self.count > 0

    def apply(self, writer: Writer, streams: list[TokenStream], end: int, out: Path, console: Console) -> list[TokenStream]:
        """Lets the target continue excerpts of the training text and of the held-out text."""
        counts = (self.count, max(64, self.count // 32))
        samplings = [Sampling(self.response_tokens, temperature) for temperature in (0.0, self.temperature)]
        written = []
        for name, stream, count in zip(("trained", "held_out"), streams, counts, strict=True):
            prompts = cut_prompts(stream, count, self.prompt_tokens, seed=0)
            written.append(regenerate(writer, prompts, samplings, out / f"responses_{name}.jsonl", end, console))
        return written


@dataclass(frozen=True)
class SelfInstruct:
    """Settings of `--self-instruct`: instructions and answers by the target.

    Attributes:
        count: number of instructions that the target writes and answers, besides the prompts of the data, which it answers at
            temperatures 0 and 1; 0 for the prompts of the data only.
        slots: number of texts that the target writes at the same time. [default: 32]
        openings: JSONL file with the first words of instructions ("begin") and the text after them ("end"), used in rotation.
            [default: none, the target writes the whole instruction]
        exclude: JSONL files of an evaluation; prompts that share 13 consecutive words with them are left out. [default: none]
    """

    count: int | None = None
    slots: int = 32
    openings: Path | None = None
    exclude: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_least(self, count=0, slots=1)
        more = (self.slots, self.openings, self.exclude)
        if self.count is None and more != (SelfInstruct.slots, SelfInstruct.openings, SelfInstruct.exclude):
            raise ValueError("expected count=INTEGER with slots, openings or exclude, found none")

    @property
    def enabled(self) -> bool:
        return self.count is not None

    def apply(
        self,
        data: Sequence[Path],
        target: Path,
        target_fingerprint: str,
        length: int,
        out: Path,
        console: Console,
    ) -> Records:
        """Lets the target write answers, and saves them as records and as messages.

        Args:
            data: files of prompts.
            target: folder or file of the target.
            target_fingerprint: fingerprint of its parameters.
            length: most tokens of prompt and answer.
            out: folder for the records and the messages.
            console: console for progress.

        Raises:
            ValueError: the target has no chat template, or a file is malformed.
        """
        template = ChatTemplate.load(target)
        if template is None:
            raise ValueError(f"expected a target with a chat template for --self-instruct, found none in {target}")
        examples = [example for path in data for example in datasets.read_examples(path, "train")]
        evaluated = [turn for path in self.exclude for example in datasets.read_examples(path) for turn in example.turns]
        runs = set[tuple[str, ...]]().union(*map(writing.runs, evaluated))
        prompts = [
            datasets.messages(example)[-1]["content"] for example in examples if writing.runs(example.turns[0]).isdisjoint(runs)
        ]
        lm = load(target, table=ShapeTable(batches=(self.slots,)), console=progress_console(console))
        options = self.options(length)
        writer = Writer(lm, target_fingerprint)
        records, left_out = writing.self_instruct(lm, template, prompts, self.count or 0, runs, options, out, console, writer)
        left_out["prompt of the excluded files"] = len(examples) - len(prompts)
        records.save(out / f"records{SUFFIX}")
        write_messages(records, lm, out / "messages.jsonl")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()) if count)
        summary = f"{len(records):,} answers of {int(records.in_loss.sum()):,} tokens"
        console.print(f"{summary}; left out: {reasons or 'nothing'}", markup=False)
        return records

    def options(self, length: int) -> SelfInstructOptions:
        """Builds the options of the writing."""
        options = SelfInstructOptions(length=length)
        if self.openings is not None:
            options = replace(options, openings=read_openings(self.openings))
        return options


def read_openings(path: Path) -> tuple[tuple[str, str], ...]:
    """Reads pairs of the first words of an instruction and the text after it. Raises a `ValueError` for other records."""
    openings = list[tuple[str, str]]()
    for record in read_jsonl(path):
        begin = record.get("begin")
        end = record.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f'{path}: expected records with the texts "begin" and "end", found {record}')
        openings.append((begin, end))
    if not openings:
        raise ValueError(f"{path}: expected at least one record, found none")
    return tuple(openings)


def write_messages(records: Records, lm: LanguageModel, path: Path) -> None:
    """Writes prompts and answers as text, to a JSONL file."""
    with path.open("w", encoding="utf-8") as file:
        for start, size, end in zip(records.starts, records.prompts, records.ends, strict=True):
            prompt, answer = (records.tokens[a:b].tolist() for a, b in ((start, start + size), (start + size, end)))
            text = lm.tokenizer.decode(prompt, skip_special_tokens=False)
            response = decode_after(lm.tokenizer, prompt, answer)
            file.write(json.dumps({"prompt": text, "response": response}, ensure_ascii=False) + "\n")


def split_records(records: Records, loop: LoopOptions, console: Console) -> tuple[Records, Records]:
    """Splits records into training and held-out records, and prints the number of records that do not fit a sequence."""
    length = loop.sequence_length
    sizes = records.ends - records.starts
    room = records.prompts + 2 <= length
    left_out = {
        f"records whose prompt fills {length} tokens": int(np.sum(~room)),
        f"ends of records beyond {length} tokens": int(np.sum(room & (sizes > length))),
    }
    print_left_out(left_out, console)
    return records.split(loop.held_out_share, loop.seed)


def drafter_text(
    data: Sequence[Path],
    loop: LoopOptions,
    regenerate: Regeneration,
    self_instruct: SelfInstruct,
    folder: Path,
    target: tuple[DecoderConfig, Any],
    out: Path,
    console: Console,
) -> Sequence[TokenSource]:
    """Returns the training text and the held-out text of a drafter.

    Args:
        data: files and folders.
        loop: options of the training loop.
        regenerate: continuations by the target.
        self_instruct: instructions and answers by the target.
        folder: folder or file of the target.
        target: configuration and parameters of the target.
        out: folder for the drafter.
        console: console for progress.

    Raises:
        ValueError: the data cannot be read, or a file of records comes with other data.
    """
    if regenerate.enabled and self_instruct.enabled:
        raise ValueError("expected --regenerate or --self-instruct, found both")
    if self_instruct.enabled:
        writer_fingerprint = fingerprint(target[1])
        records = self_instruct.apply(data, folder, writer_fingerprint, loop.sequence_length, out / "training", console)
        return split_records(records, loop, console)
    if files := [path for path in data if path.name.endswith(SUFFIX)]:
        if len(data) > 1 or regenerate.enabled:
            raise ValueError(f"expected no other data beside the records of {files[0]}, found other files or --regenerate")
        return split_records(Records.load(files[0]), loop, console)
    tokenizer = load_tokenizer(folder)
    end = target[0].eos_token_ids[0] if target[0].eos_token_ids else 0
    documents, parts = read_split(data, loop, console)
    template = chat_template(folder, documents, console)
    encode = partial(encode_documents, tokenizer, end=end, template=template, other_ends=target[0].eos_token_ids)
    streams = encode_split(encode, documents, parts, loop.sequence_length, loop, console)
    if not regenerate.enabled:
        return streams
    writer = Writer(LanguageModel(*target, tokenizer), fingerprint(target[1]))
    return regenerate.apply(writer, list(streams), end, out / "training", console)
