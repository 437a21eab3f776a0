"""What is tuned: layers of the base model with adapters on them, and the block sizes that their kernels ask for."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from scute.kernels import launch, sizes
from scute.kernels.plan import BatchPlan
from scute.tuning.layers import Adapter, Layer, LayerShape, Pool
from scute.tuning.truth import Verdict, adapted_rows, compare, poisoned, projected_rows

FOLLOW_THE_BATCH = frozenset({"rows"})
"""Fields that are not sought: a rule takes them from the number of rows, which no entry of a table may name."""
ROTATION_RULES = frozenset({"rotate_blocks", "gemm_blocks"})


def rules() -> dict[str, Callable[..., Any]]:
    """By name, without this GPU's table."""
    return dict(sizes.RULES)


def argument_names(rule: str) -> tuple[str, ...]:
    return tuple(signature(rules()[rule]).parameters)


@dataclass(frozen=True)
class Problem:
    """One fused projection, one batch size and one kind of adapter, `tenants` of them in turn."""

    shape: LayerShape
    tokens: int
    adapter: Adapter
    tenants: int
    dtype: torch.dtype
    shared_rank: int = 256

    def slots_of_rows(self) -> list[int]:
        """The tenant of every row: single rows in turn in a decode batch, runs of rows in a larger one."""
        run = max(1, self.tokens // 32) if self.tokens > 256 else 1
        return [row // run % self.tenants for row in range(self.tokens)]

    def __str__(self) -> str:
        kind = f"rank {self.adapter.rank}" if self.adapter.rank else "shared" if self.adapter.shared else "rotation"
        return f"{self.shape.in_features} to {'+'.join(map(str, self.shape.slices))}, {self.tokens} rows, {kind}"


class Instance:
    """A problem on a device: `copies` layers with factors of their own, an input and an output."""

    def __init__(self, problem: Problem, copies: int, device: torch.device) -> None:
        self.problem, self.copies = problem, copies
        pool_of = [problem.adapter] * problem.tenants
        self.pool = Pool(pool_of, [problem.shape], copies, problem.dtype, device, shared_rank=problem.shared_rank)
        self.slots = problem.slots_of_rows()
        self.plan: BatchPlan = self.pool.plan(problem.tokens, self.slots)
        random = torch.Generator(device).manual_seed(1)
        size = problem.shape.out_features, problem.shape.in_features
        self.x = torch.randn(problem.tokens, size[1], dtype=problem.dtype, device=device, generator=random)
        self.y = torch.randn(problem.tokens, size[0], dtype=problem.dtype, device=device, generator=random)
        self.weights = [
            torch.randn(size, dtype=problem.dtype, device=device, generator=random).mul_(size[1] ** -0.5)
            for _ in range(copies if problem.adapter.rotation_width else 0)
        ]
        self.rows = sorted({0, 1, problem.tokens // 2, problem.tokens - 1})

    def run(self) -> None:
        """The kernels of every layer once."""
        for index, layer in enumerate(self.pool.layers):
            self._run(layer, index, self.y)

    def check(self) -> Verdict:
        """The first layer against float64."""
        y, layer = self.y.clone(), self.pool.layers[0]
        exact = self._exact()
        with poisoned():
            out = self._run(layer, 0, y)
        return compare(layer, self.rows, out, exact)

    def _run(self, layer: Layer, index: int, y: torch.Tensor) -> torch.Tensor:
        if self.weights:
            return launch.linear(self.x, self.weights[index], None, *layer.slots, self.plan.buffer)
        launch.adapt(y, self.x, *layer.slots, self.plan.buffer)
        return y

    def _exact(self) -> torch.Tensor:
        layer, slots = self.pool.layers[0], [self.slots[row] for row in self.rows]
        x, y = self.x[self.rows].double(), self.y[self.rows].double()
        if self.weights:
            y = projected_rows(layer, slots, x, self.weights[0])
        return adapted_rows(layer, self.pool, slots, x, y)


@contextlib.contextmanager
def using(sizes: Mapping[str, Any]) -> Iterator[None]:
    """The rules named give these sizes, whatever they are asked, but for the fields that follow the batch."""

    def answer(name: str, given: Any) -> Callable[..., Any]:
        def answered(*arguments: int) -> Any:
            own = rules()[name](*arguments)._asdict()
            return given._replace(**{field: own[field] for field in FOLLOW_THE_BATCH & own.keys()})

        return answered

    with replaced({name: answer(name, given) for name, given in sizes.items()}):
        yield


def asked(instance: Instance) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Runs the problem once: rule to (its arguments, its answer), of the rules that the problem is about."""
    found: dict[str, tuple[tuple[int, ...], Any]] = {}

    def watch(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: int) -> Any:
            found[name] = arguments, rule(*arguments)
            return found[name][1]

        return watched

    with replaced({name: watch(name, rule) for name, rule in rules().items()}):
        instance.run()
    rotates = bool(instance.problem.adapter.rotation_width)
    return {name: call for name, call in found.items() if (name in ROTATION_RULES) == rotates}


@contextlib.contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Other rules in `scute.kernels.sizes`."""
    before = {name: getattr(sizes, name) for name in functions}
    for name, function in functions.items():
        setattr(sizes, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(sizes, name, function)
