"""Training text: reads files, folders and records, tokenises them into a stream, and cuts windows of fixed length.

Every order is a pure function of seed and epoch, so that a resumed run gets the same batches.
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
from tilewright.models.records import RECORD_SUFFIXES, Record, shortened
from tilewright.models.tokenizer import encode
from tilewright.train.log import METRICS
from tilewright.train.sources import DATASET_SUFFIXES, Block, DataFile, Keep, file_blocks, open_file, read_block

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""OpenAI's roles by ShareGPT's names."""
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
"""Fields of each record layout, in the order in which layouts are tried."""


@dataclass(frozen=True)
class Chat:
    """Conversation to train on.

    Attributes:
        messages: messages with `role` and `content`, in the format of chat templates.
        context_messages: number of leading messages that are not in the loss, of any role.
        tools: functions that the model may call, in OpenAI's format.
    """

    messages: tuple[Mapping[str, Any], ...] = field(hash=False)
    context_messages: int = 0
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    @property
    def learnt(self) -> list[int]:
        """Indices of the messages in the loss: the assistant's messages after a user's message, except those of weight 0."""
        first_user = next((n for n, message in enumerate(self.messages) if message["role"] == "user"), len(self.messages))
        return [
            n
            for n, message in enumerate(self.messages)
            if n >= max(self.context_messages, first_user) and message["role"] == "assistant" and message.get("weight", 1)
            if (message["content"] or "").strip() or message.get("tool_calls")
        ]

    def parts(self) -> list[tuple[str, bool]]:
        """Returns texts for a model without a chat template, with True for texts in the loss; empty lines separate messages.

        Raises:
            ValueError: a message has no text, or the conversation has tools.
        """
        if self.tools or not all(isinstance(message["content"], str) for message in self.messages):
            raise ValueError("expected messages of text only for a model without a chat template, found tools")
        parts: list[tuple[str, bool]] = []
        context = ""
        learnt = set(self.learnt)
        for n, message in enumerate(self.messages):
            context += "\n\n" if n else ""
            if n in learnt:
                parts += [(context, False), (message["content"], True)]
                context = ""
            else:
                context += message["content"]
        return parts


@dataclass(frozen=True)
class Document:
    """Text to train on.

    Attributes:
        text: text in the loss.
        prompt: text before `text`, not in the loss.
        chat: the document as a conversation, which replaces text and prompt if the model has a chat template.
        location: place in a file, for error messages.
        continues: the text goes on in another document, so that no token ends it.
    """

    text: str
    prompt: str = ""
    chat: Chat | None = None
    location: str = field(default="", compare=False)
    continues: bool = False

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """Texts for a model without a chat template, in order, with True for texts in the loss."""
        if self.chat is not None and not self.text:
            try:
                return self.chat.parts()
            except ValueError as error:
                raise ValueError(f"{self.location}: {error}") from None
        return [(self.prompt, False), (self.text, True)] if self.prompt else [(self.text, True)]

    @property
    def full_text(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def size(self) -> int:
        """Number of characters, without those of tools."""
        said = 0 if self.chat is None else sum(len(message["content"] or "") for message in self.chat.messages)
        return len(self.prompt) + len(self.text) + said

    @property
    def keys(self) -> tuple[Hashable, Hashable]:
        """Two keys: equal for documents with the same prompt (without a prompt: the same text), and for equal documents."""
        if self.chat is not None:
            first = min(self.chat.learnt)
            messages = [json.dumps(message, sort_keys=True) for message in self.chat.messages]
            return tuple(messages[:first]), tuple(messages)
        return (self.prompt, "" if self.prompt else self.text), (self.prompt, self.text)


def record_document(record: Record, location: str) -> Document | None:
    """Converts a record to a document; None if the record has no text for the loss. `LAYOUTS` lists the fields.

    Args:
        record: a JSON object.
        location: location of the record, for error messages.

    Raises:
        ValueError: the record has no known layout, or a field has the wrong type.
    """

    def text(*names: str) -> str | None:
        return next((record[name] for name in names if isinstance(record.get(name), str)), None)

    try:
        if "messages" in record or "conversations" in record:
            return chat_document(record, location)
        instruction = text("instruction")
        output = text("output")
        if instruction is not None and output is not None:
            return alpaca_document(record, instruction, output, location)
        if isinstance(record.get("prompt"), list):
            prompt, learnt = (read_messages(record.get(name), name) for name in ("prompt", "completion"))
            chat = Chat((*prompt, *learnt), len(prompt), read_tools(record))
            return Document("", "", chat, location) if chat.learnt else None
        prompt = text("prompt")
        response = text("completion", "response")
        question = text("question")
        answer = text("answer")
        if prompt is not None and response is not None:
            document = Document(response, prompt, location=location)
        elif question is not None and answer is not None:
            document = Document(format_question(question) + strip_annotations(answer), location=location)
        elif (full_text := text("text")) is not None:
            document = Document(full_text, location=location)
        else:
            raise ValueError(f"expected a record with {LAYOUTS}, found {shortened(', '.join(record) or 'no field')}")
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None
    return document if document.text.strip() else None


def alpaca_document(record: Record, instruction: str, output: str, location: str) -> Document | None:
    """Converts an Alpaca record: a chat of two messages, or Alpaca's prompt for a model without a chat template."""
    system, context = (record.get(name) or "" for name in ("system", "input"))
    if not isinstance(system, str) or not isinstance(context, str):
        raise ValueError("expected a text in 'system' and 'input'")
    question = f"{instruction}\n{context}" if context.strip() else instruction
    wording = ALPACA_WITH_INPUT if context.strip() else ALPACA
    first = ({"role": "system", "content": system},) if system else ()
    chat = Chat((*first, {"role": "user", "content": question}, {"role": "assistant", "content": output}))
    prompt = (f"{system}\n\n" if system else "") + wording.format(instruction=instruction, input=context)
    return Document(output, prompt, chat, location) if output.strip() else None


def chat_document(record: Record, location: str) -> Document | None:
    """Converts a record of messages in OpenAI's or ShareGPT's format."""
    name = "messages" if "messages" in record else "conversations"
    messages = read_messages(record[name], name)
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    chat = Chat(tuple(messages), 0, read_tools(record))
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"expected a message of the assistant in {name!r}, found none")
    return Document("", "", chat, location) if chat.learnt else None


