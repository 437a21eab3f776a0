"""Pages that repeat what the code says, held against the code."""

import re
from pathlib import Path

import pytest
import torch

from scute.cli.main import app
from scute.cli.refusals import page
from scute.engine.capacity import LayerShape, Limits
from scute.engine.options import Options
from scute.engine.pairs import SharedPairs
from scute.engine.pieces import SliceSlots
from scute.kernels.routes import FIELDS, UNIT_BYTES

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


def test_readme_lists_every_command():
    table = (DOCS.parent / "README.md").read_text().partition("## Commands")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("scute (\\w+)", row)
    }
    assert named == {command.name for command in app.registered_commands}


def test_options_have_their_names_and_defaults():
    named = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+|none) \|", OPTIONS, re.MULTILINE))
    assert named == {
        name: "none" if field.default is None else str(field.default) for name, field in Options.model_fields.items()
    }


def piece_mib(name: str, rank: int) -> float:
    """MiB of one piece of an adapter of all projections of Llama-3.1-8B."""
    units = 0
    for inputs, outs in LLAMA_8B.values():
        for out in outs:
            half = {"a": (rank, inputs), "b": (rank, out), "rotation": (inputs * 32,)}
            shape = half.get(name) or (256 if name == "d" else out,)
            dtype = torch.bfloat16 if name in half else torch.float32
            units += SliceSlots(**{name: torch.empty(shape, dtype=dtype, device="meta")}).units
    return LAYERS * units * UNIT_BYTES / MIB


def test_memory_of_an_adapter():
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([\d.]+)(?: \(\w+ \d+\))?(?:, ([\d.]+) \(rank 64\))? \|$", OPTIONS, re.MULTILINE
    )
    told = {name: [float(v) for v in values if v] for name, *values in rows}
    assert set(told) == {"a", "b", "scale", "shift", "rotation", "d", "e"}
    assert [len(told[name]) for name in "ab"] == [2, 2]
    for name, values in told.items():
        for rank, value in zip((16, 64), values, strict=False):
            assert value == pytest.approx(piece_mib(name, rank), abs=0.005)


def test_memory_of_the_arena_by_default():
    shapes = [LayerShape(wide, slices, rotates=True, shares=True) for wide, slices in LLAMA_8B.values()] * LAYERS
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", OPTIONS, re.MULTILINE)
    assert len(rows) == 4
    for rank, width, mib, gib_of_eight in rows:
        units = Limits(512, int(rank), int(width), 256, torch.bfloat16).largest_adapter(shapes)
        assert float(mib) == pytest.approx(units * UNIT_BYTES / MIB, abs=0.05)
        assert float(gib_of_eight) == pytest.approx(8 * units * UNIT_BYTES / 2**30, abs=0.005)


def test_memory_of_the_table():
    slices = LAYERS * sum(len(outs) for _, outs in LLAMA_8B.values())
    assert f"the table: {FIELDS * 4} bytes for every slot and slice" in OPTIONS
    assert f"{slices * FIELDS * 4 / 1024:g} KiB a slot" in OPTIONS


def test_ranks_of_a_gibibyte():
    ranks = int(1024 // (piece_mib("a", 1) + piece_mib("b", 1)))
    assert f"1 GiB holds {ranks} ranks of LoRA" in OPTIONS.replace("\n", " ")


def test_memory_of_a_shared_pair():
    pair = SharedPairs(1, 256, 14336, 14336, torch.bfloat16, torch.device("meta"))
    mib = (pair.a.numel() + pair.b.numel()) * pair.a.element_size() / MIB
    assert f"{mib:g} MiB a pair" in OPTIONS
