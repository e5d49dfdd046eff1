"""From what a user names to a drafter and its parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jax.numpy as jnp
from rich.console import Console

from tilewright.models import checkpoint, dflash, dflash2, draft_vocab, dspark, eagle3, hub, lilicorr
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime.interfaces import Drafter
from tilewright.speculation.drafters.blockwise import Blockwise
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.dflash2 import DFlash2
from tilewright.speculation.drafters.dspark import DSpark
from tilewright.speculation.drafters.eagle3 import Eagle3
from tilewright.speculation.drafters.lilicorr import LiLiCorr
from tilewright.speculation.drafters.ngram import NGram
from tilewright.speculation.drafters.walking import Walk

NGRAM = "ngram"
AUTO = ("auto", "auto-inexact")
"""Block sizes that are chosen round by round; see `language_model.load`."""
WALKERS = "a DFlash 2, DSpark or LiLiCorr drafter"


@dataclass(frozen=True)
class DrafterOptions:
    """Options of a drafter; None leaves one to the drafter. Named as in `language_model.load`."""

    block_size: int | str | None = None
    draft_window: int | None = None
    drafter_dtype: str | None = None
    refine: int = 0
    walk: str | None = None
    revision: str | None = None

    def check(self, drafter: str | None) -> None:
        """Raises a `ValueError` that names an option which does not go with the drafter."""
        if isinstance(self.block_size, str) and self.block_size not in AUTO:
            raise ValueError(f"expected a block size, {' or '.join(AUTO)}, found {self.block_size!r}")
        if isinstance(self.block_size, str) and drafter is None:
            raise ValueError(f"a block size of {self.block_size} needs a drafter; no drafter was named")
        if self.drafter_dtype is not None and self.drafter_dtype not in DTYPES:
            raise ValueError(f"expected a drafter dtype among {', '.join(DTYPES)}, found {self.drafter_dtype!r}")
        if self.walk is not None and self.walk not in get_args(Walk):
            raise ValueError(f"expected the walk to be {' or '.join(get_args(Walk))}, found {self.walk!r}")
        if drafter not in (None, NGRAM):
            return
        kind = "no drafter was named" if drafter is None else "n-gram drafting has no weights"
        for name, value in (("draft window", self.draft_window), ("drafter dtype", self.drafter_dtype)):
            if value is not None:
                raise ValueError(f"a {name} needs a drafter with weights; {kind}")
        if self.refine:
            raise ValueError(f"refining needs a DFlash drafter; {kind}")
        if self.walk is not None:
            raise ValueError(f"a walk needs {WALKERS}; {kind}")

    def fitting(self, drafter: str | None) -> "DrafterOptions":
        """Those of the options that a drafter takes, for callers that give several drafters the same options."""
        if drafter not in (None, "none", NGRAM):
            return self
        return DrafterOptions(block_size=self.block_size)


def load_drafter(
    source: str | None, target: DecoderConfig, dtype: str, options: DrafterOptions, console: Console | None
) -> tuple[Drafter | None, Any]:
    """Reads a drafter and checks that it fits the target. Returns it with its parameters.

    Args:
        source: a folder, a Hugging Face id or "ngram"; None for no drafter, which with a block size is block-wide decoding.
        dtype: of the drafter, unless the options name another.
    """
    size = options.block_size
    assert not isinstance(size, str), "whoever chooses round by round loads drafters as wide as they are"
    if source is None:
        return (None if size is None else Blockwise(size)), None
    if source == NGRAM:
        return (NGram() if size is None else NGram(size)), None
    precision = cast(Dtype, options.drafter_dtype or dtype)
    folder = hub.resolve(source, options.revision, console)
    fields = checkpoint.read_config(folder)
    kind = block_kind(fields)
    chain = kind is DFLASH and eagle3.is_eagle3(fields)  # by its draft vocabulary, perhaps, which others have too
    if options.walk is not None and kind is DFLASH:
        raise ValueError(f"a walk needs {WALKERS}; this is {'an EAGLE-3' if chain else 'a DFlash'} one")
    if chain:
        if options.refine:
            raise ValueError("refining needs a DFlash drafter; this is an EAGLE-3 one")
        config, params = eagle3.load(folder, target, DTYPES[precision], console)
        return Eagle3(config, config.block_size if size is None else size, options.draft_window, precision), params
    config, params = load_dflash(folder, fields, target, precision, console)
    how = (config.block_size if size is None else size, options.draft_window, precision, options.refine)
    walk: dict[str, Any] = {} if kind is DFLASH else {"walk": options.walk or "sampled"}
    return kind.drafter(config, *how, **walk), params


class Kind(NamedTuple):
    """Kind of drafter around DFlash's backbone, which drafts a block in one pass.

    Attributes:
        declares: whether a `config.json` declares it.
        model: the module that reads its configuration and declares its arrays.
        drafter: the class that drafts with them.
        rename: from a stored tensor's name to the declared one.
        ignore: whether a stored tensor is passed over.
    """

    declares: Callable[[Mapping[str, Any]], bool]
    model: Any
    drafter: type[DFlash]
    rename: Callable[[str], str] = lambda name: name.removeprefix("model.")
    ignore: Callable[[str], bool] = lambda name: False


DFLASH = Kind(lambda fields: True, dflash, DFlash)
KINDS = (
    Kind(dflash2.is_dflash2, dflash2, DFlash2),
    Kind(dspark.is_dspark, dspark, DSpark, dspark.stored_name, dspark.is_passed_over),
    Kind(lilicorr.is_lilicorr, lilicorr, LiLiCorr),
    DFLASH,
)
"""The first that a configuration declares; DFlash's own reader says what is wrong with one that declares none."""


def block_kind(fields: Mapping[str, Any]) -> Kind:
    """The kind that a `config.json` declares, of DFlash's."""
    return next(kind for kind in KINDS if kind.declares(fields))


def load_dflash(
    folder: Path, fields: Mapping[str, Any], target: DecoderConfig, dtype: Dtype, console: Console | None
) -> tuple[Any, Any]:
    """Reads a drafter of one of DFlash's kinds: its configuration, and its parameters.

    Raises:
        ValueError: all that is wrong with its fields; or, where they can be read, all that keeps it from fitting the target,
            and all tensors that do not fit.
    """
    kind = block_kind(fields)
    config = kind.model.config_from_hf(fields, str(folder / checkpoint.CONFIG), target.num_layers)
    problems, params = [], None
    try:
        dflash.check_fits(config, target)
    except ValueError as error:
        problems.append(str(error))
    try:
        params = load_tensors(folder, kind, config, dtype, console)
    except ValueError as error:
        problems.append(str(error))
    if params is None or problems:
        raise ValueError("; ".join(problems))
    return config, params


def load_tensors(folder: Path, kind: Kind, config: dflash.DFlashConfig, dtype: Dtype, console: Console | None) -> Any:
    """The arrays of a drafter, and its draft vocabulary; the checkpoint may name them with a leading `model.`."""
    size = config.draft_vocab_size

    def ignore(name: str) -> bool:
        return kind.ignore(name) or (size is not None and kind.rename(name) in draft_vocab.MAPS)

    declared = kind.model.declare(config)
    params = checkpoint.load_params(folder, declared, DTYPES[dtype], rename=kind.rename, ignore=ignore, console=console)
    if size is None:
        return params
    maps = checkpoint.load_stored(folder, draft_vocab.MAPS, kind.rename)
    ids = draft_vocab.target_ids_from_maps(size, config.vocab_size, maps, str(folder))
    return dflash.with_vocab(params, draft_vocab.DraftVocab(jnp.asarray(ids)))