def read_messages(value: object, name: str) -> list[Record]:
    """Reads the messages of a record, with OpenAI's names for roles and contents.

    Args:
        value: the field of the record.
        name: name of the field, for error messages.

    Raises:
        ValueError: the field is not a list of messages with a known role and a text.
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
    """Reads the tools of a conversation. Raises a `ValueError` if the field is not a list of objects."""
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
    """Formats the prompt of a question-and-answer record; the answer follows directly."""
    return f"Question: {question.strip()}\nAnswer: "


def strip_annotations(answer: str) -> str:
    """Removes the calculator annotations of GSM8K's answers, such as `<<48/2=24>>`."""
    return re.sub(r"<<[^<>]*>>", "", answer)


def read_documents(paths: Sequence[Path], left_out: Counter[str] | None = None) -> list[Document]:
    """Reads all documents of files and folders: one per text file, one per record.

    Args:
        paths: files and folders.
        left_out: counts files and records without text for the loss, by reason.

    Raises:
        ValueError: a path does not exist or has no text, or a record is malformed.
    """
    left_out = Counter() if left_out is None else left_out
    blocks = [block for file in find_files(paths, left_out) for block in file_blocks(file, None)]
    documents = [document for block in blocks for document in read_block_documents(block, left_out) if document is not None]
    if paths and not documents:
        raise ValueError(f"expected text to train on in {', '.join(map(str, paths))}, found none")
    return documents


def find_files(paths: Sequence[Path], left_out: Counter[str]) -> list[DataFile]:
    """Finds the data files of files and folders, sorted within a folder.

    A file that is named itself is text unless its suffix says otherwise. In a folder with files of data sets, `README.md` is
    their description and left out. So are the logs of runs that write into the folder.

    Args:
        paths: files and folders.
        left_out: counts files that are left out, by reason.

    Raises:
        ValueError: a path does not exist, or a folder has no data.
    """
    found: list[DataFile] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
        if not path.is_dir():
            found.append(DataFile(path, path.name))
            continue
        suffixes = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, *DATASET_SUFFIXES)
        files = sorted(each for each in path.rglob("*") if each.is_file())
        inside = [DataFile(each, each.relative_to(path).as_posix()) for each in files]
        inside = [file for file in inside if file.suffix in suffixes and file.path.parts[-2:] != ("training", METRICS)]
        if any(file.suffix in DATASET_SUFFIXES for file in inside):
            inside = [file for file in inside if file.path.name != "README.md"]
        if not inside:
            others = ", ".join(sorted({each.suffix or "no suffix" for each in files})) or "no file"
            raise ValueError(f"{path}: expected files ending in {', '.join(suffixes)}, found {others}")
        left_out["other files"] += len(files) - len(inside)
        found += [file for file in inside if holds_text(file, left_out)]
    return found


