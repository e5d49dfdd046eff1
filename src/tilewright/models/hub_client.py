"""Fetches models from the Hugging Face hub with the hub's own client.

The client keeps the standard cache (`HF_HOME`, `HF_HUB_CACHE`), resumes interrupted transfers, and fetches only files that the
cache lacks.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (it comes from httpx or httpx2, by the client's version)
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id
from rich.console import Console
from rich.progress import Progress

from tilewright.models.checkpoint import CONFIG, GENERATION_CONFIG, GPTQ_CONFIG, byte_progress
from tilewright.models.hub import DRAFT_ADAPTER, TOKENIZER, TOKENIZER_PARTS

SMALL = [CONFIG, GENERATION_CONFIG, GPTQ_CONFIG, *TOKENIZER, *TOKENIZER_PARTS]
WANTED = [*SMALL, "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]
"""Files to fetch. The last belongs to some drafters; see `torch_file.py`."""
UNWANTED = ["*/*", "consolidated*.safetensors"]
"""Other exports of the same weights: files in subfolders, and Mistral's own format."""
ADAPTER = [f"{DRAFT_ADAPTER}/*.json", f"{DRAFT_ADAPTER}/*.safetensors"]
"""Files of the adapter for drafting, the only subfolder to fetch."""
COMMIT = re.compile("[0-9a-f]{40}")

NETWORK_ERRORS = (HTTPError, ConnectionError, TimeoutError)
"""Errors of a hub that did not answer, or broke off. `HTTPError` is that of the client's HTTP library."""


def fetch(source: str, revision: str | None, console: Console | None, check: Callable[[Path], object] | None = None) -> Path:
    """Returns the snapshot of a hub id in the client's cache. Arguments and errors as for `hub.resolve`."""
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise ValueError(f"expected a folder or a hub id (name or org/name), found {source!r}") from error
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    with _one_line_errors(source, revision, endpoint):
        return _fetch(source, revision, endpoint, console, check)


def _fetch(
    source: str, revision: str | None, endpoint: str, console: Console | None, check: Callable[[Path], object] | None
) -> Path:
    if revision is not None and COMMIT.fullmatch(revision):
        # A commit never changes, so a cached one needs no request.
        cached = _from_cache(source, revision)
        if cached is not None:
            return cached
    try:
        info = HfApi(endpoint=endpoint).model_info(source, revision=revision, files_metadata=True)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except NETWORK_ERRORS:
        cached = _from_cache(source, revision)
        if cached is None:
            raise
        if console is not None:
            console.print(f"{endpoint} cannot be reached: using {source} from the cache", markup=False)
        return cached
    with byte_progress(console) as progress:
        bar = _bar_class(progress, source, _missing_bytes(source, info))

        def download(patterns: list[str], unwanted: Sequence[str] = UNWANTED) -> Path:
            return Path(
                snapshot_download(
                    source,
                    revision=revision,
                    endpoint=endpoint,
                    allow_patterns=patterns,
                    ignore_patterns=list(unwanted),
                    tqdm_class=bar,
                )
            )

        if check is not None:
            check(download(SMALL))
        if any(matches(file.rfilename, ADAPTER) for file in info.siblings or []):
            download(ADAPTER, ())
        return download(WANTED)


def _from_cache(source: str, revision: str | None) -> Path | None:
    """Returns the cached snapshot if it is complete, as far as the cache can tell; else None."""
    try:
        found = snapshot_download(
            source, revision=revision, local_files_only=True, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except LocalEntryNotFoundError:
        return None
    # Other programs may have fetched single files of a repository, such as its tokenizer.
    folder = Path(found)
    return folder if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")) else None


def _missing_bytes(source: str, info: ModelInfo) -> int:
    """Returns the size of the wanted files that the cache lacks."""
    return sum(
        file.size or 0
        for file in info.siblings or []
        if is_wanted(file.rfilename) and not isinstance(try_to_load_from_cache(source, file.rfilename, revision=info.sha), str)
    )


def is_wanted(name: str) -> bool:
    """Returns True for a file of a repository that is fetched."""
    return matches(name, ADAPTER) or (matches(name, WANTED) and not matches(name, UNWANTED))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns True for a name that matches some pattern."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def _bar_class(progress: Progress, source: str, total: int) -> type[tqdm]:
    """Returns a class for the client's progress bars. Bytes written to disk advance `progress`; nothing else is shown.

    The client makes up to three bars: transferred bytes (described as "Downloading bytes"; fewer with compression), bytes
    written, and files.
    """
    task = progress.add_task(f"fetching {source}", total=total, visible=total > 0)

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            self.counts = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: int | float | None = 1) -> bool | None:
            if self.counts:
                progress.advance(task, n or 0)
            return None

    return Bar


@contextmanager
def _one_line_errors(source: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """Converts errors of the hub's client to a `ValueError` of one line."""
    try:
        yield
    except GatedRepoError as error:
        problem = f"{source!r} is gated: ask for access at {endpoint}/{source}, then log in or set HF_TOKEN"
        raise ValueError(problem) from error
    except RepositoryNotFoundError as error:
        problem = f"{endpoint} has no model {source!r} (or it is private: log in or set HF_TOKEN), and there is no such folder"
        raise ValueError(problem) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{source!r} at {endpoint} has no revision {revision!r}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; check HF_TOKEN" if status in (401, 403) else ""
        raise ValueError(f"{endpoint} answered HTTP {status} when asked for {source!r}{hint}") from error
    except (LocalEntryNotFoundError, *NETWORK_ERRORS) as error:
        model = f"{source!r}" if revision is None else f"{source!r} at revision {revision!r}"
        where = f"neither a local folder nor complete in the cache {constants.HF_HUB_CACHE}"
        problem = f"{endpoint} cannot be reached, and {model} is {where}"
        raise ValueError(problem) from error
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{source!r} could not be fetched from {endpoint}: {reason}") from error
