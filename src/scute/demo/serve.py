"""One vLLM engine, one batch: every prompt under the base model and under every adapter."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scute.demo.pool import Tenant
from scute.engine.offline import Batch, Row, run_apart


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine made of all prompts under one adapter.

    logprobs: of the prompt tokens, one tensor [tokens - 1] per prompt; answer: token ids of the greedy answer to
    the first prompt.
    """

    logprobs: list[Tensor]
    answer: list[int]


def serve(base: Path, tenants: Sequence[Tenant], prompts: list[list[int]]) -> list[Served]:
    """Serve the base model and all tenants at once; returns the base model's results, then each tenant's.

    The engine computes in float32, so that what is left of the error is not rounding to half precision.
    """
    adapters = {tenant.name: str(tenant.folder.resolve()) for tenant in tenants}
    rows = [(name, index) for name in [None, *adapters] for index in range(len(prompts))]
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": len(rows),
        "kv_cache_memory_bytes": 1 << 30,
        "max_loras": len(adapters) + 1,
        "max_lora_rank": 16,
    }
    batch = Batch(base=str(base), adapters=adapters, prompts=prompts, rows=rows, engine=engine, repeat=1)
    (served,) = run_apart(batch)
    return [_served(served[first : first + len(prompts)], prompts) for first in range(0, len(rows), len(prompts))]


def _served(rows: Sequence[Row], prompts: Sequence[list[int]]) -> Served:
    logprobs = [torch.tensor(row["logprobs"][: len(prompt) - 1]) for row, prompt in zip(rows, prompts, strict=True)]
    return Served(logprobs, rows[0]["tokens"][len(prompts[0]) :])
