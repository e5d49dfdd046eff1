"""`tilewright train drafter`."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import given, keep_programs, mesh_axes
from tilewright.cli.drafter_text import Regeneration, SelfInstruct, drafter_text
from tilewright.cli.options import option_class, told
from tilewright.cli.outputs import JsonFile, check_output_folder, human_console, progress_console
from tilewright.cli.train import LoopOptions, check_context, check_out, finish, require_data
from tilewright.llm.language_model import LanguageModel
from tilewright.models import convolution, dflash, dflash2, dspark, eagle3, hub, lilicorr
from tilewright.models.checkpoint import CONFIG, load_decoder, read_config
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, default_target_layers
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.dspark import DSparkConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.speculation.drafters.load import KINDS, block_kind, load_tensors
from tilewright.train.acceptance import expected_acceptance
from tilewright.train.data import MASK, TokenSource
from tilewright.train.dflash2 import DFlash2Options, train_dflash2
from tilewright.train.drafter import DFlashOptions, save_drafter, train_drafter
from tilewright.train.dspark import DSparkOptions, train_dspark
from tilewright.train.eagle3 import Eagle3Options, default_draft_vocab, train_eagle3
from tilewright.train.lilicorr import LiLiCorrOptions, train_lilicorr
from tilewright.train.loop import TrainResult
from tilewright.train.partitioned import TrainingPlacement
from tilewright.train.sharded import data_mesh
from tilewright.train.text import TextOptions


@option_class
class DrafterSizes:
    """Sizes of a drafter; its layers have the target's own.

    Attributes:
        block_size: tokens drafted at once, the known one included; by default 8 for eagle3, 16 for the others.
        draft_vocab: tokens that the drafter can propose, the most frequent of the training text. By default all of a vocabulary
            up to 8,192, else at most 32,000, for eagle3; all for the others.
        taps: the target's layers whose outputs the drafter reads, from 0. By default the published choice for the kind; of a
            target with few layers, three (eagle3, fewer than seven) or all (the others, fewer than nine).
    """

    block_size: int | None = None
    draft_vocab: int | None = None
    taps: tuple[int, ...] = ()


@option_class
class DFlashArguments:
    """Options of --kind dflash, and of all kinds that draft a block in one pass: dflash2, dspark and lilicorr.

    Attributes:
        layers: dflash: the drafter's layers (2 by default).
        mask_token_id: dflash: the token that stands for a position to be drafted; by default <|mask|>, else the vocabulary's
            last.
        anchors: dflash: blocks drawn from each sequence at each step (32 by default).
        gamma: dflash: decay of the loss weights exp(-(k-1)/gamma); by default the published one for the block size.
        dpace: dflash: weigh slots by the drafts that are expected to be accepted instead, with this smoothing (D-PACE; 0.5).
        start: dflash: a drafter to go on from, a folder, a Hugging Face id or "demo-drafter"; its block size may be another;
            for dflash2 and lilicorr also a DFlash one, as backbone. A lilicorr drafter keeps its block size. By default
            training starts from the target's last layers.
    """

    layers: int | None = None
    mask_token_id: int | None = None
    anchors: int | None = None
    gamma: float | None = None
    dpace: float | None = None
    start: str | None = None

    def begin(self, config: DFlashConfig, seed: int, console: Console) -> tuple[DFlashConfig, Any]:
        """The configuration, and the parameters to go on from, float32, if any were named; it reads the last tap as they do."""
        if self.start is None:
            return config, None
        folder = hub.resolve(self.start, console=progress_console(console))
        saved = read_config(folder)
        where = str(folder / CONFIG)
        kind = block_kind(saved)
        layers = saved.get("num_target_layers") or config.num_target_layers
        read: DFlashConfig = kind.model.config_from_hf({**saved, "num_target_layers": layers}, where)
        found = replace(read, expected_acceptance=())
        config = replace(config, last_tap_before_norm=found.last_tap_before_norm)
        under = kind.model is dflash and isinstance(config, DFlash2Config | LiLiCorrConfig)
        wanted = config.backbone if under else config
        same = found if isinstance(found, LiLiCorrConfig) else replace(found, block_size=config.block_size)
        if same != wanted:
            raise ValueError(f"expected --start to be a drafter of these sizes: {wanted}; found {found}")
        params = load_tensors(folder, kind, found, "float32", None)
        if not under:
            return config, params
        model, _ = TRAINED[type(config)]
        return config, replace(model.fresh(config, jax.random.key(seed)), backbone=params)

    def config(self, sizes: DrafterSizes, target: DecoderConfig, tokenizer: Tokenizer) -> DFlashConfig:
        mask = tokenizer.token_to_id(MASK) if self.mask_token_id is None else self.mask_token_id
        every_layer = tuple(range(target.num_layers))
        made = DFlashConfig(
            **{**target.sizes(), "num_layers": given(self.layers, 2), "rope_scaling": None},
            block_size=given(sizes.block_size, 16),
            mask_token_id=target.vocab_size - 1 if mask is None else mask,
            target_layer_ids=sizes.taps
            or (every_layer if len(every_layer) < 9 else default_target_layers(len(every_layer), 5)),
            num_target_layers=target.num_layers,
            draft_vocab_size=sizes.draft_vocab,
        )
        config = dflash.config_from_hf(dflash.config_to_hf(made), "the drafter's sizes")
        dflash.check_fits(config, target)
        return config


@option_class
class DFlash2Arguments:
    """Options that only --kind dflash2 has, besides those of --kind dflash.

    Attributes:
        conv_kernel: dflash2: slots that a convolution reads, the slot itself included (2 by default).
        conv_group: dflash2: channels that share the dynamic part of a kernel (16 by default).
        selector_rank: dflash2: the inner size of the score of two neighbouring tokens (256 by default).
        selector_top_k: dflash2: candidates of a slot (16 by default).
        selector_weight: dflash2: of the selector's loss against the backbone's (1 by default).
    """

    conv_kernel: int | None = None
    conv_group: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_weight: float | None = None

    def config(self, backbone: DFlashConfig) -> DFlash2Config:
        made = DFlash2Config(
            **vars(backbone),
            conv_kernel_size=given(self.conv_kernel, 2),
            conv_group_size=given(self.conv_group, 16),
            selector_rank=given(self.selector_rank, 256),
            selector_top_k=given(self.selector_top_k, 16),
        )
        return dflash2.config_from_hf(dflash2.config_to_hf(made), "the drafter's sizes")


@option_class
class DSparkArguments:
    """Arguments of --kind dspark alone, besides those of --kind dflash.

    Attributes:
        markov_rank: dspark: the inner size of the serial head (256 by default).
        markov_top_k: dspark: candidates of a slot that the serial head is asked about when drafting (16 by default).
        l1_weight: dspark: share of the L1 distance to the target's distribution in the loss, from 0 to 1 (0.9 by default).
    """

    markov_rank: int | None = None
    markov_top_k: int | None = None
    l1_weight: float | None = None

    def config(self, backbone: DFlashConfig) -> DSparkConfig:
        made = DSparkConfig(
            **{**vars(backbone), "sample_from_anchor": True},
            markov_rank=given(self.markov_rank, 256),
            candidate_top_k=given(self.markov_top_k, min(dspark.TOP_K, backbone.proposed)),
        )
        return dspark.config_from_hf(dspark.config_to_hf(made), "the drafter's sizes")


@option_class
class LiLiCorrArguments:
    """Arguments of --kind lilicorr alone, besides those of --kind dflash.

    Attributes:
        lattice_top_k: lilicorr: candidates of a slot (8 by default).
        lattice_size: lilicorr: hidden size of the transformer over the candidates; by default a quarter of the target's, the
            published ratio, as far as its heads divide that.
        lattice_layers: lilicorr: its layers (2 by default).
        lattice_heads: lilicorr: its heads (8 by default).
        lattice_conv: lilicorr: with DFlash 2's convolutions around the drafter's layers.
        lattice_weight: lilicorr: of its cross-entropy against the backbone's loss (0.25 by default).
        penalty_weight: lilicorr: of what it gives to candidates that the target finds unlikely (0.25 by default).
    """

    lattice_top_k: int | None = None
    lattice_size: int | None = None
    lattice_layers: int | None = None
    lattice_heads: int | None = None
    lattice_conv: bool | None = None
    lattice_weight: float | None = None
    penalty_weight: float | None = None

    def config(self, backbone: DFlashConfig) -> LiLiCorrConfig:
        heads = given(self.lattice_heads, 8)
        size = given(self.lattice_size, max(backbone.hidden_size // 4 // max(heads, 1), 1) * heads)
        made = LiLiCorrConfig(
            **vars(backbone),
            candidate_top_k=given(self.lattice_top_k, 8),
            lattice_size=size,
            lattice_layers=given(self.lattice_layers, 2),
            lattice_heads=heads,
            mlp_ratio=2.0,
            vector_size=size,
            vector_eps=1e-4,
            logit_scale=8.0,
            **(dict(zip(convolution.SIZES, (2, 16), strict=True)) if self.lattice_conv else {}),
        )
        return lilicorr.config_from_hf(lilicorr.config_to_hf(made), "the drafter's sizes")


@option_class
class Eagle3Arguments:
    """Options that only --kind eagle3 has.

    Attributes:
        decay: eagle3: weight of a draft step's loss against that of the step before (0.8 by default).
    """

    decay: float | None = None

    def config(self, sizes: DrafterSizes, target: DecoderConfig) -> Eagle3Config:
        made = Eagle3Config(
            **{**target.sizes(), "num_layers": 1},
            draft_vocab_size=given(sizes.draft_vocab, default_draft_vocab(target.vocab_size)),
            target_hidden_size=target.hidden_size,
            target_layer_ids=sizes.taps or eagle3.default_target_layers(target.num_layers),
            block_size=given(sizes.block_size, eagle3.BLOCK_SIZE),
        )
        config = eagle3.config_from_hf(eagle3.config_to_hf(made), target.num_layers, "the drafter's sizes")
        eagle3.check_fits(config, target)
        return config


OPTIONS: dict[str, Any] = {
    "dflash": DFlashOptions,
    "dflash2": DFlash2Options,
    "dspark": DSparkOptions,
    "lilicorr": LiLiCorrOptions,
    "eagle3": Eagle3Options,
}
"""The options of training of each kind, whose names are among those of its arguments."""


@option_class
class KindArguments:
    """Options of each kind of drafter."""

    dflash: DFlashArguments = DFlashArguments()
    dflash2: DFlash2Arguments = DFlash2Arguments()
    dspark: DSparkArguments = DSparkArguments()
    lilicorr: LiLiCorrArguments = LiLiCorrArguments()
    eagle3: Eagle3Arguments = Eagle3Arguments()

    def options(self, kind: str, keep_taps: Path | None) -> Any:
        """The options of training of one kind, by default its own."""
        said = vars(self.dflash) | vars(getattr(self, kind)) | {"keep_taps": keep_taps}
        of = OPTIONS[kind]
        return of(**{each.name: said[each.name] for each in fields(of) if said[each.name] is not None})

    def refuse_others(self, kind: str) -> None:
        """Raises a `ValueError` that lists the arguments given for another kind of drafter."""
        own = (kind, kind if kind == "eagle3" else "dflash")
        wrong = [f"{name} (for {other})" for other, of in vars(self).items() if other not in own for name in told(of)]
        if wrong:
            raise ValueError(f"--kind {kind} does not take {', '.join(wrong)}")

    def config(
        self, kind: str, sizes: DrafterSizes, target: DecoderConfig, tokenizer: Tokenizer, seed: int, console: Console
    ) -> tuple[DFlashConfig | Eagle3Config, Any]:
        """The drafter's configuration, and the parameters to go on from, if any were named."""
        if kind == "eagle3":
            return self.eagle3.config(sizes, target), None
        backbone = self.dflash.config(sizes, target, tokenizer)
        return self.dflash.begin(backbone if kind == "dflash" else getattr(self, kind).config(backbone), seed, console)


