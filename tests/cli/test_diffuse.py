"""`tilewright diffuse`: what is printed, live and piped, the JSON, the replay page, and what is refused."""

import io
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.conftest import Run
from reference.diffusion_folder import write_folder
from report.reading import Page, check_self_contained
from tilewright.diffusion.options import Denoising, Saliency
from tilewright.llm.diffusion_model import DenoisingStream, DiffusionModel, load
from tilewright.report.unmasking import MASK
from tilewright.runtime.output import Piece

PROMPT = "t1 t2 t3"
SIZE = ["--new-tokens", 16, "--ignore-eos"]
BLOCK = "block_length=8"
SMALL = [*SIZE, "--denoising", BLOCK]
DENOISING = Denoising(16, block_length=8, ignore_eos=True)
PROMISED = set(
    "seconds tokens_per_s tokens steps tokens_per_forward salient_share salient_share_by_layer spans text response_tokens "
    "finish_reason seed committed mode threshold saliency chip dtype kernels compilations host_synchronisations".split()
)
"""The fields that `--json` always has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture(scope="module")
def model(folder: Path) -> DiffusionModel:
    return load(folder)


def test_a_pipe_gets_plain_text(run: Run, folder: Path, model: DiffusionModel):
    want = model.generate(PROMPT, DENOISING)[0]
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL, "--kernels", "xla")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"{PROMPT}{want.text}\n16 tokens in ")
    assert "16 steps · 1.00 tokens per forward · salient 100%\n" in ran.out
    assert "\x1b" not in ran.out
    assert MASK not in ran.out


def test_json_has_the_promised_fields(run: Run, folder: Path, model: DiffusionModel):
    ran = run("diffuse", PROMPT, "--model", folder, *SIZE, "--denoising", f"{BLOCK},mode=sparse", "--json", "-")
    want = model.generate(PROMPT, replace(DENOISING, mode="sparse"))[0]
    figures = ran.json
    assert set(figures) >= PROMISED
    assert (figures["text"], figures["response_tokens"]) == ([want.text], [want.tokens])
    assert (figures["steps"], figures["committed"], figures["mode"]) == (16, [want.committed], "sparse")
    assert figures["tokens_per_forward"] == 1
    assert figures["spans"] == {"whole": 7, "response": 9}, "four full steps, then each fourth"
    assert figures["salient_share_by_step_and_layer"][0] == [1, 1], "the first step computes everything"
    assert 0 < figures["salient_share"] < 1
    assert len(figures["salient_share_by_layer"]) == 2
    assert figures["saliency"]["tau"] == 0.99
    assert "16 steps" in ran.err


def test_several_prompts_form_a_batch(run: Run, folder: Path, model: DiffusionModel):
    prompts = [PROMPT, "t9 t4"]
    want = model.generate(prompts, DENOISING)
    ran = run("diffuse", *prompts, "--model", folder, *SMALL)
    for number, (prompt, result) in enumerate(zip(prompts, want, strict=True), 1):
        assert f" {number} of 2 (length) " in ran.out
        assert prompt + result.text in ran.out


def test_several_devices_give_the_same_text(run: Run, folder: Path, model: DiffusionModel):
    want = model.generate(PROMPT, DENOISING)[0]
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL, "--tensor-parallel", 2, "--schedule", "ring", "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json["response_tokens"] == [want.tokens]
    assert (ran.json["devices"], ran.json["schedule"]) == (2, "ring")


def test_the_schedule_of_an_automatic_choice_is_named(run: Run, folder: Path):
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL, "--tensor-parallel", 2, "--schedule", "auto")
    assert ran.status == 0, ran.err
    line = "--schedule auto: sync for 256 rows: the bandwidth of the links between these devices is unknown"
    assert line in " ".join(ran.out.split())


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=20, highlight=False, emoji=False, _environ={})
    monkeypatch.setattr("tilewright.cli.outputs.human_console", lambda _: console)
    return shown


def test_masks_give_way_on_a_terminal(run: Run, folder: Path, model: DiffusionModel, monkeypatch: pytest.MonkeyPatch):
    shown = on_a_terminal(monkeypatch)
    monkeypatch.setattr("tilewright.cli.diffuse.STEPS_PER_DISPATCH", 4)
    monkeypatch.setattr("tilewright.cli.diffuse.FRAME_S", 1e9)
    ran = run("diffuse", PROMPT, "--model", folder, *SIZE, "--denoising", f"{BLOCK},mode=sparse", "--json", "-")
    assert ran.json["host_synchronisations"] == 5, "the first frame has one step, the next four"
    frames = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", each) for each in shown.getvalue().split("step ")]
    masks = [frame.count(MASK) for frame in frames]
    assert sorted(set(masks), reverse=True) == [16, 15, 11, 7, 3, 0]
    assert shown.getvalue().count("\x1b[1;30;42m") >= 16, "each token stands out once"
    assert model.generate(PROMPT, replace(DENOISING, mode="sparse"))[0].text in shown.getvalue()


def test_frames_come_at_a_rate(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A step that takes next to nothing: the first frame shows one, the next as many as a dispatch takes."""
    on_a_terminal(monkeypatch)
    steps = []
    advance = DenoisingStream.advance

    def noted(self: DenoisingStream, most: int = 64) -> list[Piece]:
        steps.append(most)
        return advance(self, most)

    monkeypatch.setattr(DenoisingStream, "advance", noted)
    monkeypatch.setattr("tilewright.cli.diffuse.FRAME_S", 1e9)
    run("diffuse", PROMPT, "--model", folder, *SMALL)
    assert steps == [1, 64]


