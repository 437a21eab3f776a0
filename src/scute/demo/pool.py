"""The demo's tenants: amplified adapters of every method, written on the spot."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from scute.testing.adapters import AMPLIFIED, write_adapter

NAMES = ("lora-r8", "rslora-r16", "dora", "ia3", "ia3-attention", "vera", "vera-regenerated", "oft", "oft-cayley")
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "Why do leaves turn red in autumn?",
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One adapter of the pool and its PEFT folder."""

    name: str
    method: str
    folder: Path


def write_pool(base: PreTrainedModel, cache: Path) -> Iterator[Tenant]:
    """Write the adapters for `base` one after another, over those of an earlier run."""
    for name in NAMES:
        recipe = replace(AMPLIFIED[name], strength=1.0)  # the paper's amplitude moves this base enough
        yield Tenant(name, recipe.method, write_adapter(base, recipe, cache / "adapters" / name))
