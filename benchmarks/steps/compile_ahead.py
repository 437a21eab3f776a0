"""Every kernel of a run compiled in processes of their own, so that the run finds all of them in Triton's cache."""

import argparse
import gc
import sys
import time
from pathlib import Path

import torch

from scute.tuning.compilers import Compilers
from steps.arms import Arm, ScuteArm, StockArm, Workload, draw_weights
from steps.cases import CASES, LLAMA_8B, STOCK_CASES, slot_of_row
from steps.stock import StockPool, use_configurations

Task = tuple[str, str, int, Path | None, str]


def compile_ahead(arguments: argparse.Namespace) -> None:
    """CUDA should not have been used before: then the processes can be forked."""
    if arguments.engines != ["scute"]:
        import vllm.lora.ops.triton_ops  # noqa: F401 - slow: once, before the fork
    started = time.monotonic()
    tasks: list[Task] = []
    folders = {"stock": None, "stock-tuned": arguments.tuned}
    for tokens in arguments.tokens:
        for engine in arguments.engines:
            if engine == "stock-tuned" and arguments.tuned is None:
                continue
            names = arguments.cases if engine == "scute" else arguments.stock_cases
            tasks += [(engine, name, tokens, folders.get(engine), arguments.dtype) for name in names]
    with Compilers(min(arguments.processes, len(tasks)), _compile) as compilers:
        compilers.run(tasks, arguments.seconds)
    for task, failure in compilers.failures:
        print(f"compiling {task}: {failure}", file=sys.stderr)
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", flush=True)


def _compile(task: Task) -> str | None:
    engine, name, tokens, folder, dtype_name = task
    dtype = getattr(torch, dtype_name)
    try:
        workload = Workload(LLAMA_8B, draw_weights(LLAMA_8B, 1, dtype, "cuda"), 1, slot_of_row(tokens))
        arm = _arm(engine, name, workload, folder)
        arm.alone()
        arm.step()
        torch.cuda.synchronize()
    except Exception as error:  # the measurement will meet it again, and report it
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        arm = workload = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
    return None


def _arm(engine: str, name: str, workload: Workload, folder: Path | None) -> Arm:
    from scute.tuning.layers import Pool

    sizes = LLAMA_8B, 1, workload.dtype, workload.device
    if engine == "scute":
        return ScuteArm(workload, Pool(CASES[name].adapters, *sizes))
    use_configurations(folder)
    return StockArm(workload, StockPool([adapter.rank for adapter in STOCK_CASES[name].adapters], *sizes))
