"""Data files of every layout, how they are asked, and what a bad file gets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tilewright.bench.datasets import LAYOUTS, NOT_THINKING, Example, messages, prompt, read_examples
from tilewright.models.chat import ChatTemplate

RECORDS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many? ", "answer": "2 #### 2"},
    "math500": {"problem": "Find x.", "solution": "x", "answer": "1", "subject": "Algebra", "level": 2},
    "humaneval": {"task_id": "H/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
    "mbpp": {"text": "Write f.", "code": "f=1", "task_id": 11, "test_list": ["assert f"]},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorten."]},
    "swe-bench": {"instance_id": "a", "problem_statement": "It\u2028breaks.\r\n", "patch": "+"},
    "prompt": {"prompt": "Once", "category": "tales", "source": "me"},
    "messages": {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
}
TEMPLATE = ChatTemplate(
    jinja2.Template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ enable_thinking }}"), {}, "here"
)


def write(tmp_path: Path, records: Sequence[object], between: str = "\n") -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(between.join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8", newline="")
    return path


def read_one(tmp_path: Path, layout: str) -> Example:
    return read_examples(write(tmp_path, [RECORDS[layout]]))[0]


@pytest.mark.parametrize("layout", RECORDS)
def test_a_layout_is_told_by_its_fields(tmp_path: Path, layout: str):
    assert set(RECORDS) == set(LAYOUTS)
    read = read_examples(write(tmp_path, [RECORDS[layout]] * 2))
    assert [example.dataset for example in read] == [layout] * 2
    assert [example.line for example in read] == [1, 2]


def test_turns_and_categories(tmp_path: Path):
    expected = {
        "gsm8k": ("", ("How many? ",)),
        "math500": ("Algebra", ("Find x.",)),
        "humaneval": ("", ("def f():\n",)),
        "mbpp": ("", ("Write f.",)),
        "mt-bench": ("writing", ("Write.", "Shorten.")),
        "swe-bench": ("", ("It\u2028breaks.\r\n",)),
        "prompt": ("tales", ("Once",)),
        "messages": ("", ("U",)),
    }
    read = {layout: read_one(tmp_path, layout) for layout in RECORDS}
    assert {layout: (example.category, example.turns) for layout, example in read.items()} == expected
    assert read["messages"].before == (("system", "S"),)
    assert read["prompt"].before == ()


def test_empty_lines_count_and_are_passed_over(tmp_path: Path):
    read = read_examples(write(tmp_path, [RECORDS["prompt"]] * 3, between="\n \r\n\n"))
    assert [example.line for example in read] == [1, 4, 7]


def test_of_mbpp_the_test_split(tmp_path: Path):
    records = [{**RECORDS["mbpp"], "task_id": i, "text": f"task {i}"} for i in (1, 10, 11, 510, 511, 974)]
    read = read_examples(write(tmp_path, records))
    assert [(example.turns[0], example.line) for example in read] == [("task 11", 3), ("task 510", 4)]
    with pytest.raises(ValueError, match=r"MBPP's test split \(task_id 11 to 510\), found none"):
        read_examples(write(tmp_path, [records[0], records[-1]]))


def test_what_a_chat_model_is_asked(tmp_path: Path):
    step_by_step = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    conversations = {layout: messages(read_one(tmp_path, layout)) for layout in RECORDS}
    assert {layout: said[-1]["content"] for layout, said in conversations.items()} == {
        "gsm8k": "How many? " + step_by_step,
        "math500": "Find x." + step_by_step,
        "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f():\n\n```",
        "mbpp": "Write f.",
        "mt-bench": "Write.",
        "swe-bench": "Problem Statement:\nIt\u2028breaks.\r\n\nPlease fix the issue described above.",
        "prompt": "Once",
        "messages": "U",
    }
    assert all(said[-1]["role"] == "user" for said in conversations.values())
    assert [len(said) for said in conversations.values()] == [1] * 7 + [2]
    assert conversations["messages"][0] == {"role": "system", "content": "S"}


def test_the_second_turn_comes_after_the_first_answer(tmp_path: Path):
    two = read_one(tmp_path, "mt-bench")
    assert messages(two, ["Done."]) == [
        {"role": "user", "content": "Write."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Shorten."},
    ]
    assert prompt(two, [], TEMPLATE) == "<user>Write."
    assert prompt(two, [], TEMPLATE, NOT_THINKING) == "<user>Write.False"
    assert prompt(two, ["Done."], TEMPLATE) == "<user>Write.<assistant>Done.<user>Shorten."
    assert prompt(two, ["Done."], None) == "Write.\n\nDone.\n\nShorten."
    with pytest.raises(ValueError, match=r"fewer answers than the 2 turn\(s\), found 2"):
        prompt(two, ["Done.", "So."], None)


def test_a_model_without_a_template_reads_the_text_itself(tmp_path: Path):
    plain = {layout: prompt(read_one(tmp_path, layout), [], None) for layout in RECORDS}
    assert plain == {
        "gsm8k": "Question: How many?\nAnswer: ",
        "math500": "Find x.",
        "humaneval": "def f():\n",
        "mbpp": "Write f.",
        "mt-bench": "Write.",
        "swe-bench": "It\u2028breaks.\r\n",
        "prompt": "Once",
        "messages": "S\n\nU",
    }


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"prompt": ""}, "expected a text in 'prompt', found ''"),
        ({"prompt": " \n"}, "expected a text in 'prompt'"),
        ({"prompt": None}, "found None"),
        ({"prompt": ["x"] * 99}, r"found \['x', 'x'.*\.\.\.$"),
        ({"prompt": "\ud83d"}, "an unpaired surrogate"),
        ({"question": "x"}, "expected a prompt record like the first one, with 'prompt', found none"),
        ([], r"expected a JSON object, found \[\]"),
        ("prompt", "expected a JSON object"),
    ],
)
def test_a_record_without_a_prompt_names_file_and_line(tmp_path: Path, bad: object, said: str):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in ({"prompt": "a"}, {"prompt": "b"}, bad)))
    with pytest.raises(ValueError, match=rf"^{path}:3: .*{said}"):
        read_examples(path)


@pytest.mark.parametrize(
    "layout, change, said",
    [
        ("mt-bench", {"turns": []}, "list of at least one text in 'turns'"),
        ("mt-bench", {"turns": "Write."}, "list of at least one text in 'turns', found 'Write.'"),
        ("mt-bench", {"turns": ["Write.", 2]}, "a text in 'turns' at 1, found 2"),
        ("mbpp", {"task_id": "11"}, "a number in 'task_id', found '11'"),
        ("mbpp", {"text": ""}, "a text in 'text'"),
        ("messages", {"messages": {}}, "at least one message"),
        ("messages", {"messages": ["hello"]}, "at least one message"),
        ("messages", {"messages": [{"role": "user"}]}, "the content of 'messages' at 0, found None"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "a role among system, user, assistant"),
        ("messages", {"messages": [{"role": "assistant", "content": "x"}]}, "the last message to be the user's"),
    ],
)
def test_a_malformed_record_is_refused(tmp_path: Path, layout: str, change: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=rf":1: .*{said}"):
        read_examples(write(tmp_path, [{**RECORDS[layout], **change}]))


def test_a_record_outside_mbpps_test_split_is_checked_too(tmp_path: Path):
    with pytest.raises(ValueError, match=":2: expected a text in 'text'"):
        read_examples(write(tmp_path, [RECORDS["mbpp"], {**RECORDS["mbpp"], "task_id": 1, "text": 0}]))


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", ": expected at least one record, found an empty file"),
        (b"\n \n", ": expected at least one record, found an empty file"),
        (b'{"prompt": "a"}\n{"prompt": \n', ":2: not JSON"),
        (b'\n{"prompt": "a"}\n{"prompt": "\xff"}', r":3: not UTF-8 \(byte 13 of the line\)"),
        (b"[" * 100_000, ":1: not JSON"),
        (b'{"body": "a", "id": 1}', ":1: unknown dataset layout: .*gsm8k: question, answer.*found 'body', 'id'$"),
        (b"{}", ":1: unknown dataset layout: .*found none$"),
    ],
)
def test_a_file_that_is_no_data_is_refused(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}{said}"):
        read_examples(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"absent\.jsonl cannot be read: No such file"):
        read_examples(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_examples(tmp_path)
