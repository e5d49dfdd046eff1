"""`tilewright generate`: where prompts come from, what is printed, the JSON, and interruptions."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import tilewright as tw
from cli.conftest import Ran, Run
from reference.block_diffusion_numpy import random_model as random_blocks
from reference.dflash_numpy import as_folders, random_pair
from reference.self_speculation_numpy import as_folder
from report.reading import Page, check_self_contained
from tilewright.cli.generate import ending
from tilewright.kernels import native
from tilewright.llm.language_model import LanguageModel
from tilewright.llm.stream import Stream
from tilewright.runtime.output import Piece, Result

PROMISED = set(
    "autoregressive_tokens_per_s speculative_tokens_per_s speedup tokens_per_round tau_published block_size rounds identical "
    "speculative_decoding tokens text compilations chip devices schedule dtype".split()
)
"""The fields that `--json` always has."""

NEW = ["--max-new-tokens", 12]


@pytest.fixture(autouse=True)
def _one_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.cli.generate.REPETITIONS", 1)


@pytest.fixture(scope="module")
def fixed(pair: list[Any]) -> list[Any]:
    """The pair with rounds of one kind, which nothing that was measured chooses."""
    return [*pair, "--block-size", 4]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> dict[str, tuple[list[int], str]]:
    """Tokens and text that the target alone gives for each prompt."""
    prompts = ["t1 t2 t3", "t7", "t5 t5 t9 t30"]
    results = tw.load(folders[0]).generate(prompts, tw.Sampling(12))
    return {prompt: (result.tokens, result.text) for prompt, result in zip(prompts, results, strict=True)}


def test_one_prompt_is_printed_with_its_text(run: Run, fixed: list[Any], expected: dict[str, Any]):
    """A pipe gets the text alone; standard error gets one line."""
    ran = run("generate", "t1 t2 t3", *fixed, *NEW)
    assert (ran.status, ran.out) == (0, expected["t1 t2 t3"][1] + "\n")
    assert re.fullmatch(r"12 tokens in [\d.]+ s · [\d,]+ tokens/s · τ [\d.]+ · cut at --max-new-tokens 12\n", ran.err)


def test_a_terminal_shows_the_prompt_and_the_sources(
    run: Run, fixed: list[Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = run("generate", "t1 t2 t3", *fixed, *NEW)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ran.out)
    assert "accepted draft tokens, the target's own tokens\n" in plain
    assert "t1 t2 t3" + expected["t1 t2 t3"][1] + "\n12 tokens in " in plain


def test_several_texts_in_a_pipe_stand_alone(run: Run, fixed: list[Any], expected: dict[str, Any]):
    ran = run("generate", *expected, *fixed, *NEW)
    assert ran.out == "".join(text + "\n" for _, text in expected.values())
    assert ran.err.endswith(" · 3 cut at --max-new-tokens 12\n")


def test_what_ends_a_text_is_said():
    def said(reason: Any, **more: Any) -> str:
        return ending(Result("", [], [], reason, 1, **more), tw.Sampling(12))

    assert said("length") == "cut at --max-new-tokens 12"
    assert said("eos") == "ended by the model"
    assert said("stop", stop_reason="\n\n") == "stopped at '\\n\\n'"
    assert said("interrupted") == "interrupted"


def test_kernels_that_a_model_cannot_use_are_said(run: Run, tmp_path: Path):
    target, _ = as_folders(tmp_path, random_pair(0, head_dim=12, target_layers=1, drafter_layers=1, taps=[0]))
    ran = run("generate", "t1 t2", "--model", target, "--max-new-tokens", 2)
    assert "computed by XLA" not in ran.out
    (line,) = [line for line in ran.err.splitlines() if "computed by XLA" in line]
    here = native.kernels()
    why = "head size 12 is no multiple of 16" if here.isa else here.reason
    assert "attention, paged attention" in line
    assert f"(C++: {why})" in line
    assert "computed by XLA" not in run("generate", "t1 t2", "--model", target, "--max-new-tokens", 2, "--kernels", "xla").err


def test_an_adapter_is_generated_with(run: Run, folders: tuple[Path, Path], adapter: Path, fixed: list[Any], tmp_path: Path):
    (plain, want) = tw.load(folders[0], lora={"own": adapter}).generate(["t1 t2 t3"] * 2, tw.Sampling(12), lora=[None, "own"])
    assert plain.tokens != want.tokens
    ran = run("generate", "t1 t2 t3", *fixed, *NEW, "--lora", adapter, "--compare", "--json", "-")
    assert (ran.status, ran.json["tokens"], ran.json["lora"]) == (0, [want.tokens], str(adapter))
    assert ran.json["identical"], "both ways have it"
    refused = run("generate", "t1", *fixed, "--lora", tmp_path)
    assert refused.status == 2
    assert f"adapter {tmp_path}" in refused.err


def test_several_prompts_form_a_batch(run: Run, fixed: list[Any], expected: dict[str, Any]):
    ran = run("generate", *expected, *fixed, *NEW, "--json", "-")
    assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
    assert ran.json["text"] == [text for _, text in expected.values()]
    assert ran.json["finish_reason"] == ["length"] * 3
    for number, (prompt, (_, text)) in enumerate(expected.items(), 1):
        assert f" {number} of 3 (length) " in ran.err
        assert prompt + text in ran.err


def test_several_devices_give_the_same_text(run: Run, fixed: list[Any], expected: dict[str, Any]):
    ran = run("generate", *expected, *fixed, *NEW, "--tensor-parallel", 2, "--schedule", "ring", "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
    assert (ran.json["devices"], ran.json["schedule"]) == (2, "ring")


RECORDS = {
    "prompt": {"prompt": "t4 t4"},
    "math500": {"problem": "t4 t4", "subject": "t1"},
    "humaneval": {"prompt": "t4 t4", "entry_point": "t1"},
    "mbpp": {"text": "t4 t4", "code": "t1", "test_list": ["t1"], "task_id": 11},
    "mt-bench": {"turns": ["t4 t4", "t1"]},
    "swe-bench": {"problem_statement": "t4 t4"},
    "messages": {"messages": [{"role": "user", "content": "t4 t4"}]},
    "gsm8k": {"question": "t4 t4", "answer": "t9"},
}


def test_prompts_of_every_layout(run: Run, pair: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file's prompts come after those of the arguments; of several turns it is the first."""
    seen: list[list[str]] = []

    def noted(lm: LanguageModel, prompts: list[str], *rest: Any) -> None:
        seen.append(prompts)
        raise ValueError("enough")

    monkeypatch.setattr("tilewright.cli.generate.show", noted)
    for layout, record in RECORDS.items():
        (tmp_path / f"{layout}.jsonl").write_text(json.dumps(record) + "\n")
        run("generate", "t1", "--prompt-file", tmp_path / f"{layout}.jsonl", *pair, *NEW)
    assert seen == [["t1", "t4 t4"]] * 7 + [["t1", "Question: t4 t4\nAnswer: "]]


