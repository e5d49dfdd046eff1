"""Text from the model itself: instructions that it writes, and its own answers to these and to others.

A drafter should learn what its target would say. Instructions come from the model too: given nothing but what opens a user's
turn, it writes one (Magpie, arXiv 2406.08464). Answers are drawn at temperature 0 and 1 and end where the model ends them.
Texts that repeat themselves are left out, and so is whatever shares a long run of words with what will be measured on.
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
"""Words in succession that must not stand in a text to be measured on, as of GPT-3's data (arXiv 2005.14165, appendix C)."""
LEAST_WORDS = 3
"""Of an instruction."""
LEAST_DISTINCT = 0.5
"""Share of an answer's 4-grams of tokens that are different ones; below it the answer repeats itself."""


@dataclass(frozen=True)
class SelfInstructOptions:
    """Options by which answers are drawn.

    Attributes:
        instruction_tokens: the most tokens of an instruction.
        length: the most tokens of a prompt with its answer.
        prompt_tokens, answer_tokens: the most of a prompt, longer ones being left out, and of an answer; by default three
            quarters of `length`, and what the prompt leaves of it.
        temperatures: answers are drawn at each of them in turn.
        each: answers to a prompt that is given; to an instruction of the model's own there is one.
        seed: of the first text; each further one has the next.
        openings: what instructions begin with, in turn, and what is put behind them; by default nothing.
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
    """Runs of words in a text; of a shorter one all of its words."""
    found = words(text)
    return {tuple(found[n : n + length]) for n in range(max(1, len(found) - length + 1))} if found else set()


def distinct(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that are different ones; 1 of a text that is too short to have two."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) > 1 else 1.0


def opening(template: ChatTemplate) -> str:
    """All that stands before what a user says first."""
    mark = "\x02"
    return template.render([{"role": "user", "content": mark}], add_generation_prompt=False).split(mark)[0]


def asked(lm: LanguageModel, template: ChatTemplate, message: str) -> list[int]:
    """The tokens of a prompt that puts a user's message to the model."""
    text = template.render([{"role": "user", "content": message}])
    return encode(lm.tokenizer, text, add_special_tokens=False)


def response(record: Record) -> list[int]:
    """The tokens that the model wrote."""
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
    """Messages that the model writes in a user's place, `count` of them, those that did not end left out."""
    begins = [options.openings[n % len(options.openings)] for n in range(count)]
    before = opening(template)
    prompts = [encode(lm.tokenizer, before + begin, add_special_tokens=False) for begin, _ in begins]
    room = min(options.length, lm.target.max_position_embeddings) - max(map(len, prompts), default=0)
    base = Sampling(min(options.instruction_tokens, room), temperature=1.0)
    written = generated(writer, prompts, lambda n: replace(base, seed=options.seed + n), path, "writing instructions", console)
    ends = set(lm.target.eos_token_ids)
    texts = map(response, written)
    return [
        (begin + decode_after(lm.tokenizer, prompt, tokens)).strip() + end
        for (begin, end), prompt, tokens in zip(begins, prompts, texts, strict=True)
        if tokens and tokens[-1] in ends
    ]


def select_instructions(texts: Iterable[str], forbidden: Collection[tuple[str, ...]], left_out: Counter[str]) -> list[str]:
    """Instructions that are long enough, new, and share no run of words with what is measured on.

    Args:
        left_out: counts those that are not, by reason.
    """
    chosen = []
    seen = set[tuple[str, ...]]()
    for text in texts:
        found = words(text)
        start = tuple(found[:RUN])
        if len(found) < LEAST_WORDS or distinct([hash(word) for word in found]) < LEAST_DISTINCT:
            left_out["short or repetitive"] += 1
        elif start in seen:
            left_out["there before"] += 1
        elif not runs(text).isdisjoint(forbidden):
            left_out["in what is measured on"] += 1
        else:
            seen.add(start)
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
    """The model's answers to messages, at each temperature in turn; those that repeat themselves are left out.

    Args:
        messages: one that stands here several times is answered as often.
        left_out: counts the others.
    """
    length = min(options.length, lm.target.max_position_embeddings)
    every = [asked(lm, template, message) for message in messages]
    most = length * 3 // 4 if options.prompt_tokens is None else options.prompt_tokens
    prompts = [prompt for prompt in every if len(prompt) <= most]
    left_out["long prompt"] += len(every) - len(prompts)

    def sampling(n: int) -> Sampling:
        temperature = options.temperatures[n % len(options.temperatures)]
        room = length - len(prompts[n])
        return Sampling(min(room, options.answer_tokens or room), temperature, seed=options.seed + n)

    written = generated(writer, prompts, sampling, path, "writing answers", console)
    pairs = []
    seen = set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for prompt, tokens in zip(prompts, map(response, written), strict=True):
        pair = tuple(prompt), tuple(tokens)
        if distinct(tokens) < LEAST_DISTINCT:
            left_out["answer that repeats itself"] += 1
        elif pair in seen or len(tokens) < 2:
            left_out["answer there before or empty"] += 1
        else:
            seen.add(pair)
            pairs.append(pair)
    return Records.of(pairs)


def self_instruct(
    lm: LanguageModel,
    template: ChatTemplate,
    given: Sequence[str],
    count: int,
    forbidden: Collection[tuple[str, ...]],
    options: SelfInstructOptions,
    folder: Path,
    console: Console,
    writer: Writer,
) -> tuple[Records, Counter[str]]:
    """Answers to given messages and to `count` instructions of the model's own; and how many texts were left out, by reason.

    Args:
        forbidden: runs of words of what is measured on.
        folder: where texts are written as they come, so that an interrupted run goes on.
        writer: lets the model write.
    """
    left_out = Counter[str]()
    own = instructions(lm, template, count, options, folder / "instructions.jsonl", console, writer) if count else []
    left_out["instruction without an end"] = count - len(own)
    messages = [message for message in given for _ in range(options.each)] + select_instructions(own, forbidden, left_out)
    return answers(lm, template, messages, options, folder / "answers.jsonl", console, left_out, writer), left_out
