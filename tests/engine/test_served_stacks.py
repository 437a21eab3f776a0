"""Stacks in a real vLLM engine, beside the adapters that they are made of, held against PEFT's nested layers."""

from pathlib import Path

import pytest
import torch
from conftest import World, mixed_rows

from scute.admission.stacks import stack_path
from scute.agreement import Agreement, agreement
from scute.engine.offline import Batch, Row, run_apart
from scute.testing.nested import nested
from scute.testing.oracle import Oracle
from scute.testing.scoring import base_error, score
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = {"bfloat16": 0.02, "float32": 0.0001}
PARTS = ["lora-r8", "lora-r3", "dora", "ia3", "vera", "oft"]
STACKS = [
    ("ia3", "lora-r8"),
    ("lora-r8", "ia3"),
    ("lora-r3", "dora"),
    ("dora", "oft"),
    ("vera", "lora-r3"),
    ("oft", "vera", "dora-odd"),
    ("lora-r3", "ia3", "dora"),
]


def scores_of_stacks(
    world: World, rows: list[tuple[str | None, int]], served: list[Row], stacks: dict[str, list[Path]]
) -> dict[str, Agreement]:
    scores = {}
    for name, folders in stacks.items():
        mine = [row for (adapter, _), row in zip(rows, served, strict=True) if adapter == name]
        sequences = [row["tokens"] for row in mine]
        expected = Oracle(nested(world.oracle.base, folders)).logprobs(sequences)
        engine = [torch.tensor(row["logprobs"]) for row in mine]
        scores[name] = agreement(world.oracle.logprobs(sequences), expected, engine)
    return scores


@pytest.mark.parametrize(
    ("kind", "dtype", "tensor_parallel_size"),
    [("llama", "bfloat16", 1), ("qwen2", "float32", 1), ("qwen2", "float32", 2)],
)
def test_stacks_beside_their_parts_in_one_batch(worlds, kind: str, dtype: str, tensor_parallel_size: int):
    world, prompts = worlds(kind, dtype), tiny_prompts(3)
    stacks = {"+".join(names): [Path(world.folders[name]) for name in names] for names in STACKS}
    adapters = {name: world.folders[name] for name in PARTS} | {n: stack_path(paths) for n, paths in stacks.items()}
    rows = mixed_rows(list(adapters), prompts)
    batch = Batch(
        base=str(world.base),
        adapters=adapters,
        prompts=prompts,
        rows=rows,
        engine=world.engine(
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            max_lora_rank=32,
            max_loras=len(adapters) + 1,
            max_cpu_loras=len(adapters) + 1,
        ),
        repeat=1,
    )
    (served,) = run_apart(batch, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel_size > 1 else None)
    scores = score(world.oracle, rows, served, {name: world.folders[name] for name in PARTS})
    scores |= scores_of_stacks(world, rows, served, stacks)
    assert not {name: s for name, s in scores.items() if not s.ratio <= BOUND[dtype]}
    assert base_error(world.oracle, rows, served) <= BOUND[dtype]
    print({name: f"{100 * s.ratio:.5f} % of {s.effect:.2f}" for name, s in scores.items()})
