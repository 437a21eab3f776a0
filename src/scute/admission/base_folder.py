"""The folder of a base model: what admission knows of it, and its weights from safetensors, one at a time."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scute.admission.base import BaseModel, Projection
from scute.admission.tensors import FLOATS
from scute.errors import Code, Refusal

INDEX_FILE, WEIGHT_FILE = "model.safetensors.index.json", "model.safetensors"


def read_base(folder: Path) -> BaseModel:
    """The base model of a Hugging Face folder, from its config.json, in the dtype that it names or float32.

    Raises ValueError, which names the file, where transformers cannot make the folder's model.
    """
    return base_of(folder, read_hf_config(folder))


def base_of(folder: Path, config: Any) -> BaseModel:
    """The base model of a config that `read_hf_config` has read. Raises ValueError as `read_base` does."""
    try:
        base = BaseModel.from_config(config, getattr(config, "dtype", None) or torch.float32)
    except ValueError as error:
        raise _bad_config(folder, error) from error
    if not base.projections.keys() - {base.output_head}:
        raise _bad_config(folder, "it has no layers with linear projections")
    return base.with_weights(weight_reader(folder))


def read_hf_config(folder: Path) -> Any:
    """The config of a Hugging Face folder, as transformers reads it. Raises ValueError as `read_base` does."""
    from transformers import AutoConfig  # slow to import

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers looks at every field, and raises whatever comes of it
        named = isinstance(error, OSError | ValueError)
        raise _bad_config(folder, error if named else f"{type(error).__name__}: {error}") from error


def _bad_config(folder: Path, reason: object) -> ValueError:
    return ValueError(
        f"transformers cannot make the model of {folder / 'config.json'}: {' '.join(str(reason).split())}"
    )


def weight_reader(folder: Path) -> Callable[[str], Tensor | None]:
    """A function from the name of a parameter to what the folder stores of it, None where that cannot be read."""

    @functools.cache
    def weights() -> BaseWeights:
        return BaseWeights(folder)

    def read(name: str) -> Tensor | None:
        try:
            return weights().stored(name)
        except (Refusal, OSError):  # why does not matter: what should be compared with it is refused
            return None

    return read


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
        stored = self.stored(name)
        shape = (projection.in_features, projection.out_features)
        weight = stored if projection.transposed else stored.T
        if tuple(weight.shape) != shape:
            raise self._refusal(name, f"has shape {list(stored.shape)}, so it is packed or of another model")
        if not weight.isfinite().all():
            raise self._refusal(name, "holds NaN or infinity")
        return weight.to(self._device, torch.float32)

    def stored(self, name: str) -> Tensor:
        """The parameter of that name as it is stored, on the CPU. Refuses CONVERSION_WEIGHT if it is not there."""
        path = self._folder / (WEIGHT_FILE if self._files is None else self._files.get(name, WEIGHT_FILE))
        if not path.exists():
            raise self._refusal(name, "is not in the folder")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if name not in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                    raise self._refusal(name, "is not in the folder")
                stored: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._refusal(name, f"cannot be read ({error})") from error
        if stored.dtype not in FLOATS:
            raise self._refusal(name, f"is {stored.dtype}, so it is quantised")
        return stored

    def _refusal(self, name: str, what: str) -> Refusal:
        return Refusal(
            Code.CONVERSION_WEIGHT,
            f"the base model's {name} {what}: {self._folder}. A conversion reads plain safetensors weights.",
        )
