"""Adapter folders with one thing wrong, and the refusal that each of them meets."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scute.errors import Code

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_damaged(good: Path, damage: str, folder: Path) -> Path:
    """Copy the folder of a LoRA adapter and spoil the copy; returns `folder`."""
    shutil.copytree(good, folder)
    DAMAGES[damage][0](folder)
    return folder


def _with_field(name: str, value: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return damage


def _with_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(change(load_file(folder / TENSORS)), folder / TENSORS)

    return damage


def _without_last(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors.pop(sorted(tensors)[-1])
    return tensors


def _with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[sorted(tensors)[0]].view(-1)[0] = torch.nan
    return tensors


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / TENSORS), folder / "adapter_model.bin")
    (folder / TENSORS).unlink()


def _cut_off(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[: len(content) // 2])


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


DAMAGES: Mapping[str, tuple[Callable[[Path], None], Code]] = {
    "pickle": (_pickle, Code.FOLDER_PICKLE),
    "empty": (_empty, Code.FOLDER_INCOMPLETE),
    "cut-off": (_cut_off, Code.FOLDER_UNREADABLE),
    "unknown-method": (_with_field("peft_type", "LOHA"), Code.METHOD_UNSUPPORTED),
    "unknown-field": (_with_field("use_sideways_lora", True), Code.CONFIG_UNKNOWN_FIELD),
    "pissa": (_with_field("init_lora_weights", "pissa_niter_4"), Code.INIT_CHANGED_BASE),
    "prefix": (
        _with_tensors(lambda t: {f"module.{name}": tensor for name, tensor in t.items()}),
        Code.TENSOR_PREFIX,
    ),
    "missing-tensor": (_with_tensors(_without_last), Code.TENSOR_MISSING),
    "nan": (_with_tensors(_with_nan), Code.TENSOR_NOT_FINITE),
}
