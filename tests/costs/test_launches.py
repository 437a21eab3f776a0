"""Launches that are counted against those that the ops make: every kernel and every operator of torch but the views."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scute.costs import LayerShape, Slots
from scute.costs.launches import launches
from scute.costs.traffic import Route, live_routes
from scute.kernels.plan import RANKS, UNBOUNDED
from scute.kernels.routes import SMALL_BATCH
from scute.tuning.layers import Adapter, Pool

launch = pytest.importorskip("scute.kernels.launch")

SHAPE = LayerShape("qkv", 64, (48, 16))
VIEWS = {
    "empty",
    "new_empty",
    "view",
    "slice",
    "expand",
    "unsqueeze",
    "select",
    "t",
    "unbind",
    "as_strided",
    "_unsafe_view",
}
ADAPTERS = {
    "LoRA": Adapter(rank=4),
    "DoRA": Adapter(rank=4, scale=True),
    "(IA)3": Adapter(scale=True),
    "VeRA": Adapter(shared=True),
    "OFT": Adapter(rotation_width=16),
}
POOLS = (["LoRA"], ["(IA)3"], ["VeRA"], ["OFT"], ["LoRA", "OFT"], ["DoRA", "VeRA", "OFT"])


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.run = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator).split(".")[1] not in VIEWS:
            self.run.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def kernels(monkeypatch):
    """Names of the kernels that are launched, none of which runs."""
    run = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            assert all(programs > 0 for programs in grid)
            return lambda *_, **__: run.append(self.name)

    for module in (launch.launch_decode, launch.launch_prefill, launch.launch_rotate):
        for name, value in vars(module).items():
            if type(value).__name__ == "Kernel":
                monkeypatch.setattr(module, name, Kernel(name))
    return run


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("rows", [8, 128, 512, 2048])
@pytest.mark.parametrize(
    "names", [["LoRA"], ["(IA)3"], ["VeRA"], ["OFT"], ["LoRA", "OFT"], ["DoRA", "VeRA", "OFT"]], ids="+".join
)
def test_launches_of_a_layer(kernels, monkeypatch, names, rows, fuses):
    monkeypatch.setattr(launch.launch_rotate, "is_roomy", lambda _: fuses)
    adapters = [ADAPTERS[name] for name in names]
    pool = Pool([*adapters, ADAPTERS["LoRA"]], [SHAPE], 1, torch.float16, "cpu")
    slots = [row % len(adapters) for row in range(rows)]
    batch = pool.plan(rows, slots)
    if rows <= SMALL_BATCH:
        batch.live[RANKS] = UNBOUNDED  # as in a graph; the last adapter has a rank, and no row
    x, weight = torch.zeros(rows, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.float16)
    with Operators() as operators:
        launch.linear(x, weight, None, *pool.layers[0].slots, batch.buffer)
    made = len(kernels) + len(operators.run) - 1  # less the base GEMM
    own = [
        Slots(a.rank, a.scale, False, a.rotation_width, "pair" if a.shared else None, 256 * a.shared) for a in adapters
    ]
    live = live_routes([((slot, slot), 1) for slot in own])
    assert made == launches(SHAPE, live, rows, fuses), (kernels, operators.run)


def test_a_step_without_adapters_launches_nothing():
    assert launches(SHAPE, frozenset(), 8, True) == launches(SHAPE, {Route.LOW_RANK}, 0, True) == 0
