"""Where an adapter may come from: the folder that a path or a name stands for, or a refusal before anything is read."""

import os
import re
from pathlib import Path

from vllm import envs
from vllm.lora.utils import get_adapter_absolute_path

from scute.admission.compiled.manifest import MANIFEST_FILE
from scute.admission.tensors import CONFIG_FILE
from scute.engine import hub
from scute.engine.adapter_files import FILES, check_sizes, sizes_of
from scute.engine.options import Options
from scute.errors import Code, Refusal

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
LONGEST_NAME = 200

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""What no path may hold, and no message to the engine; JSON may."""


def check_text(field: str, text: str) -> None:
    """Raises Refusal for a `lora_name` or `lora_path` that cannot leave for the engine."""
    if _NO_TEXT.search(text) is not None:
        raise Refusal(
            Code.SOURCE_NAME,
            f"{field} {text[:LONGEST_NAME]!r} cannot be looked up: it holds a zero byte, or half of a surrogate pair. "
            "Send it as UTF-8.",
        )


def check_name(name: str, options: Options) -> None:
    """Raises Refusal for a name that no folder or repository is looked up for. Looks at its characters alone."""
    if len(name) > LONGEST_NAME or NAME.fullmatch(name) is None:
        raise Refusal(
            Code.SOURCE_NAME,
            f"{name[:LONGEST_NAME]!r} cannot be looked up: a name has at most {LONGEST_NAME} characters, and is parts "
            "of letters, digits, '_', '-' and '.' with '/' between them, of which none starts with '.' or '-'.",
        )
    if options.allowed_names is not None and re.fullmatch(options.allowed_names, name) is None:
        raise Refusal(
            Code.SOURCE_NAME,
            f"{name!r} cannot be looked up: names of this server match {options.allowed_names!r}, its allowed_names.",
        )


def locate(path: str, options: Options, *, fresh: bool) -> Path:
    """The folder of a `lora_path`: a folder, or one of the cache that a repository of the hub is fetched to.

    fresh: ask the hub again about a repository that is not pinned to a commit. The front end does; the workers take
    what it has fetched, so that all of them read the same.

    Raises Refusal for a path outside of what the options allow, whether anything is there or not; for files beyond
    `adapter_file_gib`, before they are opened; for a repository that cannot be fetched. Whether a folder is there is
    for its reader to say.
    """
    check_text("lora_path", path)
    if not options.restricts_sources:
        folder = _anywhere(path, options, fresh)
    elif (repository := find_repository(path, options)) is not None:
        folder = hub.fetch(repository, options.adapter_file_gib, fresh=False)
    else:
        folder = Path(os.path.expanduser(path))
        check_inside(folder, options)
    check_sizes(folder.name, sizes_of(folder), options.adapter_file_gib)
    return folder


def _anywhere(path: str, options: Options, fresh: bool) -> Path:
    """As vLLM reads a path: any folder, or else the name of a repository."""
    is_local = os.path.isabs(path) or path.startswith("~") or os.path.exists(path)
    if not is_local and not envs.VLLM_USE_MODELSCOPE:
        return hub.fetch(hub.Repository(path), options.adapter_file_gib, fresh=fresh)
    try:
        return Path(get_adapter_absolute_path(path))
    except OSError as error:  # of ModelScope
        raise hub.missing(path) from error


def find_repository(name: str, options: Options) -> hub.Repository | None:
    """The allowed repository that a name is, or is a folder of. Raises Refusal for a folder that is no name."""
    for repository, commit in (options.allowed_repositories or {}).items():
        if name == repository or name.startswith(f"{repository}/"):
            folder = name.removeprefix(repository).strip("/")
            if folder:
                check_name(folder, Options())
            return hub.Repository(repository, commit, folder)
    return None


def find_folder(name: str, options: Options) -> Path | None:
    """The adapter folder of that name under an allowed root. Raises Refusal where a link leads out of the roots."""
    for root in options.allowed_roots or ():
        folder = Path(root, name)
        check_inside(folder, options)
        if any(os.path.isfile(folder / file) for file in (CONFIG_FILE, MANIFEST_FILE)):
            return folder
    return None


def check_inside(folder: Path, options: Options) -> None:
    """Raises Refusal unless the folder and each of its files really are under an allowed root. Opens nothing."""
    roots = [os.path.realpath(root) for root in options.allowed_roots or ()]
    real = [Path(os.path.realpath(path)) for path in (folder, *(folder / file for file in FILES))]
    if all(any(path.is_relative_to(root) for root in roots) for path in real):
        return
    raise Refusal(
        Code.SOURCE_NOT_ALLOWED,
        f"{folder.name!r} leads to no place that this server takes adapters from; put its files under a folder of "
        "allowed_roots, or use a repository of allowed_repositories, in additional_config['scute']."
        if folder.is_absolute()
        else f"{str(folder)!r} is neither the full path of a folder under allowed_roots nor in allowed_repositories. "
        "Give the full path; in a stack it may also be the name of an adapter that is loaded, so load that first.",
    )
