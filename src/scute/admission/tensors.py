"""The tensors of a safetensors file, of which each can be taken once, and with or without their values."""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scute.admission.reasons import Reasons
from scute.errors import Code, Refusal

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls the dtypes of PyTorch; a file with any other is read as damaged, as PyTorch cannot hold it."""

DAMAGED = (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, OverflowError)
"""What safetensors and PyTorch raise for a file that is no safetensors file, or that no tensor can be made of."""


class Tensors:
    """The tensors of a file, by name, on the CPU. Each can be taken once; what nobody took is an error.

    Of a file whose header alone was read they are on the meta device: shapes and dtypes without values.
    file: its name, for sentences. reasons: where refusals go.
    """

    def __init__(self, tensors: dict[str, Tensor], reasons: Reasons | None = None, file: str = TENSOR_FILE) -> None:
        self._left = dict(tensors)
        self.reasons = Reasons() if reasons is None else reasons
        self.file = file
        self.has_values = not any(tensor.is_meta for tensor in tensors.values())

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
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            return Refusal(Code.TENSOR_NOT_FINITE, f"{name} holds NaN or infinity. The training run diverged; retrain.")
        return None

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


def _fits(found: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    return len(found) == len(shape) and all(
        size > 0 if isinstance(want, str) else size == want for size, want in zip(found, shape, strict=True)
    )


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file on the meta device. Raises the errors of DAMAGED, and OSError."""
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
            for name, part in parts.items()
        }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
