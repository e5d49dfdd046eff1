"""Text for training: files, folders and records, tokenised into one stream, cut into windows of a fixed length.

Every order here is a pure function of a seed and an epoch, so that a resumed run sees the batches that it would have seen.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import encode

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
Record = dict[str, Any]
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT's records by their own names; the usual names stand for themselves."""
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
"""Prompts of Stanford Alpaca (tatsu-lab/stanford_alpaca, `train.py`), for models without a chat template."""
LAYOUTS = (
    "'messages', 'conversations', 'instruction' and 'output', 'prompt' and 'completion' (or 'response'), "
    "'question' and 'answer', or 'text'"
)
"""Fields by which records are known, in the order in which they are looked for."""


@dataclass(frozen=True)
class Chat:
    """A conversation to learn.

    Attributes:
        messages: each with `role` and `content`, as chat templates take them.
        given: number of messages at the beginning that are given, whoever writes them.
        tools: functions that the model may call, as OpenAI describes them.
    """

    messages: tuple[Mapping[str, Any], ...] = field(hash=False)
    given: int = 0
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    @property
    def learnt(self) -> list[int]:
        """Indices of the messages in the loss: the assistant's that follow a user's, without those of weight 0."""
        asked = next((n for n, message in enumerate(self.messages) if message["role"] == "user"), len(self.messages))
        return [
            n
            for n, message in enumerate(self.messages)
            if n >= max(self.given, asked) and message["role"] == "assistant" and message.get("weight", 1)
            if (message["content"] or "").strip() or message.get("tool_calls")
        ]

    def parts(self) -> list[tuple[str, bool]]:
        """Contents with an empty line between them, for a model without a chat template; True for those in the loss.

        Raises:
            ValueError: a message has no text, or there are tools.
        """
        if self.tools or not all(isinstance(message["content"], str) for message in self.messages):
            raise ValueError("expected messages of text alone for a model without a chat template, found tools")
        found: list[tuple[str, bool]] = []
        given = ""
        learnt = set(self.learnt)
        for n, message in enumerate(self.messages):
            given += "\n\n" if n else ""
            if n in learnt:
                found += [(given, False), (message["content"], True)]
                given = ""
            else:
                given += message["content"]
        return found


@dataclass(frozen=True)
class Document:
    """A text to learn.

    Attributes:
        text: text in the loss.
        prompt: text before it, given rather than predicted.
        chat: the document as a conversation, which replaces the two where the model has a chat template.
        where: its place in a file, for messages.
    """

    text: str
    prompt: str = ""
    chat: Chat | None = None
    where: str = field(default="", compare=False)

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """Texts in their order without a chat template; True for those in the loss."""
        if self.chat is not None and not self.text:
            try:
                return self.chat.parts()
            except ValueError as error:
                raise ValueError(f"{self.where}: {error}") from None
        return [(self.prompt, False), (self.text, True)] if self.prompt else [(self.text, True)]

    @property
    def whole(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """Equal for documents of one prompt (or without one of the same text), and equal for the same documents."""
        if self.chat is not None:
            first = min(self.chat.learnt)
            messages = [json.dumps(message, sort_keys=True) for message in self.chat.messages]
            return tuple(messages[:first]), tuple(messages)
        return (self.prompt, "" if self.prompt else self.text), (self.prompt, self.text)


def record_document(record: Record, where: str) -> Document | None:
    """Document of one record; None where nothing in it is to be learnt. `LAYOUTS` says which fields are read.

    Raises:
        ValueError: it has none of these fields, or something else in them.
    """

    def text(*names: str) -> str | None:
        return next((record[name] for name in names if isinstance(record.get(name), str)), None)

    try:
        if "messages" in record or "conversations" in record:
            return chat_document(record, where)
        instruction = text("instruction")
        output = text("output")
        if instruction is not None and output is not None:
            return alpaca_document(record, instruction, output, where)
        if isinstance(record.get("prompt"), list):
            given, learnt = (read_messages(record.get(name), name) for name in ("prompt", "completion"))
            chat = Chat((*given, *learnt), len(given), read_tools(record))
            return Document("", "", chat, where) if chat.learnt else None
        prompt = text("prompt")
        response = text("completion", "response")
        question = text("question")
        answer = text("answer")
        if prompt is not None and response is not None:
            made = Document(response, prompt, where=where)
        elif question is not None and answer is not None:
            made = Document(format_question(question) + strip_annotations(answer), where=where)
        elif (whole := text("text")) is not None:
            made = Document(whole, where=where)
        else:
            raise ValueError(f"expected a record with {LAYOUTS}, found {shortened(', '.join(record) or 'no field')}")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return made if made.text.strip() else None


def alpaca_document(record: Record, instruction: str, output: str, where: str) -> Document | None:
    """Document of an instruction with its output: a chat of two messages, or Alpaca's prompt without a chat template."""
    system, context = (record.get(name) or "" for name in ("system", "input"))
    if not isinstance(system, str) or not isinstance(context, str):
        raise ValueError("expected a text in 'system' and 'input'")
    asked = f"{instruction}\n{context}" if context.strip() else instruction
    wording = ALPACA_WITH_INPUT if context.strip() else ALPACA
    said = ({"role": "system", "content": system},) if system else ()
    chat = Chat((*said, {"role": "user", "content": asked}, {"role": "assistant", "content": output}))
    prompt = (f"{system}\n\n" if system else "") + wording.format(instruction=instruction, input=context)
    return Document(output, prompt, chat, where) if output.strip() else None


def chat_document(record: Record, where: str) -> Document | None:
    """Document of a record of messages, OpenAI's or ShareGPT's."""
    name = "messages" if "messages" in record else "conversations"
    messages = read_messages(record[name], name)
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    chat = Chat(tuple(messages), 0, read_tools(record))
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"expected a message of the assistant in {name!r}, found none")
    return Document("", "", chat, where) if chat.learnt else None


