"""Loads drafters and their parameters from names, folders and hub ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from tilewright.models import (
    assistant,
    checkpoint,
    dflash,
    dflash2,
    draft_vocab,
    dspark,
    eagle3,
    gguf,
    hub,
    lilicorr,
    mtp,
    torch_file,
)
from tilewright.models.decoder import DecoderConfig
from tilewright.models.diffusion import is_diffusion
from tilewright.models.drafter_layouts import as_published, is_alongside, plain_name
from tilewright.models.kinds import check_kind
from tilewright.models.params import DTYPES, ArraySpec, Dtype, matrix, spec_leaves
from tilewright.models.quantised import quantised_layout
from tilewright.models.stored import is_finite, read_headers
from tilewright.runtime.interfaces import Drafter
from tilewright.speculation.drafters import base
from tilewright.speculation.drafters.assistant import Assistant
from tilewright.speculation.drafters.blockwise import Blockwise
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.dflash2 import DFlash2
from tilewright.speculation.drafters.dspark import DSpark
from tilewright.speculation.drafters.eagle3 import Eagle3
from tilewright.speculation.drafters.lilicorr import LiLiCorr
from tilewright.speculation.drafters.mtp import MTP
from tilewright.speculation.drafters.ngram import NGram, Suffix
from tilewright.speculation.drafters.self_diffusion import SelfDiffusion, self_diffusion
from tilewright.speculation.drafters.walking import Walk

NGRAM = NGram.name
SUFFIX = Suffix.name
SELF = SelfDiffusion.name
WITHOUT_FILES = {
    NGRAM: "n-gram drafting has no weights",
    SUFFIX: "suffix drafting has no weights",
    SELF: "self-speculation drafts with the target's weights",
}
"""Drafters that are not loaded from files, and why options of weights do not apply to them."""
STORED = MTP.name
"""Name of the head for multi-token prediction in the target's own folder."""
DRAFTERS = (*WITHOUT_FILES, STORED, *hub.NAMED_DRAFTERS)
"""Names of packaged drafters."""
AUTO = ("auto", "auto-inexact")
"""Block sizes that the policy chooses round by round; see `language_model.load`."""
WALKERS = "a DFlash 2, DSpark or LiLiCorr drafter"
BRANCHING = "a DFlash, DFlash 2, DSpark, LiLiCorr, EAGLE-3 or MTP drafter"


@dataclass(frozen=True)
class DrafterOptions:
    """Options of a drafter, named as in `language_model.load`. None means the drafter's default.

    Attributes:
        suffix_corpus: file of texts that the drafter "suffix" searches; ignored by `load_drafter`, which has no tokenizer.
    """

    block_size: int | str | None = None
    draft_window: int | None = None
    drafter_dtype: str | None = None
    refine: int = 0
    walk: str | None = None
    revision: str | None = None
    suffix_corpus: Path | None = None
    tree_nodes: tuple[int, ...] = ()

    def check(self, drafter: str | None) -> None:
        """Raises a `ValueError` that names an option which the drafter does not take."""
        if isinstance(self.block_size, str) and self.block_size not in AUTO:
            raise ValueError(f"expected a block size, {' or '.join(AUTO)}, found {self.block_size!r}")
        if isinstance(self.block_size, str) and drafter is None:
            raise ValueError(f"a block size of {self.block_size} needs a drafter; no drafter was named")
        if self.drafter_dtype is not None and self.drafter_dtype not in DTYPES:
            raise ValueError(f"expected a drafter dtype among {', '.join(DTYPES)}, found {self.drafter_dtype!r}")
        if self.walk is not None and self.walk not in get_args(Walk):
            raise ValueError(f"expected the walk to be {' or '.join(get_args(Walk))}, found {self.walk!r}")
        if self.suffix_corpus is not None and drafter != SUFFIX:
            raise ValueError(f"a corpus needs the drafter {SUFFIX}, found {drafter or 'none'}")
        for nodes in self.tree_nodes:
            base.check_nodes(nodes)
        if drafter is not None and drafter not in WITHOUT_FILES:
            return
        kind = "no drafter was named" if drafter is None else WITHOUT_FILES[drafter]
        for name, value in (("draft window", self.draft_window), ("drafter dtype", self.drafter_dtype)):
            if value is not None:
                raise ValueError(f"a {name} needs a drafter with weights; {kind}")
        if self.refine:
            raise ValueError(f"refining needs a DFlash drafter; {kind}")
        if self.walk is not None:
            raise ValueError(f"a walk needs {WALKERS}; {kind}")
        if self.tree_nodes:
            raise ValueError(f"a tree needs {BRANCHING}; {kind}")

    @property
    def nodes(self) -> int:
        """Nodes of the trees of a drafter by itself; 0 for chains. Raises a `ValueError` if several numbers were given."""
        nodes, *others = self.tree_nodes or (0,)
        if others:
            raise ValueError(f"expected one number of nodes with a block size, found {', '.join(map(str, self.tree_nodes))}")
        return nodes

    def fitting(self, drafter: str | None) -> "DrafterOptions":
        """Returns the options that a drafter takes, for callers that give several drafters the same options."""
        if drafter not in (None, "none", *WITHOUT_FILES):
            return replace(self, suffix_corpus=None)
        return DrafterOptions(block_size=self.block_size, suffix_corpus=self.suffix_corpus if drafter == SUFFIX else None)


