"""A safetensors file, read tensor by tensor: the header tells what is there, and only what is asked for is read.

safetensors' own reader maps the file: one that is cut off while it is read ends the process, and one that is written
anew may give half of the old and half of the new tensors. It also takes the last of two tensors of one name.
"""

import math
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from scute.admission import strict_json

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

LONGEST_HEADER = 16 * 2**20
"""Bytes, enough for 100,000 tensors; safetensors itself reads up to 100 MB."""

SETTLED = 60.0
"""Seconds after which a write is taken to have ended: the times of a file are those at which its last one began."""


CHANGED = "it was changed while it was read; write a new version elsewhere and rename it"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. begin, end: its bytes, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """The header of a file, checked as strictly as safetensors does, and its tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for what is no safetensors file, and OSError."""
        self._path = path
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._state, size = _state_of(status), status.st_size
            header = _read_header(file, size)
            self._start = file.tell()
        self._is_settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED
        self._sums: dict[str, int] = {}
        self._entries = {entry.name: entry for entry in _checked(header, size - self._start)}

    def meta(self) -> dict[str, Tensor]:
        """Every tensor on the meta device, in the order of the file's bytes."""
        return {e.name: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta") for e in self._entries.values()}

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own. Raises ValueError if the file has changed since it was opened; OSError."""
        entry = self._entries[name]
        content = self._content(entry)
        if not self._is_settled:
            self._sums[name] = zlib.crc32(content)
        if not content:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(content, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def check(self) -> None:
        """Raises ValueError if a tensor is no longer as it was read, by a write that went on at the time; OSError.

        Reads again what was read of a file that had not settled: mostly from the page cache, about 0.3 s a gigabyte.
        """
        if self._sums and SafetensorsFile(self._path)._entries != self._entries:
            raise ValueError(CHANGED)
        for name, found in self._sums.items():
            if zlib.crc32(self._content(self._entries[name])) != found:
                raise ValueError(CHANGED)

    def _content(self, entry: Entry) -> bytearray:
        content = bytearray(entry.end - entry.begin)
        with self._path.open("rb") as file:
            file.seek(self._start + entry.begin)
            if file.readinto(content) != len(content) or _state_of(os.fstat(file.fileno())) != self._state:
                raise ValueError(CHANGED)
        return content


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    """Changes when a write to the file begins, and when another file takes its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_header(file: BinaryIO, size: int) -> Any:
    start = file.read(8)
    if len(start) < 8:
        raise ValueError(f"it has {size} bytes, and the length of its header takes 8")
    (length,) = struct.unpack("<Q", start)
    if length > min(size - 8, LONGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes; the file has {size}, and at most {LONGEST_HEADER} fit")
    try:
        return strict_json.parse(file.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not readable as JSON ({error})") from error


def _checked(header: Any, num_bytes: int) -> list[Entry]:
    """The tensors, which follow one another without gap or overlap up to the end of the file."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not texts by name")
    entries = sorted((_entry(name, value) for name, value in header.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise ValueError(f"{entry.name} begins at byte {entry.begin}, and what is before it ends at {position}")
        position = entry.end
    if position != num_bytes:
        raise ValueError(f"its tensors have {position} bytes, and {num_bytes} follow the header")
    return entries


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, which PyTorch does not have")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or the offsets of {name} are no sizes")
    bits = 4 if dtype == "F4" else 8 * DTYPES[dtype].itemsize
    if math.prod(shape) * bits != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"{name}, {dtype} {shape}, does not have the {offsets[1] - offsets[0]} bytes that it is given")
    return Entry(name, dtype, tuple(shape), *offsets)


def _are_sizes(values: Any) -> bool:
    """A shape of zero elements may have any other sizes, and PyTorch holds none beyond 2**63."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