def read_messages(value: object, name: str) -> list[Record]:
    """Messages of a record with OpenAI's names for roles and contents.

    Raises:
        ValueError: they are not a list of messages with a known role and a text.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"expected a list of at least one message in {name!r}, found {shortened(value)}")
    messages = []
    for n, message in enumerate(value):
        role = message.get("role", message.get("from"))
        role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES:
            raise ValueError(f"expected a role among {', '.join(ROLES)} in {name!r} at {n}, found {shortened(role)}")
        content = message.get("content", message.get("value"))
        if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"expected a text as the content of {name!r} at {n}, found {shortened(content)}")
        more = {key: each for key, each in message.items() if key not in ("role", "from", "content", "value")}
        messages.append({"role": role, "content": content, **more})
    return messages


def read_tools(record: Record) -> tuple[Record, ...]:
    """Functions that a conversation may call. Raises a `ValueError` where they are no list of objects."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"expected JSON in 'tools': {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"expected a list of objects in 'tools', found {shortened(tools)}")
    return tuple(tools)


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
    """Number and object of each record: of a JSONL file by lines, empty ones passed over; of a JSON array by elements.

    A file that ends in `.json` may be either, or a single object.

    Raises:
        ValueError: naming the line that is not UTF-8, no JSON, or no object; or the file cannot be read.
    """
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    problem: Exception | None = None
    if path.suffix.lower() == ".json":
        try:
            value = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            problem = error
        else:
            records = list(enumerate(value if isinstance(value, list) else [value], 1))
            for number, record in records:
                if not isinstance(record, dict):
                    raise ValueError(f"{path}, record {number}: expected a JSON object, found {shortened(record)}")
            return records
    try:
        return line_records(path, content)
    except ValueError as error:
        if problem is None:
            raise
        raise ValueError(f"{path}: neither JSON ({problem}) nor a JSON object to a line ({error})") from None


def line_records(path: Path, content: bytes) -> list[tuple[int, Record]]:
    """Line number and object of each record of a JSONL file's content; see `read_records`."""
    records = []
    for number, line in enumerate(content.split(b"\n"), 1):  # no other line break ends a record
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


def read_documents(paths: Sequence[Path], left_out: Counter[str] | None = None) -> list[Document]:
    """Reads every document under `paths`: a text file is one, a record is one, a folder is searched for both.

    Args:
        left_out: counts what holds nothing to learn, by reason.

    Raises:
        ValueError: a path is absent or holds no text, or a record is malformed.
    """
    left_out = Counter() if left_out is None else left_out
    documents = [document for path in paths for document in documents_in(path, left_out)]
    if paths and not documents:
        raise ValueError(f"expected a text to learn in {', '.join(map(str, paths))}, found none")
    return documents


