"""Prompts to measure with: the JSONL files of the usual benchmarks, told apart by their fields, and how each is asked.

Everything is read and checked before anything runs; what is wrong is a `ValueError` that names the file and the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilewright.models.chat import ChatTemplate
from tilewright.train.data import Record, format_question, read_records, shortened

Message = dict[str, str]

MBPP_SPLITS = {"test": range(11, 511), "train": range(511, 975)}
"""The `task_id`s of MBPP's splits; 1 to 10 are examples for prompts, and those behind the test split validation and training
(google-research, `mbpp/README.md`)."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Example:
    """A record of a data file.

    Attributes:
        dataset: the layout it has, a key of `LAYOUTS`.
        category: the benchmark's own, "" where it has none.
        turns: what the user says, as the record has it; a turn after the first is asked after the answer to the one before.
        line: in the file, from 1.
        before: (role, content) of the messages that stand before the first turn.
    """

    dataset: str
    category: str
    turns: tuple[str, ...]
    line: int
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a benchmark's records, and the prompts that are made of them.

    Attributes:
        fields: that a file of this layout is known by.
        turns: the user's turns of a record.
        category: the field that holds a record's category.
        chat: what stands before and after the first turn where it is put to a chat model.
        plain: the prompt of a model without a chat template, from the first turn.
    """

    fields: tuple[str, ...]
    turns: Callable[[Record], tuple[str, ...]]
    category: str = "category"
    chat: tuple[str, str] = ("", "")
    plain: Callable[[str], str] = str


def checked_text(value: object, what: str) -> str:
    """`value` if it is a text that can be a prompt."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text in {what}, found {shortened(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected a text in {what}, found half of a surrogate pair in {shortened(value)}") from None
    return value


def one(name: str) -> Callable[[Record], tuple[str, ...]]:
    """The turns of records whose only turn stands in one field."""
    return lambda record: (checked_text(record[name], repr(name)),)


def listed(record: Record) -> tuple[str, ...]:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a list of at least one text in 'turns', found {shortened(turns)}")
    return tuple(checked_text(turn, f"'turns' at {i}") for i, turn in enumerate(turns))


