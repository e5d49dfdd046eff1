"""Training text by the model: instructions that it writes, and its answers to these and to given prompts.

A drafter should learn the text that its target generates. Given only the opening of a user's turn, the model writes an
instruction (Magpie, arXiv 2406.08464). It answers at temperatures 0 and 1. Repetitive texts are left out, and so are texts that
share a long run of words with evaluation data.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tilewright.llm.language_model import LanguageModel
from tilewright.models.chat import ChatTemplate
from tilewright.models.tokenizer import decode_after, encode
from tilewright.runtime.sampling import Sampling
from tilewright.train.records import Records
from tilewright.train.regenerate import Record, Writer, generated

RUN = 13
"""Consecutive words that a text must not share with evaluation data, as for GPT-3 (arXiv 2005.14165, appendix C)."""
LEAST_WORDS = 3
"""Smallest number of words in an instruction."""
LEAST_DISTINCT = 0.5
"""Smallest share of distinct 4-grams of tokens; texts below count as repetitive."""


@dataclass(frozen=True)
class SelfInstructOptions:
    """Options of the writing.

    Attributes:
        instruction_tokens: most tokens of an instruction.
        length: most tokens of a prompt with its answer.
        prompt_tokens: most tokens of a prompt, longer ones are left out; by default three quarters of `length`.
        answer_tokens: most tokens of an answer; by default the rest of `length`.
        temperatures: sampling temperatures of the answers, used in rotation.
        each: answers per given prompt; instructions of the model get one answer.
        seed: seed of the first text; later texts have the next seeds.
        openings: pairs of first words and trailing text of instructions, used in rotation; by default none.
    """

    instruction_tokens: int = 128
    length: int = 1024
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    each: int = 2
    seed: int = 0
    openings: tuple[tuple[str, str], ...] = (("", ""),)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def runs(text: str, length: int = RUN) -> set[tuple[str, ...]]:
    """Returns all runs of `length` words in a text; a shorter text is one run."""
    found = words(text)
    return {tuple(found[n : n + length]) for n in range(max(1, len(found) - length + 1))} if found else set()


def distinct(tokens: Sequence[int], n: int = 4) -> float:
    """Returns the share of distinct n-grams; 1 for a text with fewer than two n-grams."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) > 1 else 1.0


def opening(template: ChatTemplate) -> str:
    """Renders the text of the chat template before a user's first message."""
    mark = "\x02"
    return template.render([{"role": "user", "content": mark}], add_generation_prompt=False).split(mark)[0]


def prompt_tokens(lm: LanguageModel, template: ChatTemplate, message: str) -> list[int]:
    """Tokenises a user's message with the chat template."""
    text = template.render([{"role": "user", "content": message}])
    return encode(lm.tokenizer, text, add_special_tokens=False)


def response(record: Record) -> list[int]:
    """Returns the tokens of a record's response."""
    tokens = record["response_tokens"]
    assert isinstance(tokens, list)
    return tokens


def instructions(
    lm: LanguageModel,
    template: ChatTemplate,
    count: int,
    options: SelfInstructOptions,
    path: Path,
    console: Console,
    writer: Writer,
) -> list[str]:
    """Lets the model write `count` instructions, and returns those that the model ended."""
    openings = [options.openings[n % len(options.openings)] for n in range(count)]
    before = opening(template)
    prompts = [encode(lm.tokenizer, before + begin, add_special_tokens=False) for begin, _ in openings]
    room = min(options.length, lm.target.max_position_embeddings) - max(map(len, prompts), default=0)
    base = Sampling(min(options.instruction_tokens, room), temperature=1.0)
    written = generated(writer, prompts, lambda n: replace(base, seed=options.seed + n), path, "writing instructions", console)
    ends = set(lm.target.eos_token_ids)
    texts = map(response, written)
    return [
        (begin + decode_after(lm.tokenizer, prompt, tokens)).strip() + end
        for (begin, end), prompt, tokens in zip(openings, prompts, texts, strict=True)
        if tokens and tokens[-1] in ends
    ]


