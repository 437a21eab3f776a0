"""One mixed batch of every method in a real vLLM engine, held against the PEFT library in float32."""

import pytest
from conftest import mixed_rows, serve_mixed

from scute.testing.adapters import AMPLIFIED
from scute.testing.scoring import base_error, score
from scute.testing.tiny import tiny_prompts

pytestmark = pytest.mark.engine

BOUND = {"bfloat16": 0.02, "float32": 0.0001}
CASES = [
    ("llama", "bfloat16", 1),
    ("llama", "float32", 1),
    ("llama", "bfloat16", 2),
    ("qwen2", "bfloat16", 1),
    ("qwen2", "float32", 1),
    ("qwen2", "float32", 2),
]


@pytest.mark.parametrize(("kind", "dtype", "tensor_parallel_size"), CASES)
def test_every_method_in_one_batch(worlds, kind: str, dtype: str, tensor_parallel_size: int):
    world, prompts, names = worlds(kind, dtype), tiny_prompts(4), list(AMPLIFIED)
    served = serve_mixed(world, dtype, names, prompts, tensor_parallel_size=tensor_parallel_size)
    rows = mixed_rows(names, prompts)
    scores = score(world.oracle, rows, served, world.folders)
    wrong = {name: s for name, s in scores.items() if not s.ratio <= BOUND[dtype]}
    assert not wrong
    assert base_error(world.oracle, rows, served) <= BOUND[dtype]


def test_base_rows_when_every_slot_is_taken(worlds):
    """vLLM 0.32 on CPUs adds the last slot's adapter to base rows when no slot is empty."""
    world, prompts, names = worlds("llama", "float32"), tiny_prompts(2), ["lora-r8", "dora", "vera", "oft"]
    served = serve_mixed(world, "float32", names, prompts, max_loras=len(names), max_cpu_loras=len(names))
    assert base_error(world.oracle, mixed_rows(names, prompts), served) <= BOUND["float32"]
