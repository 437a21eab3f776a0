"""An adapter folder as `save_pretrained` of the PEFT library writes it: a JSON config and a safetensors file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scute.errors import Code, Refusal

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Tensors:
    """The tensors of a file, by name, on the CPU. Each can be taken once; what nobody took is an error."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._left = dict(tensors)

    @property
    def names(self) -> list[str]:
        """The names not taken yet, in the order of the file."""
        return list(self._left)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._left[name].shape)

    def take(self, name: str, reason: str = "") -> Tensor:
        """Remove and return a tensor. Refuses TENSOR_MISSING (with the reason), TENSOR_DTYPE, TENSOR_NOT_FINITE."""
        if name not in self._left:
            because = f" {reason}" if reason else ""
            raise Refusal(Code.TENSOR_MISSING, f"{TENSOR_FILE} has no tensor {name}.{because}")
        tensor = self._left.pop(name)
        if tensor.dtype not in FLOATS:
            raise Refusal(
                Code.TENSOR_DTYPE,
                f"{name} is {_short(tensor.dtype)}; expected one of {', '.join(map(_short, FLOATS))}. "
                "Save the adapter unquantised.",
            )
        if not torch.isfinite(tensor).all():
            raise Refusal(Code.TENSOR_NOT_FINITE, f"{name} holds NaN or infinity. The training run diverged; retrain.")
        return tensor

    def refuse_left_overs(self) -> None:
        """Refuse TENSOR_LEFT_OVER if any tensor was not taken: it would have changed the maths."""
        if self._left:
            shown = ", ".join(self.names[:3])
            more = f" and {len(self._left) - 3} more" if len(self._left) > 3 else ""
            raise Refusal(
                Code.TENSOR_LEFT_OVER,
                f"{TENSOR_FILE} holds tensors that {CONFIG_FILE} gives no meaning to: {shown}{more}. "
                "Serve the folder as PEFT's save_pretrained wrote it.",
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """config: the JSON as it stands; tensors: the file's tensors."""

    config: dict[str, Any]
    tensors: Tensors


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the folder; never unpickles. Refuses with the codes of `folder.`."""
    try:
        if not folder.is_dir():
            raise Refusal(
                Code.FOLDER_MISSING,
                f"the folder {folder.name!r} is not there: {folder}. Give the folder that holds {CONFIG_FILE}.",
            )
        return Checkpoint(_read_config(folder / CONFIG_FILE), Tensors(_read_tensors(folder)))
    except OSError as error:
        raise Refusal(
            Code.FOLDER_UNREADABLE, f"the folder {folder.name!r} cannot be read: {error.strerror or error}."
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    _require_file(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} is not readable as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} holds a {type(config).__name__}; expected a JSON object.")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise Refusal(
            Code.FOLDER_PICKLE,
            f"the folder {folder.name!r} has {PICKLE_FILE} and no {TENSOR_FILE}. A pickle can run code, so it is not "
            "read. Load the adapter in PEFT and call save_pretrained again.",
        )
    _require_file(path)
    try:
        tensors: dict[str, Tensor] = load_file(path, device="cpu")
    except (SafetensorError, ValueError, AttributeError, KeyError) as error:
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} is cut off or damaged: {error}. Copy it again.") from error
    return tensors


def _require_file(path: Path) -> None:
    if not path.exists():
        raise Refusal(
            Code.FOLDER_INCOMPLETE,
            f"the folder {path.parent.name!r} has no {path.name}. Is it the folder of a PEFT adapter?",
        )
    if not path.is_file():
        raise Refusal(Code.FOLDER_UNREADABLE, f"{path.name} is not a file.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