def select_instructions(texts: Iterable[str], forbidden: Collection[tuple[str, ...]], left_out: Counter[str]) -> list[str]:
    """Selects instructions that are long enough, new, and share no run of words with evaluation data.

    Args:
        texts: instructions.
        forbidden: runs of words of evaluation data.
        left_out: counts the other instructions by reason.
    """
    chosen = []
    starts = set[tuple[str, ...]]()
    for text in texts:
        found = words(text)
        start = tuple(found[:RUN])
        if len(found) < LEAST_WORDS or distinct([hash(word) for word in found]) < LEAST_DISTINCT:
            left_out["short or repetitive instruction"] += 1
        elif start in starts:
            left_out["duplicate instruction"] += 1
        elif not runs(text).isdisjoint(forbidden):
            left_out["instruction of the excluded files"] += 1
        else:
            starts.add(start)
            chosen.append(text)
    return chosen


def answers(
    lm: LanguageModel,
    template: ChatTemplate,
    messages: Sequence[str],
    options: SelfInstructOptions,
    path: Path,
    console: Console,
    left_out: Counter[str],
    writer: Writer,
) -> Records:
    """Lets the model answer messages, with rotating temperatures; leaves out repetitive and duplicate answers.

    Args:
        lm: the model.
        template: chat template of the model.
        messages: messages of a user; a repeated message gets several answers.
        options: options of the writing.
        path: file of records.
        console: console for progress.
        left_out: counts prompts and answers that are left out, by reason.
        writer: generates with the model.
    """
    length = min(options.length, lm.target.max_position_embeddings)
    encoded = [prompt_tokens(lm, template, message) for message in messages]
    longest = length * 3 // 4 if options.prompt_tokens is None else options.prompt_tokens
    prompts = [prompt for prompt in encoded if len(prompt) <= longest]
    left_out["long prompt"] += len(encoded) - len(prompts)

    def sampling(n: int) -> Sampling:
        temperature = options.temperatures[n % len(options.temperatures)]
        room = length - len(prompts[n])
        return Sampling(min(room, options.answer_tokens or room), temperature, seed=options.seed + n)

    written = generated(writer, prompts, sampling, path, "writing answers", console)
    pairs = []
    pairs_seen = set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for prompt, tokens in zip(prompts, map(response, written), strict=True):
        pair = tuple(prompt), tuple(tokens)
        if distinct(tokens) < LEAST_DISTINCT:
            left_out["repetitive answer"] += 1
        elif pair in pairs_seen or len(tokens) < 2:
            left_out["duplicate or empty answer"] += 1
        else:
            pairs_seen.add(pair)
            pairs.append(pair)
    return Records.from_pairs(pairs)


def self_instruct(
    lm: LanguageModel,
    template: ChatTemplate,
    user_messages: Sequence[str],
    count: int,
    forbidden: Collection[tuple[str, ...]],
    options: SelfInstructOptions,
    folder: Path,
    console: Console,
    writer: Writer,
) -> tuple[Records, Counter[str]]:
    """Lets the model answer messages of a user and `count` instructions of its own.

    Args:
        lm: the model.
        template: chat template of the model.
        user_messages: messages of a user.
        count: number of instructions that the model writes.
        forbidden: runs of words of evaluation data.
        options: options of the writing.
        folder: folder for the texts, from which an interrupted run resumes.
        console: console for progress.
        writer: generates with the model.

    Returns:
        prompts and answers, and the number of texts that are left out by reason.
    """
    left_out = Counter[str]()
    written = instructions(lm, template, count, options, folder / "instructions.jsonl", console, writer) if count else []
    left_out["instruction without an end"] = count - len(written)
    messages = [message for message in user_messages for _ in range(options.each)]
    messages += select_instructions(written, forbidden, left_out)
    return answers(lm, template, messages, options, folder / "answers.jsonl", console, left_out, writer), left_out