@option_class
class DrafterDevices:
    """Options that say where a drafter is trained, in what, and whether its target's states are kept.

    Attributes:
        mesh: devices along "fsdp" and "tp", which divide batches, drafter and target: fsdp=4,tp=2. By default one device.
        compute_dtype: of what the loss is computed in: bfloat16 for accelerators, where it halves the traffic with memory. The
            drafter and its optimiser stay in float32.
        keep_taps: keep the target's states in this folder, in bfloat16, so that they are computed once. For whole records, on
            one device; a token takes 2 bytes for each number of each tapped layer, and of the last one for dspark, lilicorr and
            eagle3.
    """

    mesh: str | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    keep_taps: Path | None = None

    def placement(self, writing: bool, batch_size: int) -> TrainingPlacement:
        """The mesh to train over, if one is named.

        Args:
            writing: the target is to write text first, which it does on one device.

        Raises:
            ValueError: it does not fit the devices or the batch, or the target is to write text.
        """
        if self.mesh is None:
            return TrainingPlacement()
        if writing:
            raise ValueError("expected --mesh or text by the target, found both: write the text first, in a run on one device")
        import orbax.checkpoint  # noqa: F401 (see `train.MeshOptions.setup`)

        placement = TrainingPlacement(data_mesh(mesh_axes(self.mesh)))
        placement.check_batch(batch_size)
        return placement


