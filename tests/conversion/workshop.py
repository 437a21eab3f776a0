"""A base model with adapters and text for conversions, and the conversion itself with short arguments."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from scute.admission import BaseModel
from scute.conversion import Conversion, Method, Settings, convert
from scute.testing.adapters import Recipe, write_adapter
from scute.testing.oracle import Oracle


@dataclass(frozen=True)
class Workshop:
    """A base model with its oracle, a text of token ids, and a folder to write to."""

    base: Path
    oracle: Oracle
    root: Path
    prompts: list[list[int]]

    @property
    def data(self) -> Path:
        path = self.root / "data.jsonl"
        path.write_text("".join(f"{json.dumps({'tokens': prompt})}\n" for prompt in self.prompts))
        return path

    def adapter(self, recipe: str | Recipe, name: str, **options) -> Path:
        folder = self.root / name
        return folder if folder.exists() else write_adapter(self.oracle.base, recipe, folder, **options)

    def convert(self, adapter: Path, out: str, rank: int, method: str = "svd", **settings) -> tuple[Path, Conversion]:
        given = {"data": self.data, "force": True} | settings
        return self.root / out, convert(
            adapter,
            self.root / out,
            BaseModel.from_config(AutoConfig.from_pretrained(self.base), torch.float32),
            self.base,
            Settings(rank, Method(method), **given),
            lambda *_: None,
        )


def workshop_of(base: Path, root: Path, prompts: list[list[int]]) -> Workshop:
    return Workshop(base, Oracle(base), root, prompts)
