"""Every kernel that a batch may need has run before the first batch comes; the kernels themselves need a GPU."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from conftest import World, ask, disagreement, start, stop
from torch import Tensor
from vllm.lora.request import LoRARequest

from scute.engine import warm_up
from scute.engine.graphs import Routes
from scute.engine.layers import ScuteLinear
from scute.engine.model_manager import ScuteModelManager
from scute.engine.warm_up import Batch, Kind, batches
from scute.kernels import launch
from scute.kernels.arguments import Slots
from scute.kernels.arrivals import arrivals_of
from scute.kernels.decode_expand import expand_rows
from scute.kernels.kernel import Kernel
from scute.kernels.plan import BatchPlan, Residents, size_class
from scute.kernels.routes import FIELDS, Route
from scute.kernels.sizes import gemm_blocks
from scute.testing.tiny import tiny_prompts

SLOTS, PAIRS, MAX_ROWS, RANK, SHARED_RANK, WIDTH = 3, 2, 1040, 20, 33, 16
QKV = Kind(64, (0, 64, 96, 128), (0, 0, 0), 0, Routes.EVERY, 64, has_bias=False)


@pytest.mark.parametrize("max_rows", [1, 16, 17, 40, 256, 257, 8192])
def test_a_batch_for_every_choice(max_rows: int):
    """Of every height of tile and every size of the GEMM's blocks that so many rows have, with any routes."""

    def choices(numbers: Iterable[int]) -> set[Any]:
        return {(size_class(rows), gemm_blocks(rows, 128, 2)) for rows in numbers}

    found = list(batches(QKV, max_rows, 2))
    assert max(batch.rows for batch in found) <= max_rows
    for routes in [Routes.NONE, Routes.SHARED, Routes.ROTATION, Routes.EVERY]:
        assert choices(batch.rows for batch in found if batch.routes is routes) == choices(range(1, max_rows + 1))


def test_the_batches_are_small_and_few():
    found = list(batches(QKV, 8192, 2))
    assert {batch.rows for batch in found} == {1, 17, 33, 65, 257, 1025}
    assert len(found) == len(set(found)) == 4 * (4 + 2 * 2)  # every route, and two kinds of ranks for large tiles


@pytest.mark.parametrize("routes", [Routes.NONE, Routes.SHARED, Routes.ROTATION])
def test_routes_that_a_layer_cannot_serve_are_left_out(routes: Routes):
    found = {batch.routes for batch in batches(QKV._replace(routes=routes), 8192, 2)}
    assert found == {Routes.NONE, routes}


class Layer(ScuteLinear):
    """A wrapped layer as far as its operators go."""

    def __init__(
        self, plan: BatchPlan, slices: list[int], *, inputs: int = 64, at: int = 0, serves_all: bool = True
    ) -> None:
        width, pairs = (WIDTH, PAIRS) if serves_all else (0, 0)
        self.input_size, self.rotation_width, self.has_plain_weight = inputs, width, serves_all
        self.pairs = SimpleNamespace() if serves_all else None
        starts = [0, *itertools.accumulate(slices)]
        self.base_layer = SimpleNamespace(weight=torch.zeros(starts[-1], inputs), bias=None, skip_bias_add=False)
        table = torch.zeros(SLOTS, 2 + len(slices), FIELDS, dtype=torch.int32)
        self.slots = Slots(
            torch.zeros(32),
            torch.zeros(32),
            table[:, 1:-1],
            torch.zeros(pairs, SHARED_RANK * bool(pairs), 128 * bool(pairs)),
            torch.zeros(pairs, SHARED_RANK * bool(pairs), 128 * bool(pairs)),
            torch.zeros(pairs, dtype=torch.int32),
            arrivals_of(len(slices), starts[-1], torch.zeros(pairs, SHARED_RANK * bool(pairs), 0)),
            starts,
            [16] * len(slices),
            at,
            RANK,
            width,
        )
        self.plan = plan

    def serve(self, rows: int) -> None:
        """What the forward of the layer does with a batch."""
        x = torch.zeros(rows, self.input_size)
        if self.has_plain_weight:
            torch.ops.scute.linear(x, self.base_layer.weight, self.base_layer.bias, *self.slots, self.plan.buffer)
            return
        if self.rotation_width and self.plan.is_live(Route.ROTATION):
            torch.ops.scute.rotate(x, *self.slots, self.plan.buffer)
        torch.ops.scute.adapt(torch.zeros(rows, self.slots.slice_starts[-1]), x, *self.slots, self.plan.buffer)


@pytest.fixture
def manager() -> ScuteModelManager:
    """With four kinds of layer, one of them twice, and something that is no layer of Scute's."""
    manager = ScuteModelManager.__new__(ScuteModelManager)
    plan = manager.plan = BatchPlan(MAX_ROWS, SLOTS, PAIRS, RANK, "cpu")
    manager.modules = {
        "qkv": Layer(plan, [64, 32, 32]),
        "o": Layer(plan, [64], at=8),
        "odd": Layer(plan, [64], at=5),  # the rank's inputs start where no wide load can
        "mlp": Layer(plan, [36, 36], inputs=60, serves_all=False),
        "qkv2": Layer(plan, [64, 32, 32]),
        "experts": SimpleNamespace(),
    }
    return manager