def test_prompts_from_a_file(run: Run, fixed: list[Any], expected: dict[str, Any], tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in expected))
    ran = run("generate", "--prompt-file", tmp_path / "prompts.jsonl", *fixed, *NEW, "--json", "-")
    assert ran.json["text"] == [text for _, text in expected.values()]


def test_a_chat_goes_through_the_models_template(run: Run, folders: tuple[Path, Path], expected: dict[str, Any]):
    template = folders[0] / "chat_template.jinja"
    template.write_text("{% for m in messages %}t1 {{ m.content }}{% endfor %}{% if add_generation_prompt %} t3{% endif %}")
    try:
        arguments = ["generate", "t2", "--model", folders[0], "--drafter", "none", *NEW, "--json", "-"]
        chat = run(*arguments, "--chat")
        plain = run(*arguments)
    finally:
        template.unlink()
    assert chat.json["tokens"] == [expected["t1 t2 t3"][0]]
    assert "t2\n\n" + expected["t1 t2 t3"][1] in chat.err, "people see what they asked, not the template's marks"
    assert plain.json["tokens"] != chat.json["tokens"]


@pytest.mark.parametrize("argument", [[], ["-"]], ids=["piped", "dash"])
def test_prompt_from_standard_input(run: Run, fixed: list[Any], expected: dict[str, Any], argument: list[str]):
    ran = run("generate", *argument, *fixed, *NEW, "--json", "-", stdin="t1 t2 t3")
    assert ran.json["text"] == [expected["t1 t2 t3"][1]]