def test_what_is_drawn_can_be_drawn_again(run: Run, folder: Path):
    options = ["--model", folder, *SMALL, "--temperature", 1, "--json", "-"]
    first = run("diffuse", PROMPT, *options)
    seed = first.json["seed"][0]
    assert f"seed {seed}\n" in first.err
    assert run("diffuse", PROMPT, *options, "--seed", seed).json["response_tokens"] == first.json["response_tokens"]


def test_every_option_reaches_its_field(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def watched(self: DiffusionModel, prompts: Any, request: Denoising) -> DenoisingStream:
        seen.append(request)
        raise ValueError("enough")

    monkeypatch.setattr(DiffusionModel, "start", watched)
    saliency = Saliency(0.9, 2, 3, False, False, False, False, 4)
    options = "--new-tokens 24 --temperature 0.5 --top-p 0.9 --seed 5"
    steps = "block_length=12,steps=8,remasking=entropy,guidance=1.5,suffix_window=6,mode=sparse"
    switches = "tau=0.9,full_steps=2,every=3,first_layer=no,keep_changed=no,keep_prompt=no,boundary=no,whole_until=4"
    run("diffuse", PROMPT, "--model", folder, *options.split(), "--denoising", f"{steps},{switches}")
    assert seen == [Denoising(24, 8, 12, "entropy", 0.5, 0.9, 5, None, "sparse", saliency, 6, 1.5)]
    run("diffuse", PROMPT, "--model", folder, *SIZE, "--denoising", f"{BLOCK},threshold=0.7")
    assert seen[1].threshold == 0.7
    ends = "mode=dual,first_alone=yes,logits_eos_inf=yes,confidence_eos_eot_inf=yes"
    run("diffuse", PROMPT, "--model", folder, *SIZE, "--denoising", f"{BLOCK},{ends}")
    assert (seen[2].first_alone, seen[2].logits_eos_inf, seen[2].confidence_eos_eot_inf) == (True, True, True)


def test_prompts_of_a_file_and_of_a_chat(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file's prompts come after those of the arguments, and a template makes messages of both."""
    seen: list[Any] = []

    def watched(self: DiffusionModel, prompts: Any, request: Denoising) -> DenoisingStream:
        seen.append(prompts)
        raise ValueError("enough")

    monkeypatch.setattr(DiffusionModel, "start", watched)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "t4 t5"}\n')
    run("diffuse", "t1", "--prompt-file", tmp_path / "prompts.jsonl", "--model", folder, *SMALL)
    chatting = write_folder(tmp_path / "chatting")
    (chatting / "chat_template.jinja").write_text("t9 {{ messages[0]['content'] }} t8")
    run("diffuse", "t1", "--chat", "--model", chatting, *SMALL)
    assert seen == [[[1], [4, 5]], [[9, 1, 8]]]


def test_a_replay_shows_every_step(run: Run, folder: Path, tmp_path: Path):
    options = ["--model", folder, *SIZE, "--denoising", f"{BLOCK},mode=sparse,threshold=0.05", "--json", "-"]
    ran = run("diffuse", PROMPT, *options, "--replay", tmp_path / "page.html")
    assert f"{tmp_path / 'page.html'} written" in "".join(ran.err.splitlines())
    page = Page(tmp_path / "page.html")
    check_self_contained(page)
    (passage,) = page.data()["passages"]
    tokens = {placed["position"]: placed["token"]["id"] for step in passage["rounds"] for placed in step["committed"]}
    assert [tokens[place] for place in range(16)] == ran.json["response_tokens"][0]
    assert [len(step["committed"]) for step in passage["rounds"]] == ran.json["committed"][0]
    assert [step["salient"] for step in passage["rounds"]] == ran.json["salient_share_by_step_and_layer"]
    assert len(passage["baseline"]) == 16, "a token a step"
    assert all(step["salient"] == [] for step in passage["baseline"])


def test_an_interruption_keeps_what_was_there(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    advance = DenoisingStream.advance
    done = []

    def interrupted(self: DenoisingStream, steps: int = 64) -> list[Piece]:
        if done:
            raise KeyboardInterrupt
        done.append(self)
        return advance(self, 3)

    monkeypatch.setattr(DenoisingStream, "advance", interrupted)
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL, "--json", "-")
    assert ran.status == 0
    assert "interrupted" in ran.err
    assert (ran.json["steps"], ran.json["finish_reason"]) == (3, ["interrupted"])
    assert len(ran.json["response_tokens"][0]) == 3, "without its masks"


def test_an_interruption_within_a_dispatch_comes_after_it(
    run: Run, folder: Path, model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
):
    """The state it gave away is the next one then, and the figures are of the same steps."""
    advance = DenoisingStream.advance

    def interrupted(self: DenoisingStream, steps: int = 64) -> list[Piece]:
        signal.raise_signal(signal.SIGINT)
        return advance(self, 3)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(DenoisingStream, "advance", interrupted)
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL, "--json", "-")
    assert (ran.status, signal.getsignal(signal.SIGINT)) == (0, before)
    assert (ran.json["steps"], ran.json["host_synchronisations"], ran.json["finish_reason"]) == (3, 1, ["interrupted"])
    assert len(ran.json["response_tokens"][0]) == 3
    assert ran.json["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--schedule", "ring"], "--schedule needs --tensor-parallel: one device has no partial results to sum"),
        (["--tensor-parallel", 2, "--schedule", "star"], "expected a schedule among sync, sequence, ring, domino, column"),
        (["--tensor-parallel", 3], "expected devices that divide 4 heads, 40 tokens of the vocabulary, 48 MLP columns"),
        (["--tensor-parallel", 2, "--schedule", "domino"], "expected a batch that 2 micro-batches divide, found 1 rows"),
        (["--new-tokens", 20], "expected new_tokens that are a multiple of the block_length 8, found 20"),
        (["--new-tokens", 0], "expected new_tokens of at least 1, found 0"),
        (["--denoising", "block_length=0"], "expected a block_length of at least 1, found 0"),
        (["--denoising", "steps=5"], "expected steps that are a multiple of the 2 blocks, found 5"),
        (["--denoising", "steps=32"], "expected steps of at most one a token, 16, found 32"),
        (["--denoising", "threshold=0"], "expected a threshold above 0, up to 1, found 0"),
        (["--denoising", "threshold=1.5"], "expected a threshold above 0, up to 1, found 1.5"),
        (["--denoising", "threshold=0.9,steps=8"], "expected steps or a threshold, not both, found 8"),
        (
            ["--denoising", "threshold=0.9,remasking=random"],
            "expected no threshold with random, which ranks by chance, found 0.9",
        ),
        (["--denoising", "mode=sparse,tau=0"], "expected a saliency threshold above 0, up to 2, found 0"),
        (["--denoising", "mode=sparse,full_steps=0"], "expected at least 1 full step, which fills the caches, found 0"),
        (["--denoising", "mode=sparse,every=0"], "expected whole-sequence steps every 1 step or more, found 0"),
        (["--denoising", "tau=0.9,boundary=no"], "--denoising: expected mode=sparse with tau, boundary, found mode=dense"),
        (["--denoising", "mode=dual,every=3"], "--denoising: expected mode=sparse with every, found mode=dual"),
        (["--denoising", "mode=fast"], "--denoising: expected mode=dense|prefix|dual|sparse, found mode=fast"),
        (["--denoising", "guidance=-1"], "expected guidance of at least 0, found -1"),
        (["--temperature", -1], "expected a temperature of 0, or from 1e-06 to 1e+06, found -1"),
        (["--dtype", "float16"], "expected dtype to be one of auto, float32, bfloat16, found 'float16'"),
        (["--chat"], "--chat needs a model with a chat template"),
        (["--replay", "absent/page.html"], "--replay absent/page.html: its folder does not exist"),
        (["--json", "."], "--json .: expected a file, found a folder"),
        (["--new-token", "8"], "Unknown option: --new-token. Did you mean --new-tokens?"),
        (["t39"], "expected a prompt without the mask token 39, found one"),
        (["t1 " * 4090], "a prompt of 4090 tokens leaves room for 6 in the context of 4096; new_tokens is 16"),
    ],
)
def test_what_is_refused(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, problem: str):
    monkeypatch.chdir(tmp_path)
    default = [] if "--new-tokens" in arguments else ["--new-tokens", 16]
    arguments = [f"block_length=8,{each}" if "=" in str(each) and "block_length" not in each else each for each in arguments]
    default += [] if "--denoising" in arguments else ["--denoising", BLOCK]
    default += ["--kernels", "xla"]  # with others a line says why heads of 8 do without them
    ran = run("diffuse", PROMPT, *arguments, "--model", folder, *default)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.err.startswith("tilewright: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert not list(tmp_path.iterdir())


def test_a_mask_outside_the_vocabulary_is_refused(run: Run, tmp_path: Path):
    folder = write_folder(tmp_path / "model", mask_token_id=40)
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL)
    assert (ran.status, ran.out) == (2, "")
    assert "mask_token_id [40] lies outside the vocabulary of 40" in ran.err


