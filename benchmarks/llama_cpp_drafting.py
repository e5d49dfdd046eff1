"""Compares speculative decoding with llama.cpp on the same GGUF file and prompts: one row, greedy.

    python benchmarks/llama_cpp_drafting.py MODEL --data FILE ... [--llama-python PYTHON] [--drafter NAME ...] [--json FILE]

Tilewright decodes plainly and with each drafter; the block size is chosen round by round. llama.cpp runs in another process
(see `llama_cpp_speed.py`), plainly and with prompt lookup; without `--llama-python` only Tilewright runs. Trials on the first
prompts choose llama.cpp's fastest format and kind of attention, and for each file its fastest number of drafts and n-gram
length. Seconds exclude the prompt. Ratios compare runs of the same repetition; above 1, Tilewright is faster. The outputs of
Tilewright are compared token by token. llama.cpp rounds differently, so its texts differ sooner or later. Run on an idle
machine.
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
from tilewright.bench.speculative import DatasetPrompts, build_prompts
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
"""Numbers of drafts, and lengths of n-grams, that the trials of llama.cpp run."""
TRIED = 2
"""Number of prompts of a trial."""
PEER_PLAIN = "llama.cpp"
PEER_LOOKUP = "llama.cpp, looked up"


class Timed(NamedTuple):
    """Result of decoding the prompts of a file one after another.

    Attributes:
        seconds: total seconds of decoding, without prefill.
        tokens: tokens of each response.
        rounds: number of rounds.
        made: number of tokens generated in `seconds`. llama.cpp computes the first token of a response with the prompt;
            Tilewright computes it in the first round.
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
    """Settings of llama.cpp: model file, flash attention, number of drafts and n-gram length (0, 0: no drafts)."""

    file: Path
    flash: bool
    drafts: int = 0
    ngram: int = 0


def theirs(peer: Peer, positions: int, ends: Sequence[int], new: int, setting: Setting, prompts: Sequence[list[int]]) -> Timed:
    peer.ask("open", model=str(setting.file), threads=cores(), rows=1, positions=positions, flash=setting.flash)
    peer.ask("generate", prompts=[prompts[0][:8]], new=8, ends=[])  # warms up
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
    """Returns the setting with the most tokens per second, by the better of two measurements of the first prompts."""
    results = alternate({setting: partial(run, setting, prompts[:TRIED]) for setting in settings}, 2)
    return max(results, key=lambda setting: max(timed.made / timed.seconds for timed in results[setting]))


def figures(dataset: str, results: Mapping[str, Sequence[Timed]], peers: Mapping[str, Setting]) -> list[dict[str, Any]]:
    """Returns a record for each run: medians and ranges."""
    plain = results[BASELINE]
    records = []
    for name, times in results.items():
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
        for base_name in (BASELINE, *peers):
            # Per token: the responses of llama.cpp differ from ours in text and length.
            per_token = [[each.seconds / each.made for each in measured] for measured in (results[base_name], times)]
            faster = quotients(*per_token)
            record[f"speedup_over {base_name}"] = faster.median
            record[f"speedup_over {base_name} range"] = list(faster.range)
        if name in peers:
            setting = peers[name]
            record |= {"format": setting.file.stem, "flash_attention": setting.flash}
            record |= {"drafts": setting.drafts, "ngram": setting.ngram}
        else:
            record["identical"] = sum(a == b for a, b in zip(plain[0].tokens, times[0].tokens, strict=True))
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Table:
    shown = Table(title="One row, greedy", caption="×: speedup, median")
    for column in ("", ""):
        shown.add_column(column)
    columns = (
        "tokens/s",
        "tokens per round",
        "distinct 4-grams",
        *(f"× of {base_name}" for base_name in (BASELINE, *peers)),
        "identical",
    )
    for column in columns:
        shown.add_column(column, justify="right")
    for record in records:
        same = f"{record['identical']} of {record['responses']}" if "identical" in record else ""
        ratio = f"{record['distinct_4gram_ratio']:.0%}"
        cells = [significant(record["tokens_per_s"]), f"{record['tokens_per_round']:.2f}", ratio]
        ratios = [f"{record[f'speedup_over {base_name}']:.2f}" for base_name in (BASELINE, *peers)]
        shown.add_row(record["dataset"], record["way"], *cells, *ratios, same)
    return shown