def test_text_is_printed_as_it_is(run: Run, fixed: list[Any]):
    """Neither markup nor emoji names are interpreted, in prompts or in what follows them."""
    for prompts in (["[bold]t1[/bold] :warning:  t2"], ["[red]t1", ":warning:", "t1"]):
        ran = run("generate", *prompts, *fixed, *NEW, "--json", "-")
        assert ran.status == 0
        for prompt in prompts:
            assert prompt in ran.err


def check_types(figures: dict[str, Any]) -> None:
    assert figures.keys() >= PROMISED
    assert figures["dtype"] == "float32"
    assert isinstance(figures["chip"], str)
    assert isinstance(figures["compilations"], int)


def test_json_of_a_comparison(run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path):
    path = tmp_path / "figures.json"
    ran = run("generate", *expected, *pair, "--block-size", 4, *NEW, "--compare", "--json", path)
    figures = json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]
    check_types(figures)
    assert not [name for name in PROMISED if figures[name] is None]
    assert figures["identical"] is True
    assert figures["speedup"] == figures["speculative_tokens_per_s"] / figures["autoregressive_tokens_per_s"]
    assert figures["tokens"] == [tokens for tokens, _ in expected.values()]
    drafts = figures["speculative_decoding"]
    counts = drafts["acceptance_histogram"]
    assert len(counts) == figures["block_size"] == 4
    assert drafts["mean_acceptance_length"] == sum((n + 1) * count for n, count in enumerate(counts)) / sum(counts)
    assert figures["rounds"] == sum(counts) == drafts["num_spec_steps"]
    assert figures["repetitions"] == 1
    assert figures["chosen"] is None
    least, most = figures["speedup_range"]
    speedup = f"{figures['speedup']:.2f}x ({least:.2f} to {most:.2f})"
    for shown in (speedup, "outputs identical", "yes", f"{figures['tokens_per_round']:.2f} of 4"):
        assert shown in ran.err
    assert ran.out == "".join(text + "\n" for _, text in expected.values())


def check_chosen(figures: dict[str, Any], drafters: set[str], most: int) -> None:
    """The JSON holds the chosen rounds and their costs."""
    chosen = figures["chosen"]
    assert chosen["widths"] == "alike", "in float32"
    assert sum(each["rounds"] for each in chosen["choices"]) == figures["rounds"]
    assert sum(each["tokens"] for each in chosen["choices"]) == sum(map(len, figures["tokens"]))
    assert sum(each["share_of_rounds"] for each in chosen["choices"]) == pytest.approx(1)
    (costs,) = chosen["costs"]
    assert {each["drafter"] for each in costs["rounds"]} == {"none", *drafters}
    assert max(each["block_size"] for each in costs["rounds"]) == most
    plain = next(each for each in costs["rounds"] if each["drafter"] == "none")
    assert (plain["round_cost_steps"], plain["expected_speedup"], plain["measured"]) == (1, pytest.approx(1), True)


