"""Grid search of vLLM's LoRA kernels: writes the files that it reads from VLLM_TUNED_CONFIG_FOLDER.

    python3 benchmarks/stock_tuning.py --folder tuned --ranks 16 --seconds 120
    python3 benchmarks/stock_tuning.py --dry --folder /tmp/tuned            # tiny shapes on the CPU

Every candidate is compiled in processes of their own, its result is held against float64, and it is timed in CUDA
graphs with factors that are not in L2. The shipped block sizes are a candidate too. Files that exist are added to.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from steps.cases import LLAMA_8B, SMALL
from steps.stock import interpret_on_cpu

OPS = ("shrink", "expand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where vLLM will read the files")
    parser.add_argument("--ranks", type=_numbers, default=[16])
    parser.add_argument("--tokens", type=_numbers, default=[64, 8192, 1024], help="in order of importance")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--max-loras", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=110.0, help="for each rank; half of it compiles")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, to try the code")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"
        interpret_on_cpu()
    print(search(arguments))


def search(arguments: argparse.Namespace) -> str:
    from steps import stock_search

    from scute.tuning.compilers import Compilers

    shapes = SMALL[:1] if arguments.dry else LLAMA_8B
    start = time.monotonic()
    compiled: dict[int, set[Any]] = {}
    if not arguments.dry:
        import vllm.lora.ops.triton_ops  # noqa: F401 - slow: once, before the processes are forked

        with Compilers(arguments.processes, stock_search.compile_candidate) as compilers:
            for rank in arguments.ranks:
                tasks = candidates(arguments, rank, shapes)
                compiled[rank] = compilers.run(tasks, arguments.seconds / 2)
                seconds = time.monotonic() - start
                print(f"rank {rank}: {len(compiled[rank])} of {len(tasks)} compiled, {seconds:.0f} s", flush=True)
        for candidate, problem in compilers.failures[:5]:
            print(f"left out: {candidate}: {problem}", file=sys.stderr)
    lines = []
    for rank in arguments.ranks:
        searcher = stock_search.Search(rank, shapes, arguments.max_loras, arguments.dry)
        deadline = time.monotonic() + arguments.seconds / 2
        for tokens in arguments.tokens:
            for op in arguments.ops:
                for problem in problems(op, rank, shapes):
                    tried = [
                        c.config
                        for c in candidates(arguments, rank, shapes)
                        if c.problem == problem
                        and is_decode(tokens) == c.decode
                        and (arguments.dry or c in compiled[rank])
                    ]
                    found = searcher.best(problem, tokens, tried, deadline)
                    lines.append(found.line())
                    write(arguments.folder, found, arguments.max_loras)
                    with (arguments.folder / "search.log").open("a") as log:
                        log.write(json.dumps(found.as_dict()) + "\n")
    lines.append(f"{time.monotonic() - start:.0f} s")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of vLLM's files: kernel, output slices, and the columns on both sides of the factor."""

    op: str
    slices: int
    k: int
    n: int
    shape: str

    @property
    def rank(self) -> int:
        return self.n if self.op == "shrink" else self.k


@dataclass(frozen=True, slots=True)
class Candidate:
    problem: Problem
    decode: bool
    config: tuple[tuple[str, int], ...]


def is_decode(tokens: int) -> bool:
    return tokens <= 256


def problems(op: str, rank: int, shapes: Sequence[Any]) -> Iterator[Problem]:
    """The entries that the layers need; two layers may need the same."""
    seen = set()
    for shape in shapes:
        k, n = (shape.in_features, rank) if op == "shrink" else (rank, max(shape.slices))
        if (len(shape.slices), k, n) not in seen:
            seen.add((len(shape.slices), k, n))
            yield Problem(op, len(shape.slices), k, n, shape.name)


def candidates(arguments: argparse.Namespace, rank: int, shapes: Sequence[Any]) -> list[Candidate]:
    """Every candidate of every problem, in an order that is fair to all if time runs out."""
    found = []
    for decode in sorted({is_decode(tokens) for tokens in arguments.tokens}):
        for op in arguments.ops:
            for problem in problems(op, rank, shapes):
                grid = shrink_grid(problem, decode) if op == "shrink" else expand_grid(problem, decode)
                found += [Candidate(problem, decode, config) for config in grid]
    random.Random(0).shuffle(found)
    return found


def shrink_grid(problem: Problem, decode: bool) -> Iterator[tuple[tuple[str, int], ...]]:
    columns = [size for size in (16, 32, 64, 128) if size <= max(16, problem.rank)][-2:]
    heights, stages = ((32, 64, 128), (3, 4)) if problem.rank < 64 else ((64, 128), (3,))
    for block_n in columns:
        for block_m in (16, 32) if decode else heights:
            for block_k in (128, 256, 512) if decode else (64, 128):
                for split_k in (2, 4, 8, 16, 32, 64) if decode else (1, 2, 4, 8):
                    if decode and not problem.k / 4 <= block_k * split_k <= 2 * problem.k:
                        continue  # few programs with long sums, or programs without work
                    if block_k * (block_m + block_n) * 2 > 2**17 or (block_m == 32 and block_k == 512):
                        continue
                    for num_warps in (4, 8):
                        for num_stages in (2, 4) if decode else stages:
                            yield _config(block_m, block_n, block_k, num_warps, num_stages, split_k)


def expand_grid(problem: Problem, decode: bool) -> Iterator[tuple[tuple[str, int], ...]]:
    # vLLM 0.33 runs the expand with one stage on this architecture whatever a file says.
    ranks = [size for size in (16, 32, 64, 128) if size <= max(16, problem.rank)][-2:]
    for block_k in ranks:
        for block_m in (16, 32) if decode else (32, 64, 128):
            for block_n in (32, 64, 128, 256, 512) if decode else (64, 128, 256):
                if block_k * block_n > 2**15:
                    continue
                for num_warps in (2, 4, 8) if decode else (4, 8):
                    yield _config(block_m, block_n, block_k, num_warps, 1)


def _config(m: int, n: int, k: int, warps: int, stages: int, split: int | None = None) -> tuple[tuple[str, int], ...]:
    config = {"block_m": m, "block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "num_ctas": 1}
    if split is not None:
        config |= {"split_k": split, "group_size_m": 8}
    return tuple(config.items())


def file_name(op: str) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    suffix = {"shrink": "SHRINK", "expand": "EXPAND_TRUE"}[op]
    return f"{device.replace(' ', '_').replace('-', '_')}_{suffix}.json"


def write(folder: Path, found: Any, max_loras: int) -> None:
    """Add one entry: [active ids][slices][rows][k][n], where vLLM counts the base model as an id."""
    path = folder / file_name(found.problem.op)
    data = json.loads(path.read_text()) if path.exists() else {}
    place = data
    for key in (max_loras + 1, found.problem.slices, found.tokens, found.problem.k):
        place = place.setdefault(str(key), {})
    place[str(found.problem.n)] = {**found.config, "max_nreg": None}
    path.write_text(json.dumps(data, indent=1) + "\n")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
