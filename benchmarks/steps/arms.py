"""The two engines on one workload: what a step runs, what the adapters run alone, and whether it is right."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

import scute.kernels.ops  # noqa: F401 - registers torch.ops.scute
from scute.tuning.layers import LayerShape, Pool
from scute.tuning.truth import Verdict, adapted_rows, compare, poisoned, projected_rows
from steps.cases import sampled_rows
from steps.stock import StockPool


class Workload:
    """The base model's part: `copies` layers of every shape, and one input and output a shape.

    slots: of every row of the batch. Layers are in order of their copy, then of their shape, as in a pool.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], weights: Sequence[Tensor], copies: int, slots: Sequence[int]
    ) -> None:
        self.shapes, self.copies, self.slots = tuple(shapes), copies, list(slots)
        self.weights = list(weights[: copies * len(shapes)])
        self.dtype, self.device = weights[0].dtype, weights[0].device
        self._random = torch.Generator(self.device).manual_seed(1)
        self.x = [self._draw(shape.in_features) for shape in shapes]
        self.y = [self._draw(shape.out_features) for shape in shapes]

    @property
    def tokens(self) -> int:
        return len(self.slots)

    def step(self) -> list[Tensor]:
        """The base GEMMs of a step; the outputs of the last copy."""
        return [functional.linear(self.x[kind], w) for kind, w in self.by_kind()][-len(self.shapes) :]

    def by_kind(self) -> Iterator[tuple[int, Tensor]]:
        for index, weight in enumerate(self.weights):
            yield index % len(self.shapes), weight

    def checked_layers(self) -> list[int]:
        """Indices of the layers of the first and of the last copy."""
        kinds, last = len(self.shapes), len(self.weights) - len(self.shapes)
        return sorted({*range(kinds), *range(last, last + kinds)})

    def redraw(self) -> None:
        """Outputs as a base GEMM would leave them, the same ones at every call."""
        for y in self.y:
            y.normal_(generator=self._random.manual_seed(2))

    def _draw(self, width: int) -> Tensor:
        shape = (self.tokens, width)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=self._random)


def draw_weights(
    shapes: Sequence[LayerShape], copies: int, dtype: torch.dtype, device: torch.device | str
) -> list[Tensor]:
    random = torch.Generator(device).manual_seed(3)
    sizes = [(s.out_features, s.in_features) for _ in range(copies) for s in shapes]
    return [
        torch.empty(size, dtype=dtype, device=device).normal_(0.0, size[1] ** -0.5, generator=random) for size in sizes
    ]


class Arm(Protocol):
    """An engine on a workload. step: base GEMMs and adapters; alone: adapters, on the workload's outputs in place."""

    workload: Workload

    def step(self) -> list[Tensor]: ...
    def alone(self) -> list[Tensor]: ...
    def check(self) -> Verdict: ...


class ScuteArm:
    """Scute's ops on a pool."""

    def __init__(self, workload: Workload, pool: Pool) -> None:
        self.workload, self.pool = workload, pool
        self.plan = pool.plan(workload.tokens, workload.slots)

    def step(self) -> list[Tensor]:
        work = self.workload
        out = [
            torch.ops.scute.linear(work.x[kind], weight, None, *layer.slots, self.plan.buffer)
            for (kind, weight), layer in zip(work.by_kind(), self.pool.layers, strict=True)
        ]
        return out[-len(work.shapes) :]

    def alone(self) -> list[Tensor]:
        work = self.workload
        for (kind, _), layer in zip(work.by_kind(), self.pool.layers, strict=True):
            if layer.slots.rotation_width:
                torch.ops.scute.rotate(work.x[kind], *layer.slots, self.plan.buffer)
            torch.ops.scute.adapt(work.y[kind], work.x[kind], *layer.slots, self.plan.buffer)
        return work.y

    def check(self) -> Verdict:
        work, verdicts = self.workload, []
        rows = sampled_rows(work.slots)
        slots = [work.slots[row] for row in rows]
        for index in work.checked_layers():
            kind, layer, weight = index % len(work.shapes), self.pool.layers[index], work.weights[index]
            x = work.x[kind]
            before = torch.empty_like(work.y[kind]).normal_()
            after = before.clone()
            with poisoned():
                torch.ops.scute.adapt(after, x, *layer.slots, self.plan.buffer)
                projected = torch.ops.scute.linear(x, weight, None, *layer.slots, self.plan.buffer)
            x_rows = x[rows].double()
            verdicts.append(
                compare(layer, rows, after, adapted_rows(layer, self.pool, slots, x_rows, before[rows].double()))
            )
            base = projected_rows(layer, slots, x_rows, weight)
            verdicts.append(compare(layer, rows, projected, adapted_rows(layer, self.pool, slots, x_rows, base)))
        return join(verdicts)


class StockArm:
    """vLLM's shrink and expand on a padded pool."""

    def __init__(self, workload: Workload, pool: StockPool) -> None:
        self.workload, self.pool = workload, pool
        self.meta = pool.meta(workload.slots)

    def step(self) -> list[Tensor]:
        work, out = self.workload, []
        for (kind, weight), layer in zip(work.by_kind(), self.pool.layers, strict=True):
            y = functional.linear(work.x[kind], weight)
            layer.adapt(y, work.x[kind], self.meta)
            out.append(y)
        return out[-len(work.shapes) :]

    def alone(self) -> list[Tensor]:
        work = self.workload
        for (kind, _), layer in zip(work.by_kind(), self.pool.layers, strict=True):
            layer.adapt(work.y[kind], work.x[kind], self.meta)
        return work.y

    def check(self) -> Verdict:
        work, verdicts = self.workload, []
        rows = sampled_rows(work.slots)
        slots = [work.slots[row] for row in rows]
        for index in work.checked_layers():
            kind, layer = index % len(work.shapes), self.pool.layers[index]
            before = torch.empty_like(work.y[kind]).normal_()
            after = before.clone()
            with poisoned():
                layer.adapt(after, work.x[kind], self.meta)
            verdicts.append(layer.check(rows, slots, work.x[kind], before, after))
        return join(verdicts)


def join(verdicts: Sequence[Verdict]) -> Verdict:
    total = verdicts[0]
    for verdict in verdicts[1:]:
        total = total.join(verdict)
    return total
