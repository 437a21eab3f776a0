"""The folder of a base model: what admission knows of it, and its weights by name, one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scute.admission.base import BaseModel


def read_base(folder: Path) -> BaseModel:
    """The base model of a Hugging Face folder, from its config.json, in the dtype that it names or float32.

    Raises ValueError where transformers cannot make the folder's model.
    """
    from transformers import AutoConfig  # slow to import

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return BaseModel.from_config(config, getattr(config, "dtype", None) or torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"transformers cannot build the model of {folder}: {error}") from error


class BaseWeights(Mapping[str, Tensor]):
    """The weights [in, out] of the projections of a base model by name, read when they are asked for.

    Has none where the folder has no safetensors, or where these have other names than the modules.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files |= {n.removesuffix(".weight"): path for n in list(file.keys()) if n.endswith(".weight")}
            except (SafetensorError, OSError):
                continue

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(f"{name}.weight")
        return tensor.T

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