def read_block_documents(block: Block, left_out: Counter[str], keep: Keep = lambda n: True) -> Iterator[Document | None]:
    """Yields the documents of the items of a block that are kept (see `read_block`); None for an item without text to learn."""
    for location, item in read_block(block, keep):
        if isinstance(item, str):
            document = Document(item, location=location, continues=not block.last) if item.strip() else None
            left_out["empty files"] += document is None
        else:
            document = record_document(item, location)
            left_out["records without a response"] += document is None
        yield document


def holds_text(file: DataFile, left_out: Counter[str]) -> bool:
    """Returns False for a `.json` file whose first object has no field of `LAYOUTS`, such as a settings file."""
    if file.suffix != ".json":
        return True
    value = None
    if not file.has_lines:
        with open_file(file) as opened:
            content = opened.read().strip()
        value = json.loads(content) if content.startswith(b"[") else None
    if value is not None and not any(isinstance(each, dict) for each in value):
        holds = False
    else:
        fields = {"messages", "conversations", "instruction", "prompt", "question", "text"}
        (block,) = file_blocks(file, None)
        _, first = next(read_block(block, lambda n: True), ("", {}))
        holds = not fields.isdisjoint(first)
    left_out["JSON files without records"] += not holds
    return holds


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE. It encodes any text, merges runs of spaces, and keeps digits separate.

    Args:
        documents: training text.
        vocab_size: largest vocabulary, including the special tokens `END_OF_TEXT` and `MASK`.

    Raises:
        ValueError: the vocabulary is smaller than 256 bytes and two special tokens.
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
    tokenizer.train_from_iterator((document.full_text for document in documents), trainer)
    return tokenizer