def documents_in(path: Path, left_out: Counter[str]) -> list[Document]:
    """Documents of a file or a folder; see `read_documents`."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())
        inside = [each for each in files if each.suffix.lower() in (*TEXT_SUFFIXES, *RECORD_SUFFIXES)]
        if not inside:
            suffixes = ", ".join(sorted({each.suffix or "no suffix" for each in files})) or "no file"
            expected = ", ".join((*TEXT_SUFFIXES, *RECORD_SUFFIXES))
            raise ValueError(f"{path}: expected files ending in {expected}, found {suffixes}")
        left_out["other files"] += len(files) - len(inside)
        return [document for each in inside if holds_text(each, left_out) for document in documents_in(each, left_out)]
    if path.suffix.lower() in RECORD_SUFFIXES:
        found = [record_document(record, f"{path}, record {n}") for n, record in enumerate(read_jsonl(path), 1)]
        left_out["records without a response"] += found.count(None)
        return [document for document in found if document is not None]
    document = Document(read_text(path), where=str(path))
    left_out["empty files"] += not document.text.strip()
    return [document] if document.text.strip() else []


def holds_text(path: Path, left_out: Counter[str]) -> bool:
    """False for a `.json` file whose first object has none of the fields of `LAYOUTS`, such as settings beside texts."""
    if path.suffix.lower() != ".json":
        return True
    value = json.loads(content) if (content := path.read_bytes().strip()).startswith(b"[") else None
    if value is not None and not any(isinstance(each, dict) for each in value):
        holds = False
    else:
        fields = {"messages", "conversations", "instruction", "prompt", "question", "text"}
        holds = not fields.isdisjoint(next(iter(read_jsonl(path)), {}))
    left_out["JSON files without records"] += not holds
    return holds


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE over `documents`: any text can be encoded, runs of spaces merge, digits stay apart.

    Raises:
        ValueError: the vocabulary has no room for every byte and the two special tokens.
    """
    special = [END_OF_TEXT, MASK]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
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

    def starts_in_loss(self, length: int) -> np.ndarray:
        """Beginnings of the windows, end to end, that have a token to be predicted from those before it in the window."""
        predicted = self.in_loss.copy()
        predicted[::length] = False
        return np.unique(np.flatnonzero(predicted) // length) * length

    def padded_windows(
        self, length: int, batch: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches `[batch, length]` of the windows of `starts_in_loss`, each once; arguments as for `windows`.

        Rows and ends of rows that the stream does not fill are not in the loss.
        """
        starts = np.random.default_rng((seed, 0)).permutation(self.starts_in_loss(length))
        size = len(self.tokens)
        for first in range(0, len(starts), batch):
            chosen = np.full(batch, size)
            chosen[: len(starts) - first] = starts[first : first + batch]
            index = (chosen if rows is None else chosen[rows])[:, None] + np.arange(length)
            inside = index < size
            index = np.minimum(index, size - 1)
            yield np.where(inside, self.tokens[index], 0), inside & self.in_loss[index]

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


@contextmanager
def special_tokens_as_text(tokenizer: Tokenizer) -> Iterator[None]:
    """Encodes the names of special tokens like other text while it lasts."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        yield
    finally:
        tokenizer.encode_special_tokens = before


Encoded = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are in the loss."""


def encode_plain(tokenizer: Tokenizer, documents: Sequence[Document], end: int) -> list[Encoded]:
    """Tokens of documents without a chat template, each closed by the token `end`, which is in the loss.

    Each part is tokenised by itself, as it will be when a response is generated; the first has the tokens that the tokenizer
    adds. The name of a special token is text like any other.
    """
    parts = [document.parts for document in documents]
    with special_tokens_as_text(tokenizer):
        firsts = tokenizer.encode_batch([texts[0][0] for texts in parts])
        rests = iter(tokenizer.encode_batch([text for texts in parts for text, _ in texts[1:]], add_special_tokens=False))
    sequences: list[Encoded] = []
    for texts, first in zip(parts, firsts, strict=True):
        ids = list(first.ids)
        flags = [texts[0][1]] * len(first.ids)
        for _, in_loss in texts[1:]:
            more = next(rests).ids
            ids += more
            flags += [in_loss] * len(more)
        sequences.append(([*ids, end], [*flags, True]))
    return sequences


def chat_tokens(tokenizer: Tokenizer, template: ChatTemplate, chat: Chat, count: int, answering: bool) -> list[int]:
    """Tokens of a conversation's first `count` messages by a chat template, as a model reads them when it answers.

    Args:
        answering: whether the beginning of an answer follows.
    """
    text = template.render(chat.messages[:count], add_generation_prompt=answering, tools=chat.tools or None)
    return encode(tokenizer, text, add_special_tokens=False)


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, document: Document, ends: Sequence[int]) -> list[Encoded]:
    """Tokens of a conversation by a chat template; the assistant's messages are in the loss with the tokens that end them.

    It is one sequence. A template that writes earlier turns in another way than the last one (without their reasoning, say)
    makes a sequence for each turn, in which only that turn is in the loss.

    Args:
        ends: tokens that end a message; the first closes a message that the template does not end.
    """
    chat = document.chat
    assert chat is not None
    sequences: list[Encoded] = []
    whole: list[int] = []
    for turn in chat.learnt:
        try:
            prompt, after = (chat_tokens(tokenizer, template, chat, turn + n, not n) for n in (0, 1))
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from None
        same = next((n for n, (a, b) in enumerate(zip(prompt, after, strict=False)) if a != b), min(len(prompt), len(after)))
        response = after[same:]
        last = max((n for n, token in enumerate(response) if token in ends), default=len(response) - 1)
        learnt = [n <= last for n in range(len(response))]
        flags: list[bool] = []
        if sequences and after[: len(whole)] == whole and len(whole) <= same:
            _, flags = sequences.pop()
        sequences.append((after, [*flags, *[False] * (same - len(flags)), *learnt]))
        whole = after
    return [closed(ids, flags, ends) for ids, flags in sequences]


def closed(ids: list[int], flags: list[bool], ends: Sequence[int]) -> Encoded:
    """A sequence up to its last token in the loss, and the token that ends it if that is none."""
    size = max((n + 1 for n, in_loss in enumerate(flags) if in_loss), default=0)
    ids = ids[:size]
    flags = flags[:size]
    return (ids, flags) if ids and ids[-1] in ends else ([*ids, ends[0]], [*flags, True])


def encode_each(
    tokenizer: Tokenizer, documents: Sequence[Document], ends: Sequence[int], template: ChatTemplate | None = None
) -> Iterator[list[Encoded]]:
    """Sequences of each document, by the chat template where there is one and the document is a conversation."""
    plain = [document for document in documents if template is None or document.chat is None]
    encoded = iter(encode_plain(tokenizer, plain, ends[0]))
    for document in documents:
        if template is None or document.chat is None:
            yield [next(encoded)]
        else:
            yield encode_chat(tokenizer, template, document, ends)


def encode_documents(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    end: int,
    template: ChatTemplate | None = None,
    other_ends: Collection[int] = (),
) -> TokenStream:
    """Tokenises documents into a stream with the tokens that close them, in the loss.

    Args:
        end: closes a document.
        template: writes the conversations; None writes them as plain text.
        other_ends: tokens that end a message of a conversation besides.
    """
    every = [each for found in encode_each(tokenizer, documents, (end, *other_ends), template) for each in found]
    tokens = [token for ids, _ in every for token in ids]
    flags = [in_loss for _, in_losses in every for in_loss in in_losses]
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


def choose_held_out(levels: Sequence[Sequence[Hashable]], held_out: float, seed: int) -> np.ndarray | None:
    """Mask of the items that are held out, by a shuffle that depends on `seed` alone; items of equal keys stay together.

    Args:
        levels: keys of all items, from those that keep most together to those that keep least.

    Returns:
        the mask by the first level of which the share makes a whole group; None where no level has groups enough.
    """
    for keys in levels:
        groups = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        if len(groups) > 1 and held_out * len(groups) >= 1:
            order = np.random.default_rng(seed).permutation(len(groups))
            held = set(order[: min(len(groups) - 1, round(held_out * len(groups)))].tolist())
            return np.asarray([groups[key] in held for key in keys])
    return None


def choose_some(items: np.ndarray, held_out: float, seed: int, what: str) -> np.ndarray:
    """Mask of a share of the items, at least one and not all. Raises a `ValueError` where there are fewer than two."""
    if len(items) < 2:
        raise ValueError(f"expected at least 2 {what}, so that one can be held out, found {len(items)}")
    order = np.random.default_rng(seed).permutation(len(items))
    mask = np.zeros(len(items), bool)
    mask[order[: min(len(items) - 1, max(1, round(held_out * len(items))))]] = True
    return mask


Split = tuple[list[Document], list[Document]]
"""Documents to train on, and held-out ones."""


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> Split | None:
    """Splits whole documents; None where the share is less than one of them, so that windows are to be held out.

    Documents with the same prompt stay together, and so do those that have none and the same text. Where prompts are few, the
    same documents do.
    """
    held = choose_held_out(list(zip(*(document.keys for document in documents), strict=True)), held_out, seed)
    if held is None:
        return None
    sides: Split = ([], [])
    for document, apart in zip(documents, held.tolist(), strict=True):
        sides[apart].append(document)
    return sides


def split_windows(stream: TokenStream, length: int, held_out: float, seed: int) -> tuple[TokenStream, TokenStream]:
    """Splits a stream by windows of `length` tokens, of which a share is held out, at least one.

    The first token behind a gap is not in the loss: what stood before it is held out.

    Raises:
        ValueError: there are fewer than two whole windows with a token in the loss.
    """
    windows = np.arange(len(stream.tokens)) // length
    starts = np.asarray([start for start in stream.starts_in_loss(length) if start + length <= len(stream.tokens)])
    chosen = starts[choose_some(starts, held_out, seed, f"windows of {length} tokens in a text of {len(stream.tokens)}")]
    held = np.isin(windows, chosen // length)
    behind_gap = np.concatenate([[False], held[:-1]])
    return (
        TokenStream(stream.tokens[~held], (stream.in_loss & ~behind_gap)[~held]),
        TokenStream(stream.tokens[held], stream.in_loss[held]),
    )