def check_sources(source: str | Sequence[str] | None, options: DrafterOptions) -> None:
    """Raises a `ValueError` if the drafter, or every one of several drafters, rejects an option."""
    if source is None or isinstance(source, str):
        options.check(source)
        return
    if not source:
        raise ValueError("expected at least one drafter, found none")
    if set(source) <= set(WITHOUT_FILES) or (options.suffix_corpus is not None and SUFFIX not in source):
        options.check(SUFFIX if SUFFIX in source else source[0])
    for drafter in source:
        options.fitting(drafter).check(drafter)


def load_drafter(
    source: str | None,
    target: DecoderConfig,
    dtype: str,
    options: DrafterOptions,
    console: Console | None,
    target_folder: Path | None = None,
) -> tuple[Drafter | None, Any]:
    """Loads a drafter and checks that it fits the target. Returns the drafter and its parameters.

    Args:
        source: folder, hub id, "ngram", "suffix" or "self". None with a block size is block-wide decoding,
            without one no drafter.
        dtype: dtype of the drafter, unless the options name another.
        target_folder: folder of the target, which may hold a head for "mtp".
    """
    size = options.block_size
    assert not isinstance(size, str), "callers that choose widths per round load drafters at full width"
    if source is None:
        return (None if size is None else Blockwise(size)), None
    if source in (NGRAM, SUFFIX):
        kind = NGram if source == NGRAM else Suffix
        return (kind() if size is None else kind(size)), None
    if source == SELF:
        return self_diffusion(target, size), None
    precision = cast(Dtype, options.drafter_dtype or dtype)
    if source == STORED:
        return load_stored_head(target_folder, target, precision, options, console)
    folder = hub.resolve(source, options.revision, console, names=DRAFTERS)
    if source in hub.NAMED_TARGETS or is_diffusion(folder) or gguf.gguf_file(folder) is not None:
        check_kind(source, folder, "drafter")
    fields = as_published(checkpoint.read_config(folder), str(folder / checkpoint.CONFIG))
    kind = block_kind(fields)
    if assistant.is_assistant(fields):
        check_chain(options, "an assistant")
        if options.tree_nodes:
            raise ValueError(f"a tree needs {BRANCHING}; this is an assistant")
        if options.draft_window is not None:
            raise ValueError("a draft window needs a drafter with a context; an assistant reads the target's keys and values")
        config, params = assistant.load(folder, target, DTYPES[precision], console)
        return Assistant(config, config.block_size if size is None else size, precision), params
    if mtp.is_mtp(fields):
        check_chain(options, "an MTP head")
        head, params = mtp.load(folder, target, DTYPES[precision], console)
        return MTP(head, size or head.block_size, precision, window=options.draft_window, nodes=options.nodes), params
    if kind is DFLASH and eagle3.is_eagle3(fields):
        check_chain(options, "an EAGLE-3 one")
        config, params = eagle3.load(folder, target, DTYPES[precision], console)
        return Eagle3(config, size or config.block_size, precision, window=options.draft_window, nodes=options.nodes), params
    if options.walk is not None and kind is DFLASH:
        raise ValueError(f"a walk needs {WALKERS}; this is a DFlash one")
    config, params = load_dflash(folder, fields, target, precision, console)
    settings = (config.block_size if size is None else size, options.draft_window, precision, options.refine)
    more: dict[str, Any] = {} if kind is DFLASH else {"walk": options.walk or "sampled"}
    return kind.drafter(config, *settings, **more, nodes=options.nodes), params