def test_rounds_are_chosen_unless_a_block_size_is_given(run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path):
    prompts = list(expected)
    compared = ["--compare", "--json", "-"]
    for options in ([], ["--block-size", "auto"]):
        ran = run("generate", *prompts, *pair, *NEW, *options, *compared)
        assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
        assert ran.json["identical"] is True
        check_chosen(ran.json, {"dflash"}, 4)
    model = pair[:2]
    ran = run("generate", *prompts, *model, *NEW, "--json", "-")  # n-grams by default
    assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
    check_chosen(ran.json, {"ngram"}, 16)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(text for _, text in expected.values()))
    ran = run("generate", *prompts, *model, *NEW, "--drafting", f"suffix_corpus={corpus}", "--json", "-")
    assert ran.json["tokens"] == [tokens for tokens, _ in expected.values()]
    check_chosen(ran.json, {"suffix"}, 16)
    ran = run("generate", "t1", *model, *NEW, "--drafter", "ngram", "--drafting", f"suffix_corpus={corpus}")
    assert (ran.status, ran.err) == (2, "tilewright: a corpus needs the drafter suffix, found ngram\n")


def test_a_replay_says_what_each_round_was(run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path):
    ran = run("generate", *expected, *pair, *NEW, "--json", "-", "--replay", tmp_path / "page.html")
    assert ran.status == 0
    page = Page(tmp_path / "page.html")
    for passage in page.data()["passages"]:
        for each in passage["rounds"]:
            assert (each["drafter"], each["width"]) in {("none", 1), ("dflash", 2), ("dflash", 4)}
            assert len(each["drafted"]) == each["width"] - 1


def test_json_without_a_comparison(run: Run, pair: list[Any]):
    figures = run("generate", "t1 t2 t3", *pair, "--block-size", 4, *NEW, "--json", "-").json
    check_types(figures)
    assert [figures[name] for name in ("autoregressive_tokens_per_s", "speedup", "identical")] == [None] * 3
    assert figures["speculative_tokens_per_s"] > 0
    assert figures["speculative_decoding"]["num_spec_steps"] == figures["rounds"]
    assert figures["tau_by_response"] == figures["speculative_decoding"]["mean_acceptance_length"] >= 12 / figures["rounds"]
    assert figures["tokens_per_round"] == 12 / figures["rounds"]
    assert figures["compilations"] >= 3, "allocation, prefill and the decode loop"


def programs(ran: Ran) -> tuple[int, int]:
    return ran.json["compilations"], ran.json["programs_loaded"]


def test_compiled_programs_are_loaded_by_the_next_run(run: Run, folders: tuple[Path, Path], kept: Path):
    arguments = ["generate", "t1 t2 t3", "--model", folders[0], "--drafter", "none", *NEW, "--json", "-"]
    runs = [run(*arguments) for _ in range(2) if not jax.clear_caches()]
    (count, loaded), after = (programs(ran) for ran in runs)
    assert count >= 3
    assert (loaded, after) == (0, (count, count))
    assert runs[0].json["tokens"] == runs[1].json["tokens"]
    assert runs[1].json["compile_seconds"] > 0
    assert [folder.name for folder in kept.iterdir()] == ["xla"]


