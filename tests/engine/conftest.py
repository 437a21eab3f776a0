"""Tiny models and amplified adapters, made once a session, and engines on the CPU that serve them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scute.engine.offline import Batch, Row, run_apart
from scute.testing import tiny
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.oracle import Oracle

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class World:
    """A base model, its oracle and an adapter folder for every recipe."""

    base: Path
    oracle: Oracle
    folders: dict[str, str]

    def engine(self, **options: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM` for this model; one slot stays empty unless the test asks otherwise."""
        defaults = {
            "max_loras": len(self.folders) + 1,
            "max_cpu_loras": len(self.folders) + 1,
            "max_lora_rank": 16,
            "max_model_len": 256,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.05,
        }
        return defaults | options


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory):
    """Maker of worlds by model kind and dtype; each is made once."""
    made: dict[tuple[str, str], World] = {}

    def world(kind: str, dtype: str) -> World:
        if (kind, dtype) not in made:
            root = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            base = getattr(tiny, f"tiny_{kind}")(root / "base", DTYPES[dtype])
            oracle = Oracle(base)
            folders = {name: str(write_adapter(oracle.base, name, root / name)) for name in AMPLIFIED}
            made[kind, dtype] = World(base, oracle, folders)
        return made[kind, dtype]

    return world


def serve_mixed(world: World, dtype: str, names: list[str], prompts: list[list[int]], **options: Any) -> list[Row]:
    """One batch of every prompt under the base model and under every named adapter."""
    batch = Batch(
        base=str(world.base),
        adapters={name: world.folders[name] for name in names},
        prompts=prompts,
        rows=mixed_rows(names, prompts),
        engine=world.engine(dtype=dtype, **options),
        repeat=1,
    )
    binding = "|".join(str(rank) for rank in range(options.get("tensor_parallel_size", 1)))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": binding} if "|" in binding else None
    return run_apart(batch, environment=environment)[0]


def mixed_rows(names: list[str], prompts: list[list[int]]) -> list[tuple[str | None, int]]:
    return [(name, index) for index in range(len(prompts)) for name in [None, *names]]