def check_chain(options: DrafterOptions, kind: str) -> None:
    """Raises a `ValueError` for options that only drafters of blocks take."""
    if options.refine:
        raise ValueError(f"refining needs a DFlash drafter; this is {kind}")
    if options.walk is not None:
        raise ValueError(f"a walk needs {WALKERS}; this is {kind}")


def load_stored_head(
    folder: Path | None, target: DecoderConfig, dtype: Dtype, options: DrafterOptions, console: Console | None
) -> tuple[MTP, Any]:
    """Loads the head for multi-token prediction in the target's own folder.

    Raises:
        ValueError: the target has no folder, or its folder no head that is supported; or an option does not apply.
    """
    check_chain(options, "an MTP head")
    if options.revision is not None:
        raise ValueError(f"revision {options.revision!r} was given, but {STORED!r} is part of the target")
    if folder is None:
        raise ValueError(f"expected a target that was loaded from a folder for the drafter {STORED!r}, found parameters")
    config, params = mtp.load_stored_head(folder, target, DTYPES[dtype], console)
    size = config.block_size if options.block_size is None else options.block_size
    assert not isinstance(size, str)
    return MTP(config, size, dtype, window=options.draft_window, nodes=options.nodes), params


class Kind(NamedTuple):
    """Kind of drafter with DFlash's backbone, which drafts a block in one pass.

    Attributes:
        declares: returns True for a `config.json` of this kind.
        model: module that reads the configuration and declares the arrays.
        drafter: drafter class.
        rename: maps a stored tensor's name (see `drafter_layouts.plain_name`) to the declared name.
        ignore: returns True for stored tensors that are not read.
    """

    declares: Callable[[Mapping[str, Any]], bool]
    model: Any
    drafter: type[DFlash]
    rename: Callable[[str], str] = lambda name: name
    ignore: Callable[[str], bool] = lambda name: False

    def declared_name(self, name: str) -> str:
        """Returns the declared name of a stored tensor."""
        return self.rename(plain_name(name))

    def ignores(self, name: str) -> bool:
        """Returns True for a stored tensor that is not read."""
        return is_alongside(name) or self.ignore(plain_name(name))


DFLASH = Kind(lambda fields: True, dflash, DFlash)
KINDS = (
    Kind(dflash2.is_dflash2, dflash2, DFlash2),
    Kind(dspark.is_dspark, dspark, DSpark, dspark.stored_name, dspark.is_passed_over),
    Kind(lilicorr.is_lilicorr, lilicorr, LiLiCorr, lilicorr.stored_name),
    DFLASH,
)
"""Kinds in order of precedence. DFlash comes last: its reader reports what is wrong with any other configuration."""


def block_kind(fields: Mapping[str, Any]) -> Kind:
    """Returns the kind of drafter that a `config.json` declares."""
    published = as_published(fields, checkpoint.CONFIG)
    return next(kind for kind in KINDS if kind.declares(published))


def load_dflash(
    folder: Path, fields: Mapping[str, Any], target: DecoderConfig, dtype: Dtype, console: Console | None
) -> tuple[Any, Any]:
    """Loads the configuration and the parameters of a drafter of one of DFlash's kinds.

    Raises:
        ValueError: lists all wrong fields; with readable fields, all tensors and fields that do not fit the target.
    """
    fields = as_published(fields, str(folder / checkpoint.CONFIG))
    kind = block_kind(fields)
    config = kind.model.config_from_hf(fields, str(folder / checkpoint.CONFIG), target)
    problems = []
    params = None
    try:
        config = with_stored(folder, kind, config)
        params = load_tensors(folder, kind, config, dtype, console, fields.get("quantization_config"))
    except ValueError as error:
        problems.append(str(error))
    try:
        dflash.check_fits(config, target)
    except ValueError as error:
        problems.insert(0, str(error))
    if params is None or problems:
        raise ValueError("; ".join(problems))
    return dflash.fold_value_scale(config, params)


HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
MASK = "mask_embedding"
MASK_FILE = "mask_embedding.pt"