def test_nothing_is_kept_where_that_is_not_wanted_or_not_safe(
    run: Run, folders: tuple[Path, Path], kept: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tilewright.cli.generate.show", None)
    # The command ends early: a replay needs a drafter.
    arguments = ["generate", "t1 t2 t3", "--model", folders[0], "--drafter", "none", "--replay", "page.html"]
    kept.chmod(0o777)
    said = run(*arguments).err
    assert said.startswith(f"compiled programs are not stored: others may write to {kept} (its mode is 777)\n")
    assert said.splitlines()[1].startswith("tilewright: --replay needs a drafter")
    kept.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_COMPILE_CACHE", "0")
    assert "not stored" not in run(*arguments).err
    assert not list(kept.iterdir())


def test_json_without_a_drafter(run: Run, folders: tuple[Path, Path], expected: dict[str, Any]):
    ran = run("generate", "t7", "--model", folders[0], "--drafter", "none", *NEW, "--json", "-")
    check_types(ran.json)
    drafting = ("speculative_tokens_per_s", "speedup", "identical", "speculative_decoding")
    assert [ran.json[name] for name in drafting] == [None] * len(drafting)
    assert ran.json["autoregressive_tokens_per_s"] > 0
    assert ran.json["rounds"] == 12
    assert ran.json["text"] == [expected["t7"][1]]
    assert re.search(r"tokens/s · cut at --max-new-tokens 12\n$", ran.err), "without τ"


def test_sampling_options_reach_the_generation(run: Run, folders: tuple[Path, Path], fixed: list[Any]):
    options = ["--temperature", 0.9, "--top-p", 0.8, "--top-k", 7, "--seed", 5]
    sampling = tw.Sampling(12, temperature=0.9, top_p=0.8, top_k=7, seed=5)
    want = tw.load(*folders).generate("t1 t2 t3", sampling)[0]
    assert want.tokens != tw.load(*folders).generate("t1 t2 t3", tw.Sampling(12))[0].tokens
    assert run("generate", "t1 t2 t3", *fixed, *NEW, *options, "--json", "-").json["tokens"] == [want.tokens]


def test_without_a_seed_each_prompt_draws_its_own_which_is_told(run: Run, fixed: list[Any]):
    options = [*fixed, *NEW, "--temperature", 1, "--json", "-"]
    drawn = run("generate", "t1", "t1", *options, "--compare")
    assert drawn.json["identical"] is True, "both ways draw with the same seeds"
    seeds = drawn.json["seed"]
    tokens = drawn.json["tokens"]
    assert seeds[0] != seeds[1]
    assert tokens[0] != tokens[1]
    assert all(f"(length, seed {seed})" in drawn.err for seed in seeds)
    again = run("generate", "t1", *options, "--seed", seeds[1])
    assert (again.json["tokens"], again.json["seed"]) == ([tokens[1]], [seeds[1]])
    assert f"seed {seeds[1]}\n" in again.err
    assert run("generate", "t1", *fixed, *NEW, "--json", "-").json["seed"] == [None], "nothing was drawn"


def test_every_sampling_option_reaches_its_field(run: Run, pair: list[Any], monkeypatch: pytest.MonkeyPatch):
    sampling = tw.Sampling(
        7,
        0.6,
        0.9,
        5,
        seed=3,
        stop=("x",),
        ignore_eos=True,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        logit_bias=((4, -2.5), (7, 100.0)),
        min_tokens=2,
        stop_token_ids=(9, 8),
        include_stop=True,
        skip_special_tokens=False,
    )
    assert not [name for name, value in vars(sampling).items() if value == getattr(tw.Sampling(), name)]
    written = {"stop": "x", "logit_bias": "4:-2.5,7:100", "stop_token_ids": "9,8"}
    given = {name: written.get(name, value) for name, value in vars(sampling).items()}
    alone = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    options: list[Any] = [word for name in alone for word in (f"--{name.replace('_', '-')}", given.pop(name))]
    options += ["--sampling", ",".join(f"{name}={value}" for name, value in given.items())]
    seen = []
    start = LanguageModel.start

    def watched(self: LanguageModel, prompts: Any, sampling: Any = None, speculative: bool | None = None) -> Stream:
        seen.append(sampling)
        return start(self, prompts, tw.Sampling(1), speculative)

    monkeypatch.setattr(LanguageModel, "start", watched)
    assert run("generate", "t1", *pair, *options).status == 0
    assert seen == [[sampling]]


def test_a_stop_string_ends_the_text(run: Run, fixed: list[Any], expected: dict[str, Any]):
    words = expected["t1 t2 t3"][1].split()
    stop = f" {words[5]}"
    figures = run("generate", "t1 t2 t3", *fixed, *NEW, "--stop", stop, "--json", "-").json
    assert figures["finish_reason"] == ["stop"]
    assert figures["text"] == [expected["t1 t2 t3"][1].split(stop)[0]]


def test_passes_of_a_model_with_blocks_are_counted(run: Run, tmp_path: Path):
    folder = as_folder(tmp_path, random_blocks(3))  # type: ignore[arg-type]
    (want,) = tw.load(folder).generate("t1 t2 t3", tw.Sampling(16))
    figures = run("generate", "t1 t2 t3", "--model", folder, *NEW[:1], 16, "--json", "-").json
    assert (figures["tokens"], figures["passes"]) == ([want.tokens], [want.passes])
    assert figures["tokens_per_pass"] == [16 / want.passes]


def test_block_size_and_window_change_no_token(run: Run, pair: list[Any], expected: dict[str, Any]):
    figures = run("generate", "t1 t2 t3", *pair, *NEW, "--block-size", 2, "--drafting", "window=5", "--json", "-").json
    assert figures["tokens"] == [expected["t1 t2 t3"][0]]
    assert len(figures["speculative_decoding"]["acceptance_histogram"]) == 2


def test_without_a_drafter_a_block_size_decodes_in_blocks(run: Run, folders: tuple[Path, Path], expected: dict[str, Any]):
    ran = run("generate", "t1 t2 t3", "--model", folders[0], "--drafter", "none", "--block-size", 4, *NEW, "--json", "-")
    figures = ran.json
    assert figures["tokens"] == [expected["t1 t2 t3"][0]]
    assert (figures["block_size"], figures["tokens_per_round"], figures["rounds"]) == (4, 1, 12)
    assert figures["speculative_decoding"]["num_spec_steps"] == 0


@pytest.mark.slow
def test_a_replay_shows_every_prompt(run: Run, folders: tuple[Path, Path], expected: dict[str, Any], tmp_path: Path):
    options = ["--model", folders[0], "--drafter", "ngram", *NEW, "--temperature", 1, "--sampling", "min_p=0.01", "--json", "-"]
    ran = run("generate", *expected, *options, "--replay", tmp_path / "page.html")
    assert f"{tmp_path / 'page.html'} written" in "".join(ran.err.splitlines())
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    assert page.data()["about"]["min_p"] == 0.01
    assert [passage["prompt"] for passage in page.data()["passages"]] == list(expected)
    for passage, tokens in zip(page.data()["passages"], ran.json["tokens"], strict=True):
        assert [token["id"] for each in passage["rounds"] for token in each["emitted"]] == tokens


def interrupt_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the given number of dispatches on, all further ones meet Ctrl-C."""
    advance = Stream.advance
    done = []

    def interrupted(self: Stream, steps: int = 64) -> list[Piece]:
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(self)
        return advance(self, min(steps, 2))

    monkeypatch.setattr(Stream, "advance", interrupted)


def check_interrupted(ran: Ran, prompts: list[str], expected: dict[str, Any], path: Path) -> dict[str, Any]:
    """What was generated is printed and written; it is the beginning of what would have come."""
    assert ran.status == 0
    assert ran.err.endswith("interrupted\n")
    figures = json.loads(path.read_text())
    check_types(figures)
    assert figures["finish_reason"] == ["interrupted"] * len(prompts)
    for prompt, tokens, text in zip(prompts, figures["tokens"], figures["text"], strict=True):
        assert len(tokens) < 12
        assert tokens == expected[prompt][0][: len(tokens)]
        assert text in ran.out
    return figures


@pytest.mark.parametrize("count", [1, 3], ids=["one", "several"])
def test_an_interruption_keeps_what_was_generated(
    run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    prompts = list(expected)[:count]
    interrupt_after(1, monkeypatch)
    ran = run("generate", *prompts, *pair, *NEW, "--compare", "--json", tmp_path / "figures.json")
    figures = check_interrupted(ran, prompts, expected, tmp_path / "figures.json")
    assert all(figures["tokens"])
    assert figures["tokens_per_round"] >= 1
    assert figures["speedup"] is None


def test_an_interruption_before_the_first_token(
    run: Run, pair: list[Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    interrupt_after(0, monkeypatch)
    ran = run("generate", "t7", *pair, *NEW, "--json", tmp_path / "figures.json")
    figures = check_interrupted(ran, ["t7"], expected, tmp_path / "figures.json")
    assert figures["tokens"] == [[]]
    assert figures["tokens_per_round"] is None
    assert figures["speculative_decoding"]["acceptance_histogram"] == [0, 0, 0, 0]
