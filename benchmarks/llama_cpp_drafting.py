"""Drafting beside llama.cpp, in turns, on the same GGUF file and the same prompts: one row, greedy.

    python benchmarks/llama_cpp_drafting.py MODEL --data FILE ... [--llama-python PYTHON] [--drafter NAME ...] [--json FILE]

Ours decodes plainly and with every drafter named, in blocks whose width is chosen round by round; without `--llama-python`
ours alone runs. llama.cpp runs in a process of its own (see `llama_cpp_speed.py`), plainly and with drafts that it looks up in
the text itself: in the format and with the kind of attention that a trial on the first prompts finds fastest, and with the
number of drafts and the length of what is looked up that a trial on the first prompts of each file does. Seconds are those
after the prompt. Ratios are of what ran in one repetition, above 1 where ours is faster. Our outputs are compared token for
token; llama.cpp rounds otherwise, and its texts part from ours sooner or later. Only an idle machine gives figures.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import jax
from cyclopts import App, Parameter
from llama_cpp_peer import Peer
from llama_cpp_speed import formats
from rich.console import Console
from rich.table import Table

import tilewright as tw
from tilewright.bench.datasets import read_examples
from tilewright.bench.speculative import DatasetPrompts, ask
from tilewright.bench.speculative_figures import BASELINE
from tilewright.cli.bench_speculative import DrafterArguments
from tilewright.cli.common import AUTO, TargetOptions, keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, quotients, spread
from tilewright.llm.acceptance import distinct_ngram_ratio
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models import hub
from tilewright.models.chat import ChatTemplate

DRAFTS = (2, 4, 10)
NGRAMS = (2, 3)
"""How many tokens llama.cpp is tried with, and how long a run it looks up."""
TRIED = 2
"""Prompts that a trial decodes."""
PEER_PLAIN = "llama.cpp"
PEER_LOOKUP = "llama.cpp, looked up"


class Timed(NamedTuple):
    """A file's prompts, decoded one after the other.

    Attributes:
        seconds: after each prompt, together.
        tokens: of each response.
        made: how many of them the seconds went to. llama.cpp has a response's first with its prompt; here the first round
            gives it.
    """

    seconds: float
    tokens: list[list[int]]
    rounds: int
    made: int


def ours(lm: LanguageModel, speculative: bool, sampling: tw.Sampling, prompts: Sequence[list[int]]) -> Timed:
    made = [lm.generate([prompt], sampling, speculative=speculative) for prompt in prompts]
    rounds = sum(len(each[0].acceptance_lengths) for each in made)
    tokens = [each[0].tokens for each in made]
    return Timed(sum(each.decode_seconds for each in made), tokens, rounds, sum(map(len, tokens)))


class Setting(NamedTuple):
    """How llama.cpp runs: the model's file, with flash attention or not, and how it looks drafts up, or (0, 0)."""

    file: Path
    flash: bool
    drafts: int = 0
    ngram: int = 0


def theirs(peer: Peer, positions: int, ends: Sequence[int], new: int, setting: Setting, prompts: Sequence[list[int]]) -> Timed:
    peer.ask("open", model=str(setting.file), threads=cores(), rows=1, positions=positions, flash=setting.flash)
    peer.ask("generate", prompts=[prompts[0][:8]], new=8, ends=[])  # does not count
    seconds = 0.0
    tokens = list[list[int]]()
    rounds = 0
    for prompt in prompts:
        if setting.drafts:
            made = peer.ask("draft", prompt=prompt, new=new, ends=list(ends), drafts=setting.drafts, ngram=setting.ngram)
        else:
            made = peer.ask("generate", prompts=[prompt], new=new, ends=list(ends))
        seconds += made["decode_s"]
        tokens += made["tokens"]
        rounds += made.get("rounds", len(made["tokens"][0]) - 1) + 1  # the first token comes with the prompt
    return Timed(seconds, tokens, rounds, sum(len(each) - 1 for each in tokens))


def fastest(run: Callable[..., Timed], prompts: Sequence[list[int]], settings: Sequence[Setting]) -> Setting:
    """The setting with the most tokens a second, by the better of two measurements of the first prompts."""
    taken = alternate({setting: partial(run, setting, prompts[:TRIED]) for setting in settings}, 2)
    return max(taken, key=lambda setting: max(timed.made / timed.seconds for timed in taken[setting]))