def with_stored(folder: Path, kind: Kind, config: Any) -> Any:
    """Adds to the configuration which tensors the checkpoint has in place of the target's."""
    names = {kind.declared_name(tensor.name) for tensor in read_headers(checkpoint.weight_files(folder))}
    stored = {"own_embedding": EMBEDDING in names, "own_head": HEAD in names}
    if config.draft_vocab_size is None and "d2t" in names:
        stored |= {"draft_vocab_size": config.vocab_size}
    return replace(config, **stored, mask_embedding=MASK in names or (folder / MASK_FILE).is_file())


def load_tensors(
    folder: Path, kind: Kind, config: dflash.DFlashConfig, dtype: Dtype, console: Console | None, quantisation: Any = None
) -> Any:
    """Loads the arrays of a drafter and its draft vocabulary.

    Args:
        quantisation: `quantization_config` of the drafter's `config.json`. Quantised matrices are dequantised.
    """
    separate = (*draft_vocab.MAPS, MASK)  # loaded below
    precision = DTYPES[dtype]

    def ignore(name: str) -> bool:
        plain = kind.declared_name(name)
        return kind.ignores(name) or (plain in separate and (plain == MASK or config.has_head))

    declared = dflash.with_backbone(kind.model.declare(config), mask=None)
    head = (
        matrix(HEAD, config.hidden_size, config.num_proposable, ("hidden", "vocab"), kind="head") if config.own_head else None
    )
    tables, declared = whole_tables(folder, kind, config, declared)
    params, head = checkpoint.load_params(
        folder,
        (declared, head),
        precision,
        rename=kind.declared_name,
        ignore=ignore,
        console=console,
        layout=quantised_layout(quantisation),
    )
    if config.has_head:
        maps = checkpoint.load_stored(folder, draft_vocab.MAPS, kind.declared_name)
        ids = draft_vocab.target_ids_from_maps(config.num_proposable, config.vocab_size, maps, str(folder))
        params = jax.tree.map(lambda spec, array: array[ids] if spec.name in tables else array, declared, params)
        params = dflash.with_vocab(params, draft_vocab.DraftVocab(jnp.asarray(ids), head))
    if config.mask_embedding:
        params = dflash.with_backbone(params, mask=jnp.asarray(mask_embedding(folder, kind, config), precision))
    return params


def whole_tables(folder: Path, kind: Kind, config: dflash.DFlashConfig, declared: Any) -> tuple[set[str], Any]:
    """Finds tables of the draft vocabulary that are stored with one row for each token of the target.

    Returns:
        The tables' names, and the declaration with their stored shapes.
    """
    stored = {kind.declared_name(tensor.name): tensor.shape for tensor in read_headers(checkpoint.weight_files(folder))}

    def is_whole(spec: ArraySpec) -> bool:
        rows = spec.kind == "embedding" and spec.shape[0] == config.num_proposable < config.vocab_size
        return rows and stored.get(spec.name) == (config.vocab_size, *spec.shape[1:])

    names = {spec.name for spec in spec_leaves(declared) if is_whole(spec)}
    whole = jax.tree.map(lambda spec: replace(spec, shape=stored[spec.name]) if spec.name in names else spec, declared)
    return names, whole


def mask_embedding(folder: Path, kind: Kind, config: dflash.DFlashConfig) -> np.ndarray:
    """Reads the embedding of the mask token from the checkpoint's tensors or the file beside them.

    Raises:
        ValueError: the file was not written by `torch.save`, is for another token, or has another size.
    """
    found = checkpoint.load_stored(folder, (MASK,), kind.declared_name).get(MASK)
    where = f"{folder}: {MASK}" if found is not None else str(folder / MASK_FILE)
    if found is None:
        content = torch_file.load_tensors(folder / MASK_FILE)
        found = content
        if isinstance(content, Mapping):
            token = content.get("mask_token_id", config.mask_token_id)
            found = content.get("embedding")
            if token != config.mask_token_id:
                raise ValueError(f"{where} is for token {token}, but mask_token_id is {config.mask_token_id}")
    size = config.hidden_size
    if not isinstance(found, np.ndarray) or found.size != size or not is_finite(found := found.astype(np.float32)):
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else repr(found)
        raise ValueError(f"{where}: expected {size} finite numbers, found {shown}")
    return found.reshape(size)
