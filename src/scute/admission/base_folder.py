"""The folder of a base model: what admission knows of it, and its weights from safetensors, one at a time."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scute.admission.base import BaseModel, Projection
from scute.admission.tensors import FLOATS
from scute.errors import Code, Refusal

INDEX_FILE, WEIGHT_FILE = "model.safetensors.index.json", "model.safetensors"


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


class BaseWeights:
    """A base model's folder. No more than the weight that is asked for is ever in memory."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        self._folder, self._device = folder, torch.device(device)
        index = folder / INDEX_FILE
        self._files: dict[str, str] | None = None
        if index.exists():
            try:
                self._files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise Refusal(Code.CONVERSION_WEIGHT, f"{index} is no index of weights: {error!r}.") from error

    def read(self, module: str, projection: Projection) -> Tensor:
        """W of the projection, [in, out], float32, on the device. Refuses CONVERSION_WEIGHT if it is not there."""
        name = f"{module}.weight"
        path = self._folder / (WEIGHT_FILE if self._files is None else self._files.get(name, WEIGHT_FILE))
        if not path.exists():
            raise self._refusal(name, "is not in the folder")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if name not in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                    raise self._refusal(name, "is not in the folder")
                stored: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise self._refusal(name, f"cannot be read ({error})") from error
        if stored.dtype not in FLOATS:
            raise self._refusal(name, f"is {stored.dtype}, so it is quantised")
        shape = (projection.in_features, projection.out_features)
        weight = stored if projection.transposed else stored.T
        if tuple(weight.shape) != shape:
            raise self._refusal(name, f"has shape {list(stored.shape)}, so it is packed or of another model")
        return weight.to(self._device, torch.float32)

    def _refusal(self, name: str, what: str) -> Refusal:
        return Refusal(
            Code.CONVERSION_WEIGHT,
            f"the base model's {name} {what}: {self._folder}. A conversion reads plain safetensors weights.",
        )