def test_a_model_of_another_kind_is_refused(run: Run, tmp_path: Path):
    folder = write_folder(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "qwen3"}))
    ran = run("diffuse", PROMPT, "--model", folder, *SMALL)
    other = (
        "is an autoregressive language model: run it with `tilewright generate`, `chat` or `serve`, with --denoising for blocks"
    )
    assert (ran.status, ran.err) == (2, f"tilewright: expected a diffusion language model; {folder} {other}\n")


def test_generate_takes_it_with_the_options_that_both_have(run: Run, folder: Path):
    plain = run("diffuse", PROMPT, "--model", folder, *SMALL, "--json", "-").json
    size = ["--max-new-tokens", len(plain["response_tokens"][0]), "--sampling", "ignore_eos=true"]
    ran = run("generate", PROMPT, "--model", folder, *size, "--denoising", f"{BLOCK},mode=dual", "--json", "-")
    assert ran.status == 0, ran.err
    assert (ran.json["mode"], len(ran.json["response_tokens"][0])) == ("dual", size[1])
    assert (ran.json["passes"], ran.json["tokens_per_pass"]) == ([size[1]], [1.0])
    drawn = ["--temperature", 0.9, "--top-k", 5, "--seed", 3, "--sampling", "ignore_eos=true,min_p=0.05,presence_penalty=0.7"]
    ran = run("generate", PROMPT, "--model", folder, *size[:2], *drawn, "--denoising", f"{BLOCK},mode=dual", "--json", "-")
    request = Denoising(size[1], block_length=8, mode="dual", temperature=0.9, top_k=5, seed=3, ignore_eos=True, min_p=0.05)
    (want,) = load(folder).generate(PROMPT, replace(request, presence_penalty=0.7))
    assert ran.json["response_tokens"] == [want.tokens]
    for options, said in (
        (["--stop", "t1"], "--stop is not offered by generate for a masked diffusion model; use serve"),
        (
            ["--sampling", "include_stop=true"],
            "--sampling include_stop is not offered by generate for a masked diffusion model",
        ),
        (["--drafter", "ngram"], "--drafter is for models that decode token by token"),
        (["--compare"], "--compare is for models that decode token by token"),
    ):
        ran = run("generate", PROMPT, "--model", folder, *options)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err


def test_a_command_for_models_of_tokens_says_which_ones_take_it(run: Run, folder: Path):
    ran = run("bench", "speculative", "--model", folder)
    assert ran.status == 2
    assert f"{folder} is a diffusion language model: run it with `tilewright generate`" in ran.err


def test_the_packaged_model_is_asked_a_problem_as_it_was_trained_on_them(run: Run):
    """With a line's end, whether that was typed or not."""
    options = ["--new-tokens", 64, "--denoising", "threshold=0.9", "--json", "-"]
    typed, whole = (run("diffuse", f"a=12 b=34 a+b{end}", *options).json for end in ("", "\n"))
    assert typed["response_tokens"] == whole["response_tokens"]
    assert typed["text"][0].startswith("ones:0+a2=02+b4=06")
