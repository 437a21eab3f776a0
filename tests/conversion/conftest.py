"""Base models, adapters and text for conversions, and the conversion itself with short arguments."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from scute.admission import BaseModel
from scute.conversion import Conversion, Method, Settings, convert
from scute.testing.adapters import Recipe, write_adapter
from scute.testing.oracle import Oracle
from scute.testing.tiny import tiny_llama, tiny_prompts


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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Workshop:
    root = tmp_path_factory.mktemp("tiny")
    return workshop_of(tiny_llama(root / "base"), root, tiny_prompts(8, 24))


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Workshop:
    """The demo's model, if `make demo` has fetched it."""
    base = Path(__file__).parents[2] / ".cache" / "smollm2"
    if not base.exists():
        pytest.skip("make demo has not fetched its base model")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(49152, (4, 32), generator=generator).tolist()
    return workshop_of(base, tmp_path_factory.mktemp("demo"), prompts)
