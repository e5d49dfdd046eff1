"""`tilewright train drafter`: trains drafters for speculative decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from cyclopts import Parameter
from rich.console import Console
from tokenizers import Tokenizer

from tilewright.cli.common import check_decodes, given, keep_programs, mesh_axes
from tilewright.cli.options import option_class, settings
from tilewright.cli.outputs import check_output_folder, human_console, progress_console
from tilewright.cli.train import (
    COMMON,
    MODEL,
    PERFORMANCE,
    TEXT,
    JsonOption,
    LoopOptions,
    check_context,
    check_out,
    report,
    require_data,
)
from tilewright.cli.train_drafter_text import Regeneration, SelfInstruct, drafter_text
from tilewright.llm.language_model import LanguageModel
from tilewright.models import convolution, dflash, dflash2, dspark, eagle3, hub, lilicorr, mtp
from tilewright.models.checkpoint import CONFIG, load_decoder, read_config
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, default_target_layers
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.dspark import DSparkConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.mtp import MtpConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.models.tokenizer import load_tokenizer
from tilewright.speculation.drafters.load import KINDS, block_kind, load_tensors
from tilewright.speculation.drafters.mtp import MTP
from tilewright.train.acceptance import expected_acceptance
from tilewright.train.data import MASK, TokenSource
from tilewright.train.dflash2 import DFlash2Options, train_dflash2
from tilewright.train.drafter import DFlashOptions, save_drafter, train_drafter
from tilewright.train.dspark import DSparkOptions, train_dspark
from tilewright.train.eagle3 import Eagle3Options, default_draft_vocab, train_eagle3
from tilewright.train.lilicorr import LiLiCorrOptions, train_lilicorr
from tilewright.train.loop import TrainResult
from tilewright.train.mtp import MtpOptions, train_mtp
from tilewright.train.step import ONE_DEVICE, TrainingPlacement, data_mesh
from tilewright.train.text import TextOptions

Kind = Literal["dflash", "dflash2", "dspark", "lilicorr", "eagle3", "mtp"]
CHAINS = ("eagle3", "mtp")
"""Kinds that draft one token after another."""


@dataclass(frozen=True)
class DrafterSizes:
    """Settings of `--sizes`: sizes of a drafter. The hidden size and the heads are the target's.

    Attributes:
        block_size: tokens per draft block, including the last token. [default: 16, eagle3 8, mtp 4]
        draft_vocab: number of tokens that the drafter can propose, the most frequent ones of the training text. [default: the
            whole vocabulary; eagle3 and mtp at most 32000 for a vocabulary above 8192]
        taps: target layers whose outputs the drafter reads, counted from 0, such as 1,8,15, not for mtp. [default: the
            published layers of the kind; for small targets all layers, eagle3 three]
        layers: layers of the drafter, not for eagle3 and mtp. [default: 2]
        mask_token_id: token of the positions to draft, not for eagle3 and mtp. [default: <|mask|>, else the last of the
            vocabulary]
        conv_kernel: dflash2, slots that a convolution reads, including its own. [default: 2]
        conv_group: dflash2, channels that share the dynamic part of a convolution kernel. [default: 16]
        selector_rank: dflash2, rank of the score of two neighbouring tokens. [default: 256]
        selector_top_k: dflash2, candidates per slot. [default: 16]
        markov_rank: dspark, rank of the serial head. [default: 256]
        markov_top_k: dspark, candidates per slot that the serial head scores when drafting. [default: 16]
        lattice_top_k: lilicorr, candidates per slot, a power of two up to 16. [default: 8]
        lattice_size: lilicorr, hidden size of the transformer over candidates. [default: a quarter of the target's]
        lattice_layers: lilicorr, layers of that transformer. [default: 2]
        lattice_heads: lilicorr, heads of that transformer. [default: 8]
        lattice_conv: lilicorr, add the convolutions of dflash2 to the drafter's layers. [default: false]
    """

    block_size: int | None = None
    draft_vocab: int | None = None
    taps: tuple[int, ...] = ()
    layers: int | None = None
    mask_token_id: int | None = None
    conv_kernel: int | None = None
    conv_group: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    markov_rank: int | None = None
    markov_top_k: int | None = None
    lattice_top_k: int | None = None
    lattice_size: int | None = None
    lattice_layers: int | None = None
    lattice_heads: int | None = None
    lattice_conv: bool = False

    def dflash(self, target: DecoderConfig, tokenizer: Tokenizer) -> DFlashConfig:
        mask = tokenizer.token_to_id(MASK) if self.mask_token_id is None else self.mask_token_id
        every_layer = tuple(range(target.num_layers))
        config = DFlashConfig(
            **{**target.sizes(), "num_layers": given(self.layers, 2), "rope_scaling": None},
            block_size=given(self.block_size, 16),
            mask_token_id=target.vocab_size - 1 if mask is None else mask,
            target_layer_ids=self.taps or (every_layer if len(every_layer) < 9 else default_target_layers(len(every_layer), 5)),
            num_target_layers=target.num_layers,
            draft_vocab_size=self.draft_vocab,
        )
        config = dflash.config_from_hf(dflash.config_to_hf(config), "the drafter's sizes")
        dflash.check_fits(config, target)
        return config

    def dflash2(self, backbone: DFlashConfig) -> DFlash2Config:
        config = DFlash2Config(
            **vars(backbone),
            conv_kernel_size=given(self.conv_kernel, 2),
            conv_group_size=given(self.conv_group, 16),
            selector_rank=given(self.selector_rank, 256),
            selector_top_k=given(self.selector_top_k, 16),
        )
        return dflash2.config_from_hf(dflash2.config_to_hf(config), "the drafter's sizes")

    def dspark(self, backbone: DFlashConfig) -> DSparkConfig:
        config = DSparkConfig(
            **{**vars(backbone), "sample_from_anchor": True},
            markov_rank=given(self.markov_rank, 256),
            candidate_top_k=given(self.markov_top_k, min(dspark.TOP_K, backbone.num_proposable)),
        )
        return dspark.config_from_hf(dspark.config_to_hf(config), "the drafter's sizes")

    def lilicorr(self, backbone: DFlashConfig) -> LiLiCorrConfig:
        top_k = given(self.lattice_top_k, 8)
        if not 1 <= top_k <= lilicorr.WIDEST or top_k & (top_k - 1):
            raise ValueError(f"expected lattice_top_k to be a power of two up to {lilicorr.WIDEST}, found {top_k}")
        heads = given(self.lattice_heads, 8)
        # The published size is a quarter of the target's; the heads must divide it.
        size = given(self.lattice_size, max(backbone.hidden_size // 4 // max(heads, 1), 1) * heads)
        config = LiLiCorrConfig(
            **vars(backbone),
            candidate_top_k=top_k,
            lattice_size=size,
            lattice_layers=given(self.lattice_layers, 2),
            lattice_heads=heads,
            mlp_ratio=2.0,
            vector_size=size,
            vector_eps=1e-4,
            logit_scale=8.0,
            **(dict(zip(convolution.SIZES, (2, 16), strict=True)) if self.lattice_conv else {}),
        )
        return lilicorr.config_from_hf(lilicorr.config_to_hf(config), "the drafter's sizes")

    def eagle3(self, target: DecoderConfig) -> Eagle3Config:
        config = Eagle3Config(
            **{**target.sizes(), "num_layers": 1},
            draft_vocab_size=given(self.draft_vocab, default_draft_vocab(target.vocab_size)),
            target_hidden_size=target.hidden_size,
            target_layer_ids=self.taps or eagle3.default_target_layers(target.num_layers),
            block_size=given(self.block_size, eagle3.BLOCK_SIZE),
        )
        config = eagle3.config_from_hf(eagle3.config_to_hf(config), target.num_layers, "the drafter's sizes")
        eagle3.check_fits(config, target)
        return config

    def mtp(self, target: DecoderConfig) -> MtpConfig:
        size = given(self.draft_vocab, default_draft_vocab(target.vocab_size))
        config = MtpConfig(
            layer=mtp.layer_config(target),
            num_target_layers=target.num_layers,
            block_size=given(self.block_size, mtp.BLOCK_SIZE),
            draft_vocab_size=None if size == target.vocab_size else size,
        )
        return mtp.config_from_hf(mtp.config_to_hf(config), "the drafter's sizes")

    def config(self, kind: Kind, target: DecoderConfig, tokenizer: Tokenizer) -> DFlashConfig | Eagle3Config | MtpConfig:
        """Configures a drafter. Raises a `ValueError` for sizes that do not fit the target or each other."""
        if kind == "eagle3":
            return self.eagle3(target)
        if kind == "mtp":
            return self.mtp(target)
        backbone = self.dflash(target, tokenizer)
        return backbone if kind == "dflash" else getattr(self, kind)(backbone)


@dataclass(frozen=True)
class DrafterLoss:
    """Settings of `--loss`: the training loss of a drafter.

    Attributes:
        anchors: draft blocks per sequence and step, not for eagle3 and mtp. [default: 32]
        gamma: decay of the weights exp(-(k-1)/gamma) of the slots k, not for eagle3 and mtp. [default: the published value for
            the block size]
        dpace: weigh slots by their expected acceptance, smoothed by this value from 0 to 1 (D-PACE), instead of the decay; not
            for eagle3 and mtp.
        selector_weight: dflash2, weight of the selector's loss. [default: 1]
        l1_weight: dspark, share of the L1 distance to the target's distribution, from 0 to 1. [default: 0.9]
        lattice_weight: lilicorr, weight of the cross-entropy over candidates. [default: 0.25]
        penalty_weight: lilicorr, weight of the penalty for candidates that are unlikely for the target. [default: 0.25]
        decay: eagle3 and mtp, weight of a draft step relative to the step before. [default: 0.8]
    """

    anchors: int | None = None
    gamma: float | None = None
    dpace: float | None = None
    selector_weight: float | None = None
    l1_weight: float | None = None
    lattice_weight: float | None = None
    penalty_weight: float | None = None
    decay: float | None = None

    def options(self, kind: Kind, keep_taps: Path | None) -> Any:
        """Builds the training options of a kind of drafter. Raises a `ValueError` for a value out of its range."""
        values = {**vars(self), "keep_taps": keep_taps}
        names = [field.name for field in fields(OPTIONS[kind])]
        return OPTIONS[kind](**{name: values[name] for name in names if values[name] is not None})


OPTIONS: dict[str, Any] = {
    "dflash": DFlashOptions,
    "dflash2": DFlash2Options,
    "dspark": DSparkOptions,
    "lilicorr": LiLiCorrOptions,
    "eagle3": Eagle3Options,
    "mtp": MtpOptions,
}
"""Class of the training options of each kind; their fields are fields of `DrafterLoss`, and `keep_taps`."""

BLOCK_SIZES = ("block_size", "draft_vocab", "taps", "layers", "mask_token_id")
BLOCK_LOSS = ("anchors", "gamma", "dpace")
SIZES: dict[str, tuple[str, ...]] = {
    "dflash": BLOCK_SIZES,
    "dflash2": (*BLOCK_SIZES, "conv_kernel", "conv_group", "selector_rank", "selector_top_k"),
    "dspark": (*BLOCK_SIZES, "markov_rank", "markov_top_k"),
    "lilicorr": (*BLOCK_SIZES, "lattice_top_k", "lattice_size", "lattice_layers", "lattice_heads", "lattice_conv"),
    "eagle3": ("block_size", "draft_vocab", "taps"),
    "mtp": ("block_size", "draft_vocab"),
}
"""Keys of `--sizes` for each kind."""
LOSS: dict[str, tuple[str, ...]] = {
    "dflash": BLOCK_LOSS,
    "dflash2": (*BLOCK_LOSS, "selector_weight"),
    "dspark": (*BLOCK_LOSS, "l1_weight"),
    "lilicorr": (*BLOCK_LOSS, "lattice_weight", "penalty_weight"),
    "eagle3": ("decay",),
    "mtp": ("decay",),
}
"""Keys of `--loss` for each kind."""


def check_keys(option: str, kind: str, values: object, allowed: Mapping[str, tuple[str, ...]]) -> None:
    """Raises a `ValueError` for keys of an option that only other kinds of drafters have."""
    defaults = vars(type(values)())
    for name, value in vars(values).items():
        if value != defaults[name] and name not in allowed[kind]:
            kinds = ", ".join(other for other, names in allowed.items() if name in names)
            expected = f"expected {option} of --kind {kind} with keys among {', '.join(allowed[kind])}"
            raise ValueError(f"{expected}, found {name} (for {kinds})")


@Parameter(group=PERFORMANCE)
@option_class
class DrafterDevices:
    """Options of devices for the training of a drafter.

    Attributes:
        mesh: devices along "fsdp" and "tp", which shard batches, drafter and target, such as fsdp=4,tp=2; by default one
            device.
        keep_taps: folder that keeps the target's hidden states in bfloat16, so that they are computed once. For whole records
            on one device. A token takes 2 bytes per number of each tapped layer, and of the last layer for dspark, lilicorr,
            eagle3 and mtp.
    """

    mesh: Annotated[str | None, Parameter(group=COMMON)] = None
    keep_taps: Path | None = None

    def placement(self, writing: bool, options: TextOptions) -> TrainingPlacement:
        """Builds the mesh of `--mesh`.

        Args:
            writing: the target writes text first, which needs one device.
            options: options of the training loop.

        Raises:
            ValueError: the mesh does not fit the devices or the batch, or the target writes text.
        """
        if self.mesh is None:
            return ONE_DEVICE
        if writing:
            raise ValueError("expected --mesh or text by the target, found both: write the text first, in a run on one device")
        placement = TrainingPlacement(data_mesh(mesh_axes(self.mesh)))
        placement.check_batch(options.batch_size, parts=options.accumulate)
        return placement


TRAINED: dict[type[DFlashConfig], tuple[Any, Any]] = {
    DFlashConfig: (dflash, train_drafter),
    DFlash2Config: (dflash2, train_dflash2),
    DSparkConfig: (dspark, train_dspark),
    LiLiCorrConfig: (lilicorr, train_lilicorr),
}
"""Model and training function of each kind that drafts a block in one pass."""


def load_start(start: str, config: DFlashConfig, seed: int, console: Console) -> tuple[DFlashConfig, Any]:
    """Loads the drafter of `--start`, or a DFlash drafter as the backbone of a dflash2 or lilicorr drafter.

    Args:
        start: value of `--start`.
        config: configuration of the new drafter.
        seed: seed of parameters that a backbone lacks.
        console: console for progress.

    Returns:
        the configuration, with `last_tap_before_norm` of the loaded drafter, and float32 parameters.

    Raises:
        ValueError: the loaded drafter has other sizes. The block size may differ, except for lilicorr.
    """
    folder = hub.resolve(start, console=progress_console(console))
    saved = read_config(folder)
    kind = block_kind(saved)
    layers = saved.get("num_target_layers") or config.num_target_layers
    read: DFlashConfig = kind.model.config_from_hf({**saved, "num_target_layers": layers}, str(folder / CONFIG))
    loaded = replace(read, expected_acceptance=())
    config = replace(config, last_tap_before_norm=loaded.last_tap_before_norm)
    is_backbone = kind.model is dflash and isinstance(config, DFlash2Config | LiLiCorrConfig)
    expected = config.backbone if is_backbone else config
    resized = loaded if isinstance(loaded, LiLiCorrConfig) else replace(loaded, block_size=config.block_size)
    if resized != expected:
        raise ValueError(f"expected --start to be a drafter of these sizes: {expected}; found {loaded}")
    params = load_tensors(folder, kind, loaded, "float32", None)
    if not is_backbone:
        return config, params
    model, _ = TRAINED[type(config)]
    return config, replace(model.fresh(config, jax.random.key(seed)), backbone=params)


def fit(
    config: DFlashConfig | Eagle3Config | MtpConfig,
    drafter_options: Any,
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
    """Trains and saves a drafter. On one device, measures the acceptance of its drafts on held-out text and saves it as well.

    Args:
        config: configuration of the drafter.
        drafter_options: training options of the kind of drafter.
        target: configuration and parameters of the target.
        tokenizer: tokenizer of the target.
        texts: training text and held-out text.
        options: options of the training loop.
        start: parameters to start from; None for new ones.
        out: folder for the drafter.
        dtype: dtype of the saved drafter.
        console: console for progress.
        placement: devices.

    Returns:
        the result, and metrics of the kind of drafter.
    """
    arguments: tuple[Any, ...] = (*target, config, *texts, options, drafter_options, out / "training", console)
    if isinstance(config, Eagle3Config):
        result, agreed = train_eagle3(*arguments, placement=placement)
        eagle3.save(out, config, result.params, DTYPES[dtype])
        return result, {"agreement": agreed}
    if isinstance(config, MtpConfig):
        result, agreed = train_mtp(*arguments, placement=placement)
        mtp.save(out, config, result.params, DTYPES[dtype])
        if placement.mesh is None:
            lm = LanguageModel(*target, tokenizer).with_drafter(MTP(config, config.block_size), result.params)
            config = replace(config, expected_acceptance=expected_acceptance(lm, texts[1]))
            mtp.save(out, config, result.params, DTYPES[dtype])
        return result, {"agreement": agreed, "expected_acceptance": list(config.expected_acceptance)}
    model, train = TRAINED[type(config)]
    result = train(*arguments, start=start, placement=placement)
    save_drafter(out, model, config, result.params, DTYPES[dtype])  # before the measurement, which takes minutes
    if placement.mesh is None:
        drafting = next(kind for kind in KINDS if kind.model is model).drafter(config, config.block_size)
        lm = LanguageModel(*target, tokenizer).with_drafter(drafting, result.params)
        config = replace(config, expected_acceptance=expected_acceptance(lm, texts[1]))
        save_drafter(out, model, config, result.params, DTYPES[dtype])
    return result, {"expected_acceptance": list(config.expected_acceptance)}


def drafter(
    *data: Path,
    target: Annotated[str, Parameter(alias="-m", group=COMMON)],
    out: Annotated[Path, Parameter(alias="-o", group=COMMON)],
    kind: Annotated[Kind, Parameter(alias="-k", group=COMMON)] = "dflash",
    start: Annotated[str | None, Parameter(group=COMMON)] = None,
    sizes: Annotated[DrafterSizes, settings(DrafterSizes, "sizes of the drafter"), Parameter(group=MODEL)] = DrafterSizes(),
    loss: Annotated[DrafterLoss, settings(DrafterLoss, "training loss"), Parameter(group=MODEL)] = DrafterLoss(),
    regenerate: Annotated[
        Regeneration,
        settings(Regeneration, "train on text that the target continues, instead of on the data"),
        Parameter(group=TEXT),
    ] = Regeneration(),
    self_instruct: Annotated[
        SelfInstruct,
        settings(SelfInstruct, "train on instructions and answers that the target writes"),
        Parameter(group=TEXT),
    ] = SelfInstruct(),
    loop: LoopOptions = LoopOptions(),
    devices: DrafterDevices = DrafterDevices(),
    dtype: Annotated[Dtype, Parameter(group=MODEL)] = "float32",
    json_file: JsonOption = None,
) -> None:
    """Trains a drafter for a target; the target does not change.

    Args:
        data: text files, JSONL or JSON files of records (see `tilewright train lm`), or folders of both, similar to the text
            that the target will generate. Conversations go through the target's chat template. With --self-instruct, JSONL
            files of prompts that the target answers. Alternatively one file of records (.npz.xz).
        target: a folder, a GGUF file, a Hugging Face id, "smollm2-135m" or "demo".
        out: folder for the drafter. Its subfolder `training` holds the checkpoint that an interrupted run resumes from.
        kind: architecture. dflash drafts a block in one pass. dflash2 adds a selector among each slot's candidates, dspark a
            serial head, lilicorr a small transformer. eagle3 and mtp draft one token after another; mtp reads the target's last
            hidden state, as the heads in checkpoints of Qwen3-Next and Qwen3.5 do.
        start: existing drafter to train further, a folder, a Hugging Face id or "demo-drafter"; its block size may differ,
            except for lilicorr. dflash2 and lilicorr also take a DFlash drafter as backbone. By default training starts from
            the target's last layers. Not for eagle3 and mtp.
        dtype: dtype of the saved drafter. Training keeps float32 weights.
    """
    console = human_console(json_file)
    require_data(data)
    check_out(out, loop.save)
    if devices.keep_taps is not None:
        check_output_folder("--keep-taps", devices.keep_taps)
    check_keys("--sizes", kind, sizes, SIZES)
    check_keys("--loss", kind, loss, LOSS)
    if kind in CHAINS and start is not None:
        raise ValueError(f"expected --start with a kind that drafts blocks, found --kind {kind}")
    options = loop.options()
    drafter_options = loss.options(kind, devices.keep_taps)
    keep_programs()
    folder = hub.resolve(target, console=progress_console(console), check=load_tokenizer)
    check_decodes(folder)
    tokenizer = load_tokenizer(folder)
    placement = devices.placement(regenerate.enabled or self_instruct.enabled, options)
    loaded = load_decoder(folder, jnp.float32, progress_console(console), placement.shardings)
    check_context(options.sequence_length, loaded[0].max_position_embeddings)
    config = sizes.config(kind, loaded[0], tokenizer)
    params = None
    if start is not None and not isinstance(config, Eagle3Config | MtpConfig):
        config, params = load_start(start, config, options.seed, console)
    texts = drafter_text(data, loop, regenerate, self_instruct, folder, loaded, out, console)
    result, more = fit(config, drafter_options, loaded, tokenizer, texts, options, params, out, dtype, console, placement)
    report(result, out, console, json_file, training_tokens=int(texts[0].in_loss.sum()), target=target, **more)
