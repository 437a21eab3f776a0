"""DoRA's scale in the expand, and the four ways to apply it outside (paper, section 4.3 and Table A7)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scute.costs.outside import OUTSIDE, OutsidePass, carried_scale
from scute.tuning.layers import LayerShape, Pool
from scute.tuning.timing import Clock
from scute.tuning.truth import adapted_rows, compare_slices, poisoned
from steps.arms import ScuteArm, Workload, draw_weights
from steps.cases import DORA, LORA, sampled_rows
from steps.measure import difference, profile_kernels
from steps.record import Constants, Correctness, RouteRow
from steps.stock import StockPool

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Route:
    """work: a way to run a range of layers; plain: the schedule that it is compared with, which has no scale.

    exact: what it makes of sampled rows of one layer.
    outside: what it moves and launches more, or None in the expand.
    """

    name: str
    work: Callable[[range], object]
    plain: Callable[[range], object]
    exact: Callable[[Tensor, Tensor], Tensor]

    @property
    def outside(self) -> OutsidePass | None:
        return OUTSIDE.get(self.name)


def measure(
    clock: Clock,
    constants: Constants,
    shape: LayerShape,
    slots: Sequence[int],
    copies: int,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[RouteRow]:
    """One row a route, on `copies` layers of one projection."""
    tenants, device = max(slots) + 1, clock.device
    weights = draw_weights((shape,), 1, dtype, device) * copies  # no GEMM runs: only the sizes are used
    work = Workload((shape,), weights, copies, slots)
    own = Routes(work, tenants)
    for route in own.all():
        every = range(copies)
        plain, timed = (clock.record(partial(work, every)) for work in (route.plain, route.work))
        correctness = own.check(route)
        if not correctness.passed:
            raise ValueError(f"route {route.name} on {shape.name}, {len(slots)} rows: {correctness}")
        before, after = (1e3 * s.median / copies for s in clock.time(plain, timed, repeats=repeats))
        added, launches = carried_scale(tenants, shape.out_features), 0
        if route.outside is not None:
            launches = route.outside.launches
            added = route.outside.bytes_moved(len(slots), shape.out_features, dtype.itemsize)
        cached = route.outside is not None and added < constants.l2_bytes
        added_ms = 1e3 * added / (constants.cached_bandwidth if cached else constants.bandwidth)
        kernels = [profile_kernels(clock, r) for r in (plain, timed)] if route.outside is None else []
        expands = [sum(ms for name, (_, ms) in found.items() if "expand" in name) for found in kernels]
        yield RouteRow(
            route=route.name,
            projection=shape.name,
            tokens=len(slots),
            dtype=str(dtype).removeprefix("torch."),
            dry=device.type == "cpu",
            environment=constants.environment,
            plain=before,
            time=after,
            ratio=after / before,
            expand_ratio=expands[1] / expands[0] if expands and expands[0] else None,
            added_bytes=added,
            added_launches=launches,
            predicted=before + 1e3 * (added_ms + launches * constants.launch),
            bytes_dominate=added_ms > constants.launch,
            correctness=correctness,
        )


class Routes:
    """The pools and scales behind the routes of one projection."""

    def __init__(self, work: Workload, tenants: int) -> None:
        self.work, shape = work, work.shapes[0]
        arguments = work.shapes, work.copies, work.dtype, work.device
        self.lora = ScuteArm(work, Pool([LORA] * tenants, *arguments))
        self.dora = ScuteArm(work, Pool([DORA] * tenants, *arguments))
        self.stock = StockPool([LORA.rank] * tenants, *arguments)
        self.meta = self.stock.meta(work.slots)
        size = (tenants, shape.out_features)
        self.scales = [
            torch.empty(size, dtype=work.dtype, device=work.device).uniform_(0.5, 0.95) for _ in range(work.copies)
        ]
        self.slot_of_row = torch.tensor(work.slots, dtype=torch.int32, device=work.device)
        self.row_order = torch.arange(work.tokens, device=work.device)
        self.shrunk = [layer.buffer(work.x[0]) for layer in self.stock.layers]
        for layer, shrunk in zip(self.stock.layers, self.shrunk, strict=True):
            layer.shrink(work.x[0], self.meta, shrunk)

    def all(self) -> Iterator[Route]:
        yield Route("in the expand", partial(self._adapt, self.dora), self._plain, self._exact_dora)
        yield Route("side kernel", self._side, self._plain, self._exact_before)
        yield Route("gathered scale", self._gathered, self._plain, self._exact_after)
        yield Route("index scale", self._indexed, self._plain, self._exact_after)
        yield Route("vLLM outside", self._outside, self._expand, self._exact_stock)

    def check(self, route: Route) -> Correctness:
        """The first layer of the route from fresh outputs, against float64; and the whole route, run twice."""
        work, rows = self.work, sampled_rows(self.work.slots)
        work.redraw()
        y, x = work.y[0], work.x[0]
        exact = route.exact(x[rows].double(), y[rows].double())
        with poisoned():
            route.work(range(1))
        verdict = compare_slices(work.shapes[0].slices, rows, y, exact)
        results = []
        for _ in range(2):
            work.redraw()
            route.work(range(work.copies))
            results.append(y.clone())
        return Correctness.of(verdict, difference(*results))

    def _slots(self) -> list[int]:
        return [self.work.slots[row] for row in sampled_rows(self.work.slots)]

    def _scale_rows(self) -> Tensor:
        return self.scales[0][self._slots()].double()

    def _exact_dora(self, x: Tensor, y: Tensor) -> Tensor:
        return adapted_rows(self.dora.pool.layers[0], self.dora.pool, self._slots(), x, y)

    def _exact_before(self, x: Tensor, y: Tensor) -> Tensor:
        return adapted_rows(self.lora.pool.layers[0], self.lora.pool, self._slots(), x, y * self._scale_rows())

    def _exact_after(self, x: Tensor, y: Tensor) -> Tensor:
        return adapted_rows(self.lora.pool.layers[0], self.lora.pool, self._slots(), x, y) * self._scale_rows()

    def _exact_stock(self, x: Tensor, y: Tensor) -> Tensor:
        return self.stock.layers[0].adapted_rows(self._slots(), x, y) * self._scale_rows()

    def _adapt(self, arm: ScuteArm, layers: range) -> None:
        for index in layers:
            slots = arm.pool.layers[index].slots
            torch.ops.scute.adapt(self.work.y[0], self.work.x[0], *slots, arm.plan.buffer)

    def _plain(self, layers: range) -> None:
        self._adapt(self.lora, layers)

    def _side(self, layers: range) -> None:
        for index in layers:
            scale_rows(self.work.y[0], self.scales[index], self.slot_of_row)
            self._adapt(self.lora, range(index, index + 1))

    def _gathered(self, layers: range) -> None:
        for index in layers:
            self._adapt(self.lora, range(index, index + 1))
            scale_rows(self.work.y[0], self.scales[index], self.slot_of_row)

    def _indexed(self, layers: range) -> None:
        for index in layers:
            self._adapt(self.lora, range(index, index + 1))
            self.work.y[0].mul_(self.scales[index].index_select(0, self.slot_of_row))

    def _expand(self, layers: range) -> None:
        for index in layers:
            self.stock.layers[index].expand(self.work.y[0], self.shrunk[index], self.meta)

    def _outside(self, layers: range) -> None:
        for index in layers:
            self._expand(range(index, index + 1))
            slots = self.slot_of_row.index_select(0, self.row_order)
            self.work.y[0].mul_(self.scales[index].index_select(0, slots))


def scale_rows(y: Tensor, scale: Tensor, slot_of_row: Tensor) -> None:
    """y[row] *= scale[slot_of_row[row]] in one launch."""
    if not y.is_cuda:
        y.mul_(scale.index_select(0, slot_of_row))
        return
    from steps.scale_kernel import scale_rows_kernel

    blocks = -(-y.shape[1] // _BLOCK)
    scale_rows_kernel[(y.shape[0], blocks)](y, scale, slot_of_row, y.shape[1], BLOCK=_BLOCK, num_warps=4)
