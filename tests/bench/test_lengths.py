"""Traces of requests: what is read, and how what is wrong with them is told."""

import re
from pathlib import Path

import numpy as np
import pytest

from tilewright.bench.lengths import read_lengths, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109"


@pytest.mark.parametrize(
    ("name", "text", "lengths"),
    [
        ("azure.csv", AZURE, [(374, 44), (396, 109)]),
        ("azure.CSV", "\ufeff" + AZURE.replace("\n", "\r\n") + "\r\n", [(374, 44), (396, 109)]),
        ("plain.csv", '\n output_tokens , prompt_tokens \n 0 ,1\n\n3,"2"\n', [(1, 0), (2, 3)]),
        ("a.jsonl", '{"prompt_tokens": 7, "output_tokens": 0}\n\n{"output_tokens": 2, "prompt_tokens": 1}', [(7, 0), (1, 2)]),
        ("usage.jsonl", '{"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}', [(7, 3)]),
        ("azure.jsonl", '{"ContextTokens": 7, "GeneratedTokens": 3}', [(7, 3)]),
    ],
)
def test_layouts(tmp_path: Path, name: str, text: str, lengths: list[tuple[int, int]]):
    (tmp_path / name).write_bytes(text.encode())
    prompts, outputs = read_lengths(tmp_path / name)
    assert list(zip(prompts.tolist(), outputs.tolist(), strict=True)) == lengths


PROMPT = "expected prompt_tokens of 1 to 2**31 - 1 tokens"
OUTPUT = "expected output_tokens of 0 to 2**31 - 1 tokens"
KNOWN = "prompt_tokens and output_tokens; prompt_tokens and completion_tokens; ContextTokens and GeneratedTokens"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.csv", b"", ": expected at least one request, found none"),
        ("t.csv", b"prompt_tokens,output_tokens\n", ": expected at least one request, found none"),
        ("t.csv", b"prompt_tokens,tokens\n1,2\n", f":1: expected the lengths of a request ({KNOWN}), found 'prompt"),
        ("t.csv", b"prompt_tokens,output_tokens\n1,2\n3\n", ":3: expected 2 values, found 1"),
        ("t.csv", b"prompt_tokens,output_tokens\n1,2\n\n3,-4\n", f":4: {OUTPUT}, found '-4'"),
        ("t.csv", b"prompt_tokens,output_tokens\n0,2\n", f":2: {PROMPT}, found '0'"),
        ("t.csv", b"prompt_tokens,output_tokens\nmany,2\n", f":2: {PROMPT}, found 'many'"),
        ("t.csv", b"prompt_tokens,output_tokens\n1,\n", f":2: {OUTPUT}, found ''"),
        ("t.csv", b"prompt_tokens,output_tokens\n1.5,2\n", f":2: {PROMPT}, found '1.5'"),
        ("t.csv", b"prompt_tokens,output_tokens\n2147483648,2\n", f":2: {PROMPT}"),
        ("t.csv", b"prompt_tokens,output_tokens\n" + b"9" * 5000 + b",2\n", f":2: {PROMPT}"),
        ("t.csv", b"a,b\xff\n", ": not UTF-8 (byte 4)"),
        ("t.csv", b"prompt_tokens,output_tokens\n" + b"1" * 200_000 + b",2\n", ":2: not CSV (field larger than field limit"),
        ("t.jsonl", b"", ": expected at least one request, found none"),
        ("t.jsonl", b'{"prompt_tokens": 1, "output_tokens": 2}\n{', ":2: not JSON"),
        ("t.jsonl", b'{"prompt_tokens": 1}', f":1: expected the lengths of a request ({KNOWN}), found 'prompt_tokens'"),
        ("t.jsonl", b"{}", f":1: expected the lengths of a request ({KNOWN}), found none"),
        ("t.jsonl", b'{"prompt_tokens": true, "output_tokens": 2}', f":1: {PROMPT}, found True"),
        ("t.jsonl", b'{"prompt_tokens": 1.0, "output_tokens": 2}', f":1: {PROMPT}, found 1.0"),
        ("t.jsonl", b'{"prompt_tokens": 1, "output_tokens": null}', f":1: {OUTPUT}, found None"),
        ("t.txt", b"", ": expected a trace in .csv or .jsonl, found .txt"),
        ("t", b"", ": expected a trace in .csv or .jsonl, found no suffix"),
    ],
)
def test_what_is_wrong(tmp_path: Path, name: str, text: bytes, problem: str):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}{problem}")):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize("name", ["absent.csv", "absent.jsonl"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name} cannot be read: No such file or directory"):
        read_lengths(tmp_path / name)


TIMED = '{"prompt_tokens": 1, "output_tokens": 2, "arrival_s": 1}\n'
DATE = "expected a date and time in TIMESTAMP"
NUMBER = "expected a number of seconds in arrival_s"
LIKE = "expected arrival_s as the first request has it"
CSV = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "text", "requests"),
    [
        ("azure.csv", AZURE, [(374, 44, 0.0), (396, 109, 4.314579)]),
        ("zone.csv", AZURE.replace(",374", "+00:00,374"), [(374, 44, 0.0), (396, 109, 4.314579)]),
        ("plain.csv", "arrival_s,output_tokens,prompt_tokens\n5,1,2\n 3.5,3,4\n3.5,5,6", [(4, 3, 0), (6, 5, 0), (2, 1, 1.5)]),
        ("a.jsonl", TIMED + TIMED.replace("1}", "-0.5}"), [(1, 2, 0), (1, 2, 1.5)]),
    ],
)
def test_times_of_arrival(tmp_path: Path, name: str, text: str, requests: list[tuple[int, int, float]]):
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name)
    assert trace.arrivals_s is not None
    assert list(zip(trace.prompts.tolist(), trace.outputs.tolist(), strict=True)) == [each[:2] for each in requests]
    np.testing.assert_allclose(trace.arrivals_s, [each[2] for each in requests], atol=2e-6)


def test_a_trace_need_not_say_when(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt_tokens,output_tokens\n1,2\n")
    trace = read_trace(tmp_path / "a.csv")
    assert (trace.arrivals_s, trace.prompts.tolist(), trace.outputs.tolist()) == (None, [1], [2])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.csv", AZURE.replace("2023-11-16 18:15:50", "yesterday"), f":3: {DATE}, found 'yesterday"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1.5,1,2", f":2: {DATE}, found '1.5'"),
        ("t.csv", CSV + "soon,1,2", f":2: {NUMBER}, found 'soon'"),
        ("t.csv", CSV + "nan,1,2", f":2: {NUMBER}, found 'nan'"),
        ("t.jsonl", TIMED.replace(": 1}", ": true}"), f":1: {NUMBER}, found True"),
        ("t.jsonl", TIMED.replace(": 1}", ": null}"), f":1: {NUMBER}, found None"),
        ("t.jsonl", TIMED.replace(": 1}", f": 1{'0' * 400}}}"), f":1: {NUMBER}, found 1000"),
        ("t.jsonl", TIMED + TIMED.replace("arrival_s", "x"), f":2: {LIKE}, found no time"),
        ("t.jsonl", TIMED + TIMED.replace("arrival_s", "TIMESTAMP"), f":2: {LIKE}, found TIM"),
        ("t.csv", "prompt_tokens,output_tokens\n0,2\n", f":2: {PROMPT}, found '0'"),
        ("t.csv", "prompt_tokens,output_tokens\n", ": expected at least one request, found none"),
    ],
)
def test_times_that_are_none(tmp_path: Path, name: str, text: str, problem: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}{problem}")):
        read_trace(tmp_path / name)
