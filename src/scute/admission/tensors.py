"""The tensors of a safetensors file, of which each can be taken once, and with or without their values."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from scute.admission.memory import check_size
from scute.admission.reasons import Reasons
from scute.admission.safetensors_file import SafetensorsFile
from scute.errors import Code, Refusal

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DAMAGED = (ValueError, TypeError, RuntimeError, OverflowError)
"""What is raised for a file that is no safetensors file, or that no tensor can be made of."""


class Tensors:
    """The tensors of a file, by name, on the CPU. Each can be taken once; what nobody took is an error.

    Of a file whose header alone was read they are on the meta device: shapes and dtypes without values.
    file: its name, for sentences. reasons: where refusals go. source: has the values of tensors on the meta device.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        reasons: Reasons | None = None,
        file: str = TENSOR_FILE,
        source: SafetensorsFile | None = None,
    ) -> None:
        self._left = dict(tensors)
        self.reasons = Reasons() if reasons is None else reasons
        self.file = file
        self._source = source
        self.has_values = source is not None or not any(tensor.is_meta for tensor in tensors.values())

    @classmethod
    def of_file(cls, path: Path, reasons: Reasons | None = None, *, values: bool = True) -> Self:
        """The tensors of a file, each of which is read when it is taken, or never.

        Refuses FOLDER_UNREADABLE and CAPACITY_HOST; raises OSError.
        """
        check_size(path.name, path.stat().st_size)
        try:
            file = SafetensorsFile(path)
            return cls(file.meta(), reasons, path.name, file if values else None)
        except DAMAGED as error:
            raise _damaged(path.name, error) from error

    def without_values(self) -> Self:
        """All that is not taken yet once more, as the header has it."""
        return type(self)(
            {n: torch.empty_like(t, device="meta") for n, t in self._left.items()}, self.reasons, self.file
        )

    @property
    def names(self) -> list[str]:
        """The names not taken yet, in the order of the file."""
        return list(self._left)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._left[name].shape)

    def num_bytes(self, name: str) -> int:
        return self._left[name].nbytes

    def discard(self, name: str) -> None:
        """Count a tensor as taken whose name was refused."""
        del self._left[name]

    def take(self, name: str, *shape: int | str, reason: str = "") -> Tensor:
        """Remove and return a tensor of that shape; a string in the shape is any size of at least 1.

        The shape is checked before any value is read. Refuses TENSOR_MISSING (with the reason), TENSOR_SHAPE,
        TENSOR_DTYPE and TENSOR_NOT_FINITE; where refusals are collected, the result then has the shape alone.
        """
        tensor = self._left.pop(name, None)
        refusal = self._refusal_of(name, tensor, shape, reason)
        if refusal is None and tensor is not None and self._source is not None:
            with self._reading():
                tensor = self._source.read(name)
            refusal = self._refusal_of_values(name, tensor)
        if refusal is None:
            assert tensor is not None
            return tensor
        size = [1 if isinstance(want, str) else want for want in shape]
        if math.prod(size) >= 2**48:
            raise refusal  # no tensor can stand in for it
        self.reasons.add(refusal)
        return torch.empty(size, device="meta")

    def _refusal_of(
        self, name: str, tensor: Tensor | None, shape: tuple[int | str, ...], reason: str
    ) -> Refusal | None:
        if tensor is None:
            because = f" {reason}" if reason else ""
            return Refusal(Code.TENSOR_MISSING, f"{self.file} has no tensor {name}.{because}")
        if not _fits(tuple(tensor.shape), shape):
            expected = ", ".join(str(want) for want in shape)
            return Refusal(
                Code.TENSOR_SHAPE,
                f"{name} has shape {list(tensor.shape)}; expected [{expected}]. "
                "Was the adapter trained on this base model, and were sharded weights gathered before saving?",
            )
        if tensor.dtype not in FLOATS:
            return Refusal(
                Code.TENSOR_DTYPE,
                f"{name} is {_short(tensor.dtype)}; expected one of {', '.join(map(_short, FLOATS))}. "
                "Save the adapter unquantised.",
            )
        return self._refusal_of_values(name, tensor)

    def _refusal_of_values(self, name: str, tensor: Tensor) -> Refusal | None:
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            return Refusal(Code.TENSOR_NOT_FINITE, f"{name} holds NaN or infinity. The training run diverged; retrain.")
        return None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Refusal(Code.FOLDER_UNREADABLE, f"{self.file} cannot be read: {error.strerror or error}.") from error
        except DAMAGED as error:
            raise _damaged(self.file, error) from error

    def refuse_changes(self) -> None:
        """Refuse FOLDER_UNREADABLE if the file was being written while tensors were taken."""
        if self._source is not None:
            with self._reading():
                self._source.check()

    def refuse_left_overs(self, meaning: str = CONFIG_FILE) -> None:
        """Refuse TENSOR_LEFT_OVER if any tensor was not taken: it would have changed the maths.

        meaning: the file that says what tensors mean. Where refusals are collected, every tensor is one.
        """
        groups = [[name] for name in self.names] if self.reasons.collects else [self.names] * bool(self._left)
        for names in groups:
            shown = ", ".join(names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.reasons.add(
                Refusal(
                    Code.TENSOR_LEFT_OVER,
                    f"{self.file} holds tensors that {meaning} gives no meaning to: {shown}{more}. "
                    "Serve the folder as it was saved.",
                )
            )


def _damaged(file: str, error: Exception) -> Refusal:
    return Refusal(Code.FOLDER_UNREADABLE, f"{file} is cut off or damaged: {error}. Copy it again.")


def _fits(found: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    return len(found) == len(shape) and all(
        size > 0 if isinstance(want, str) else size == want for size, want in zip(found, shape, strict=True)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
