"""A good adapter folder in memory, in parts that mutations change, and as files."""

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scute.admission.compiled.manifest import DIGEST, content_digest

NOTHING_TO_CHANGE = (AttributeError, TypeError, KeyError, ValueError, IndexError, RuntimeError, OSError)
"""What a second mutation meets where the first has been; the folder is then as it left it."""
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I32": 32, "U8": 8}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class Tensor:
    """One entry of the header, and its bytes."""

    dtype: str
    shape: list[Any]
    data: bytes

    def values(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.data), dtype=TORCH[self.dtype]).reshape(self.shape)

    @classmethod
    def of(cls, values: torch.Tensor, dtype: str = "F32") -> "Tensor":
        data = values.to(TORCH[dtype]).contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
        return cls(dtype, list(values.shape), data)


@dataclass
class Folder:
    """config: the JSON; tensors: in the order of the file. What a mutation cannot say with these it does to the files.

    rehash: whether the digests of the manifest are made to fit what is written.
    """

    kind: str
    json_file: str
    tensor_file: str
    config: Any
    tensors: dict[str, Tensor]
    text: str | None = None
    metadata: Any = field(default_factory=lambda: {"format": "pt"})
    on_header: list[Callable[[dict[str, Any]], str | None]] = field(default_factory=list)
    on_bytes: list[Callable[[bytes], bytes]] = field(default_factory=list)
    on_files: list[Callable[[Path], None]] = field(default_factory=list)
    rehash: bool = False

    @property
    def is_compiled(self) -> bool:
        return self.json_file == "manifest.json"

    def copy(self) -> "Folder":
        """Another folder of the same values."""
        tensors = {name: Tensor(t.dtype, list(t.shape), t.data) for name, t in self.tensors.items()}
        config = json.loads(json.dumps(self.config))
        return Folder(self.kind, self.json_file, self.tensor_file, config, tensors)

    def write(self, folder: Path) -> None:
        """Write the files anew."""
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        content = self._tensor_bytes()
        if self.rehash and isinstance(self.config, dict) and isinstance(self.config.get("weights"), dict):
            self.config["weights"]["sha256"] = hashlib.sha256(content).hexdigest()
        if self.rehash and isinstance(self.config, dict):
            self.config[DIGEST] = content_digest({name: value for name, value in self.config.items() if name != DIGEST})
        text = json.dumps(self.config, ensure_ascii=True) if self.text is None else self.text
        (folder / self.json_file).write_bytes(text.encode("utf-8", "surrogatepass"))
        (folder / self.tensor_file).write_bytes(content)
        for change in self.on_files:
            with contextlib.suppress(*NOTHING_TO_CHANGE):
                change(folder)

    def _tensor_bytes(self) -> bytes:
        header: dict[str, Any] = {} if self.metadata is None else {"__metadata__": self.metadata}
        position = 0
        for name, tensor in self.tensors.items():
            offsets = [position, position + len(tensor.data)]
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            position = offsets[1]
        text = None
        for change in self.on_header:
            with contextlib.suppress(*NOTHING_TO_CHANGE):
                text = change(header) or text
        raw = (json.dumps(header) if text is None else text).encode("utf-8", "surrogatepass")
        raw += b" " * (-len(raw) % 8)
        content = struct.pack("<Q", len(raw)) + raw + b"".join(tensor.data for tensor in self.tensors.values())
        for damage in self.on_bytes:
            with contextlib.suppress(*NOTHING_TO_CHANGE):
                content = damage(content)
        return content


def read(folder: Path, kind: str) -> Folder:
    """A folder that PEFT or Scute wrote."""
    compiled = (folder / "manifest.json").exists()
    names = (
        ("manifest.json", "members.safetensors") if compiled else ("adapter_config.json", "adapter_model.safetensors")
    )
    content = (folder / names[1]).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    tensors = {
        name: Tensor(e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
        for name, e in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }
    config = json.loads((folder / names[0]).read_text())
    for modules in ("target_modules", "feedforward_modules"):  # PEFT writes sets, in another order in every process
        if isinstance(config.get(modules), list):
            config[modules].sort()
    return Folder(kind, *names, config, tensors)
