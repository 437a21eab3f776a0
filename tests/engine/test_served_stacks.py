"""Stacks in a real vLLM engine, beside the adapters that they are made of, held against PEFT's nested layers."""

import pytest
from conftest import mixed_rows, stack_disagreement

from scute.admission.stacks import stack_path
from scute.engine.offline import Batch, run_apart
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


@pytest.mark.parametrize(
    ("kind", "dtype", "tensor_parallel_size"),
    [("llama", "bfloat16", 1), ("qwen2", "float32", 1), ("qwen2", "float32", 2)],
)
def test_stacks_beside_their_parts_in_one_batch(worlds, kind: str, dtype: str, tensor_parallel_size: int):
    world, prompts = worlds(kind, dtype), tiny_prompts(3)
    parts = {name: world.folders[name] for name in PARTS}
    stacks = {"+".join(names): [world.folders[name] for name in names] for names in STACKS}
    adapters = parts | {name: stack_path(folders) for name, folders in stacks.items()}
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
    errors = {name: s.ratio for name, s in score(world.oracle, rows, served, parts).items()}
    for name, folders in stacks.items():
        mine = [row for (adapter, _), row in zip(rows, served, strict=True) if adapter == name]
        errors[name] = stack_disagreement(world, folders, mine)
    assert not {name: error for name, error in errors.items() if not error <= BOUND[dtype]}
    assert base_error(world.oracle, rows, served) <= BOUND[dtype]
