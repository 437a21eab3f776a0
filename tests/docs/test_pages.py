"""Pages that repeat what the code says, held against the code."""

import re
from pathlib import Path

import pytest
import torch

from scute.cli.refusals import page
from scute.engine.options import Options
from scute.engine.slots import LayerSlots, SharedPairs, Sizes

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = (DOCS / "options.md").read_text()

LAYERS, MIB = 32, 2**20
LLAMA_8B = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def test_refusals_page_is_current():
    assert (DOCS / "refusals.md").read_text() == page(), "run: scute refusals --markdown > docs/refusals.md"


def test_options_have_their_names_and_defaults():
    named = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+|none) \|", OPTIONS, re.MULTILINE))
    assert named == {
        name: "none" if field.default is None else str(field.default) for name, field in Options.model_fields.items()
    }


def slot_mib(name: str, rank: int) -> float:
    """MiB of one buffer for one adapter slot, over all layers of Llama-3.1-8B."""
    sizes = Sizes(1, rank, 32, 256, torch.bfloat16, torch.device("meta"))
    buffers = [getattr(LayerSlots(sizes, wide, slices, has_shared=True), name) for wide, slices in LLAMA_8B.values()]
    return LAYERS * sum(b.numel() * b.element_size() for b in buffers) / MIB


def test_memory_of_a_slot():
    rows = re.findall(
        r"^\| `([\w`, ]+)` \|.*\| ([\d.]+)(?: \(rank 16\), ([\d.]+) \(rank 64\))? \|$", OPTIONS, re.MULTILINE
    )
    told = {name: [float(v) for v in values if v] for names, *values in rows for name in re.findall(r"\w+", names)}
    assert set(told) == {"a", "b", "scale", "shift", "rotation", "d", "e"}
    for name, values in told.items():
        for rank, value in zip((16, 64), values, strict=False):
            assert value == pytest.approx(slot_mib(name, rank), abs=0.005)


def test_memory_of_a_shared_pair():
    sizes = Sizes(1, 16, 32, 256, torch.bfloat16, torch.device("meta"))
    pair = SharedPairs(sizes, 1, 14336, 14336)
    mib = (pair.a.numel() + pair.b.numel()) * pair.a.element_size() / MIB
    assert f"{mib:g} MiB a pair" in OPTIONS