@dataclass(frozen=True)
class TokenStream:
    """Concatenated tokens of documents; the end-of-text token ends each document.

    Attributes:
        tokens: token ids, int32 `[n]`.
        in_loss: mask of the tokens in the loss, bool `[n]`; False for prompts.
        documents: number of each token's document, int32 `[n]`; None if it is not known.
    """

    tokens: np.ndarray
    in_loss: np.ndarray
    documents: np.ndarray | None = None

    def windows(
        self, length: int, batch: int, seed: int, epoch: int, rows: Int[np.ndarray, " R"] | None = None, segments: bool = False
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields batches `[batch, length]` of tokens and loss mask that cover the stream once, in random order.

        Each epoch cuts the stream at another random offset, and drops the windows that do not fill a batch.

        Args:
            length: tokens per window.
            batch: windows per batch.
            seed: seed of the order.
            epoch: number of the epoch.
            rows: rows of each batch to return; by default all.
            segments: also yield the number of each token's document.
        """
        rng = np.random.default_rng((seed, epoch))
        spare = len(self.tokens) - length
        starts = np.arange(int(rng.integers(0, min(length, spare + 1))), spare + 1, length)
        starts = rng.permutation(starts)
        for first in range(0, len(starts) - batch + 1, batch):
            chosen = starts[first : first + batch]
            yield self.rows(chosen if rows is None else chosen[rows], length, segments)

    def starts_in_loss(self, length: int) -> np.ndarray:
        """Returns the starts of the consecutive windows that have a token in the loss after their first position."""
        predicted = self.in_loss.copy()
        predicted[::length] = False
        return np.unique(np.flatnonzero(predicted) // length) * length

    def padded_windows(
        self, length: int, batch: int, seed: int, rows: Int[np.ndarray, " R"] | None = None, segments: bool = False
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields batches `[batch, length]` of the windows of `starts_in_loss`, each once; see `windows` for the arguments.

        Padding rows and padding at the ends of rows are not in the loss.
        """
        starts = np.random.default_rng((seed, 0)).permutation(self.starts_in_loss(length))
        size = len(self.tokens)
        for first in range(0, len(starts), batch):
            chosen = np.full(batch, size)
            chosen[: len(starts) - first] = starts[first : first + batch]
            yield self.rows(chosen if rows is None else chosen[rows], length, segments)

    def rows(self, starts: Int[np.ndarray, " B"], length: int, segments: bool) -> tuple[np.ndarray, ...]:
        """Returns the windows at these starts; padding behind the end of the stream is not in the loss."""
        index = starts[:, None] + np.arange(length)
        inside = index < len(self.tokens)
        index = np.minimum(index, len(self.tokens) - 1)
        found = np.where(inside, self.tokens[index], 0), inside & self.in_loss[index]
        if not segments:
            return found
        if self.documents is None:
            raise ValueError("expected text whose documents are known for segments, found joined text")
        return *found, self.documents[index]

    def steps_per_epoch(self, length: int, batch: int) -> int:
        """Returns the smallest number of batches per epoch; the offset of an epoch may allow one more window."""
        return (len(self.tokens) // length - 1) // batch


@runtime_checkable
class TokenSource(Protocol):
    """Concatenated tokens and their loss mask: a `TokenStream` or `Records`."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def in_loss(self) -> np.ndarray: ...


def frequent_tokens(source: TokenSource, vocab_size: int, size: int) -> np.ndarray:
    """Returns the `size` most frequent tokens in the loss as sorted ids, int32; ties go to lower ids."""
    counts = np.bincount(source.tokens[source.in_loss], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


@contextmanager
def special_tokens_as_text(tokenizer: Tokenizer) -> Iterator[None]:
    """Context in which the tokenizer encodes names of special tokens as plain text."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        yield
    finally:
        tokenizer.encode_special_tokens = before


Encoded = tuple[list[int], list[bool]]
"""Token ids of a sequence, and their loss mask."""


def encode_plain(tokenizer: Tokenizer, documents: Sequence[Document], end: int) -> list[Encoded]:
    """Tokenises documents without a chat template; the token `end` ends each document and is in the loss, unless it continues.

    Each part is tokenised separately, as when a response is generated. The first part has the special tokens that the tokenizer
    adds. Names of special tokens in the text are plain text.
    """
    parts = [document.parts for document in documents]
    with special_tokens_as_text(tokenizer):
        firsts = tokenizer.encode_batch([texts[0][0] for texts in parts])
        rests = iter(tokenizer.encode_batch([text for texts in parts for text, _ in texts[1:]], add_special_tokens=False))
    sequences: list[Encoded] = []
    for document, texts, first in zip(documents, parts, firsts, strict=True):
        ids = list(first.ids)
        flags = [texts[0][1]] * len(first.ids)
        for _, in_loss in texts[1:]:
            more = next(rests).ids
            ids += more
            flags += [in_loss] * len(more)
        sequences.append((ids, flags) if document.continues else ([*ids, end], [*flags, True]))
    return sequences


def chat_tokens(tokenizer: Tokenizer, template: ChatTemplate, chat: Chat, count: int, answering: bool) -> list[int]:
    """Tokenises the first `count` messages of a conversation with a chat template, as in generation.

    Args:
        tokenizer: tokenizer of the model.
        template: chat template of the model.
        chat: the conversation.
        count: number of messages.
        answering: append the generation prompt.
    """
    text = template.render(chat.messages[:count], add_generation_prompt=answering, tools=chat.tools or None)
    return encode(tokenizer, text, add_special_tokens=False)


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, document: Document, ends: Sequence[int]) -> list[Encoded]:
    """Tokenises a conversation with a chat template; the assistant's messages and their end tokens are in the loss.

    The conversation becomes one sequence. If the template renders earlier turns differently from the last one (for example
    without reasoning), each turn becomes a sequence in which only that turn is in the loss.

    Args:
        tokenizer: tokenizer of the model.
        template: chat template of the model.
        document: a document with a conversation.
        ends: tokens that end a message; the first one ends messages that the template leaves open.
    """
    chat = document.chat
    assert chat is not None
    sequences: list[Encoded] = []
    previous: list[int] = []
    for index in chat.learnt:
        try:
            prompt, sequence = (chat_tokens(tokenizer, template, chat, index + n, not n) for n in (0, 1))
        except ValueError as error:
            raise ValueError(f"{document.location}: {error}") from None
        common = next(
            (n for n, (a, b) in enumerate(zip(prompt, sequence, strict=False)) if a != b), min(len(prompt), len(sequence))
        )
        response = sequence[common:]
        response_end = max((n for n, token in enumerate(response) if token in ends), default=len(response) - 1)
        learnt = [n <= response_end for n in range(len(response))]
        flags: list[bool] = []
        if sequences and sequence[: len(previous)] == previous and len(previous) <= common:
            _, flags = sequences.pop()
        sequences.append((sequence, [*flags, *[False] * (common - len(flags)), *learnt]))
        previous = sequence
    return [closed(ids, flags, ends) for ids, flags in sequences]


def closed(ids: list[int], flags: list[bool], ends: Sequence[int]) -> Encoded:
    """Cuts a sequence after its last token in the loss, and appends `ends[0]` if no end token is there."""
    size = max((n + 1 for n, in_loss in enumerate(flags) if in_loss), default=0)
    ids = ids[:size]
    flags = flags[:size]
    return (ids, flags) if ids and ids[-1] in ends else ([*ids, ends[0]], [*flags, True])


def encode_each(
    tokenizer: Tokenizer, documents: Sequence[Document], ends: Sequence[int], template: ChatTemplate | None = None
) -> Iterator[list[Encoded]]:
    """Yields the sequences of each document; conversations use the chat template if one is given."""
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
    """Tokenises documents into a stream; end tokens are in the loss.

    Args:
        tokenizer: tokenizer of the model.
        documents: the documents.
        end: token that ends a document.
        template: chat template for conversations; None renders them as plain text.
        other_ends: further tokens that end a message of a conversation.
    """
    sequences = [
        sequence for encoded in encode_each(tokenizer, documents, (end, *other_ends), template) for sequence in encoded
    ]
    tokens = [token for ids, _ in sequences for token in ids]
    flags = [in_loss for _, in_losses in sequences for in_loss in in_losses]
    documents_of = np.repeat(np.arange(len(sequences), dtype=np.int32), [len(ids) for ids, _ in sequences])
    return TokenStream(np.asarray(tokens, np.int32), np.asarray(flags, bool), documents_of)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Returns the token that separates documents. Raises a `ValueError` if the tokenizer lacks the token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"expected a tokenizer with the token {END_OF_TEXT}, which separates documents, found none")
    return end