def conversation(record: Record) -> tuple[tuple[str, str], ...]:
    """(role, content) of a record's `messages`, of which the last is the user's."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"expected a list of at least one message in 'messages', found {shortened(messages)}")
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            found = shortened(message.get("role"))
            raise ValueError(f"expected a role among {', '.join(ROLES)} in 'messages' at {i}, found {found}")
    if messages[-1]["role"] != "user":
        raise ValueError(f"expected the last message to be the user's, found {shortened(messages[-1]['role'])}")
    contents = [checked_text(message.get("content"), f"the content of 'messages' at {i}") for i, message in enumerate(messages)]
    return tuple((message["role"], content) for message, content in zip(messages, contents, strict=True))


STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LAYOUTS = {
    "gsm8k": RecordLayout(("question", "answer"), one("question"), chat=("", STEP_BY_STEP), plain=format_question),
    "math500": RecordLayout(("problem",), one("problem"), category="subject", chat=("", STEP_BY_STEP)),
    "humaneval": RecordLayout(
        ("prompt", "entry_point"),
        one("prompt"),
        chat=("Write a solution to the following problem and make sure that it passes the tests:\n```python\n", "\n```"),
    ),
    "mbpp": RecordLayout(("text", "code", "test_list", "task_id"), one("text")),
    "mt-bench": RecordLayout(("turns",), listed),
    "swe-bench": RecordLayout(
        ("problem_statement",),
        one("problem_statement"),
        chat=("Problem Statement:\n", "\nPlease fix the issue described above."),
    ),
    "messages": RecordLayout(("messages",), lambda record: (conversation(record)[-1][1],)),
    "prompt": RecordLayout(("prompt",), one("prompt")),
}
"""By name, the first that fits decides. The wording for chat models is that of DFlash's benchmark (z-lab/dflash,
`dflash/benchmark.py`; SWE-bench as in forks of its first version), so that acceptance lengths compare with published ones."""


def layout_name(record: Record, where: str) -> str:
    """The first layout whose fields a record has."""
    for name, layout in LAYOUTS.items():
        if all(field in record for field in layout.fields):
            return name
    known = "; ".join(f"{name}: {', '.join(layout.fields)}" for name, layout in LAYOUTS.items())
    found = ", ".join(map(ascii, record)) or "none"
    raise ValueError(f"{where}: unknown dataset layout: expected the fields of one of ({known}), found {found}")


def example(record: Record, name: str, line: int) -> Example:
    layout = LAYOUTS[name]
    missing = [field for field in layout.fields if field not in record]
    if missing:
        raise ValueError(f"expected a {name} record like the first one, with {missing[0]!r}, found none")
    if name == "mbpp" and (not isinstance(record["task_id"], int) or isinstance(record["task_id"], bool)):
        raise ValueError(f"expected a number in 'task_id', found {shortened(record['task_id'])}")
    category = record.get(layout.category)
    turns = layout.turns(record)
    before = conversation(record)[:-1] if name == "messages" else ()
    return Example(name, category if isinstance(category, str) else "", turns, line, before)


Split = Literal["test", "train"]


def read_examples(path: Path, split: Split = "test") -> list[Example]:
    """The examples of a data file, whose layout its first record decides; of MBPP those of a split.

    Args:
        split: of MBPP alone, the one layout that tells its splits apart: "test", or "train" for the task ids behind it.

    Raises:
        ValueError: the file is absent, empty or of unknown layout, or a record is malformed, has another layout, or no prompt.
    """
    records = read_records(path)
    if not records:
        raise ValueError(f"{path}: expected at least one record, found an empty file")
    name = layout_name(records[0][1], f"{path}:{records[0][0]}")
    examples = []
    for line, record in records:
        try:
            made = example(record, name, line)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None
        if name != "mbpp" or record["task_id"] in MBPP_SPLITS[split]:
            examples.append(made)
    if not examples:
        first = MBPP_SPLITS[split][0]
        last = MBPP_SPLITS[split][-1]
        raise ValueError(f"{path}: expected records of MBPP's {split} split (task_id {first} to {last}), found none")
    return examples


def messages(example: Example, answers: Sequence[str] = ()) -> list[Message]:
    """The conversation up to the user's turn that follows `answers`, worded for a chat model."""
    head, tail = LAYOUTS[example.dataset].chat
    asked = [head + example.turns[0] + tail, *example.turns[1:]][: len(answers) + 1]
    said = [Message(role=role, content=content) for role, content in example.before]
    for i, turn in enumerate(asked):
        said.append(Message(role="user", content=turn))
        if i < len(answers):
            said.append(Message(role="assistant", content=answers[i]))
    return said


NOT_THINKING = {"enable_thinking": False}
"""Template values of all benchmarks: published acceptance lengths, for comparison, are of models that answer at once."""


def prompt(
    example: Example, answers: Sequence[str], template: ChatTemplate | None, values: Mapping[str, Any] | None = None
) -> str:
    """The prompt of the turn that follows `answers`, with one answer for each turn before it.

    With a template, its text for the conversation: encode it without further special tokens. Without one, as for base models,
    the record's own text; after the first turn all texts so far, an empty line between them.

    Args:
        values: what the template is told.

    Raises:
        ValueError: no turn is left, or the template refuses the conversation.
    """
    if len(answers) >= len(example.turns):
        raise ValueError(f"expected fewer answers than the {len(example.turns)} turn(s), found {len(answers)}")
    if template is not None:
        return template.render(messages(example, answers), values=values)
    turns = [LAYOUTS[example.dataset].plain(example.turns[0]), *example.turns[1:]]
    texts = [content for _, content in example.before]
    for turn, answer in zip(turns, answers, strict=False):
        texts += [turn, answer]
    return "\n\n".join([*texts, turns[len(answers)]])
