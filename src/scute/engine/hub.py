"""One adapter of a repository on the Hugging Face hub: how large its files are, and the folder they are fetched to.

The base model's folder is looked up here too, in a cache that vLLM has filled.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scute.admission.tensors import PICKLE_FILE
from scute.engine.adapter_files import FILES, check_sizes, is_complete
from scute.errors import Code, Refusal

SECONDS = 30
"""How long the hub may take to answer."""


@dataclass(frozen=True, slots=True)
class Repository:
    """commit: what it is pinned to, or None for its main branch; folder: the adapter's, or "" for the top."""

    name: str
    commit: str | None = None
    folder: str = ""

    def path_of(self, file: str) -> str:
        return f"{self.folder}/{file}" if self.folder else file

    def __str__(self) -> str:
        return f"{self.name}/{self.folder}" if self.folder else self.name


def api() -> Any:
    """The hub's client, which reads HF_HUB_OFFLINE, HF_TOKEN, HF_HOME and HF_ENDPOINT."""
    from huggingface_hub import HfApi

    return HfApi(library_name="scute")


def fetch(repository: Repository, limit_gib: float | None, *, fresh: bool) -> Path:
    """The adapter's folder in the hub's cache, with what the repository has of FILES and nothing else.

    fresh: ask the hub first, and take what is cached where it cannot be reached; else the cache comes first. Raises
    Refusal if there is no adapter, or if its files are beyond the limit by what the hub says of them.
    """
    if not fresh and (cached := _cached(repository)) is not None:
        return cached
    try:
        sizes = _list_once(repository.name, repository.commit) if repository.commit else _list(repository.name, None)
    except Exception as error:  # of three libraries: the hub's client, its HTTP client and its validators
        if (cached := _cached(repository)) is not None:
            return cached
        raise missing(str(repository)) from error
    wanted = {path: sizes[path] for path in map(repository.path_of, FILES) if path in sizes}
    _check(repository, wanted, limit_gib, has_pickle=repository.path_of(PICKLE_FILE) in sizes)
    try:
        snapshot = api().snapshot_download(repository.name, revision=repository.commit, allow_patterns=list(wanted))
    except Exception as error:
        raise Refusal(
            Code.FOLDER_UNREADABLE, f"{str(repository)!r} could not be downloaded ({type(error).__name__}); try again."
        ) from error
    return Path(snapshot, repository.folder)


def missing(name: str) -> Refusal:
    return Refusal(
        Code.FOLDER_MISSING,
        f"{name!r} is no folder under {Path.cwd().name!r}, where the engine runs, and no repository that it can "
        "fetch. Give the full path of the folder that holds adapter_config.json; in a stack it may also be the name of "
        "an adapter that is loaded, so load that first.",
    )


def _check(repository: Repository, sizes: dict[str, int | None], limit_gib: float | None, *, has_pickle: bool) -> None:
    """sizes: bytes by path of the files to be fetched, None where the hub does not say."""
    if len(sizes) < 2 and has_pickle:
        raise Refusal(
            Code.FOLDER_PICKLE,
            f"{str(repository)!r} has its tensors in {PICKLE_FILE}. A pickle can run code, so it is not fetched. Load "
            "the adapter in PEFT and call save_pretrained again.",
        )
    if not sizes:
        raise Refusal(Code.FOLDER_INCOMPLETE, f"{str(repository)!r} holds no adapter: it has no adapter_config.json.")
    known = [size for size in sizes.values() if size is not None]
    if limit_gib is not None and len(known) < len(sizes):
        raise Refusal(Code.SOURCE_TOO_LARGE, f"the hub does not say how large the files of {str(repository)!r} are.")
    check_sizes(str(repository), known, limit_gib)


def _list(name: str, commit: str | None) -> dict[str, int | None]:
    """Bytes of every file of a repository, by its path."""
    info = api().model_info(name, revision=commit, files_metadata=True, timeout=SECONDS)
    return {file.rfilename: file.size for file in info.siblings}


_list_once = functools.lru_cache(maxsize=256)(_list)
"""A commit does not change: requests for folders that it does not have ask the hub once."""


def _cached(repository: Repository) -> Path | None:
    snapshot = cached(repository.name, repository.commit, files=[repository.path_of(file) for file in FILES])
    folder = None if snapshot is None else snapshot / repository.folder
    return folder if folder is not None and is_complete(folder) else None


def cached(name: str, revision: str | None, *, files: list[str] | None = None, cache: str | None = None) -> Path | None:
    """The folder of a repository in a cache, by default the hub's own, or None. files: those that are asked for."""
    try:
        snapshot = api().snapshot_download(
            name, revision=revision, allow_patterns=files, cache_dir=cache, local_files_only=True
        )
    except Exception:  # it is not there, or the name is none
        return None
    return Path(snapshot)