def figures(dataset: str, taken: Mapping[str, Sequence[Timed]], peers: Mapping[str, Setting]) -> list[dict[str, Any]]:
    """A record for each way: medians and ranges."""
    plain = taken[BASELINE]
    records = []
    for name, times in taken.items():
        rates = spread([timed.made / timed.seconds for timed in times])
        record: dict[str, Any] = {
            "dataset": dataset,
            "way": name,
            "responses": len(times[0].tokens),
            "tokens": times[0].made,
            "tokens_per_s": rates.median,
            "tokens_per_s_range": list(rates.range),
            "tokens_per_round": sum(map(len, times[0].tokens)) / times[0].rounds,
            "distinct_4gram_ratio": fmean(distinct_ngram_ratio(tokens, 4) for tokens in times[0].tokens),
        }
        for of in (BASELINE, *peers):
            # Of equal work: llama.cpp's responses are others, and end elsewhere.
            per_token = [[each.seconds / each.made for each in of_way] for of_way in (taken[of], times)]
            faster = quotients(*per_token)
            record[f"speedup_over {of}"] = faster.median
            record[f"speedup_over {of} range"] = list(faster.range)
        if name in peers:
            setting = peers[name]
            record |= {"format": setting.file.stem, "flash_attention": setting.flash}
            record |= {"drafts": setting.drafts, "ngram": setting.ngram}
        else:
            record["identical"] = sum(a == b for a, b in zip(plain[0].tokens, times[0].tokens, strict=True))
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Table:
    shown = Table(title="One row, greedy", caption="×: how much faster, the median")
    for column in ("", ""):
        shown.add_column(column)
    columns = ("tokens/s", "tokens a round", "distinct 4-grams", *(f"× of {of}" for of in (BASELINE, *peers)), "identical")
    for column in columns:
        shown.add_column(column, justify="right")
    for record in records:
        same = f"{record['identical']} of {record['responses']}" if "identical" in record else ""
        ratio = f"{record['distinct_4gram_ratio']:.0%}"
        cells = [significant(record["tokens_per_s"]), f"{record['tokens_per_round']:.2f}", ratio]
        ratios = [f"{record[f'speedup_over {of}']:.2f}" for of in (BASELINE, *peers)]
        shown.add_row(record["dataset"], record["way"], *cells, *ratios, same)
    return shown


class LlamaCpp:
    """llama.cpp in the format and with the attention that it is fastest in, and with lookups as fast as it has them.

    Args:
        folder: for the model in other formats.
        asked: prompts of each file.
        new: the length limit of each text.
    """

    def __init__(self, peer: Peer, file: Path, folder: str, asked: Sequence[DatasetPrompts], ends: Sequence[int], new: int):
        positions = max(len(prompt) for each in asked for prompt in each.prompts) + new + max(DRAFTS) + 1
        self.about = peer.ask("about")
        files = formats(peer, file, folder)
        self.run = partial(theirs, peer, positions, ends, new)
        self.plain = fastest(self.run, asked[0].prompts, [Setting(*one) for one in product(files.values(), (True, False))])

    def settings(self, prompts: Sequence[list[int]]) -> dict[str, Setting]:
        """Its ways for the prompts of one file."""
        tried = [Setting(self.plain.file, self.plain.flash, *one) for one in product(DRAFTS, NGRAMS)]
        return {PEER_PLAIN: self.plain, PEER_LOOKUP: fastest(self.run, prompts, tried)}


def main(
    model: str,
    *,
    data: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())],
    llama_python: Path | None = None,
    drafter: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = ("ngram", "dflash2", "auto"),
    weights: str = "int8",
    samples: int = 8,
    max_new_tokens: int = 128,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Measures drafting beside llama.cpp.

    Parameters
    ----------
    model
        The GGUF file, or "smollm2-135m"; a model with a chat template.
    data
        Files of prompts, as for `tilewright bench speculative`.
    llama_python
        An interpreter that has llama-cpp-python; without one, ours alone runs.
    drafter
        As for `tilewright bench speculative`.
    weights
        Ours.
    samples
        Records of each file, from its beginning.
    max_new_tokens
        The length limit of each text.
    repetitions
        How often each side runs.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    console = human_console(json_file)
    file = hub.resolve(model)
    template = ChatTemplate.load(file)
    keep_programs(True)
    target = TargetOptions(model, weights=weights)  # type: ignore[arg-type]
    ways = DrafterArguments(drafter, block_size=AUTO).ways(drafter, target, console)
    base = ways[BASELINE]
    sampling = tw.Sampling(max_new_tokens)
    asked = [ask(base, path.stem, read_examples(path)[:samples], template, sampling) for path in data]
    with ExitStack() as stack:
        llama = None
        if llama_python is not None:
            peer = stack.enter_context(Peer(llama_python))
            folder = stack.enter_context(TemporaryDirectory())
            llama = LlamaCpp(peer, file, folder, asked, base.target.eos_token_ids, max_new_tokens)
        records = in_turns(ways, llama, asked, sampling, repetitions, console)
    print_table(console, table(records, [] if llama is None else [PEER_PLAIN, PEER_LOOKUP]))
    settings = {"model": model, "weights": weights, "samples": samples, "max_new_tokens": max_new_tokens}
    versions = {"tilewright": tw.__version__, "jax": jax.__version__}
    if llama is not None:
        versions["llama_cpp_python"] = llama.about
        about = f"llama-cpp-python {llama.about['version']} ({llama.about['features']}), {cores()} threads"
        console.print(about, markup=False)
    write_json(json_file, {"chip": chip_name(), "repetitions": repetitions, **versions, **settings, "data": records})


def in_turns(
    ways: Mapping[str, LanguageModel],
    llama: LlamaCpp | None,
    asked: Sequence[DatasetPrompts],
    sampling: tw.Sampling,
    repetitions: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Decodes every file in every way, `repetitions` times."""
    records: list[dict[str, Any]] = []
    for lm in ways.values():
        if lm.pacing is not None:
            lm.pacing.patient = True
    for each in asked:
        peers = {} if llama is None else llama.settings(each.prompts)
        runs = {name: partial(ours, lm, name != BASELINE, sampling, each.prompts) for name, lm in ways.items()}
        for once in runs.values():
            once()  # compiles
        both = {name: partial(llama.run, setting, each.prompts) for name, setting in peers.items()} if llama else {}
        records += figures(each.name, alternate({**runs, **both}, repetitions), peers)
        console.print(f"{each.name}: done")
    return records


if __name__ == "__main__":
    app = App(name="llama_cpp_drafting", help=__doc__)
    app.default(main)
    app()
