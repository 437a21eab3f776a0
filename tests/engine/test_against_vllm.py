"""The same rows in vLLM without Scute: what Scute must leave alone, and what it must be no worse than."""

import pytest
import torch
from conftest import World, mixed_rows

from scute.engine.offline import Batch, Row, run_apart
from scute.testing.scoring import score
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

PLAIN = ["lora-r8", "lora-r3", "rslora-r16"]
OTHERS = ["dora", "dora-odd", "ia3", "vera"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def arms(worlds) -> tuple[World, list[tuple[str | None, int]], list[Row], list[Row]]:
    """Rows served by Scute, and by vLLM alone with plain LoRA in place of the methods that it refuses."""
    world, prompts = worlds("llama", "bfloat16"), tiny_prompts(8)
    rows = mixed_rows(PLAIN + OTHERS, prompts)
    batch = Batch(
        base=str(world.base),
        adapters={name: world.folders[name] for name in PLAIN + OTHERS},
        prompts=prompts,
        rows=rows,
        engine=world.engine(dtype="bfloat16"),
        repeat=1,
    )
    stand_ins = [(name if name in (None, *PLAIN) else PLAIN[0], index) for name, index in rows]
    stock = batch | {
        "rows": stand_ins,
        "adapters": {name: world.folders[name] for name in PLAIN},
        "engine": world.engine(dtype="bfloat16", lora_target_modules=PROJECTIONS),
    }
    return world, rows, run_apart(batch)[0], run_apart(Batch(**stock), with_scute=False)[0]


def test_base_rows_are_bit_identical(arms):
    _, rows, scute, stock = arms
    base = [i for i, (name, _) in enumerate(rows) if name is None]
    assert [scute[i] for i in base] == [stock[i] for i in base]


def test_plain_lora_is_no_further_from_peft(arms):
    world, rows, scute, stock = arms
    plain = [i for i, (name, _) in enumerate(rows) if name in PLAIN]
    folders = {name: world.folders[name] for name in PLAIN}

    def mean_error(served: list[Row]) -> float:
        scores = score(world.oracle, [rows[i] for i in plain], [served[i] for i in plain], folders)
        return float(torch.tensor([s.error for s in scores.values()]).mean())

    assert mean_error(scute) <= mean_error(stock)
