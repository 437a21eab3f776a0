"""The search behind `stock_tuning.py`: candidates compiled in parallel, then checked and timed one after another."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scute.tuning.layers import LayerShape
from scute.tuning.timing import Clock, Recorded
from steps.cases import LLAMA_8B, sampled_rows, slot_of_row
from steps.stock import DRY_CONFIGURATION, Config, StockPool, using

FINALISTS = 6
_ERROR = 2e-3


_layers: dict[tuple[str, int], tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, ...]]] = {}


def compile_candidate(candidate: Any) -> str | None:
    """Runs in a process of its own. Neither the slots nor the rows are part of what is compiled."""
    problem = candidate.problem
    key = (problem.shape, problem.rank)
    try:
        if key not in _layers:
            _layers.clear()
            shape = next(s for s in LLAMA_8B if s.name == problem.shape)
            pool = StockPool([problem.rank] * 2, [shape], 1, torch.float16, "cuda")
            x = torch.ones(64, shape.in_features, dtype=torch.float16, device="cuda")
            y = torch.ones(64, shape.out_features, dtype=torch.float16, device="cuda")
            layer = pool.layers[0]
            _layers[key] = layer, x, y, layer.buffer(x).fill_(1), pool.meta(slot_of_row(64, 2))
        layer, x, y, shrunk, meta = _layers[key]
        with using(candidate.config):
            if problem.op == "shrink":
                layer.shrink(x, meta, shrunk)
            else:
                layer.expand(y, shrunk, meta)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """Microseconds of one call: with the sizes that vLLM ships, and with the best ones; tried: how many were timed."""

    problem: Any
    tokens: int
    config: dict[str, int | None]
    shipped: float
    best: float
    tried: int
    wrong: int

    def line(self) -> str:
        p = self.problem
        sizes = " ".join(f"{key}={value}" for key, value in self.config.items() if key not in ("num_ctas", "max_nreg"))
        return (
            f"{p.op:6} slices {p.slices} k {p.k:5} n {p.n:5} rows {self.tokens:5}: shipped {self.shipped:8.1f} us,"
            f" best {self.best:8.1f} us of {self.tried} ({self.wrong} wrong): {sizes}"
        )

    def as_dict(self) -> dict[str, Any]:
        p = self.problem
        entry = {"op": p.op, "slices": p.slices, "k": p.k, "n": p.n, "tokens": self.tokens, "config": self.config}
        return entry | {"shipped_us": self.shipped, "best_us": self.best, "tried": self.tried, "wrong": self.wrong}


class Search:
    """One rank on one device; holds the layers of the problem at hand."""

    def __init__(self, rank: int, shapes: Sequence[LayerShape], max_loras: int, dry: bool) -> None:
        self.rank, self.shapes, self.dry = rank, {s.name: s for s in shapes}, dry
        self.max_loras = 2 if dry else max_loras
        self.device = torch.device("cpu" if dry else "cuda")
        self.clock = Clock(self.device)

    def best(self, problem: Any, tokens: int, configs: Sequence[Config], deadline: float) -> Found:
        """Times all candidates a few times, and the finalists again."""
        calls = _Calls(self, problem, tokens)
        shipped = DRY_CONFIGURATION if self.dry else calls.shipped()
        timed: list[tuple[float, Config]] = []
        wrong = 0
        for config in [shipped, *(c for c in configs if c != shipped)][: 3 if self.dry else None]:
            if time.monotonic() > deadline and timed:
                break
            if not calls.is_right(config):
                wrong += 1
                continue
            timed.append((self._time(calls.record(config), 3), config))
        if not timed:
            raise ValueError(f"no candidate of {problem} is right, the shipped one included")
        finalists = [config for _, config in sorted(timed)[:FINALISTS]]
        if shipped not in finalists and any(config == shipped for _, config in timed):
            finalists.append(shipped)
        recorded = [calls.record(config) for config in finalists]
        samples = self.clock.time(*recorded, repeats=1 if self.dry else 15, warm_seconds=0.01)
        final = {c: 1e3 * s.median / calls.copies for c, s in zip(finalists, samples, strict=True)}
        winner = min(final, key=lambda c: final[c])
        return Found(problem, tokens, dict(winner), final.get(shipped, float("nan")), final[winner], len(timed), wrong)

    def _time(self, recorded: Recorded, repeats: int) -> float:
        return self.clock.time(recorded, repeats=1 if self.dry else repeats, warm_seconds=0.0)[0].median


class _Calls:
    """Calls of one kernel on several layers, each with factors of its own."""

    def __init__(self, search: Search, problem: Any, tokens: int) -> None:
        self.problem = problem
        shape = search.shapes[problem.shape]
        self.copies = 1 if search.dry else 8 if tokens <= 1024 else 2
        tokens = min(tokens, 8) if search.dry else tokens
        self.tokens = tokens
        self.clock = search.clock
        self.slots = slot_of_row(tokens, search.max_loras)
        dtype, device = torch.float16, search.device
        self.pool = StockPool([problem.rank] * search.max_loras, [shape], self.copies, dtype, device)
        self.meta = self.pool.meta(self.slots)
        self.x = torch.randn(tokens, shape.in_features, dtype=dtype, device=device)
        self.before = torch.randn(tokens, shape.out_features, dtype=dtype, device=device)
        self.y = self.before.clone()
        self.shrunk = torch.randn_like(self.pool.layers[0].buffer(self.x))
        self.out = torch.empty_like(self.shrunk)
        self.rows = sampled_rows(self.slots)
        slots = [self.slots[row] for row in self.rows]
        first = self.pool.layers[0]
        if problem.op == "shrink":
            self.exact = first.shrunk_rows(slots, self.x[self.rows].double())
        else:
            self.exact = first.expanded_rows(slots, self.shrunk[:, self.rows].to(dtype).double())

    def shipped(self) -> Config:
        from vllm.lora.ops.triton_ops import utils

        p = self.problem
        hidden = p.k if p.op == "shrink" else p.n
        adds = {"add_inputs": True} if p.op == "expand" else {}
        default = utils.get_lora_op_configs(
            p.op, len(self.pool.ranks) + 1, self.tokens, hidden, p.rank, p.slices, **adds
        )
        return tuple((key, value) for key, value in default.items() if key != "max_nreg")

    def is_right(self, config: Config) -> bool:
        self.y.copy_(self.before)  # timing has added to it again and again
        with using(config):
            self._call(0)
        if self.problem.op == "shrink":
            actual = self.out[:, self.rows].double()
            finite = bool(torch.isfinite(self.out).all())
        else:
            actual = self.y[self.rows].double() - self.before[self.rows].double()
            finite = bool(torch.isfinite(self.y).all())
        self.out.fill_(float("nan"))
        error = (actual - self.exact).norm() / self.exact.norm()
        return finite and bool(error <= _ERROR)

    def record(self, config: Config) -> Recorded:
        def work() -> None:
            with using(config):
                for index in range(self.copies):
                    self._call(index)

        return self.clock.record(work)

    def _call(self, index: int) -> None:
        layer = self.pool.layers[index]
        if self.problem.op == "shrink":
            layer.shrink(self.x, self.meta, self.out)
        else:
            layer.expand(self.y, self.shrunk, self.meta)