def require_windows(stream: TokenStream, length: int, batch: int, text: str) -> None:
    """Raises a `ValueError` for a text with less than one batch of windows per epoch, or without tokens in the loss."""
    if stream.steps_per_epoch(length, batch) < 1:
        size = length * (batch + 1)
        raise ValueError(
            f"expected at least {size} tokens in {text}, for a batch of {batch} windows of {length}, found {len(stream.tokens)}"
        )
    if not stream.in_loss.any():
        raise ValueError(f"expected tokens in the loss in {text}, found none among {len(stream.tokens)}")


def choose_held_out(levels: Sequence[Sequence[Hashable]], held_out: float, seed: int) -> np.ndarray | None:
    """Chooses held-out items at random; items with equal keys stay together.

    Args:
        levels: keys of all items for each level, from the coarsest level to the finest.
        held_out: share of the groups that is held out.
        seed: seed of the choice.

    Returns:
        mask of the held-out items by the first level with a whole group to hold out; None if no level has enough groups.
    """
    for keys in levels:
        groups = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        if len(groups) > 1 and held_out * len(groups) >= 1:
            order = np.random.default_rng(seed).permutation(len(groups))
            held_groups = set(order[: min(len(groups) - 1, round(held_out * len(groups)))].tolist())
            return np.asarray([groups[key] in held_groups for key in keys])
    return None


def choose_some(items: np.ndarray, held_out: float, seed: int, label: str) -> np.ndarray:
    """Returns a random mask of a share of the items, at least one. Raises a `ValueError` for fewer than two items."""
    if len(items) < 2:
        raise ValueError(f"expected at least 2 {label}, so that one can be held out, found {len(items)}")
    order = np.random.default_rng(seed).permutation(len(items))
    mask = np.zeros(len(items), bool)
    mask[order[: min(len(items) - 1, max(1, round(held_out * len(items))))]] = True
    return mask


Split = tuple[list[Document], list[Document]]
"""Training documents and held-out documents."""


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> Split | None:
    """Splits whole documents; returns None if the share is less than one document, to hold out windows instead.

    Documents with the same prompt (without a prompt: the same text) stay together. With few prompts, only equal documents do.
    """
    mask = choose_held_out(list(zip(*(document.keys for document in documents), strict=True)), held_out, seed)
    if mask is None:
        return None
    sides: Split = ([], [])
    for document, is_held_out in zip(documents, mask.tolist(), strict=True):
        sides[is_held_out].append(document)
    return sides


def split_windows(stream: TokenStream, length: int, held_out: float, seed: int) -> tuple[TokenStream, TokenStream]:
    """Splits a stream into windows of `length` tokens, and holds out a share of them, at least one window.

    The first token after a held-out window is not in the loss, since its context is held out.

    Raises:
        ValueError: fewer than two whole windows have a token in the loss.
    """
    windows = np.arange(len(stream.tokens)) // length
    starts = np.asarray([start for start in stream.starts_in_loss(length) if start + length <= len(stream.tokens)])
    chosen = starts[choose_some(starts, held_out, seed, f"windows of {length} tokens in a text of {len(stream.tokens)}")]
    is_held_out = np.isin(windows, chosen // length)
    behind_gap = np.concatenate([[False], is_held_out[:-1]])
    numbers = stream.documents

    def part(kept: np.ndarray, in_loss: np.ndarray) -> TokenStream:
        return TokenStream(stream.tokens[kept], in_loss[kept], None if numbers is None else numbers[kept])

    return part(~is_held_out, stream.in_loss & ~behind_gap), part(is_held_out, stream.in_loss)
