"""Prompts for benchmarks: reads the usual JSONL files, recognises their layout by the fields, and formats the prompts.

All records are read and checked before anything runs. A `ValueError` names the file and the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilewright.models.chat import ChatTemplate
from tilewright.models.records import Record, read_records, shortened
from tilewright.train.data import format_question

Message = dict[str, str]

MBPP_SPLITS = {"test": range(11, 511), "train": range(511, 975)}
"""`task_id`s of MBPP's splits. 1 to 10 are few-shot examples; those after the test split are validation and training
(google-research, `mbpp/README.md`)."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Example:
    """A record of a data file.

    Attributes:
        dataset: layout, a key of `LAYOUTS`.
        category: the benchmark's category; "" without one.
        turns: the user's turns. Each turn after the first follows the answer to the previous turn.
        line: line in the file, from 1.
        before: (role, content) of messages before the first turn.
    """

    dataset: str
    category: str
    turns: tuple[str, ...]
    line: int
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RecordLayout:
    """Layout of a benchmark's records, and its prompt formats.

    Attributes:
        fields: fields that identify the layout.
        turns: function that returns the user's turns of a record.
        category: field of a record's category.
        chat: texts before and after the first turn for a chat model.
        plain: formats the first turn for a model without a chat template.
    """

    fields: tuple[str, ...]
    turns: Callable[[Record], tuple[str, ...]]
    category: str = "category"
    chat: tuple[str, str] = ("", "")
    plain: Callable[[str], str] = str


def checked_text(value: object, label: str) -> str:
    """Returns `value` if it is a valid prompt text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text in {label}, found {shortened(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected a text in {label}, found an unpaired surrogate in {shortened(value)}") from None
    return value


def question_field(name: str) -> Callable[[Record], tuple[str, ...]]:
    """Returns a function for records with a single turn in one field."""
    return lambda record: (checked_text(record[name], repr(name)),)


def listed(record: Record) -> tuple[str, ...]:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a list of at least one text in 'turns', found {shortened(turns)}")
    return tuple(checked_text(turn, f"'turns' at {i}") for i, turn in enumerate(turns))


def conversation(record: Record) -> tuple[tuple[str, str], ...]:
    """Returns (role, content) of a record's `messages`, the last of which is the user's."""
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
    "gsm8k": RecordLayout(("question", "answer"), question_field("question"), chat=("", STEP_BY_STEP), plain=format_question),
    "math500": RecordLayout(("problem",), question_field("problem"), category="subject", chat=("", STEP_BY_STEP)),
    "humaneval": RecordLayout(
        ("prompt", "entry_point"),
        question_field("prompt"),
        chat=("Write a solution to the following problem and make sure that it passes the tests:\n```python\n", "\n```"),
    ),
    "mbpp": RecordLayout(("text", "code", "test_list", "task_id"), question_field("text")),
    "mt-bench": RecordLayout(("turns",), listed),
    "swe-bench": RecordLayout(
        ("problem_statement",),
        question_field("problem_statement"),
        chat=("Problem Statement:\n", "\nPlease fix the issue described above."),
    ),
    "messages": RecordLayout(("messages",), lambda record: (conversation(record)[-1][1],)),
    "prompt": RecordLayout(("prompt",), question_field("prompt")),
}
"""Layouts by name; the first match counts. The wording for chat models is that of DFlash's benchmark (z-lab/dflash,
`dflash/benchmark.py`; SWE-bench as in forks of its first version), so that acceptance lengths are comparable with published
ones."""


def layout_name(record: Record, location: str) -> str:
    """Returns the first layout whose fields a record has."""
    for name, layout in LAYOUTS.items():
        if all(field in record for field in layout.fields):
            return name
    layouts = "; ".join(f"{name}: {', '.join(layout.fields)}" for name, layout in LAYOUTS.items())
    found = ", ".join(map(ascii, record)) or "none"
    raise ValueError(f"{location}: unknown dataset layout: expected the fields of one of ({layouts}), found {found}")


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
    """Reads the examples of a data file. The first record decides the layout.

    Args:
        split: split of MBPP, the only layout with marked splits: "test", or "train" for higher task ids.

    Raises:
        ValueError: The file is absent, empty or of unknown layout; or a record is malformed, has another layout, or no prompt.
    """
    records = read_records(path)
    if not records:
        raise ValueError(f"{path}: expected at least one record, found an empty file")
    name = layout_name(records[0][1], f"{path}:{records[0][0]}")
    examples = []
    for line, record in records:
        try:
            converted = example(record, name, line)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None
        if name != "mbpp" or record["task_id"] in MBPP_SPLITS[split]:
            examples.append(converted)
    if not examples:
        first = MBPP_SPLITS[split][0]
        last = MBPP_SPLITS[split][-1]
        raise ValueError(f"{path}: expected records of MBPP's {split} split (task_id {first} to {last}), found none")
    return examples


def messages(example: Example, answers: Sequence[str] = ()) -> list[Message]:
    """Returns the conversation up to the user's turn after `answers`, worded for a chat model."""
    head, tail = LAYOUTS[example.dataset].chat
    turns = [head + example.turns[0] + tail, *example.turns[1:]][: len(answers) + 1]
    chat = [Message(role=role, content=content) for role, content in example.before]
    for i, turn in enumerate(turns):
        chat.append(Message(role="user", content=turn))
        if i < len(answers):
            chat.append(Message(role="assistant", content=answers[i]))
    return chat


NOT_THINKING = {"enable_thinking": False}
"""Template values of all benchmarks: published acceptance lengths are of models that answer without thinking."""


def prompt(
    example: Example, answers: Sequence[str], template: ChatTemplate | None, values: Mapping[str, Any] | None = None
) -> str:
    """Returns the prompt of the turn after `answers`, which has one answer for each earlier turn.

    With a template: the rendered conversation, to be encoded without further special tokens. Without one (base models): the
    record's own text; after the first turn, all texts so far, separated by empty lines.

    Args:
        values: values for the template.

    Raises:
        ValueError: No turn is left, or the template rejects the conversation.
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
