"""An adapter folder as `save_pretrained` of the PEFT library writes it: a JSON config and a safetensors file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scute.admission import strict_json
from scute.admission.reasons import Reasons
from scute.admission.tensors import CONFIG_FILE, PICKLE_FILE, TENSOR_FILE, Tensors
from scute.errors import Code, Refusal


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """config: the JSON as it stands; tensors: the file's tensors, which are read when they are taken."""

    config: dict[str, Any]
    tensors: Tensors


def open_checkpoint(folder: Path, reasons: Reasons | None = None, *, values: bool = True) -> Checkpoint | None:
    """Open the folder; never unpickles. Refuses with the codes of `folder.`; None if that was collected.

    values: whether a tensor that is taken is read, beyond its name, shape and dtype.
    """
    reasons = Reasons() if reasons is None else reasons
    try:
        if not folder.is_dir():
            what = f"{named(folder)} is a file" if folder.exists() else f"the folder {named(folder)} is not there"
            raise Refusal(Code.FOLDER_MISSING, f"{what}: {folder}. Give the folder that holds {CONFIG_FILE}.")
        config = reasons.attempt(read_config_file, folder / CONFIG_FILE)
        tensors = reasons.attempt(_open_tensors, folder, reasons, values)
    except OSError as error:
        reason = f"the folder {named(folder)} cannot be read: {error.strerror or error}."
        reasons.add(Refusal(Code.FOLDER_UNREADABLE, reason))
        return None
    except Refusal as refusal:
        reasons.add(refusal)
        return None
    if config is None or tensors is None:
        return None
    return Checkpoint(config, tensors)


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object of a config. Refuses FOLDER_INCOMPLETE and FOLDER_UNREADABLE; raises OSError."""
    _require_file(path)
    try:
        config = strict_json.read(path)
    except (ValueError, RecursionError) as error:
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} is not readable as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} holds a {type(config).__name__}; expected a JSON object.")
    return config


def _open_tensors(folder: Path, reasons: Reasons, values: bool) -> Tensors:
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise Refusal(
            Code.FOLDER_PICKLE,
            f"the folder {named(folder)} has {PICKLE_FILE} and no {TENSOR_FILE}. A pickle can run code, so it is not "
            "read. Load the adapter in PEFT and call save_pretrained again.",
        )
    _require_file(path)
    return Tensors.of_file(path, reasons, values=values)


def named(folder: Path) -> str:
    """The last part of a path, for a sentence; the whole path where it has none."""
    return repr(folder.name or str(folder))


def _require_file(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise Refusal(
            Code.FOLDER_INCOMPLETE,
            f"{path.name} in the folder {named(path.parent)} is a link to a file that is not there. Copy the file.",
        )
    if not path.exists():
        raise Refusal(
            Code.FOLDER_INCOMPLETE,
            f"the folder {named(path.parent)} has no {path.name}. Is it the folder of a PEFT adapter?",
        )
    if not path.is_file():
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} is not a file. Save the adapter again.")
