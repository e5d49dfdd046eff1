"""Finds a model's folder: a local one as it is, or a repository of the Hugging Face hub (`hub_client.py`)."""

from pathlib import Path

from rich.console import Console

TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
"""A model's tokenizer and what belongs to it."""
DEMO = Path(__file__).parents[1] / "assets" / "demo"
PACKAGED = {
    "demo": DEMO / "target",
    "demo-drafter": DEMO / "drafter",
    "demo-dflash2": DEMO / "dflash2",
    "demo-eagle3": DEMO / "eagle3",
    "demo-diffusion": DEMO / "diffusion",
}
"""Models that come with the package, by the names that stand for their folders."""


def resolve(source: str, revision: str | None = None, console: Console | None = None) -> Path:
    """The folder of a model, fetched from the hub first if need be.

    Args:
        source: an existing folder, a name among `PACKAGED`, or a hub id (`name` or `org/name`).
        revision: a branch, tag or commit of the hub repository; its main branch by default.
        console: where to show a progress bar while files come in; None for no bar.

    Returns:
        `source` itself where it is a folder, otherwise the snapshot in the hub client's cache.

    Raises:
        ValueError: `source` is neither; or the hub has no such repository or revision, or refuses access; or it cannot be
            reached and the cache lacks the model. `HF_ENDPOINT` names another hub.
    """
    folder = Path(source)
    if source and folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} was given, but {source!r} is a local folder, which has none")
        return folder
    if source in PACKAGED:
        if revision is not None:
            raise ValueError(f"revision {revision!r} was given, but {source!r} comes with the package, which has none")
        return PACKAGED[source]
    from tilewright.models.hub_client import fetch  # the client takes a quarter of a second to import

    return fetch(source, revision, console)
