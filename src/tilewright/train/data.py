"""Text for training: files, folders and JSONL records, tokenised into one stream, cut into windows of a fixed length.

Every order here is a pure function of a seed and an epoch, so that a resumed run sees the batches that it would have seen.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
Record = dict[str, Any]
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")


@dataclass(frozen=True)
class Document:
    """A text to learn.

    Attributes:
        text: what is in the loss.
        prompt: what stands before it, given rather than predicted.
    """

    text: str
    prompt: str = ""

    @property
    def whole(self) -> str:
        return self.prompt + self.text


def record_document(record: object, where: str) -> Document:
    """Document of one JSONL record.

    It has a `text`; a `prompt`, which is given, and its `response`; or a `question` with its `answer`, both to be learnt, for
    together they are a text.
    """
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return Document(record["text"])
        if isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
            return Document(record["response"], record["prompt"])
        if isinstance(record.get("question"), str) and isinstance(record.get("answer"), str):
            return Document(format_question(record["question"]) + strip_annotations(record["answer"]))
    raise ValueError(f"{where}: expected a record with 'text', 'prompt' and 'response', or 'question' and 'answer'")


def format_question(question: str) -> str:
    """The prompt of a question-and-answer record; its answer follows directly."""
    return f"Question: {question.strip()}\nAnswer: "


def strip_annotations(answer: str) -> str:
    """GSM8K's answers carry calculator annotations (`<<48/2=24>>`), which are no text."""
    return re.sub(r"<<[^<>]*>>", "", answer)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None


def read_records(path: Path) -> list[tuple[int, Record]]:
    """Line number and object of each record of a JSONL file; empty lines are passed over.

    Raises:
        ValueError: naming the line that is not UTF-8, no JSON, or no object; or the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # no other line break ends a record
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, found {shortened(record)}")
        records.append((number, record))
    return records


def read_jsonl(path: Path) -> list[Record]:
    """The records of `read_records` without their lines; errors are those."""
    return [record for _, record in read_records(path)]


def shortened(value: object) -> str:
    """A value in at most 60 characters, for messages."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Every document under `paths`: a text file is one, a JSONL record is one, a folder is searched for both."""
    documents: list[Document] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (*TEXT_SUFFIXES, ".jsonl") and p.is_file())
            documents += read_documents(inside)
        elif not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        elif path.suffix == ".jsonl":
            documents += [record_document(r, f"{path}, record {n}") for n, r in enumerate(read_jsonl(path), 1)]
        else:
            documents.append(Document(read_text(path)))
    return [document for document in documents if document.text.strip()]


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE over `documents`: any text can be encoded, runs of spaces merge, digits stay apart.

    Raises:
        ValueError: the vocabulary has no room for every byte and the two special tokens.
    """
    special, alphabet = [END_OF_TEXT, MASK], pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ValueError(f"expected a vocabulary of at least {len(special) + len(alphabet)}, found {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.whole for document in documents), trainer)
    return tokenizer


@dataclass(frozen=True)
class TokenStream:
    """Tokenised documents, end to end, each closed by the end-of-text token.

    Attributes:
        tokens: int32 `[n]`.
        in_loss: bool `[n]`; False for tokens that are given rather than predicted (a prompt before a response).
    """

    tokens: np.ndarray
    in_loss: np.ndarray

    def windows(
        self, length: int, batch: int, seed: int, epoch: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches `[batch, length]` of tokens and loss flags that cover the stream once, in an order set by seed and epoch.

        The cut moves by a random offset each epoch; what is left over at the end waits for another epoch.

        Args:
            rows: of each batch, for who needs only some; by default all.
        """
        rng = np.random.default_rng((seed, epoch))
        spare = len(self.tokens) - length
        starts = np.arange(int(rng.integers(0, min(length, spare + 1))), spare + 1, length)
        starts = rng.permutation(starts)
        for first in range(0, len(starts) - batch + 1, batch):
            chosen = starts[first : first + batch]
            index = (chosen if rows is None else chosen[rows])[:, None] + np.arange(length)
            yield self.tokens[index], self.in_loss[index]

    def steps_per_epoch(self, length: int, batch: int) -> int:
        """Least number of batches of an epoch (its offset may leave room for one more window)."""
        return (len(self.tokens) // length - 1) // batch


@runtime_checkable
class TokenSource(Protocol):
    """Tokens to train on, end to end, and which of them are in the loss: a `TokenStream`, or `Records`."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def in_loss(self) -> np.ndarray: ...


def frequent_tokens(source: TokenSource, vocab_size: int, size: int) -> np.ndarray:
    """The `size` most frequent tokens of what is in the loss, as rising ids, int32; among equals the lower ids."""
    counts = np.bincount(source.tokens[source.in_loss], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], end: int) -> TokenStream:
    """Tokenises documents into a stream with their texts, and the tokens that close them, in the loss.

    A prompt is tokenised by itself, as it will be when a response to it is generated.
    """
    firsts = tokenizer.encode_batch([document.prompt or document.text for document in documents])
    rests = tokenizer.encode_batch(
        [document.text if document.prompt else "" for document in documents], add_special_tokens=False
    )
    tokens: list[int] = []
    flags: list[bool] = []
    for document, first, rest in zip(documents, firsts, rests, strict=True):
        tokens += [*first.ids, *rest.ids, end]
        flags += [not document.prompt] * len(first.ids) + [True] * (len(rest.ids) + 1)
    return TokenStream(np.asarray(tokens, np.int32), np.asarray(flags, bool))


def end_of_text(tokenizer: Tokenizer) -> int:
    """The token that separates documents.

    Raises:
        ValueError: the tokenizer has none.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"the tokenizer lacks the token {END_OF_TEXT} that separates documents")
    return end


def require_windows(stream: TokenStream, length: int, batch: int, what: str) -> None:
    """Raises a `ValueError` where a text has not one batch of windows in each epoch, or nothing to learn in it."""
    if stream.steps_per_epoch(length, batch) < 1:
        need = length * (batch + 1)
        raise ValueError(f"{what} has {len(stream.tokens)} tokens; a batch of {batch} windows of {length} needs {need}")
    if not stream.in_loss.any():
        raise ValueError(f"{what} has no token to be predicted: its {len(stream.tokens)} are all given")


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Splits whole documents into training and held-out ones, by a shuffle that depends on `seed` alone.

    Documents with the same prompt stay together, and so do those that have none and the same text.
    """
    keys = [(document.prompt, "" if document.prompt else document.text) for document in documents]
    groups = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    order = np.random.default_rng(seed).permutation(len(groups))
    held = set(order[: max(1, round(held_out * len(groups)))].tolist())
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document, key in zip(documents, keys, strict=True):
        sides[groups[key] in held].append(document)
    return sides
