"""Tiny models and amplified adapters, made once a session, and engines on the CPU that serve them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scute.agreement import agreement, mean_difference
from scute.engine.offline import Batch, Row, run_apart
from scute.testing import tiny
from scute.testing.adapters import AMPLIFIED, write_adapter
from scute.testing.nested import nested
from scute.testing.oracle import Oracle

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # churn and cycles, which run longer by themselves
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


@pytest.fixture(scope="session")
def world(worlds) -> World:
    """The one that most engines here serve."""
    return worlds("llama", "float32")


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


def serve_by_name(world: World, dtype: str, **options: Any) -> dict[str | None, list[Row]]:
    """The rows of one such batch of all of the world's adapters, by adapter; None is the base model."""
    prompts, names = tiny.tiny_prompts(2), list(world.folders)
    found: dict[str | None, list[Row]] = {}
    served = serve_mixed(world, dtype, names, prompts, **options)
    for (name, _), row in zip(mixed_rows(names, prompts), served, strict=True):
        found.setdefault(name, []).append(row)
    return found


def mixed_rows(names: list[str], prompts: list[list[int]]) -> list[tuple[str | None, int]]:
    return [(name, index) for index in range(len(prompts)) for name in [None, *names]]


def start(world: World, **options: Any) -> Any:
    """A `vllm.LLM` that serves the world from this process; `stop` ends its processes."""
    from vllm import LLM

    return LLM(model=str(world.base), skip_tokenizer_init=True, enable_lora=True, **world.engine(**options))


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def ask(llm: Any, rows: list[tuple[Any, list[int]]], *, prompt_logprobs: bool = True, max_tokens: int = 6) -> list[Row]:
    """Serve (LoRARequest or None, prompt) rows in one call; every third row decodes longer than its neighbours.

    Without `prompt_logprobs` a row holds the log-probabilities of its continuation alone, and vLLM may use its
    prefix cache.
    """
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            temperature=0,
            prompt_logprobs=0 if prompt_logprobs else None,
            logprobs=0,
            max_tokens=max_tokens * (1 + 2 * (number % 3 == 2)),
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(len(rows))
    ]
    prompts = [{"prompt_token_ids": prompt} for _, prompt in rows]
    outputs = llm.generate(prompts, parameters, lora_request=[request for request, _ in rows], use_tqdm=False)
    return [_row(output) for output in outputs]


def _row(output: Any) -> Row:
    (continuation,) = output.outputs
    tokens = [*output.prompt_token_ids, *continuation.token_ids]
    steps = [*(output.prompt_logprobs or [None])[1:], *continuation.logprobs]
    return Row(
        tokens=tokens,
        logprobs=[s[t].logprob for t, s in zip(tokens[-len(steps) :], steps, strict=True)],
    )


def disagreement(world: World, name: str | None, rows: list[Row]) -> float:
    """Error of an adapter's rows as a share of its effect in the PEFT library; of base rows, in nats a token."""
    if name is None:
        return mean_difference(_logprobs(rows), _reference(world.oracle, rows))
    return _error(world, _reference(world.oracle, rows, Path(world.folders[name])), rows)


def stack_disagreement(world: World, folders: Sequence[Path | str], rows: list[Row]) -> float:
    """The same for adapters that are applied in order."""
    stacked = Oracle(nested(world.oracle.base, [Path(folder) for folder in folders]))
    return _error(world, _reference(stacked, rows), rows)


def _error(world: World, expected: list[torch.Tensor], rows: list[Row]) -> float:
    return agreement(_reference(world.oracle, rows), expected, _logprobs(rows)).ratio


def _logprobs(rows: list[Row]) -> list[torch.Tensor]:
    return [torch.tensor(row["logprobs"]) for row in rows]


def _reference(oracle: Oracle, rows: list[Row], folder: Path | None = None) -> list[torch.Tensor]:
    """Log-probabilities of the tokens that have one in the rows."""
    whole = oracle.logprobs([row["tokens"] for row in rows], folder)
    return [values[-len(row["logprobs"]) :] for values, row in zip(whole, rows, strict=True)]