def test_each_kind_runs_once_and_the_plan_is_left_alone(manager, monkeypatch):
    runs: list[tuple[int, Batch, list[bool]]] = []
    live = manager.plan.live
    live[:] = torch.tensor([5, 0, 7, 9])

    def record(layer: Layer, batch: Batch) -> None:
        runs.append((layer.slots.slice_starts[-1], batch, live.bool().tolist()))

    monkeypatch.setattr(warm_up, "_run", record)
    warm_up.run(manager)
    kinds = [Kind.of(manager.modules[name]) for name in ("qkv", "o", "odd", "mlp")]
    wanted = [(kind.slice_starts[-1], batch) for kind in kinds for batch in batches(kind, MAX_ROWS, 4)]
    assert [run[:2] for run in runs] == wanted
    for _, batch, live_routes in runs:
        assert live_routes == [True, Routes.SHARED in batch.routes, Routes.ROTATION in batch.routes, True]
    assert live.tolist() == [5, 0, 7, 9]


def test_routes_are_restored_after_an_error(manager, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warm_up, "_run", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        warm_up.run(manager)
    assert not manager.plan.live.any()


def test_it_runs_on_the_cpu_and_changes_nothing(manager):
    buffer = manager.plan.buffer.clone()
    warm_up.run(manager)
    assert torch.equal(manager.plan.buffer, buffer)
    assert not manager.plan.live.any()


class Launches:
    """Stands in for a kernel: what it would be compiled for, of every launch."""

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self.kernel, self.seen = kernel, seen
        self.names = list(inspect.signature(kernel.function.fn).parameters)
        self.loose = {parameter.name for parameter in kernel.function.params if parameter.do_not_specialize}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **keywords: Any) -> None:
            if 0 in grid:
                return
            named = zip(self.names, arguments, strict=False)
            given = [(name, type(v) if name in self.loose else special(v)) for name, v in named]
            self.seen.add((self.kernel.function.fn.__name__, *given, *sorted(keywords.items())))

        return launch


def special(value: Any) -> Any:
    """What Triton tells apart."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(special, value))
    return value if value is None or value == 1 else (type(value), value % 16 == 0)


@pytest.fixture(params=[True, False], ids=["hopper", "older"])
def seen(request, monkeypatch) -> set[Any]:
    """The variants of kernels that would have been compiled since."""
    found: set[Any] = set()
    kernels = 0
    for module in [module for name, module in sys.modules.items() if name.startswith("scute.kernels.")]:
        for name, value in list(vars(module).items()):
            if module.__name__.startswith(launch.__name__) and isinstance(value, Kernel):
                monkeypatch.setattr(module, name, Launches(value, found))
                kernels += 1
        for kind in ("is_hopper", "is_roomy"):
            if hasattr(module, kind):
                monkeypatch.setattr(module, kind, lambda _: request.param)
    assert kernels
    if not isinstance(expand_rows.function, triton.JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    for name in ("linear", "adapt", "rotate"):
        monkeypatch.setattr(torch.ops.scute, name, getattr(launch, name))
    return found


def steps() -> Iterator[tuple[np.ndarray, Residents]]:
    """Of every number of rows around a limit, and of every mix of plain, VeRA and OFT rows."""
    residents = Residents(
        np.array([RANK, 0, 1], dtype=np.int32),
        np.array([-1, 1, -1], dtype=np.int32),
        np.array([False, False, True]),
        np.array([7, SHARED_RANK], dtype=np.int32),
    )
    for rows in [*range(1, 70), 100, 128, 200, *range(250, 262), 272, 288, MAX_ROWS]:
        for mix in ([-1], [0], [0, 1], [2, -1], [0, 1, 2]):
            yield np.resize(np.array(mix, dtype=np.int32), rows), residents


def test_no_batch_has_a_kernel_compiled(manager, seen):
    warm_up.run(manager)
    known = set(seen)
    layers = [layer for layer in manager.modules.values() if isinstance(layer, Layer)]
    for slots, residents in steps():
        manager.plan.update(slots, residents)
        for layer in layers:
            layer.serve(len(slots))
    assert seen - known == set()
    assert {variant[0] for variant in known} >= {
        "shrink_rows",
        "expand_rows",
        "shrink_tiles",
        "shrink_pair_tiles",
        "expand_pair_tiles",
        "expand_tiles",
        "copy_and_rotate",
        "rotate",
    }


@pytest.mark.parametrize("seen", [True], indirect=True)
def test_one_batch_of_every_route_is_not_enough(manager, seen):
    """What vLLM's profile run compiles, and so what a test that can fail must tell apart."""
    manager.plan.live.fill_(2**30)
    for layer in manager.modules.values():
        if isinstance(layer, Layer):
            layer.serve(MAX_ROWS)
    profiled = set(seen)
    seen.clear()
    warm_up.run(manager)
    assert profiled < seen
    assert any(variant[0] == "fused_gemm" for variant in seen)


@pytest.mark.engine
def test_an_engine_serves_as_before(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for sending a function to the worker
    llm = start(world, dtype="float32", max_loras=2, max_cpu_loras=2)

    def warm(worker: Any) -> tuple[bool, int]:
        from scute.engine import warm_up  # in the worker

        manager = worker.model_runner.lora_manager._adapter_manager
        before = manager.plan.buffer.clone(), manager.plan.live.clone(), manager.arena.table.clone()
        manager.plan.buffer.zero_()
        warm_up.run(manager)
        after = manager.plan.live, manager.arena.table
        manager.plan.buffer.copy_(before[0])
        kinds = {warm_up.Kind.of(layer) for layer in manager.modules.values()}
        return all(torch.equal(a, b) for a, b in zip(before[1:], after, strict=True)), len(kinds)

    try:
        assert llm.collective_rpc(warm) == [(True, 4)]
        names = [None, "oft", "vera"]
        requests = [name and LoRARequest(name, index, world.folders[name]) for index, name in enumerate(names)]
        rows = ask(llm, [(request, tiny_prompts(1)[0]) for request in requests])
    finally:
        stop(llm)
    assert max(disagreement(world, name, [row]) for name, row in zip(names, rows, strict=True)) < 1e-4
