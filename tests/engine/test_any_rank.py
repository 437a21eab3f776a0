"""Adapters of any rank share one batch without a flag, on projections that vLLM fuses and on one that it does not."""

from dataclasses import replace

import pytest
from conftest import World, disagreement, serve_by_name

from scute.engine.offline import Row
from scute.testing.adapters import AMPLIFIED, write_adapter

pytestmark = pytest.mark.engine

BOUND = 1e-4
TARGETS = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")  # without k: a fused layer with a gap in it
RANKS = {f"row21-row23-row25-rank{rank}": rank for rank in (1, 3, 5, 48, 65, 300)}


@pytest.fixture(scope="module")
def ranks(world, tmp_path_factory) -> World:
    root = tmp_path_factory.mktemp("ranks")
    folders = {}
    for name, rank in RANKS.items():
        recipe = replace(AMPLIFIED["dora" if rank == 48 else "lora-r3"], targets=TARGETS, seed=rank)
        folders[name] = str(write_adapter(world.oracle.base, recipe, root / name, r=rank, lora_alpha=24))
    return World(world.base, world.oracle, folders)


@pytest.fixture(scope="module")
def rows(ranks) -> dict[str | None, list[Row]]:
    return serve_by_name(ranks, "float32")  # with vLLM's default of 16


@pytest.mark.parametrize("name", [None, *RANKS], ids=str)
def test_answers_equal_peft(name, ranks, rows):
    assert disagreement(ranks, name, rows[name]) <= BOUND
