"""Training text of `tilewright train drafter`: files, the target's continuations of them, or its answers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from tilewright.bench import datasets
from tilewright.cli.options import check_least, option_class
from tilewright.cli.outputs import progress_console
from tilewright.cli.train import LoopOptions, chat_template, encode_split, read_split, say_left_out
from tilewright.kernels.select import PLAIN
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.chat import ChatTemplate
from tilewright.models.checkpoint import load_decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.tokenizer import decode_after, load_tokenizer
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.train import self_instruct
from tilewright.train.checkpoint import fingerprint
from tilewright.train.data import TokenSource, TokenStream, encode_documents, read_jsonl
from tilewright.train.records import SUFFIX, Records
from tilewright.train.regenerate import BatchWriter, Writer, cut_prompts, regenerate
from tilewright.train.self_instruct import SelfInstructOptions
from tilewright.train.waves import Waves, WaveWriter


@option_class
class Regeneration:
    """Options for text that the target continues, for its drafter to learn from.

    Attributes:
        regenerated: let the target continue this many stretches of the data and train on what it writes instead of on the data.
        prompt_tokens: length of such a stretch.
        response_tokens: length of its continuation.
        temperature: of the continuations; half of them are always greedy.
    """

    regenerated: int = 0
    prompt_tokens: int = 64
    response_tokens: int = 192
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_least(self, regenerated=0, prompt_tokens=1)

    def apply(self, writer: Writer, streams: list[TokenStream], end: int, out: Path, console: Console) -> list[TokenStream]:
        """Training and held-out text as the target continues them."""
        counts = (self.regenerated, max(64, self.regenerated // 32))
        samplings = [Sampling(self.response_tokens, temperature) for temperature in (0.0, self.temperature)]
        written = []
        for name, stream, count in zip(("trained", "held_out"), streams, counts, strict=True):
            prompts = cut_prompts(stream, count, self.prompt_tokens, seed=0)
            written.append(regenerate(writer, prompts, samplings, out / f"responses_{name}.jsonl", end, console))
        return written


@option_class
class SelfInstruct:
    """Options for instructions and answers that the target writes, for its drafter to learn from.

    Attributes:
        self_instruct: let the target write this many instructions, answer them and the data's prompts, these at temperatures 0
            and 1, and train on its answers; 0 answers the data's prompts alone.
        exclude: JSONL files to be measured on: a prompt that shares 13 words in a row with one of theirs is left out.
        slots: texts that are written at once.
        waves: write in waves of so many rows, in bfloat16, instead: faster on a GPU, for models without windows. Prompts then
            have up to half of a sequence, answers up to five eighths.
        openings: JSONL file of what instructions begin with ("begin") and what is put behind them ("end"), in turn; by default
            the model begins by itself.
    """

    self_instruct: int | None = None
    exclude: tuple[Path, ...] = ()
    slots: int = 32
    waves: int = 0
    openings: Path | None = None

    def __post_init__(self) -> None:
        check_least(self, self_instruct=0, slots=1, waves=0)

    @property
    def asked(self) -> bool:
        return self.self_instruct is not None

    def apply(
        self, data: Sequence[Path], target: Path, target_fingerprint: str, length: int, out: Path, console: Console
    ) -> Records:
        """The target's answers, of up to `length` tokens with their prompts; also written as messages and as records."""
        template = ChatTemplate.load(target)
        if template is None:
            raise ValueError(f"--self-instruct needs a model with a chat template, {target} has none")
        given = [example for path in data for example in datasets.read_examples(path, "train")]
        forbidden = [turn for path in self.exclude for example in datasets.read_examples(path) for turn in example.turns]
        runs = set[tuple[str, ...]]().union(*map(self_instruct.runs, forbidden))
        prompts = [
            datasets.messages(example)[-1]["content"]
            for example in given
            if self_instruct.runs(example.turns[0]).isdisjoint(runs)
        ]
        lm = load(target, table=ShapeTable(batches=(self.slots,)), console=progress_console(console))
        options = self.options(length)
        writer = self.writer(lm, target, target_fingerprint, length, console)
        records, left_out = self_instruct.self_instruct(
            lm, template, prompts, self.self_instruct or 0, runs, options, out, console, writer
        )
        left_out["prompt in what is measured on"] = len(given) - len(prompts)
        records.save(out / f"records{SUFFIX}")
        write_messages(records, lm, out / "messages.jsonl")
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()) if count)
        summary = f"{len(records):,} answers of {int(records.in_loss.sum()):,} tokens"
        console.print(f"{summary}; left out: {reasons or 'nothing'}", markup=False)
        return records

    def options(self, length: int) -> SelfInstructOptions:
        """Sampling of answers."""
        options = SelfInstructOptions(length=length)
        if self.openings is not None:
            options = replace(options, openings=read_openings(self.openings))
        return replace(options, prompt_tokens=length // 2, answer_tokens=length * 5 // 8) if self.waves else options

    def writer(self, lm: LanguageModel, target: Path, target_fingerprint: str, length: int, console: Console) -> Writer:
        """Writer that lets the model write."""
        if not self.waves:
            return BatchWriter(lm, target_fingerprint)
        config, params = load_decoder(target, jnp.bfloat16, progress_console(console))
        return WaveWriter(Waves(config, PLAIN, params, self.waves, length // 2, length * 5 // 8), target_fingerprint)


def read_openings(path: Path) -> tuple[tuple[str, str], ...]:
    """Beginnings of instructions, and what is put behind them. Raises a `ValueError` for other records."""
    found = read_jsonl(path)
    openings = list[tuple[str, str]]()
    for record in found:
        begin = record.get("begin")
        end = record.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f'{path}: expected records with the texts "begin" and "end", found {record}')
        openings.append((begin, end))
    if not openings:
        raise ValueError(f"{path}: expected at least one record, found none")
    return tuple(openings)


def write_messages(records: Records, lm: LanguageModel, path: Path) -> None:
    """Writes prompts and answers as text, a JSON object to a line."""
    with path.open("w", encoding="utf-8") as file:
        for start, size, end in zip(records.starts, records.prompts, records.ends, strict=True):
            prompt, answer = (records.tokens[a:b].tolist() for a, b in ((start, start + size), (start + size, end)))
            text = lm.tokenizer.decode(prompt, skip_special_tokens=False)
            response = decode_after(lm.tokenizer, prompt, answer)
            file.write(json.dumps({"prompt": text, "response": response}, ensure_ascii=False) + "\n")


def split_records(records: Records, loop: LoopOptions, console: Console) -> tuple[Records, Records]:
    """Records to train on and held-out ones; prints how many do not fit a sequence."""
    length = loop.sequence_length
    sizes = records.ends - records.starts
    room = records.prompts + 2 <= length
    left_out = {
        f"records whose prompt fills {length} tokens": int(np.sum(~room)),
        f"ends of records beyond {length} tokens": int(np.sum(room & (sizes > length))),
    }
    say_left_out(left_out, console)
    return records.split(loop.held_out, loop.seed)


def drafter_text(
    data: Sequence[Path],
    loop: LoopOptions,
    writing: tuple[Regeneration, SelfInstruct],
    folder: Path,
    target: tuple[DecoderConfig, Any],
    out: Path,
    console: Console,
) -> Sequence[TokenSource]:
    """Text that a drafter of `target` is trained on, and text that is held out.

    Args:
        folder: of the target, or its file.

    Raises:
        ValueError: the data cannot be read, or files of records are mixed with others.
    """
    regeneration, answering = writing
    if regeneration.regenerated and answering.asked:
        raise ValueError("expected --regenerated or --self-instruct, found both")
    if answering.asked:
        records = answering.apply(data, folder, fingerprint(target[1]), loop.sequence_length, out / "training", console)
        return split_records(records, loop, console)
    if kept := [path for path in data if path.name.endswith(SUFFIX)]:
        if len(data) > 1 or regeneration.regenerated:
            raise ValueError(f"expected {kept[0]} alone, for it holds records; found other data or --regenerated too")
        return split_records(Records.load(kept[0]), loop, console)
    tokenizer = load_tokenizer(folder)
    end = target[0].eos_token_ids[0] if target[0].eos_token_ids else 0
    documents, parts = read_split(data, loop, console)
    template = chat_template(folder, documents, console)
    encode = partial(encode_documents, tokenizer, end=end, template=template, other_ends=target[0].eos_token_ids)
    streams = encode_split(encode, documents, parts, loop.sequence_length, loop, console)
    if not regeneration.regenerated:
        return streams
    writer = BatchWriter(LanguageModel(*target, tokenizer), fingerprint(target[1]))
    return regeneration.apply(writer, list(streams), end, out / "training", console)