TRAINED: dict[type[DFlashConfig], tuple[Any, Any]] = {
    DFlashConfig: (dflash, train_drafter),
    DFlash2Config: (dflash2, train_dflash2),
    DSparkConfig: (dspark, train_dspark),
    LiLiCorrConfig: (lilicorr, train_lilicorr),
}
"""The model and the training of each kind that drafts a block in one pass."""


def fit(
    made: DFlashConfig | Eagle3Config,
    own: Any,
    target: tuple[DecoderConfig, Any],
    tokenizer: Tokenizer,
    texts: Sequence[TokenSource],
    options: TextOptions,
    start: Any,
    out: Path,
    dtype: Dtype,
    console: Console,
    placement: TrainingPlacement,
) -> tuple[TrainResult, dict[str, Any]]:
    """Trains and saves a drafter; `own` are the options of its kind. Returns the result, and figures of its kind.

    On one device the acceptance of its drafts is measured on the held-out text then, and saved with it.
    """
    arguments: tuple[Any, ...] = (*target, made, *texts, options, own, out / "training", console)
    if isinstance(made, Eagle3Config):
        result, agreed = train_eagle3(*arguments, placement=placement)
        eagle3.save(out, made, result.params, DTYPES[dtype])
        return result, {"agreement": agreed}
    model, train = TRAINED[type(made)]
    result = train(*arguments, start=start, placement=placement)
    save_drafter(out, model, made, result.params, DTYPES[dtype])  # measuring takes minutes, in which the process may be ended
    if placement.mesh is None:
        drafting = next(kind for kind in KINDS if kind.model is model).drafter(made, made.block_size)
        lm = LanguageModel(*target, tokenizer).with_drafter(drafting, result.params)
        made = replace(made, expected_acceptance=expected_acceptance(lm, texts[1]))
        save_drafter(out, model, made, result.params, DTYPES[dtype])
    return result, {"expected_acceptance": list(made.expected_acceptance)}