class LlamaCpp:
    """llama.cpp with its fastest format, kind of attention and lookup settings.

    Args:
        folder: folder for the model in other formats.
        datasets: prompts of each file.
        new: maximum number of tokens of each text.
    """

    def __init__(self, peer: Peer, file: Path, folder: str, datasets: Sequence[DatasetPrompts], ends: Sequence[int], new: int):
        positions = max(len(prompt) for each in datasets for prompt in each.prompts) + new + max(DRAFTS) + 1
        self.about = peer.ask("about")
        files = formats(peer, file, folder)
        self.run = partial(theirs, peer, positions, ends, new)
        self.plain = fastest(self.run, datasets[0].prompts, [Setting(*one) for one in product(files.values(), (True, False))])

    def settings(self, prompts: Sequence[list[int]]) -> dict[str, Setting]:
        """Returns the settings of llama.cpp for the prompts of one file."""
        candidates = [Setting(self.plain.file, self.plain.flash, *one) for one in product(DRAFTS, NGRAMS)]
        return {PEER_PLAIN: self.plain, PEER_LOOKUP: fastest(self.run, prompts, candidates)}


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
    """Compares speculative decoding with llama.cpp.

    Parameters
    ----------
    model
        GGUF file of a model with a chat template, or "smollm2-135m".
    data
        Files of prompts, as for `tilewright bench speculative`.
    llama_python
        A Python interpreter with llama-cpp-python; without it only Tilewright runs.
    drafter
        Drafters, as for `tilewright bench speculative`.
    weights
        Format of Tilewright's weights.
    samples
        Number of records of each file, from its beginning.
    max_new_tokens
        Maximum number of tokens of each text.
    repetitions
        Number of runs of each side.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    console = human_console(json_file)
    file = hub.resolve(model)
    template = ChatTemplate.load(file)
    keep_programs()
    target = TargetOptions(model, weights=weights)  # type: ignore[arg-type]
    models = DrafterArguments(drafter, block_size=AUTO).variants(drafter, target, console)
    base = models[BASELINE]
    sampling = tw.Sampling(max_new_tokens)
    datasets = [build_prompts(base, path.stem, read_examples(path)[:samples], template, sampling) for path in data]
    with ExitStack() as stack:
        llama = None
        if llama_python is not None:
            peer = stack.enter_context(Peer(llama_python))
            folder = stack.enter_context(TemporaryDirectory())
            llama = LlamaCpp(peer, file, folder, datasets, base.target.eos_token_ids, max_new_tokens)
        records = in_turns(models, llama, datasets, sampling, repetitions, console)
    print_table(console, table(records, [] if llama is None else [PEER_PLAIN, PEER_LOOKUP]))
    settings = {"model": model, "weights": weights, "samples": samples, "max_new_tokens": max_new_tokens}
    versions = {"tilewright": tw.__version__, "jax": jax.__version__}
    if llama is not None:
        versions["llama_cpp_python"] = llama.about
        about = f"llama-cpp-python {llama.about['version']} ({llama.about['features']}), {cores()} threads"
        console.print(about, markup=False)
    write_json(json_file, {"chip": chip_name(), "repetitions": repetitions, **versions, **settings, "data": records})


def in_turns(
    models: Mapping[str, LanguageModel],
    llama: LlamaCpp | None,
    datasets: Sequence[DatasetPrompts],
    sampling: tw.Sampling,
    repetitions: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Decodes every file with every drafter and setting, in alternation, `repetitions` times."""
    records: list[dict[str, Any]] = []
    for lm in models.values():
        if lm.pacing is not None:
            lm.pacing.patient = True
    for each in datasets:
        peers = {} if llama is None else llama.settings(each.prompts)
        runs = {name: partial(ours, lm, name != BASELINE, sampling, each.prompts) for name, lm in models.items()}
        for run in runs.values():
            run()  # compiles
        peer_runs = {name: partial(llama.run, setting, each.prompts) for name, setting in peers.items()} if llama else {}
        records += figures(each.name, alternate({**runs, **peer_runs}, repetitions), peers)
        console.print(f"{each.name}: done")
    return records


if __name__ == "__main__":
    app = App(name="llama_cpp_drafting", help=__doc__)
    app.default(main)
    app()