def drafter(
    *data: Path,
    target: str,
    out: Path,
    kind: Literal["dflash", "dflash2", "dspark", "lilicorr", "eagle3"] = "dflash",
    sizes: DrafterSizes = DrafterSizes(),
    of_kinds: KindArguments = KindArguments(),
    regeneration: Regeneration = Regeneration(),
    self_instruct: SelfInstruct = SelfInstruct(),
    loop: LoopOptions = LoopOptions(),
    over: DrafterDevices = DrafterDevices(),
    dtype: Dtype = "float32",
    json_file: JsonFile = None,
) -> None:
    """Trains a drafter for a target, which stays as it is.

    Args:
        data: text files, JSONL or JSON files of records (see `tilewright train lm`), or folders of both, of the kind of text
            that will be generated; the target's chat template writes conversations. With --self-instruct, JSONL files of
            prompts that the target is to answer. Or one file of records (.npz.xz).
        target: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" or "demo".
        out: folder for the drafter; its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        kind: a block-diffusion drafter (dflash), which drafts a block in one pass; one that besides walks through each slot's
            best candidates, by a selector (dflash2), a serial head (dspark) or a small transformer (lilicorr); or a chain
            (eagle3), one token after another.
        dtype: of the drafter as it is written; it is trained in float32.
    """
    console = human_console(json_file)
    require_data(data)
    check_out(out)
    if over.keep_taps is not None:
        check_output_folder("--keep-taps", over.keep_taps)
    of_kinds.refuse_others(kind)
    options = replace(loop.options(), compute_dtype=over.compute_dtype)
    own = of_kinds.options(kind, over.keep_taps)
    keep_programs(loop.compile_cache)
    folder = hub.resolve(target, console=progress_console(console), check=load_tokenizer)
    tokenizer = load_tokenizer(folder)
    placement = over.placement(bool(regeneration.regenerated or self_instruct.asked), options.batch_size)
    config, params = load_decoder(folder, jnp.float32, progress_console(console), placement.shardings)
    check_context(options.sequence_length, config.max_position_embeddings)
    made, start = of_kinds.config(kind, sizes, config, tokenizer, options.seed, console)
    texts = drafter_text(data, loop, (regeneration, self_instruct), folder, (config, params), out, console)
    result, more = fit(made, own, (config, params), tokenizer, texts, options, start, out, dtype, console, placement)
    finish(result, out, console, json_file, training_tokens=int(texts[0].in_loss.sum()), target=target, **more)
